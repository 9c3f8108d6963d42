"""Runs ``lcfl <args>`` in this process, in an empty working directory, for the tests of the command line."""

import sys
from pathlib import Path

import pytest
import yaml

from lcfl.cli import federated_cli
from lcfl.cli.federated_cli import FederatedCLI
from lcfl.cli.yaml_files import LOADER
from lcfl.runs.result import Run

CONFIGS = Path(__file__).parents[2] / "configs"
METHODS = sorted((CONFIGS / "methods").glob("*.yaml"))
DATA = sorted((CONFIGS / "data").glob("*.yaml"))
PAPERS = sorted((CONFIGS / "papers").glob("*.yaml"))
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

# The clusters of these come about in different ways: never, by choice of the clients, once, online, and by split and
# merge. Tests of all other methods are marked slow.
KINDS = ("ascfl", "fedavg", "fedclust", "ifca", "lcfed")
KIND_OF_METHOD = [
    pytest.param(path, id=path.stem, marks=[] if path.stem in KINDS else [pytest.mark.slow]) for path in METHODS
]

# What a method needs beside its file: with a network that may have batch normalisation, and with any other one.
NEEDS = {"fedbn": ("--model.network.init_args.batch_norm=true", "--data.drop_last=true")}
ELSE = {"fedbn": ("--method.exchange.own_layers=[decision]",)}

CLUSTERS = ("--method.clustering.init_args.num_clusters=4", "--method.clustering.init_args.dimension=10")
FIT = ("fit", *SYNTHETIC, *LCFED, *SMALL, *CLUSTERS)

PARTS = """
import os, signal
import torch
from torch import nn
from lcfl import Callback, FederatedModule
from lcfl.methods.clustering import Clustering
from lcfl.data.datamodule import FederatedDataModule

class Parity(Clustering):
    def on_round_end(self, state):
        state.assignment = torch.arange(state.num_clients) % 2
        state.centres = state.initial.repeat(2, 1) if len(state.centres) != 2 else state.centres

class Net(nn.Module):
    def __init__(self, width: int = 5):
        super().__init__()
        self.body, self.head = nn.Linear(16, width), nn.Linear(width, 8)
    def forward(self, inputs):
        return self.head(self.body(inputs).relu())

class Stop(Callback):
    def on_round_start(self, state):
        if state.round == 1:
            os.kill(os.getpid(), signal.SIGTERM)

class Unpacks(Callback):
    def on_round_end(self, uploads):
        first, second = uploads

class Data(FederatedDataModule):
    pass

class Module(FederatedModule):
    def __init__(self, *args, penalty: float = 0.0, **options):
        super().__init__(*args, **options)
        self.penalty = penalty
    def training_step(self, batch, batch_idx=0):
        self.log("train/penalty", self.penalty)
        return super().training_step(batch, batch_idx) + self.penalty * self.network.head.weight.square().sum()
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Changes to an empty working directory; afterwards, modules imported from it and its path are forgotten."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["x"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture
def parts(tmp_path):
    """Writes a module with user-defined parts to the working directory."""
    (tmp_path / "own_parts.py").write_text(PARTS)


@pytest.fixture
def built(monkeypatch):
    """Provides ``built(*args)``: trainer, model, datamodule, method and ckpt_path of ``lcfl fit <args>``, by name."""
    caught = {}

    def fit(self, **arguments):
        caught.update(arguments, trainer=self.trainer)
        self.result = {}

    monkeypatch.setattr(FederatedCLI, "fit", fit)

    def build(*args):
        lcfl("fit", *SYNTHETIC, *LCFED, *args)
        return dict(caught)

    return build


def lcfl(*args: object) -> Run | dict[str, float]:
    """Runs the command and returns its result."""
    return federated_cli.main([str(arg) for arg in args])


def shared(folder: Path, *args: object) -> Run:
    """Runs ``lcfl fit <args>`` in a folder, for a fixture that several tests share and none may change."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["x"])
        run = lcfl("fit", *args, f"--trainer.default_root_dir={folder}")
    assert isinstance(run, Run)
    return run


def failure(capsys, *args: object) -> str:
    """Returns what a command that the parser refuses prints on standard error."""
    with pytest.raises(SystemExit) as ended:
        lcfl(*args)
    assert ended.value.code == 2
    return capsys.readouterr().err


def printed(capsys, *args: object) -> dict:
    """Returns the configuration that ``lcfl fit <args> --print_config`` prints."""
    with pytest.raises(SystemExit) as ended:
        lcfl("fit", *args, "--print_config")
    assert ended.value.code == 0
    return yaml.load(capsys.readouterr().out, LOADER)


def content(path: Path) -> dict:
    """Returns what a configuration file holds."""
    return yaml.load(path.read_text(), LOADER)


def files(folder: Path) -> dict[Path, tuple[int, int]]:
    """Returns every file below a folder with its size and the time of its last change."""
    return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}
