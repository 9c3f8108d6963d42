"""Tests the errors of the parser for unknown names and missing arguments, and where it finds classes."""

import functools
import sys
from pathlib import Path

import pytest
import torch
from jsonargparse import Namespace
from torch import nn

from lcfl import __main__
from lcfl.cli.commands import partition
from lcfl.cli.parser import Parser, check_given
from lcfl.data.datamodule import FederatedDataModule
from lcfl.data.partition import IID
from lcfl.federation.federation import Federation
from lcfl.methods.method import Method
from lcfl.models import MLP
from lcfl.models.module import FederatedModule
from tests.helpers.commandline import CONFIGS, FIT, SYNTHETIC, failure, lcfl

pytestmark = pytest.mark.usefixtures("here")


class Module(FederatedModule):
    def __init__(self, *args, penalty: float = 0.0, **options):
        super().__init__(*args, **options)


@pytest.mark.parametrize(
    ("kind", "argument", "must_be"),
    [
        (Federation, "rounds", "a whole number"),
        (Federation, "default_root_dir", "a text"),
        (Federation, "enable_checkpointing", "true or false"),
        (Federation, "accelerator", "auto or cpu or cuda or gpu"),
        (Method, "clustering", "a list"),
        (FederatedModule, "network", "a class"),
        (FederatedModule, "optimizer", "a class"),
        (FederatedModule, "cluster_weight", "a number"),
        (FederatedDataModule, "pool", "train or all"),
        (FederatedDataModule, "client_transforms", "a list"),
        (FederatedDataModule, "dataset", "a class"),
        ("torch.optim.SGD", "lr", "a number"),
        ("torch.optim.SGD", "momentum", "a number"),
        ("torch.optim.SGD", "nesterov", "true or false"),
        ("torch.optim.Adam", "betas", "a list"),
        ("torch.nn.CrossEntropyLoss", "label_smoothing", "a number"),
        ("lcfl.models.MLP", "in_features", "a whole number"),
        ("lcfl.models.MLP", "hidden", "a list"),
        ("lcfl.data.datasets.Synthetic", "separation", "a number"),
        ("lcfl.callbacks.Checkpoint", "every_n_rounds", "a whole number"),
        (f"{__name__}.Module", "penalty", "a number"),
        (f"{__name__}.Module", "global_weight", "a number"),
    ],
)
def test_null_is_refused_where_an_argument_needs_a_value(kind, argument, must_be):
    given, option, named = Namespace({argument: None}), f"a.{argument}", kind
    if isinstance(kind, str):
        given, option, named = Namespace(class_path=kind, init_args=given), f"a.init_args.{argument}", None
    with pytest.raises(ValueError) as error:
        check_given(given, "a", named)
    assert str(error.value) == f"{option}: got {argument}=null; it must be {must_be}."


@pytest.mark.parametrize(
    ("kind", "argument"),
    [
        (Federation, "callbacks"),
        (Federation, "final_models"),
        (FederatedModule, "loss"),
        (FederatedDataModule, "leavers"),
        ("torch.optim.SGD", "foreach"),
        ("torch.nn.CrossEntropyLoss", "weight"),
    ],
)
def test_null_is_accepted_where_it_is_a_value(kind, argument):
    given = Namespace({argument: None})
    if isinstance(kind, str):
        check_given(Namespace(class_path=kind, init_args=given), "a")
    else:
        check_given(given, "a", kind)


def test_every_command_finds_classes_in_the_current_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each not in ("", str(tmp_path))])
    Parser()
    assert sys.path[-1] == str(tmp_path)


@pytest.mark.parametrize("words", [["--trainer.roundz=2"], ["-c", "trainer: {roundz: 2}"]])
def test_an_unknown_key_is_reported_with_the_closest_one(capsys, words):
    said = failure(capsys, *FIT, *words)
    assert "trainer.roundz" in said and "Did you mean trainer.rounds?" in said
    assert len(said.splitlines()) == 2 and "lcfl fit --help" in said


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("--model.optimzer.lr=3", "model.optimizer.lr"),
        ("--method.clusterng.init_args.theta=1", "method.clustering.init_args.theta"),
        ("--model.optimzer=Adam", "model.optimizer"),
        ("--trainer.roundz.x=3", "trainer.rounds"),
    ],
)
def test_an_argument_of_a_misspelt_option_is_reported_with_what_it_should_be(capsys, word, meant):
    assert failure(capsys, *FIT, word).partition("\n")[0].endswith(f"arguments: {word}. Did you mean {meant}?")


@pytest.mark.parametrize("words", [["--trainer.max_epochs=2"], ["-c", "trainer: {max_epochs: 2}"]])
def test_an_option_of_the_lightning_trainer_is_reported_with_the_one_to_use(capsys, words):
    said = failure(capsys, *FIT, *words)
    assert "trainer.max_epochs" in said and "In place of this option of lightning.Trainer, set trainer.rounds;" in said


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
def test_an_unknown_key_in_a_file_is_reported(capsys, layer, key):
    assert f"'{key}'" in failure(capsys, *FIT, "-c", layer)


@pytest.mark.parametrize(
    ("words", "wrong", "meant"),
    [
        (["--data.dataset=CIFAR11"], "CIFAR11", "CIFAR10"),
        (["--trainer.callbacks+=EarlyStoping"], "EarlyStoping", "EarlyStopping"),
        (["-c", "method: {clustering: [LowRankCosin]}"], "LowRankCosin", "LowRankCosine"),
        (["-c", "method: {exchange: lcfl.FulModel}"], "FulModel", "FullModel"),
        (["-c", "model: {optimizer: torch.optim.SDG}"], "SDG", "SGD"),
        (["--model.network=LeNet"], "LeNet", "LeNet5"),
    ],
)
def test_a_misspelt_class_is_reported_with_the_closest_ones(capsys, words, wrong, meant):
    said = failure(capsys, *FIT, *words)
    assert f"'{wrong}'" in said and f"Did you mean {meant}" in said
    assert len(said.splitlines()) == 2


@pytest.mark.parametrize(
    ("layer", "says"),
    [
        ("data: {partition: {init_args: 3.5}}", "data.partition: expected a mapping as init_args, got a number"),
        ("model: {optimizer: {class_path: SGD, init_args: null}}", "model.optimizer: expected a mapping as init_args"),
        (
            "model: {optimizer: {class_path: Adam, init_args: {betas: 3.5}}}",
            "model.optimizer.init_args.betas: expected a list, got 3.5\n",
        ),
    ],
)
def test_arguments_of_another_kind_are_refused_in_words(capsys, layer, says):
    assert failure(capsys, *FIT, "-c", layer).startswith(f"lcfl: error: {says}")


def test_a_class_without_a_close_name_is_reported_with_all_classes_of_the_option(capsys):
    said = failure(capsys, *FIT, "--data.partition=Xyz")
    assert "data.partition" in said and "Pathological" in said and "IID" in said and "Did you mean" not in said
    assert "CIFAR10" not in said and "Partition," not in said


def test_missing_options_are_listed_with_configurations_that_set_them(capsys):
    said = failure(capsys, "fit", *SYNTHETIC)
    missing = "method.local_update, method.exchange, method.aggregation"
    assert said.startswith(f"lcfl: error: {missing}: no value is given. Add a configuration with -c, such as {CONFIGS}")
    assert said.endswith("\nlcfl fit --help shows all options.\n")


@pytest.mark.parametrize("sign", ["=", "+="])
def test_wrong_arguments_of_a_callback_are_reported(capsys, sign):
    said = failure(capsys, *FIT, f"--trainer.callbacks{sign}EarlyStopping", "--trainer.callbacks.monitr=x")
    assert "lcfl.callbacks.EarlyStopping has no argument 'monitr'. Did you mean monitor?" in said
    assert len(said.splitlines()) == 2
    said = failure(capsys, *FIT, f"--trainer.callbacks{sign}EarlyStopping", "--trainer.callbacks.patience=abc")
    assert said.startswith("lcfl: error: trainer.callbacks.init_args.patience: expected a whole number, got abc\n")


def test_an_argument_without_type_and_default_is_required(built, tmp_path):
    """The parser would pass None for it."""
    (tmp_path / "own_parts.py").write_text(
        "from torch import nn\n"
        "from lcfl.methods.clustering import Clustering\n"
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


def test_a_callback_of_the_lightning_trainer_is_refused(capsys):
    said = failure(capsys, *FIT, "--trainer.callbacks+=lightning.pytorch.callbacks.Timer")
    assert "trainer.callbacks: got lightning.pytorch.callbacks.Timer" in said and "lcfl.Callback" in said
    assert len(said.splitlines()) == 2


WEIGHT = "model.loss.init_args.weight: expected a list of numbers or null, got ['a']"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--model.optimizer.lr=abc", "model.optimizer.init_args.lr: expected a number, got abc"),
        ("--model.optimizer.momentum=[1]", "model.optimizer.init_args.momentum: expected a number, got [1]"),
        (
            "--model.loss={class_path: torch.nn.NLLLoss, init_args: {weight: abc}}",
            "model.loss.init_args.weight: expected a list of numbers or null, got abc",
        ),
        ("--trainer.clients_per_round=abc", "trainer.clients_per_round: expected a number, got abc"),
        ("--data.batch_size=x", "data.batch_size: expected a whole number, got x"),
        ("--trainer.final_models=[foo]", "trainer.final_models: Expected one of ['personal', 'cluster', 'global', "),
        ("--model.loss={class_path: CrossEntropyLoss, init_args: {weight: [a]}}", WEIGHT),
        (
            "--model.network=MLP",
            "model.network: lcfl.models.MLP needs in_features: set model.network.init_args.in_features",
        ),
        (
            "--model.network={class_path: torchvision.models.shufflenet_v2_x0_5, init_args: {num_classes: 4}}",
            "model.network.init_args.inverted_residual: torchvision.models.shufflenetv2.InvertedResidual is a class",
        ),
        ("--model.metrics={a: null}", "model.metrics: expected a class, got None in {'a': None}"),
        ("--method.clustering=3", "method.clustering: expected a list, got 3\n"),
        ("--data.protocols=own_split", "data.protocols: expected a list, got own_split; write [own_split]\n"),
        ("--model.trainable=head", "model.trainable: expected a list or null, got head; write [head]\n"),
        ("--trainer.logger=Foo", "trainer.logger: there is no class 'Foo'. It needs its import path"),
        ("--data.newcomers=alice", "data.newcomers: expected a "),
        ("--data.leavers=[3]", "data.leavers: expected a mapping or null, got [3]\n"),
        (
            "--data.dataset=Table",
            "data.dataset: Table is no class for this option, but for data.dataset.init_args.reader.",
        ),
        (
            "--model.metrics.f1.init_args.task=x",
            "model.metrics: got task=x for no class. Name it first: --model.metrics.f1=",
        ),
        ("--model.network.hiden=3", "model.network: lcfl.models.MLP has no argument 'hiden'. Did you mean hidden"),
    ],
)
def test_a_value_of_a_wrong_type_is_reported_with_what_was_expected(capsys, words, message):
    said = failure(capsys, *FIT, words)
    assert said.startswith(f"lcfl: error: {message}")
    assert len(said.splitlines()) == 2


class Narrow(FederatedModule):
    """A module whose `__init__` does not pass on what a method sets."""

    def __init__(self, hidden: int = 16):
        super().__init__(functools.partial(MLP, 16, [hidden], 8), functools.partial(torch.optim.SGD, lr=0.1))


def test_an_argument_of_a_base_class_that_is_not_passed_on_is_reported(capsys):
    said = failure(capsys, *FIT, f"--model={__name__}.Narrow", "--model.cluster_weight=1")
    assert (
        f"{__name__}.Narrow has no argument 'cluster_weight'. Its arguments: hidden. FederatedModule has it: let"
        in said
    )


@pytest.mark.parametrize(("file", "shown"), [("table.csv", "table.csv"), ("folder/table.csv", "age,label")])
def test_a_file_of_data_in_place_of_a_class_is_explained(capsys, monkeypatch, tmp_path, file, shown):
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path(file).write_text("age,label\n0.5,1\n0.7,2\n")
    said = failure(capsys, *FIT, f"--data.dataset={file}")
    assert said.startswith(f"lcfl: error: data.dataset: got {shown}, which names no class.")
    assert len(said.splitlines()) == 2


def test_weights_of_classes_are_a_list_of_numbers(built, tmp_path):
    loss = "{class_path: CrossEntropyLoss, init_args: {weight: [1, 2, 0.5, 1, 1, 1, 1, 3]}}"
    model = built(f"--model.loss={loss}")["model"]
    assert torch.equal(model.loss.weight, torch.tensor([1, 2, 0.5, 1, 1, 1, 1, 3]))


def test_arguments_of_a_function_that_is_named_elsewhere_are_explained(capsys):
    said = failure(capsys, *FIT, "--model.network=torchvision.models.resnet18", "--model.network.num_classes=8")
    assert "--model.network='{class_path: package.function, init_args: {num_classes: 8}}'" in said


def test_the_reason_of_a_class_stands_alone():
    with pytest.raises(ValueError, match=r"^EarlyStopping: got monitor=test/x; test data must not .* val/x\.$"):
        lcfl(*FIT, "--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=test/x")


@pytest.mark.parametrize("value", [".nan", ".inf"])
@pytest.mark.parametrize("option", ["model.optimizer.lr", "trainer.clients_per_round", "data.val_fraction"])
def test_a_number_that_is_not_finite_is_refused(option, value):
    with pytest.raises(ValueError, match=rf"{option.rpartition('.')[2]}: got (nan|inf); it must be a finite number"):
        lcfl(*FIT, f"--{option}={value}")


@pytest.mark.parametrize("words", [["--trainer.round=2"], ["--trainer.round", "2"]])
def test_an_abbreviated_option_is_refused(capsys, words):
    said = failure(capsys, *FIT, *words)
    assert "trainer.round" in said and "Did you mean trainer.rounds?" in said


def any_network(width=4, **more):
    return nn.Linear(width, 2)


def test_arguments_that_a_function_takes_without_naming_them_belong_elsewhere(capsys):
    network = "{class_path: tests.cli.test_parser.any_network, init_args: {num_classes: 3}}"
    said = failure(capsys, *FIT, f"--model.network={network}")
    assert "It takes others, too: give 'num_classes' in dict_kwargs beside init_args." in said


def test_an_error_in_the_file_of_a_user_s_module_is_reported_with_its_place(monkeypatch, here, capsys):
    monkeypatch.delenv("LCFL_DEBUG", raising=False)
    (here / "misspelt.py").write_text("class Own: ...\n\nOwn.size = undefined\n")
    with pytest.raises(SystemExit):
        __main__.main([*map(str, FIT), "--model.class_path=misspelt.Own"])
    said = "lcfl: error: model: name 'undefined' is not defined\n"
    assert f"{said}(NameError at {here}/misspelt.py, line 3; set LCFL_DEBUG=1" in capsys.readouterr().err
