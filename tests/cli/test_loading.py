"""Tests `lcfl.load`, which opens the run in a run directory."""

import shutil
from functools import partial

import pytest
import torch
import yaml
from torch import nn

import lcfl as package
from lcfl import FederatedModule, Federation
from lcfl.cli.federated_cli import instantiate
from lcfl.cli.loading import _named_as
from tests.helpers import builders
from tests.helpers.commandline import FEDAVG, LCFED, SMALL, SYNTHETIC, files, lcfl, shared

pytestmark = pytest.mark.usefixtures("here")


class Own(nn.Linear):
    """A layer with a function of its scores."""

    def __init__(self, act):
        super().__init__(16, 8)
        self.act = act

    def forward(self, inputs):
        return self.act(super().forward(inputs))


INPUTS = torch.linspace(-1, 1, 3 * 16).reshape(3, 16)


@pytest.fixture(scope="module")
def fedavg(tmp_path_factory):
    """A run of FedAvg, which no test may change."""
    return shared(tmp_path_factory.mktemp("fedavg"), *SYNTHETIC, *FEDAVG, *SMALL)


@pytest.fixture
def copy(fedavg, here):
    """A copy of the directory of that run."""
    return shutil.copytree(fedavg.path, here / "copy")


def same(one, two):
    return torch.equal(one(INPUTS), two(INPUTS))


def test_a_loaded_run_has_the_models_and_metrics_of_the_run():
    run = lcfl("fit", *SYNTHETIC, *LCFED, *SMALL)
    loaded = package.load(run.path)
    assert loaded.metrics == run.metrics and loaded.path == run.path
    client = int(torch.nonzero(run.state.participated)[0])
    for address in ({"kind": "personal", "client": client}, {"kind": "cluster", "cluster": 1}, {"kind": "global"}):
        model = loaded.model(**address)
        assert isinstance(model, torch.nn.Module) and not model.training
        assert same(model, run.model(**address)) and model(INPUTS).shape == (3, 8)
    assert not same(loaded.model("personal", client=client), loaded.model("global"))


def test_each_call_returns_a_separate_network(fedavg):
    loaded = package.load(fedavg.path)
    one, two = loaded.model("global"), loaded.model("global")
    with torch.no_grad():
        next(one.parameters()).add_(1)
    assert not same(one, two) and same(two, loaded.model("global"))


def test_loading_writes_nothing_and_needs_neither_data_nor_trainer(tmp_path, fedavg, copy):
    config = yaml.safe_load((copy / "config.yaml").read_text())
    config["data"]["dataset"] = {"class_path": "a.module.that.IsGone"}
    config["trainer"] |= {"precision": "16-mixed", "accelerator": "cuda", "callbacks": ["gone.Callback"]}
    (copy / "config.yaml").write_text(yaml.safe_dump(config))
    before = files(tmp_path)
    assert same(package.load(str(copy)).model("global"), fedavg.model("global"))
    assert files(tmp_path) == before


@pytest.mark.parametrize(
    "network",
    [
        "{class_path: lcfl.models.split, init_args: {"
        "embedding: {class_path: torch.nn.Linear, init_args: {in_features: 16, out_features: 4}}, "
        "decision: {class_path: torch.nn.Linear, init_args: {in_features: 4, out_features: 8}}}}",
        "{class_path: own_networks.build, init_args: {width: 6}}",
    ],
)
def test_networks_built_by_functions_can_be_loaded(tmp_path, network):
    (tmp_path / "own_networks.py").write_text(
        "from torch import nn\n"
        "from lcfl.models import SplitNetwork\n"
        "def build(width: int = 3) -> nn.Module:\n"
        "    return SplitNetwork(nn.Linear(16, width), nn.Linear(width, 8))\n"
    )
    run = lcfl("fit", *SYNTHETIC, *FEDAVG, *SMALL, "-c", f"model: {{network: {network}}}")
    assert same(package.load(run.path).model("global"), run.model("global"))


def test_a_directory_without_a_run_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere is not a run directory: there is no such folder\."):
        package.load(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"is not a run directory: it has no config\.yaml\."):
        package.load(tmp_path)


def test_a_run_from_python_needs_its_model_and_method(fedavg, copy):
    module, method = instantiate(copy / "config.yaml")
    (copy / "config.yaml").write_text("described: {}\n")
    with pytest.raises(ValueError, match=r"started from Python, .* lcfl\.load\(run, model=\.\.\., method=\.\.\.\)"):
        package.load(copy)
    with pytest.raises(ValueError, match="started from Python"):
        package.load(copy, model=module)
    assert same(package.load(copy, module, method).model("global"), fedavg.model("global"))


def test_a_run_from_python_refuses_another_model_or_method(tmp_path):
    method = builders.fedavg()

    def module(act=torch.relu, lr=0.1):
        return FederatedModule(partial(Own, act), partial(torch.optim.SGD, lr=lr), cut=None)

    run = Federation(1, default_root_dir=tmp_path, enable_progress_bar=False).fit(module(), builders.blobs(), method)
    assert same(package.load(run.path, module(lr=0.5), method).model("global"), run.model("global"))
    with pytest.raises(ValueError, match=r"another model or method: model\.network_functions\.act: .*relu.*, .*tanh"):
        package.load(run.path, module(torch.tanh), method)
    with pytest.raises(ValueError, match=r"method\.exchange\.class: .* 'FullModel', .* 'CentreAndEmbedding'"):
        package.load(run.path, module(), builders.lcfed(2))


def test_what_a_script_defined_is_the_same_in_another_script():
    saved = {"method": [{"class": "__main__.Own", "steps": 1}, "__main__.act"]}
    now = {"method": [{"class": "train.Own", "steps": 1}, "package.train.act"]}
    assert _named_as(now, saved) == now
    other = {"method": [{"class": "train.Other", "steps": 1}, "act"]}
    assert _named_as(other, saved) == saved


@pytest.mark.parametrize("text", ["trainer: {}", "method: {nonsense: 1}\nmodel: {}", "just words", "", "a: [", "- 1"])
def test_an_invalid_configuration_is_refused(tmp_path, text):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"config\.yaml cannot be read"):
        package.load(tmp_path)
