"""Tests parts that are given by name on the command line and in YAML."""

import os

import pytest
import torch
import torchvision

import lcfl as package
from lcfl.cli.class_options import with_modules
from lcfl.runs import checkpoint
from tests.helpers.commandline import FIT, LCFED, SMALL, SYNTHETIC, lcfl

pytestmark = pytest.mark.usefixtures("here")


def test_callbacks_are_added_by_short_name_with_their_arguments(built):
    arguments = ("--trainer.callbacks.monitor=val/own_split/personal/acc", "--trainer.callbacks.patience=9")
    for path in ("EarlyStopping", "lcfl.callbacks.EarlyStopping"):
        callbacks = built(f"--trainer.callbacks+={path}", *arguments, "--trainer.callbacks+=Monitor")[
            "trainer"
        ].all_callbacks
        early = [callback for callback in callbacks if type(callback).__name__ == "EarlyStopping"]
        assert [callback.patience for callback in early] == [9]
        names = [type(callback).__name__ for callback in callbacks]
        assert names.count("Monitor") == names.count("Checkpoint") == names.count("Progress") == 1


def test_parts_can_be_named_without_their_modules(built):
    layer = """
    method: {local_update: {class_path: LocalTraining, init_args: {epochs: 2}}, clustering: [LowRankCosine]}
    data: {dataset: CIFAR10, partition: {class_path: ClientDirichlet, init_args: {alpha: 0.5}}}
    model: {network: LeNet5, optimizer: {class_path: Adam, init_args: {lr: 0.25}}}
    """
    parts = built("-c", layer)
    assert parts["method"].local_update.epochs == 2 and parts["method"].clustering[0].num_clusters == 10
    data = parts["datamodule"]
    assert type(data.dataset).__name__ == "CIFAR10" and data.partition.alpha == 0.5 and data.num_clients == 20
    optimizer = parts["model"].configure_optimizers()
    assert isinstance(optimizer, torch.optim.Adam) and optimizer.param_groups[0]["lr"] == 0.25
    assert parts["model"].configure_optimizers() is not optimizer


@pytest.mark.parametrize(
    "words",
    [
        ("-c", "model: {network: {class_path: MLP, init_args: {in_features: 7, num_classes: 2}}}"),
        ("--model.network=MLP", "--model.network.in_features=7", "--model.network.num_classes=2"),
    ],
)
def test_a_name_means_the_class_of_lcfl_if_another_library_has_it_too(built, words):
    assert torchvision.ops.MLP in torch.nn.Sequential.__subclasses__()
    assert isinstance(built(*words)["model"].network, package.models.MLP)


def test_only_names_of_networks_get_a_module():
    network = {"class_path": "split", "init_args": {"embedding": {"class_path": "MLP", "init_args": {"name": "CNN"}}}}
    layer = {"model": {"network": network}, "trainer": {"name": "MLP"}, "method": {"clustering": ["LowRankCosine"]}}
    found = with_modules(layer)
    embedding = found["model"].pop("network")["init_args"]["embedding"]
    assert embedding == {"class_path": "lcfl.models.MLP", "init_args": {"name": "CNN"}}
    assert found == {name: layer[name] for name in ("trainer", "method")} | {"model": {}}


def test_the_learning_rate_of_a_run_is_that_of_its_yaml():
    run = lcfl(*FIT, "-c", "model: {optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.3}}}")
    assert run.summary()["identity"]["model"]["optimizer"]["lr"] == 0.3


def test_one_line_replaces_the_clustering(parts):
    run = lcfl("fit", *SYNTHETIC, *LCFED, *SMALL, "-c", "method: {clustering: [own_parts.Parity]}")
    assert run.state.assignment.tolist() == [0, 1] * 10 and run.state.num_clusters == 2


NETWORKS = {
    "class": ("{class_path: lcfl.models.MLP, init_args: {in_features: 16, num_classes: 8}}", "decision"),
    "own class": ("{class_path: own_parts.Net, init_args: {width: 7}}", "head"),
    "own class by name": ("own_parts.Net", "head"),
    "function": ("{class_path: torchvision.models.squeezenet1_1, init_args: {num_classes: 8}}", "classifier"),
    "function by name": ("torchvision.models.squeezenet1_1", "classifier"),
    "split": (
        "{class_path: lcfl.models.split, init_args: {"
        "embedding: {class_path: torch.nn.Linear, init_args: {in_features: 16, out_features: 4}}, "
        "decision: {class_path: torch.nn.Linear, init_args: {in_features: 4, out_features: 8}}}}",
        "decision",
    ),
}


@pytest.mark.parametrize("kind", NETWORKS)
def test_every_initial_model_is_a_new_network(built, parts, kind):
    network, cut = NETWORKS[kind]
    model = built("-c", f"model: {{network: {network}, cut: {cut}}}")["model"]
    one, two = model.make_network(), model.make_network()
    assert not {id(parameter) for parameter in one.parameters()} & {id(parameter) for parameter in two.parameters()}
    zero = model.initial_model(0, number=0)
    assert torch.equal(zero, model.initial_model(0, number=0))
    assert not torch.equal(zero, model.initial_model(0, number=1))
    assert 0 < model.layout.num_embedding < model.layout.num_parameters


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("CNN", "{channels: [2], hidden: []}"), ("LeNet5", "{}"), ("ResNet9", "{}"), ("VGG16", "{}")],
)
def test_networks_of_lcfl_can_be_given_by_short_name(built, name, arguments):
    model = built("-c", f"model: {{network: {{class_path: {name}, init_args: {arguments}}}}}")["model"]
    assert type(model.network).__module__.startswith("lcfl.models.") and type(model.network).__name__ == name


@pytest.mark.parametrize(
    ("name", "cut"), [("squeezenet1_1", "classifier"), pytest.param("resnet18", "fc", marks=pytest.mark.slow)]
)
def test_a_network_of_torchvision_cut_at_its_last_layer_runs(name, cut):
    network = f"{{class_path: torchvision.models.{name}, init_args: {{num_classes: 10}}}}"
    layer = f"""
    data: {{dataset: CIFAR10, partition: IID, num_clients: 2, batch_size: 5}}
    model: {{network: {network}, cut: {cut}}}
    method: {{clustering: [{{class_path: LowRankCosine, init_args: {{num_clusters: 2}}}}]}}
    """
    run = lcfl("fit", *SYNTHETIC, *LCFED, "-c", layer, "--trainer.fast_dev_run=true", "--trainer.devices=1")
    assert run.state.round == 1 and run.model("global")(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    assert run._module.layout.num_parameters - run._module.layout.num_embedding == 512 * 10 + 10


def test_a_run_starts_from_weights_in_a_file_and_continues_without_it():
    torch.save(lcfl(*FIT).model("global").state_dict(), "start.pt")
    more = ("--model.init_from=start.pt", "--trainer.name=tuned")
    run = lcfl(*FIT, *more)
    start = run._module.layout.pack(run.model("global"))
    initial = lcfl(*FIT, *more, "--trainer.rounds=0").state.initial
    os.rename("start.pt", "moved.pt")
    assert torch.equal(initial, torch.cat([each.flatten() for each in torch.load("moved.pt").values()]))
    assert torch.equal(run._module.layout.pack(package.load(run.path).model("global")), start)
    resume = ("--trainer.name=tuned", f"--ckpt_path={run.path}", "--trainer.rounds=3")
    assert lcfl(*FIT, *resume, "--model.init_from=moved.pt").state.round == 3
    with pytest.raises(ValueError, match=r"model.init_from: there is no file 'start.pt'"):
        lcfl(*FIT, *resume, "--model.init_from=start.pt")
    torch.save({name: 2 * each for name, each in torch.load("moved.pt").items()}, "other.pt")
    with pytest.raises(checkpoint.CheckpointError, match=r"init_from: the checkpoint has '\w{64}', this run '\w{64}'"):
        lcfl(*FIT, *resume, "--model.init_from=other.pt")
    assert lcfl(*FIT, *resume[:-1], "--trainer.rounds=4").state.round == 4  # all models are in the checkpoint
    assert lcfl("test", *FIT[1:], f"--ckpt_path={run.path}")
