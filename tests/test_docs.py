"""Tests that the names, paths, tables and outputs in docs/ are correct and complete."""

import contextlib
import importlib
import inspect
import io
import re
import sys
from pathlib import Path

import pytest
import yaml

import lcfl.data.partition
from lcfl.__main__ import COMMANDS
from lcfl.cli import federated_cli
from lcfl.cli.commands import partition
from lcfl.core.callback import HOOKS
from lcfl.data.datamodule import FederatedDataModule
from lcfl.data.protocols import PROTOCOLS
from lcfl.models.module import FederatedModule
from tests.test_readme import PAGES, lcfl_commands

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
TEXTS = {page: (ROOT / page).read_text() for page in PAGES if page != "CHANGELOG.md"}
PARTITIONS = sorted(set(lcfl.data.partition.__all__) - {"Partition", "ClientShares", "Pool", "write_partition"})


@pytest.fixture
def pages(monkeypatch):
    """Imports docs/pages.py, which builds the reference."""
    monkeypatch.syspath_prepend(DOCS)
    yield importlib.import_module("pages")
    sys.modules.pop("pages")


def page_of(name):
    """Returns the page of a partition: ``class_dirichlet`` for ``ClassDirichlet``."""
    return "iid" if name == "IID" else re.sub(r"(?<=.)(?=[A-Z])", "_", name).lower()


def exists(path):
    """Returns whether a dotted path leads to a module, class, function or attribute."""
    parts = path.split(".")
    for number in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:number]))
        except ModuleNotFoundError:
            continue
        for name in parts[number:]:
            if not hasattr(found, name):
                return name in getattr(found, "__dataclass_fields__", {})
            found = getattr(found, name)
        return True
    return False


@pytest.mark.parametrize("page", TEXTS)
def test_every_path_below_lcfl_exists(page):
    named = set(re.findall(r"(?<![\w./-])lcfl(?:\.[A-Za-z_]\w*)+", TEXTS[page]))
    assert not [path for path in named if not exists(path)]


@pytest.mark.parametrize("page", TEXTS)
def test_every_named_file_exists(page):
    named = re.findall(
        r"(?<![\w./$-])((?:configs|lcfl|docs|tests|examples|benchmarks)/[\w./]*\w)(?![\w*-])", TEXTS[page]
    )
    made = {"docs/_build/html/index.html", "docs/_build/html"}
    assert not [path for path in set(named) - made if not (ROOT / path).exists()]


@pytest.mark.parametrize("text", [text for page, text in TEXTS.items() if page.startswith("docs/methods")])
def test_options_on_a_page_of_a_method_exist_in_the_code(text):
    for name, options in re.findall(r"`([A-Z]\w+)\.(\w+)(?=[:`])", text):
        owners = [
            getattr(module, name)
            for module in map(
                importlib.import_module, ("lcfl.methods.clustering", "lcfl.methods.local", "lcfl.methods.aggregation")
            )
            if hasattr(module, name)
        ]
        assert not owners or hasattr(owners[0], options) or options in inspect.signature(owners[0]).parameters


@pytest.mark.parametrize("path", sorted((ROOT / "configs/methods").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_page_of_a_method_names_every_option_of_its_parts(pages, path):
    """An option that many methods have may be on the page of all methods instead."""
    page = pages.method_page(path)
    named = set(re.findall(r"`(?:\w+\.)?(\w+)(?=[:`])", TEXTS[f"docs/{page}"] + TEXTS["docs/methods.md"]))
    parts = yaml.safe_load(path.read_text())["method"]
    clustering = parts.pop("clustering")
    assert not {name for part in [*parts.values(), *clustering] for name in part.get("init_args", {})} - named


def test_everything_public_is_in_the_reference(pages):
    documented = {id(getattr(importlib.import_module(path), name)) for path, name in split(pages.documented())}
    packages = ["lcfl", *(name for name in pages.modules() if hasattr(importlib.import_module(name), "__path__"))]
    for package in packages:
        module = importlib.import_module(package)
        offered = [name for name in getattr(module, "__all__", []) if not name.startswith("__")]
        assert not [name for name in offered if id(getattr(module, name)) not in documented], package
    shown = "\n".join(pages.reference().values())
    for name in ("lcfl.Federation", "lcfl.data.partition.IID", "lcfl.methods.clustering.tuning.granularity"):
        assert f":: {name}\n" in shown
    entries = re.findall(r"^\.\. auto(?:class|function):: (.*)$", shown, re.MULTILINE)
    assert len(entries) == len(set(entries))


def split(names):
    return [name.rpartition(".")[::2] for name in names]


def test_every_page_has_a_place_in_the_navigation(pages):
    places = [each for groups in pages.NAVIGATION.values() for names in groups.values() for each in names]
    patterns = [re.sub(r".*<(.*)>", r"\1", each) for each in places]
    for page in (path.relative_to(DOCS) for path in map(ROOT.joinpath, TEXTS) if path.is_relative_to(DOCS)):
        assert page.stem == "index" or any(page.with_suffix("").match(pattern) for pattern in patterns), page
    for pattern in patterns:
        if "*" not in pattern and pattern != "self" and not pattern.startswith(("api/", "project/")):
            assert (DOCS / f"{pattern}.md").is_file()


def test_the_table_of_methods_has_every_file(pages):
    table = pages.methods_table()
    for path in (ROOT / "configs/methods").glob("*.yaml"):
        assert f"| [{path.stem}](methods/" in table
    assert "`LocalTraining` steps: 5, start: centre" in table


def test_there_is_a_page_for_every_partition_and_protocol():
    assert {path.stem for path in (DOCS / "partitions").glob("*.md")} == set(map(page_of, PARTITIONS))
    assert {path.stem for path in (DOCS / "protocols").glob("*.md")} == PROTOCOLS.keys()


@pytest.mark.parametrize("name", PARTITIONS)
def test_a_page_of_a_partition_has_its_arguments_and_the_output_of_the_command(name):
    path = DOCS / f"partitions/{page_of(name)}.md"
    text = path.read_text()
    layer = re.search(r"```yaml\n(.*?)```", text, re.DOTALL)[1]
    named = yaml.safe_load(layer)["data"]["partition"]
    arguments = set(inspect.signature(getattr(lcfl.data.partition, name)).parameters)
    assert named["class_path"] == f"lcfl.data.partition.{name}" and set(named["init_args"]) == arguments
    assert set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)) == arguments
    assert "**Definition.**" in text and "**Source.**" in text
    if name in ("FromFile", "ByOwner"):  # the digits know no owners
        return
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        partition.main(["-c", str(ROOT / "configs/data/digits.yaml"), "-c", layer])
    assert re.search(r"```text\n(.*?)```", text, re.DOTALL)[1] == printed.getvalue()
    assert f"({path.stem}.png)" in text


def test_partition_from_python_as_written(tmp_path, monkeypatch, capsys):
    text = (DOCS / "partitions/from_file.md").read_text()
    monkeypatch.chdir(tmp_path)
    exec(re.search(r"```python\n(.*?)```", text, re.DOTALL)[1], {})
    own = "{data: {partition: {class_path: FromFile, init_args: {path: partition.json}}}}"
    partition.main(["-c", str(ROOT / "configs/data/digits.yaml"), "-c", own])
    assert "20 clients" in capsys.readouterr().out


def test_every_metric_that_the_package_logs_is_described():
    described = "\n".join(text for page, text in TEXTS.items() if page == "docs/monitoring.md" or "methods/" in page)
    logged = set()
    for path in {*(ROOT / "lcfl").rglob("*.py")} - {ROOT / "lcfl/callbacks/monitored_metric.py"}:  # has prefixes
        logged |= set(re.findall(r"f?\"((?:cluster|comm|time|train)/[\w{}:]+)\"", path.read_text()))
    logged = {re.sub(r"{(\w+)[^}]*}", "<>", name) for name in logged}
    assert {"train/loss", "cluster/ari", "comm/up_bytes", "time/round_s"} <= logged
    shown = re.sub(r"<\w+>", "<>", described)
    assert not [name for name in logged if name != "time/<>_s" and f"`{name}`" not in shown]
    for what in ("round", "send", "local", "receive", "cluster", "aggregate", "eval"):
        assert f"`time/{what}_s`" in shown


def test_every_picture_of_a_run_is_described():
    source = (ROOT / "lcfl/callbacks/monitor.py").read_text()
    names = re.findall(r"self\._figure\(server, f?\"([\w{}]+)\"", source)
    assert len(names) >= 5
    for name in names:
        tag = name.replace("{", "<").replace("}", ">")
        assert f"`{tag}`" in TEXTS["docs/monitoring.md"]


def test_every_command_and_option_is_described():
    text = TEXTS["docs/commands.md"]
    for command, module in COMMANDS.items():
        section = re.search(rf"^## {command}\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)[1]
        for action in importlib.import_module(module).parser()._actions:
            flags = [flag for flag in action.option_strings if flag.startswith("--")]
            if flags and not flags[0].startswith(("--help", "--data", "--config.", "--print")):
                assert f"`{flags[-1]}`" in section or flags[-1] in section, (command, flags)
    for group, made in {"model": FederatedModule, "data": FederatedDataModule}.items():
        (row,) = (line for line in text.splitlines() if line.startswith(f"| `--{group}.*`"))
        assert set(inspect.signature(made).parameters) == set(re.findall(r"`(\w+)`", row))


def test_the_table_of_hooks_is_complete():
    rows = [line.split("|")[1:4] for line in TEXTS["docs/howto/callback.md"].splitlines() if line.startswith("| `on_")]
    assert {name.strip(" `"): tuple(re.findall(r"^ `(\w+)`", more)) for name, _, more in rows} == HOOKS


SHOWN = {
    " ".join(words): words
    for page, text in TEXTS.items()
    if (page == "README.md" or page.startswith("docs/")) and "howto" not in page and "getting_started" not in page
    for words in lcfl_commands(text)
}


@pytest.mark.parametrize("arguments", SHOWN.values(), ids=SHOWN)
def test_command_is_accepted(arguments, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["lcfl"])
    command, *words = arguments
    if command in COMMANDS:
        parser = importlib.import_module(COMMANDS[command]).parser()
        assert parser.parse_known_args(words) if command == "sweep" else parser.parse_args(words)
        return
    words = [
        str(ROOT / "configs/quickstart.yaml") if word.endswith("version_0/config.yaml") else word for word in words
    ]
    with pytest.raises(SystemExit) as left:
        federated_cli.main([command, *words, "--print_config"])
    assert left.value.code in (0, None)
    assert "trainer:" in capsys.readouterr().out
