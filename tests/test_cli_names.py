"""Parts by name on the command line and in YAML, and what is said of a name that is none."""

import os

import pytest
import torch
import yaml

import lcfl as package
from lcfl import checkpoint
from lcfl.commands import partition
from lcfl.data.partition import IID
from tests.commandline import FIT, LCFED, SMALL, SYNTHETIC, failure, lcfl

pytestmark = pytest.mark.usefixtures("here")


def test_callbacks_are_added_by_short_name_with_their_arguments(built):
    arguments = ("--trainer.callbacks.monitor=val/own_split/personal/acc", "--trainer.callbacks.patience=9")
    for path in ("EarlyStopping", "lcfl.callbacks.EarlyStopping"):
        callbacks = built(f"--trainer.callbacks+={path}", *arguments, "--trainer.callbacks+=Monitor")[
            "trainer"
        ].callbacks
        early = [callback for callback in callbacks if type(callback).__name__ == "EarlyStopping"]
        assert [callback.patience for callback in early] == [9]
        names = [type(callback).__name__ for callback in callbacks]
        assert names.count("Monitor") == names.count("Checkpoint") == names.count("Progress") == 1


def test_parts_are_named_without_their_modules(built):
    layer = """
    method: {local_update: {class_path: LocalTraining, init_args: {epochs: 2}}, clustering: [LowRankCosine]}
    data: {dataset: CIFAR10, partition: {class_path: ClientDirichlet, init_args: {alpha: 0.5}}}
    model: {network: LeNet5, optimizer: {class_path: Adam, init_args: {lr: 0.25}}}
    """
    found = built("-c", layer)
    assert found["method"].local_update.epochs == 2 and found["method"].clustering[0].num_clusters == 10
    data = found["datamodule"]
    assert type(data.dataset).__name__ == "CIFAR10" and data.partition.alpha == 0.5 and data.num_clients == 20
    optimizer = found["model"].configure_optimizers()
    assert isinstance(optimizer, torch.optim.Adam) and optimizer.param_groups[0]["lr"] == 0.25
    assert found["model"].configure_optimizers() is not optimizer


def test_the_learning_rate_of_a_run_is_that_of_its_yaml():
    run = lcfl(*FIT, "-c", "model: {optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.3}}}")
    assert run.summary()["identity"]["model"]["optimizer"]["lr"] == 0.3


def test_one_line_swaps_the_clustering(parts):
    run = lcfl("fit", *SYNTHETIC, *LCFED, *SMALL, "-c", "method: {clustering: [own_parts.Parity]}")
    assert run.state.assignment.tolist() == [0, 1] * 10 and run.state.num_clusters == 2


NETWORKS = {
    "class": (
        "{class_path: lcfl.networks.MLP, init_args: {in_features: 16, hidden: [32], num_classes: 8}}",
        "decision",
    ),
    "own class": ("{class_path: own_parts.Net, init_args: {width: 7}}", "head"),
    "own class by name": ("own_parts.Net", "head"),
    "function": ("{class_path: torchvision.models.resnet18, init_args: {num_classes: 8}}", "fc"),
    "function by name": ("torchvision.models.squeezenet1_1", "classifier"),
    "split": (
        "{class_path: lcfl.networks.split, init_args: {"
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
    assert torch.equal(zero, model.initial_model(0, number=0)) and not torch.equal(
        zero, model.initial_model(0, number=1)
    )
    assert 0 < model.layout.num_embedding < model.layout.num_parameters


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("CNN", "{channels: [2], hidden: []}"),
        ("LeNet5", "{}"),
        ("ResNet9", "{}"),
        ("VGG16", "{}"),
    ],
)
def test_networks_of_lcfl_go_by_their_short_names(built, name, arguments):
    model = built("-c", f"model: {{network: {{class_path: {name}, init_args: {arguments}}}}}")["model"]
    assert type(model.network).__module__.startswith("lcfl.networks.") and type(model.network).__name__ == name


@pytest.mark.parametrize("kind", ["own class", "split"])
def test_networks_of_ones_own_train(parts, kind):
    network, cut = NETWORKS[kind]
    run = lcfl(*FIT, "-c", f"model: {{network: {network}, cut: {cut}}}")
    assert run.metrics["test/own_split/personal/acc"] > 0
    saved = yaml.safe_load((run.path / "config.yaml").read_text())["model"]
    assert saved["cut"] == cut and saved["network"]["class_path"] in network


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


# names that are none


@pytest.mark.parametrize("words", [["--trainer.roundz=2"], ["-c", "trainer: {roundz: 2}"]])
def test_an_unknown_key_is_named_with_the_closest_one(capsys, words):
    said = failure(capsys, *FIT, *words)
    assert "trainer.roundz" in said and "Did you mean trainer.rounds?" in said
    assert len(said.splitlines()) == 2 and "lcfl fit --help" in said


@pytest.mark.parametrize(
    ("layer", "key"),
    [
        ("nonsense: 3", "nonsense"),
        ("data: {alpha: 3}", "data.alpha"),
        ("data: {partition: {class_path: IID, init_args: {alpha: 3}}}", "alpha"),
        ("method: {clusterings: []}", "method.clusterings"),
        ("model: {network: {init_args: {widht: 3}}}", "widht"),
    ],
)
def test_an_unknown_key_in_a_file_is_named(capsys, layer, key):
    assert f"'{key}'" in failure(capsys, *FIT, "-c", layer)


@pytest.mark.parametrize(
    ("words", "wrong", "meant"),
    [
        (["--data.dataset=CIFAR11"], "CIFAR11", "CIFAR10"),
        (["--trainer.callbacks+=EarlyStoping"], "EarlyStoping", "EarlyStopping"),
        (["-c", "method: {clustering: [LowRankCosin]}"], "LowRankCosin", "LowRankCosine"),
        (["-c", "method: {exchange: lcfl.exchange.FulModel}"], "FulModel", "FullModel"),
        (["-c", "model: {optimizer: torch.optim.SDG}"], "SDG", "SGD"),
        (["--model.network=LeNet"], "LeNet", "LeNet5"),
    ],
)
def test_a_misspelt_class_is_answered_with_the_closest_ones(capsys, words, wrong, meant):
    said = failure(capsys, *FIT, *words)
    assert f"'{wrong}'" in said and f"Did you mean {meant}" in said
    assert len(said.splitlines()) == 2


def test_a_class_that_is_like_none_is_answered_with_all_of_that_kind(capsys):
    said = failure(capsys, *FIT, "--data.partition=Xyz")
    assert "data.partition" in said and "Pathological" in said and "IID" in said and "Did you mean" not in said
    assert "CIFAR10" not in said and "Partition," not in said


@pytest.mark.parametrize("sign", ["=", "+="])
def test_what_a_callback_is_not_given_is_named(capsys, sign):
    said = failure(capsys, *FIT, f"--trainer.callbacks{sign}EarlyStopping")
    assert "trainer.callbacks: lcfl.callbacks.EarlyStopping needs monitor: set trainer.callbacks.init_args.mon" in said
    said = failure(capsys, *FIT, f"--trainer.callbacks{sign}EarlyStopping", "--trainer.callbacks.monitr=x")
    assert "lcfl.callbacks.EarlyStopping has no argument 'monitr'. Did you mean monitor?" in said
    assert len(said.splitlines()) == 2
    said = failure(capsys, *FIT, f"--trainer.callbacks{sign}EarlyStopping", "--trainer.callbacks.patience=abc")
    assert said.startswith("lcfl: error: trainer.callbacks.init_args.patience: Expected a int. Got value: abc\n")


def test_an_argument_without_type_and_default_has_to_be_given(built, tmp_path):
    """The parser would pass None for it."""
    (tmp_path / "own_parts.py").write_text(
        "from torch import nn\n"
        "from lcfl.clustering import Clustering\n"
        "class Grouping(Clustering):\n"
        "    def __init__(self, size):\n"
        "        self.size = size\n"
        "from lcfl.data.partition import IID\n"
        "class Dealing(IID):\n"
        "    def __init__(self, seed):\n"
        "        super().__init__()\n"
        "    @classmethod\n"
        "    def of(cls) -> 'Dealing':\n"
        "        return cls(0)\n"
        "class Bare(nn.Sequential):\n"
        "    def __init__(self, width, depth=None, bias: bool | None = None):\n"
        "        super().__init__(nn.Linear(16, width), nn.Linear(width, 8))\n"
    )
    network = ("--model.network=own_parts.Bare", "--model.cut=1")
    with pytest.raises(ValueError, match=r"model.network: own_parts.Bare needs width: set model.network.init_args.wid"):
        built(*network)
    assert built(*network, "--model.network.width=3")["model"].layout.num_parameters == 17 * 3 + 4 * 8
    with pytest.raises(ValueError, match=r"method.clustering.1: own_parts.Grouping needs size: set method.clust"):
        built("--method.clustering=[LowRankCosine, own_parts.Grouping]")
    with pytest.raises(ValueError, match=r"data.partition: own_parts.Dealing needs seed: set data.partition"):
        partition.main(["-c", str(SYNTHETIC[1]), "--data.partition=own_parts.Dealing"])
    assert isinstance(built("--data.partition=own_parts.Dealing.of")["datamodule"].partition, IID)


def test_a_callback_of_lightnings_trainer_is_refused(capsys):
    words = ("--trainer.callbacks+=lightning.pytorch.callbacks.Timer",)
    assert "lcfl.Callback" in failure(capsys, *FIT, *words)


def test_a_run_starts_from_weights_in_a_file_and_goes_on_without_it():
    torch.save(lcfl(*FIT).model("global").state_dict(), "start.pt")
    more = ("--model.init_from=start.pt", "--trainer.name=tuned")
    run = lcfl(*FIT, *more)
    start = run._module.layout.pack(run.model("global"))
    begun = lcfl(*FIT, *more, "--trainer.rounds=0").state.initial
    os.rename("start.pt", "moved.pt")
    assert torch.equal(begun, torch.cat([each.flatten() for each in torch.load("moved.pt").values()]))
    assert torch.equal(run._module.layout.pack(package.load(run.path).model("global")), start)
    resume = ("--trainer.name=tuned", f"--ckpt_path={run.path}", "--trainer.rounds=3")
    assert lcfl(*FIT, *resume, "--model.init_from=moved.pt").state.round == 3
    with pytest.raises(ValueError, match=r"model.init_from: there is no file 'start.pt'"):
        lcfl(*FIT, *resume, "--model.init_from=start.pt")
    with pytest.raises(checkpoint.CheckpointError, match=r"init_from: the checkpoint has '\w{64}', this run None"):
        lcfl(*FIT, *resume)
    assert lcfl("test", *FIT[1:], f"--ckpt_path={run.path}")
