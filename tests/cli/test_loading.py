"""Tests `lcfl.load`, which opens the run in a run directory."""

import pytest
import torch
import yaml

import lcfl as package
from tests.helpers.commandline import FEDAVG, LCFED, SMALL, SYNTHETIC, files, lcfl

pytestmark = pytest.mark.usefixtures("here")

INPUTS = torch.linspace(-1, 1, 3 * 16).reshape(3, 16)


def fitted(*args, method=LCFED):
    return lcfl("fit", *SYNTHETIC, *method, *SMALL, *args)


def same(one, two):
    return torch.equal(one(INPUTS), two(INPUTS))


def test_a_loaded_run_has_the_models_and_metrics_of_the_run():
    run = fitted()
    loaded = package.load(run.path)
    assert loaded.metrics == run.metrics and loaded.path == run.path
    client = int(torch.nonzero(run.state.participated)[0])
    for address in ({"kind": "personal", "client": client}, {"kind": "cluster", "cluster": 1}, {"kind": "global"}):
        model = loaded.model(**address)
        assert isinstance(model, torch.nn.Module) and not model.training
        assert same(model, run.model(**address)) and model(INPUTS).shape == (3, 8)
    assert not same(loaded.model("personal", client=client), loaded.model("global"))


def test_each_call_returns_a_separate_network():
    loaded = package.load(fitted(method=FEDAVG).path)
    one, two = loaded.model("global"), loaded.model("global")
    with torch.no_grad():
        next(one.parameters()).add_(1)
    assert not same(one, two) and same(two, loaded.model("global"))


def test_loading_writes_nothing_and_needs_neither_data_nor_trainer(tmp_path):
    run = fitted(method=FEDAVG)
    path = run.path / "config.yaml"
    config = yaml.safe_load(path.read_text())
    config["data"]["dataset"] = {"class_path": "a.module.that.IsGone"}
    config["trainer"] |= {"precision": "16-mixed", "accelerator": "cuda", "callbacks": ["gone.Callback"]}
    path.write_text(yaml.safe_dump(config))
    before = files(tmp_path)
    loaded = package.load(str(run.path))
    assert same(loaded.model("global"), run.model("global"))
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
    run = fitted("-c", f"model: {{network: {network}}}", method=FEDAVG)
    assert same(package.load(run.path).model("global"), run.model("global"))


def test_a_directory_without_a_run_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere is not a run directory: it has no config\.yaml"):
        package.load(tmp_path / "nowhere")


def test_a_run_from_python_needs_its_model_and_method(tmp_path):
    from lcfl.cli.federated_cli import instantiate

    run = fitted(method=FEDAVG)
    module, method = instantiate(run.path / "config.yaml")
    (run.path / "config.yaml").write_text("described: {}\n")
    with pytest.raises(ValueError, match=r"started from Python\. .* lcfl\.load\(run, model=\.\.\., method=\.\.\.\)"):
        package.load(run.path)
    with pytest.raises(ValueError, match="started from Python"):
        package.load(run.path, model=module)
    assert same(package.load(run.path, module, method).model("global"), run.model("global"))


@pytest.mark.parametrize("text", ["trainer: {}", "method: {nonsense: 1}\nmodel: {}", "just words", "", "a: [", "- 1"])
def test_an_invalid_configuration_is_refused(tmp_path, text):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"config\.yaml cannot be read"):
        package.load(tmp_path)
