"""``lcfl <args>`` in this process, from an empty working directory, for the tests of the command line."""

import sys
from pathlib import Path

import pytest
import yaml

from lcfl import cli
from lcfl.result import Run

CONFIGS = Path(__file__).parents[1] / "configs"
METHODS = sorted((CONFIGS / "methods").glob("*.yaml"))
DATA = sorted((CONFIGS / "data").glob("*.yaml"))
QUICKSTART = CONFIGS / "quickstart.yaml"
SYNTHETIC = ("-c", CONFIGS / "data" / "synthetic.yaml")
LCFED = ("-c", CONFIGS / "methods" / "lcfed.yaml")
FEDAVG = ("-c", CONFIGS / "methods" / "fedavg.yaml")
SMALL = (
    "--trainer.rounds=2",
    "--trainer.clients_per_round=4",
    "--trainer.evaluate_every=1",
    "--trainer.devices=1",
    "--trainer.logger=false",
    "--trainer.enable_progress_bar=false",
)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working directory; modules found there, and the path to it, are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["x"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def lcfl(*args: object) -> Run | dict[str, float]:
    """Runs the command and returns what it returned."""
    return cli.main([str(arg) for arg in args])


def failure(capsys, *args: object) -> str:
    """What a command that the parser refuses says on standard error."""
    with pytest.raises(SystemExit) as ended:
        lcfl(*args)
    assert ended.value.code == 2
    return capsys.readouterr().err


def printed(capsys, *args: object) -> dict:
    """The configuration that ``lcfl fit <args> --print_config`` prints."""
    with pytest.raises(SystemExit) as ended:
        lcfl("fit", *args, "--print_config")
    assert ended.value.code == 0
    return yaml.safe_load(capsys.readouterr().out)


def files(folder: Path) -> dict[Path, tuple[int, int]]:
    """Every file below a folder with size and time of the last change."""
    return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}
