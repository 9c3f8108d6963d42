"""Tests user-defined modules and data modules, named on the command line or in YAML, or given to `FederatedCLI`."""

import csv
from importlib import import_module

import pytest
import torch
import yaml

import lcfl as package
from lcfl.cli import federated_cli
from lcfl.cli.commands import partition
from lcfl.cli.layered_config import names_class
from tests.helpers.commandline import FEDAVG, FIT, SYNTHETIC, failure, lcfl, printed

pytestmark = pytest.mark.usefixtures("here", "parts")

NET = ("--model.network=own_parts.Net", "--model.cut=head")
OWN = ("--model.class_path=own_parts.Module", "--model.penalty=0.5")


def penalty_of(run):
    """Returns the value that the steps of the last round logged."""
    with (run.path / "metrics.csv").open() as file:
        return float(list(csv.DictReader(file))[-1]["train/penalty"])


def opened(path):
    """Returns the module and the data module that the configuration in a run directory builds."""
    return package.load(path)._module, federated_cli.instantiate_data(path / "config.yaml")


@pytest.mark.parametrize(
    "words",
    [
        ("--model=own_parts.Module", "--model.penalty=0.5"),
        ("-c", "model: {class_path: own_parts.Module, init_args: {penalty: 0.5}}"),
    ],
    ids=["model", "layer"],
)
def test_a_user_defined_module_can_be_named_in_other_ways(capsys, words):
    expected, other = (printed(capsys, *FIT[1:], *NET, *way)["model"] for way in (OWN, words))
    assert other == expected and other["init_args"]["penalty"] == 0.5


def test_a_user_defined_module_trains_with_the_network_of_the_layers_below():
    run = lcfl(*FIT, *NET, *OWN, "--data=own_parts.Data", "--data.batch_size=9")
    assert penalty_of(run) == 0.5
    saved = yaml.safe_load((run.path / "config.yaml").read_text())
    assert saved["model"]["class_path"] == "own_parts.Module" and saved["model"]["init_args"]["cut"] == "head"
    own = import_module("own_parts")
    module, data = opened(run.path)
    assert type(module) is own.Module and module.penalty == 0.5 and type(module.network) is own.Net
    assert type(data) is own.Data and data.batch_size == 9
    again = lcfl("fit", "-c", run.path / "config.yaml")
    assert torch.equal(again.state.global_model, run.state.global_model)
    assert lcfl("test", "-c", run.path / "config.yaml", "--ckpt_path=last")


def test_a_later_layer_changes_arguments_and_network_of_a_user_defined_module(capsys):
    later = ("-c", "model: {penalty: 2.0, network: {class_path: lcfl.models.MLP, init_args: {in_features: 16}}}")
    shown = printed(capsys, *SYNTHETIC, *FEDAVG, *OWN, *NET, *later, "--model.optimizer=Adam")["model"]["init_args"]
    assert shown["penalty"] == 2.0 and shown["cut"] == "head"
    assert shown["network"]["init_args"] == {"in_features": 16, "hidden": [64], "num_classes": 10, "batch_norm": False}
    assert shown["optimizer"]["class_path"] == "torch.optim.Adam" and "momentum" not in shown["optimizer"]["init_args"]


def test_a_function_builds_a_new_network_for_every_model(built):
    network = "model: {network: {class_path: torchvision.models.squeezenet1_1, init_args: {num_classes: 8}}}"
    model = built("-c", network, *OWN, "--model.cut=classifier")["model"]
    assert model.make_network() is not model.make_network()


def test_a_configuration_without_a_class_stays_without_a_class(capsys):
    shown = printed(capsys, *SYNTHETIC, *FEDAVG)
    assert "class_path" not in shown["model"] and shown["model"]["cut"] == "decision"
    assert "class_path" not in shown["data"] and shown["data"]["num_clients"] == 20


def test_a_run_has_the_classes_given_to_the_cli(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    own = import_module("own_parts")
    words = [str(word) for word in (*FIT, *NET, "--model.penalty=0.25")]
    run = federated_cli.FederatedCLI(own.Module, own.Data, args=words).result
    assert penalty_of(run) == 0.25
    module, data = opened(run.path)
    assert type(module) is own.Module and module.penalty == 0.25 and type(data) is own.Data


def test_any_other_class_is_refused_with_the_allowed_ones(capsys):
    said = failure(capsys, *FIT, "--model.class_path=lcfl.models.MLP")
    assert "model: got lcfl.models.MLP; allowed are FederatedModule and its subclasses." in said
    said = failure(capsys, *FIT, "--model.class_path=own_parts.Modul")
    assert "model: there is no 'Modul' in own_parts. Did you mean Module?" in said
    said = failure(capsys, *FIT, *OWN, "--model.network=LeNet")
    assert "model.init_args.network: there is no class 'LeNet'. Did you mean LeNet5" in said and "Shards" not in said


def test_a_file_that_a_layer_refers_to_may_name_the_class(tmp_path):
    (tmp_path / "own_module.yaml").write_text("class_path: own_parts.Module\ninit_args: {penalty: 0.5}\n")
    (tmp_path / "layer.yaml").write_text("model: own_module.yaml\n")
    for words in (["-c", str(tmp_path / "layer.yaml")], [f"--model={tmp_path / 'own_module.yaml'}"]):
        assert names_class(words, "model")
    assert penalty_of(lcfl(*FIT, "-c", tmp_path / "layer.yaml", *NET)) == 0.5


def test_a_module_with_different_arguments_can_be_loaded(tmp_path):
    source = "import functools, lcfl\nfrom own_parts import Net\n\n\nclass Closed(lcfl.FederatedModule):\n"
    source += "    def __init__(self, rate: float = 0.1):\n        super().__init__(Net, cut='head')\n"
    (tmp_path / "closed.py").write_text(source)
    with pytest.warns(UserWarning, match=r"cluster_weight: a configuration sets it to 0\.5, but Closed has no"):
        run = lcfl(*FIT, "--model.class_path=closed.Closed")
    module, _ = opened(run.path)
    assert type(module).__name__ == "Closed" and package.load(run.path).model("global") is not None


def test_partition_accepts_a_user_defined_data_module(capsys):
    words = [*map(str, SYNTHETIC), "--data.class_path=own_parts.Data"]
    partition.main(words)
    assert "20 clients" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ([], False),
        (["-c"], False),
        (["--model"], False),
        (["-c", "model: {cut: a}", "--model.cut", "b", "--model=model.yaml"], False),
        (["-c", "model: {network: {class_path: a.B}}", "-c", "no: [", "--model.network.class_path=a.C"], False),
        (["--config=model: a.B"], True),
        (["-c", "{model: {class_path: a.B}}", "-c", "model: {cut: a}"], True),
        (["--model", "{class_path: a.B}"], True),
        (["--model.class_path", "a.B"], True),
    ],
)
def test_names_class_finds_words_that_name_the_class_of_a_group(words, named):
    assert names_class(words, "model") == named and not names_class(words, "data")
