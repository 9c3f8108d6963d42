"""Imports go down only, also those that only a type checker follows; `lcfl --help` waits for no torch."""

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from types import ModuleType

import pytest

import lcfl
import lcfl.methods

ROOT = Path(lcfl.__file__).parent

# The rooms from the bottom to the top: a room may import those above it in this list, never one below.
ROOMS = [
    "core",
    "figures",
    "models",
    "data",
    "methods",
    "engines",
    "distributed",
    "runs",
    "server",
    "callbacks",
    "federation",
    "cli",
    "__main__",
]


def module_name(path):
    parts = ("lcfl", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


def imported_by(name):
    """The modules of lcfl that a module names in an import, wherever in the file; lcfl itself (its version) is free."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: imports are absolute"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in MODULES else node.module)
    return {each for each in found if each.startswith("lcfl.")}


GRAPH = {name: imported_by(name) for name in MODULES if name != "lcfl"}


def room(name):
    return name.split(".")[1]


def test_every_import_of_the_package_exists():
    assert {each for names in GRAPH.values() for each in names} <= set(MODULES)


def test_there_are_no_circles():
    try:
        TopologicalSorter(GRAPH).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(error.args[1][::-1]))


def test_every_module_is_in_a_room():
    assert {room(name) for name in GRAPH} == set(ROOMS)


def test_rooms_import_only_rooms_below_them():
    floor = {name: number for number, name in enumerate(ROOMS)}
    wrong = [
        f"{name} imports {other}"
        for name, others in GRAPH.items()
        for other in others
        if room(name) != room(other) and floor[room(other)] > floor[room(name)]
    ]
    assert wrong == []


def test_the_check_sees_imports_of_every_kind():
    assert "lcfl.cli.federated_cli" in GRAPH["lcfl.cli.loading"], "inside a function"
    assert "lcfl.core.rng" in GRAPH["lcfl.models.module"], "from lcfl.core import rng"
    assert "lcfl.methods.clustering" in GRAPH["lcfl.cli.parser"], "import lcfl.methods.clustering"
    assert {"lcfl.server.server", "lcfl.core.state"} <= GRAPH["lcfl.callbacks.checkpoint"]


def test_the_package_itself_imports_nothing_of_its_own_at_run_time():
    tree = ast.parse((ROOT / "__init__.py").read_text())
    eager = [node.module for node in tree.body if isinstance(node, ast.ImportFrom)]
    assert [name for name in eager if name.startswith("lcfl")] == []


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], []])
def test_help_and_version_import_no_torch(arguments):
    code = (
        "import sys, lcfl, lcfl.__main__\n"
        f"lcfl.__main__.main({arguments!r})\n"
        "heavy = {'torch', 'lightning', 'numpy', 'sklearn', 'yaml', 'jsonargparse'} & set(sys.modules)\n"
        "sys.exit(', '.join(sorted(heavy)) or None)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT.parent)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"lcfl {lcfl.__version__}" if arguments == ["--version"] else "usage: lcfl")


def test_the_command_and_a_first_round_import_what_they_use():
    """Lightning's command line brings much; lcfl must not add to it what a run of FedAvg does not use."""
    code = (
        "import sys, tempfile\n"
        "import lightning.pytorch.cli\n"
        "before = set(sys.modules)\n"
        "import lcfl.cli.federated_cli\n"
        "heavy = {'sklearn', 'scipy', 'matplotlib', 'tensorboard', 'threadpoolctl', 'pandas', 'dp_accounting'}\n"
        "added = lambda: heavy & {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "assert not added(), f'the command: {added()}'\n"
        "files = ('data/synthetic.yaml', 'methods/fedavg.yaml')\n"
        "layers = [word for file in files for word in ('-c', f'configs/{file}')]\n"
        "options = ['--trainer.rounds', '1', '--trainer.devices', '1', '--trainer.logger', 'false']\n"
        "with tempfile.TemporaryDirectory() as folder:\n"
        "    lcfl.cli.federated_cli.main(['fit', *layers, *options, '--trainer.default_root_dir', folder])\n"
        "assert not added(), f'the round: {added()}'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT.parent)
    assert done.returncode == 0, done.stderr


def test_every_public_name_can_be_had_from_the_package():
    for name in [*lcfl.__all__, *lcfl.methods.__all__]:
        assert getattr(lcfl, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = lcfl.Nothing


def test_completion_shows_the_names_of_the_package_and_its_modules():
    public = {*lcfl.__all__, *lcfl.methods.__all__}
    assert {*public, "__doc__", "__file__"} <= {*dir(lcfl)}
    others = {name for name in dir(lcfl) if not name.startswith("_")} - public
    assert all(isinstance(getattr(lcfl, name), ModuleType) for name in others)
