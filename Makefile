# `make` lists the targets. Where there is a .venv its programs are used, else those on the path.
PYTHON ?= python3
BIN := $(if $(wildcard .venv/bin/python),.venv/bin/,)

.DEFAULT_GOAL := help
.PHONY: help install test test-slow lint type format coverage quickstart docs clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-12s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

install:  ## make .venv with the package and the tools for its development and documentation
	$(PYTHON) -m venv .venv && .venv/bin/pip install -e '.[dev,docs]'

test:  ## run the fast tests on all cores
	$(BIN)python -m pytest -n auto --dist worksteal

test-slow:  ## run the slow tests: minutes, kills processes at many moments
	$(BIN)python -m pytest -m slow

lint:  ## check style, format and which room imports which, change nothing
	$(BIN)ruff check
	$(BIN)ruff format --check
	$(BIN)lint-imports

type:  ## check types, strictly
	$(BIN)mypy

format:  ## mend what can be mended in style and format
	$(BIN)ruff check --fix
	$(BIN)ruff format

coverage:  ## run the fast tests and report which lines they reach, as README.md does
	$(BIN)python -m pytest -n auto --dist worksteal --cov=lcfl

quickstart:  ## train the quickstart
	$(BIN)lcfl fit -c configs/quickstart.yaml

docs:  ## build the documentation into docs/_build/html; a warning is an error
	$(BIN)python -m sphinx -b html -W --keep-going -q docs docs/_build/html

clean:  ## remove caches and build products; runs and data stay
	rm -rf build dist docs/_build docs/api docs/project htmlcov .coverage .coverage.* .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find lcfl tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +
