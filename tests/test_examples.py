"""Tests that the scripts and configurations in examples/ run."""

import functools
import re
import runpy
from pathlib import Path

import pytest
import torch

import lcfl
from lcfl.cli import federated_cli
from lcfl.data.datamodule import FederatedDataModule
from lcfl.data.datasets import Synthetic
from lcfl.data.partition import Pathological
from lcfl.methods.aggregation import ClusterMean
from lcfl.methods.clustering import LowRankCosine
from lcfl.methods.exchange import CentreAndEmbedding
from lcfl.methods.local import LocalTraining
from lcfl.models import MLP
from tests.helpers.commandline import METHODS
from tests.test_task_examples import TASKS

ROOT = Path(__file__).parent.parent
OWN = {"fedbn": ("--method.exchange.own_layers=[head]",)}  # the network has no batch normalisation
AS_SHOWN = ("lcfed", "fedclust")  # the method in docs/ and one that clusters before the first round


def parts():
    """Returns model, data and method of a small federation, as examples/python_api.py builds them."""
    network = functools.partial(MLP, in_features=16, hidden=[32], num_classes=8)
    model = lcfl.FederatedModule(network, functools.partial(torch.optim.SGD, lr=0.1), cluster_weight=0.5)
    clustering: list = [LowRankCosine(num_clusters=4, dimension=4)]
    method = lcfl.Method(LocalTraining(steps=2), CentreAndEmbedding(), ClusterMean(), clustering)
    data = FederatedDataModule(Synthetic(), Pathological(2), num_clients=20, batch_size=10)
    return {"model": model, "data": data, "method": method}


@pytest.mark.parametrize(
    ("script", "accuracy"),
    [
        ("python_api", "personal accuracy"),
        ("tabular", "global accuracy"),
        pytest.param("text", "personal accuracy", marks=pytest.mark.slow),
        pytest.param("lora", "lora: personal accuracy", marks=pytest.mark.slow),
    ],
)
def test_a_script_runs(here, capsys, script, accuracy):
    if script == "lora":
        pytest.importorskip("peft")
        pytest.importorskip("transformers")
    runpy.run_path(str(ROOT / f"examples/{script}.py"), run_name="__main__")
    shown = capsys.readouterr().out
    assert float(re.search(rf"{accuracy}: (\S+)", shown)[1]) > 0.8
    if script == "python_api":
        assert "test samples correct" in shown
        assert (here / "logs/python_api/version_0/summary.json").is_file()


@pytest.mark.parametrize(
    "method",
    [pytest.param(path, id=path.stem, marks=[] if path.stem in AS_SHOWN else [pytest.mark.slow]) for path in METHODS],
)
def test_user_defined_data_with_every_method(here, method):
    (here / "own.py").symlink_to(ROOT / "examples/own.py")
    words = ["fit", "-c", str(method), "-c", str(ROOT / "examples/own.yaml"), *OWN.get(method.stem, ())]
    assert federated_cli.main([*words, "--trainer.fast_dev_run=true", "--trainer.devices=1"]).metrics


def test_every_example_is_tested():
    names = {path.name for path in (ROOT / "examples").iterdir() if path.suffix in (".py", ".yaml")}
    tasks = {f"{name}{ending}" for name in TASKS for ending in (".py", ".yaml")}
    assert names == {"lora.py", "own.py", "own.yaml", "python_api.py", "tabular.py", "text.py"} | tasks
