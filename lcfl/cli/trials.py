"""The trials of a sweep: grids of options, their points, and the name of the run for each."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from lcfl.cli.option_paths import without_init_args

__all__ = ["Grid", "Point", "Trial", "given_to", "parse_grid", "points_of"]

Point = tuple[tuple[str, str], ...]  # (option, value) pairs


@dataclass(frozen=True)
class Grid:
    """The values to try for one option.

    Attributes:
        option: the option.
        values: the values as text.
        method: the method that tries them; None for all methods.
    """

    option: str
    values: tuple[str, ...]
    method: str | None = None


def parse_grid(text: str) -> Grid:
    """Reads a grid from a text ``[method:]option=value,value``, whose values are YAML.

    A value may be a mapping: ``model={cluster_weight: 0, global_weight: 0},{cluster_weight: 1, global_weight: 1}``
    tries pairs of values for two options. Two grids would try all combinations of their values.

    Raises:
        ValueError: if the text has another form.
    """
    option, sign, values = text.partition("=")
    method, colon, rest = option.partition(":")
    try:
        parsed = yaml.safe_load(f"[{values}]")
    except yaml.YAMLError:
        parsed = []
    if not sign or not option or not parsed:
        raise ValueError(f"sweep: got --grid {text}; allowed are option=value,value and method:option=value,value.")
    words = tuple(dict.fromkeys(map(_text, parsed)))
    return Grid(rest, words, method) if colon else Grid(option, words)


def points_of(method: str, grids: Sequence[Grid]) -> list[Point]:
    """Returns every combination of the values of a method's grids; one empty point if there is nothing to choose.

    Raises:
        ValueError: if two grids set the same option.
    """
    known: dict[str, str] = {}
    for grid in _grids_of(method, grids):
        options = {without_init_args(option) for value in grid.values for option, _ in _leaves(grid.option, value)}
        for option, other in known.items():
            if any(f"{each}.".startswith(f"{option}.") or f"{option}.".startswith(f"{each}.") for each in options):
                raise ValueError(
                    f"sweep: --grid {grid.option} and --grid {other} both set {option} of {method}; give one of them."
                )
        known |= dict.fromkeys(options, grid.option)
    own = [grid for grid in _grids_of(method, grids) if len(grid.values) > 1]
    return list(product(*([(grid.option, value) for value in grid.values] for grid in own)))


def given_to(method: str, grids: Sequence[Grid]) -> list[str]:
    """Returns a method's grids with a single value as options of all runs of that method."""
    own = [grid for grid in _grids_of(method, grids) if len(grid.values) == 1]
    return [f"--{grid.option}={grid.values[0]}" for grid in own]


def _grids_of(method: str, grids: Sequence[Grid]) -> list[Grid]:
    """Returns the grids of a method, which may be named as it is or by the name of its file alone."""
    return [grid for grid in grids if grid.method in (None, method, Path(method).stem)]


@dataclass(frozen=True)
class Trial:
    """One run of a sweep.

    Attributes:
        method: the method.
        point: the point of its grid.
        seed: the seed.
        rounds: the number of rounds if the trial is shorter than a run; None otherwise.
    """

    method: str
    point: Point
    seed: int
    rounds: int | None = None

    @property
    def name(self) -> str:
        """The ``trainer.name`` of the run."""
        parts = [Path(self.method).stem, *_short_names(self.point)]
        parts += [] if self.rounds is None else [f"rounds={self.rounds}"]
        return "-".join([*parts, f"seed{self.seed}"]).replace("/", "_")


def _short_names(point: Point) -> list[str]:
    """Returns the options of a point as ``lr=0.1``, each by the shortest end of its path that no other option has."""
    leaves = [leaf for option, value in point for leaf in _leaves(option, value)]
    paths = [without_init_args(option).split(".") for option, _ in leaves]
    return [f"{_suffix(path, paths)}={value}" for path, (_, value) in zip(paths, leaves, strict=True)]


def _leaves(option: str, value: str) -> Point:
    """Returns an option and its value; if the value is a YAML mapping, its items as options."""
    parsed = yaml.safe_load(value) if value.startswith("{") else None
    if not isinstance(parsed, dict):
        return ((option, value),)
    items = {str(key): _text(item) for key, item in parsed.items()}
    return tuple(leaf for key, item in items.items() for leaf in _leaves(f"{option}.{key}", item))


def _text(value: Any) -> str:
    """Returns a YAML value as text; a date, which JSON lacks, as a string."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _suffix(path: list[str], paths: list[list[str]]) -> str:
    lengths = range(1, len(path))
    unique = (length for length in lengths if sum(other[-length:] == path[-length:] for other in paths) == 1)
    return ".".join(path[-next(unique, len(path)) :])
