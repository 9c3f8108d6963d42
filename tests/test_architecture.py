"""Tests that rooms import only rooms below them, that files are short, and that `lcfl --help` does not import torch.

The contracts stand in pyproject.toml. Imports that only a type checker follows count, too.
"""

import ast
import pickle
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import lcfl
import lcfl.methods
from lcfl.cli.federated_cli import Seed
from lcfl.cli.parser import Parser

ROOT = Path(lcfl.__file__).parent
PROJECT = ROOT.parent / "pyproject.toml"
MOST_LINES = 400  # of a file, see CONTRIBUTING.md


def lint(config):
    """Runs import-linter in a process of its own: it closes the standard output that pytest captures."""
    code = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(sys.argv[1], no_cache=True))"
    return subprocess.run([sys.executable, "-c", code, str(config)], capture_output=True, text=True, cwd=ROOT.parent)


def test_imports_keep_the_contracts():
    done = lint(PROJECT)
    assert done.returncode == 0 and "3 kept, 0 broken" in done.stdout, done.stdout


def test_an_import_to_a_higher_floor_is_found(tmp_path):
    """Turns a contract around: the higher room imports the lower one, so the check must fail."""
    text = '[tool.importlinter]\nroot_package = "lcfl"\n'
    for layers in (["lcfl.core", "lcfl.methods"], ["lcfl.server", "lcfl.federation"], ["lcfl.runs", "lcfl.callbacks"]):
        text += f'[[tool.importlinter.contracts]]\nname = "upside down"\ntype = "layers"\nlayers = {layers}\n'
        text += 'ignore_imports = ["lcfl -> lcfl.**"]\n'
    (tmp_path / "contracts.toml").write_text(text)
    assert "0 kept, 3 broken" in lint(tmp_path / "contracts.toml").stdout


def test_every_room_has_a_floor_and_is_in_the_picture():
    layers = tomllib.loads(PROJECT.read_text())["tool"]["importlinter"]["contracts"][0]["layers"]
    rooms = {room.strip() for layer in layers for room in layer.split("|")}
    assert rooms == {f"lcfl.{path.parent.name}" for path in ROOT.glob("*/__init__.py")} | {"lcfl.__main__"}
    picture = (ROOT.parent / "docs/rooms.svg").read_text()
    assert not [room for room in rooms - {"lcfl.__main__"} if f">{room}<" not in picture]


def test_no_file_is_too_long_to_read():
    files = [
        path for folder in ("lcfl", "tests", "benchmarks", "examples") for path in (ROOT.parent / folder).rglob("*.py")
    ]
    lengths = {str(path.relative_to(ROOT.parent)): len(path.read_text("utf-8").splitlines()) for path in sorted(files)}
    long = {name: length for name, length in lengths.items() if length > MOST_LINES}
    assert lengths and not long, f"split by subject what has more than {MOST_LINES} lines: {long}"


def test_the_package_imports_none_of_its_modules_at_run_time():
    tree = ast.parse((ROOT / "__init__.py").read_text())
    eager = [node.module for node in tree.body if isinstance(node, ast.ImportFrom)]
    assert [name for name in eager if name.startswith("lcfl")] == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--help"], "usage: lcfl"),
        (["-h"], "usage: lcfl"),
        ([], "usage: lcfl"),
        (["--version"], f"lcfl {lcfl.__version__}"),
        (["configs"], str(ROOT.parent / "configs")),
    ],
)
def test_what_only_prints_or_copies_imports_no_dependency(arguments, said):
    """Runs `python -m lcfl`."""
    code = (
        "import runpy, sys\n"
        f"sys.argv[1:] = {arguments}\n"
        "try:\n"
        "    runpy.run_module('lcfl', run_name='__main__')\n"
        "except SystemExit as ended:\n"
        "    assert not ended.code, ended.code\n"
        "heavy = {'torch', 'lightning', 'numpy', 'sklearn', 'yaml', 'jsonargparse'} & set(sys.modules)\n"
        "sys.exit(', '.join(sorted(heavy)) or None)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT.parent)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(said)


@pytest.mark.slow
def test_a_spawned_rank_and_a_first_round_import_only_what_they_use():
    """Lightning's command line imports a lot. lcfl must not add packages that a run of FedAvg does not use.

    A spawned rank has imported nothing of lcfl when it unpickles the parser, which LightningCLI's callback holds that
    saves the configuration. The parser must find the type of the seed then.
    """
    parser = Parser()
    parser.add_argument("--seed", type=Seed)
    code = (
        "import pickle, sys, tempfile\n"
        "import lightning.pytorch.cli\n"
        "before = set(sys.modules)\n"
        "assert 'lcfl' not in before\n"
        "pickle.load(sys.stdin.buffer)\n"
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
    spawned = [sys.executable, "-c", code]
    done = subprocess.run(spawned, input=pickle.dumps(parser), capture_output=True, cwd=ROOT.parent)
    assert done.returncode == 0, done.stderr.decode()


def test_every_public_name_can_be_imported_from_the_package():
    for name in [*lcfl.__all__, *lcfl.methods.__all__]:
        assert getattr(lcfl, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = lcfl.Nothing


def test_completion_shows_the_names_of_the_package_and_its_modules():
    public = {*lcfl.__all__, *lcfl.methods.__all__}
    assert {*public, "__doc__", "__file__"} <= {*dir(lcfl)}
    others = {name for name in dir(lcfl) if not name.startswith("_")} - public
    assert all(isinstance(getattr(lcfl, name), ModuleType) for name in others)
