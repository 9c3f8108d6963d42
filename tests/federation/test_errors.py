"""Bad input raises an error before training starts, which names the option, the value, what is allowed and a fix."""

import csv
import json
import re

import pytest

from tests.helpers.commandline import LCFED, SMALL, SYNTHETIC, failure, files, lcfl

pytestmark = pytest.mark.usefixtures("here")

FIT = ("fit", *SYNTHETIC, *LCFED, *SMALL, "--method.clustering.init_args.dimension=10")

PARTS = """
import torch
from PIL import Image
from torch import nn
from torch.utils.data import Dataset
from lcfl import Callback
from lcfl.data.datasets import FederatedDataset
from lcfl.data.samples import TensorSamples

class Odd(FederatedDataset):
    shape, num_classes = (16,), 8
    def load(self):
        return TensorSamples(torch.zeros(40, 16), torch.arange(40) % 9, 40, self.num_classes)

class Pictures(Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, index):
        return Image.new("L", (4, 4)), index % 8

class Uneven(Pictures):
    def __getitem__(self, index):
        return [0.5] * (1 + index), index % 8

class Misspelt(Callback):
    def on_round_ends(self, state):
        pass

class Headless(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(16, 8)
    def forward(self, inputs):
        return self.body(inputs)
"""


def layer(text):
    return ("-c", text)


def partition(name, **arguments):
    return layer(f"data: {{partition: {{class_path: {name}, init_args: {json.dumps(arguments)}}}}}")


THREE = ("--data.num_clients=3", "--trainer.clients_per_round=1", "--method.clustering.init_args.num_clusters=2")
# Maps what is wrong to the options and to the words of the message: option, value, what is allowed, fix.
REFUSED = {
    "more clusters than clients": (
        ["--method.clustering.init_args.num_clusters=21"],
        ["num_clusters=21", "the 20 clients of the run", "Lower num_clusters", "raise data.num_clients"],
    ),
    "no cluster": (["--method.clustering.init_args.num_clusters=0"], ["num_clusters=0", "at least 1"]),
    "more clients a round than clients": (
        ["--trainer.clients_per_round=21"],
        ["trainer.clients_per_round", "got 21", "data.num_clients=20", "counts from 1 to 20"],
    ),
    "no client a round": (["--trainer.clients_per_round=0"], ["trainer.clients_per_round", "got 0", "from 1 to 20"]),
    "a share above 1": (["--trainer.clients_per_round=1.5"], ["trainer.clients_per_round", "1.5", "(0, 1]"]),
    "alpha 0": (partition("ClassDirichlet", alpha=0), ["data.partition: ClassDirichlet: ", "alpha", "> 0", "0"]),
    "alpha below 0": (
        partition("ClientDirichlet", alpha=-0.5),
        ["data.partition: ClientDirichlet: ", "alpha", "> 0", "-0.5"],
    ),
    "a partition that takes more than there is": (
        partition("ClassDirichlet", alpha=0.5, min_samples=100),
        [
            "data.partition: ClassDirichlet: ",
            "20 clients",
            "min_samples 100",
            "1600",
            "lower num_clients or min_samples",
        ],
    ),
    "a partition that no draw gives": (
        partition("ClassDirichlet", alpha=0.01, min_samples=70, max_tries=3),
        ["data.partition: ClassDirichlet: ", "3 draws", "alpha 0.01", "raise alpha"],
    ),
    "sizes that are too large": (
        partition("ClientDirichlet", alpha=1.0, sizes=[500, 600]),
        ["data.partition: ClientDirichlet: ", "(500, 600)", "1600", "lower sizes or num_clients"],
    ),
    "a class with too few samples": (
        ["--data.num_clients=900", "--trainer.clients_per_round=4"],
        ["data.partition: Pathological: ", "need 225 samples", "the pool has 200", "lower num_clients"],
    ),
    "more classes a client than classes": (
        partition("Pathological", classes_per_client=9),
        ["data.partition: Pathological: ", "classes_per_client is 9", "8 classes", "use at most that"],
    ),
    "no class a client": (
        ["--data.partition.classes_per_client=0"],
        ["data.partition: Pathological: ", "classes_per_client", "at least 1", "0"],
    ),
    "sizes of a partition in another one": (
        layer("data: {partition: {class_path: Subsampled, init_args: {base: IID, sizes: [3, 2]}}}"),
        ["data.partition: Subsampled: ", "low <= high", "(3, 2)"],
    ),
    "blobs of no class": (
        layer("data: {dataset: {init_args: {num_classes: 0}}}"),
        ["data.dataset: Synthetic: ", "num_classes", "at least 1"],
    ),
    "own data of PIL images": (
        layer("data: {dataset: {class_path: Datasets, init_args: {train: own.Pictures, num_classes: 8}}}"),
        ["data.dataset: Datasets: ", "item 0 of train", "PIL image", "transform=torchvision.transforms.ToTensor()"],
    ),
    "own data of unequal shapes": (
        layer(
            "{data: {dataset: {class_path: Datasets, init_args: {train: own.Uneven, num_classes: 8}}}, "
            "model: {network: {init_args: {in_features: 1}}}}"
        ),
        ["data.dataset: Datasets: ", "item 1 of train", "(2,)", "(1,)", "resize"],
    ),
    "labels out of range": (
        [*layer("data: {dataset: own.Odd}"), "--data.partition=IID", "--data.num_clients=10"],
        ["data.dataset: labels", "0 to 7", "num_classes 8", "0 to 8", "correct num_classes"],
    ),
    "an empty client": (
        [*partition("FromFile", path="shares.json"), *THREE],
        ["data.partition: FromFile: ", "1 of 3 clients got no sample", "client 1", "fewer clients or more samples"],
    ),
    "a client whose samples are all held out": (
        ["--data.val_fraction=0.9", "--data.test_fraction=0.9", "--data.num_clients=400"],
        ["left without training samples", "lower data.val_fraction"],
    ),
    "a network without the layer": (
        ["--model.cut=fc"],
        ["model.cut", "MLP", "'fc'", "its layers are embedding.fc1, decision"],
    ),
    "an own network without the layer": (
        layer("model: {network: own.Headless}"),
        ["model.cut", "Headless", "'decision'", "its layers are body", "e.g. model.cut=body, or to null for no head"],
    ),
    "too few scores": (
        ["--model.network.init_args.num_classes=5"],
        ["model.network", "(5,)", "8 classes", "set its num_classes to 8"],
    ),
    "another input shape": (
        ["--model.network.init_args.in_features=15"],
        ["model.network", "(16,)", "Synthetic", "arguments to fit"],
    ),
    "data that is not there": (
        layer("{data: {dataset: {class_path: CIFAR10, init_args: {root: nowhere}}}, model: {network: LeNet5}}"),
        [
            "CIFAR10",
            "'nowhere'",
            "data.dataset.init_args.root",
            "init_args.download=true",
            'python -c "import torchvision',
        ],
    ),
    "a misspelt hook": (
        ["--trainer.callbacks+=own.Misspelt"],
        ["trainer.callbacks", "Misspelt.on_round_ends", "Did you mean on_round_end?", "on_fit_start"],
    ),
    "a pull below 0": (["--model.cluster_weight=-1"], ["model.cluster_weight", "-1", ">= 0"]),
    "half precision on a CPU": (
        ["--trainer.precision=16-mixed", "--trainer.accelerator=cpu"],
        ["trainer.precision", "16-mixed", "bf16-mixed"],
    ),
    "null for a number of the trainer": (
        layer("trainer: {rounds: null}"),
        ["trainer.rounds: got rounds=null", "a whole number"],
    ),
    "null for a share": (
        layer("trainer: {client_dropout: null}"),
        ["trainer.client_dropout: got client_dropout=null", "a number"],
    ),
    "null for a name": (layer("trainer: {name: null}"), ["trainer.name: got name=null", "a text"]),
    "null for a number of the method": (
        ["--method.local_update.lr_decay=null"],
        ["method.local_update.init_args.lr_decay: got lr_decay=null", "a number"],
    ),
    "null for a list of the method": (
        layer("method: {exchange: {init_args: {transforms: null}}}"),
        ["method.exchange.init_args.transforms: got transforms=null", "a list"],
    ),
    "null for the clusterings": (
        layer("method: {clustering: null}"),
        ["method.clustering: got clustering=null", "a list"],
    ),
    "null for a number of the data": (
        layer("data: {val_fraction: null}"),
        ["data.val_fraction: got val_fraction=null", "a number"],
    ),
    "null for a list of the data": (
        layer("data: {client_transforms: null}"),
        ["data.client_transforms: got client_transforms=null"],
    ),
    "null for a weight": (
        layer("model: {cluster_weight: null}"),
        ["model.cluster_weight: got cluster_weight=null", "a number"],
    ),
    "a number of steps that never ends": (
        ["--method.local_update.steps=4611686018427387904"],
        ["method.local_update", "steps=4611686018427387904", "at most 1000000", "trainer.rounds"],
    ),
    "a timeout of nothing": (["--trainer.client_timeout=0"], ["trainer.client_timeout: got 0", "above 0", "null"]),
    "rounds below 0": (["--trainer.rounds=-1"], ["rounds=-1", "negative"]),
    "a name with a folder": (["--trainer.name=a/b"], ["trainer.name", "'a/b'", "one folder"]),
    "devices that are no number": (["--trainer.devices=many"], ["trainer.devices", "'many'", "auto"]),
    "no device": (["--trainer.devices=0"], ["devices=0", "at least one"]),
    "a choice by test data": (
        ["--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=test/own_split/personal/acc"],
        ["EarlyStopping", "test/own_split/personal/acc", "val/own_split/personal/acc"],
    ),
    "neither steps nor epochs": (
        layer("method: {local_update: LocalTraining}"),
        ["method.local_update", "steps=None, epochs=None", "exactly one", "steps=5"],
    ),
    "a start that nobody sends": (
        layer(
            "method: {local_update: {init_args: {start: centre}}, exchange: NoExchange, aggregation: NoAggregation,"
            " clustering: []}"
        ),
        ["method.local_update", "start=centre", "NoExchange", "start=own"],
    ),
    "stored models that nobody stores": (
        layer("method: {exchange: FullModel}"),
        ["ClusterMean", "FullModel", "participants", "CentreAndEmbedding"],
    ),
    "no client at all": (["--data.num_clients=0"], ["data.num_clients", "at least 1", "0"]),
    "no sample a batch": (["--data.batch_size=0"], ["data.batch_size", "at least 1", "0"]),
    "all samples held out": (["--data.test_fraction=1.0"], ["data.test_fraction", "[0, 1)", "1.0"]),
    "official test images that are not there": (
        layer(
            "{data: {dataset: Digits, protocols: [label_view]}, "
            "model: {network: {init_args: {in_features: 64, num_classes: 10}}}}"
        ),
        ["label_view", "Digits", "own_split"],
    ),
    "a strategy that splits models": (["--trainer.strategy=fsdp"], ["trainer.strategy", "ddp_fork", "fsdp"]),
    "an unknown precision": (["--trainer.precision=64-true"], ["trainer.precision", "bf16-mixed", "64-true"]),
}

# Refused in the same way as others of the above, and tested where the refusing function is tested.
REPEATED = {
    "null for a share",
    "null for a name",
    "null for a list of the data",
    "null for a number of the method",
    "a partition that no draw gives",
    "a share above 1",
    "a misspelt hook",
    "a name with a folder",
    "a start that nobody sends",
    "all samples held out",
    "alpha below 0",
    "an own network without the layer",
    "an unknown precision",
    "another input shape",
    "half precision on a CPU",
    "labels out of range",
    "more classes a client than classes",
    "no class a client",
    "no client a round",
    "no sample a batch",
    "own data of unequal shapes",
    "rounds below 0",
    "too few scores",
}

UNPARSED = {
    "null for a number of the partition": (
        ["--data.partition.classes_per_client=null"],
        ["data.partition: ", "Pathological needs classes_per_client: set data.partition.init_args.classes_per_client"],
    ),
    "an unknown protocol": (["--data.protocols=[other]"], ["data.protocols", "own_split", "label_view", "other"]),
    "a word for a number": (["--trainer.rounds=many"], ["trainer.rounds", "a whole number", "many"]),
    "a missing argument": (
        partition("ClassDirichlet"),
        ["data.partition: ", "ClassDirichlet needs alpha: set data.partition.init_args.alpha"],
    ),
    "an argument of another class": (
        partition("IID", alpha=0.1),
        ["data.partition: ", "IID has no argument 'alpha'", "Its arguments: samples_per_client."],
    ),
    "a misspelt argument of a class in a class": (
        ["--data.partition=Subsampled", "--data.partition.base=IID", "--data.partition.base.samples=3"],
        ["data.partition.init_args.base: ", "IID has no argument 'samples'.", "Its arguments: samples_per_client."],
    ),
    "a word for a number in a class": (
        ["--data.partition.classes_per_client=two"],
        ["data.partition.init_args.classes_per_client: ", "a whole number", "two"],
    ),
    "three sizes": (
        ["--data.partition.sizes=[1,2,3]"],
        ["data.partition.init_args.sizes: ", "a list of 2 values or null", "[1, 2, 3]"],
    ),
    "a word for yes or no": (["--data.drop_last=perhaps"], ["data.drop_last: ", "true or false", "perhaps"]),
}


@pytest.fixture
def nothing_written(tmp_path):
    """A working directory with user-defined modules and files, in which no run may be afterwards."""
    (tmp_path / "own.py").write_text(PARTS)
    (tmp_path / "shares.json").write_text(json.dumps({"indices": [[0, 1, 2, 3], [], [4, 5, 6, 7]], "groups": None}))
    yield
    assert {path.name for path in files(tmp_path) if "__pycache__" not in path.parts} == {"own.py", "shares.json"}


@pytest.mark.usefixtures("nothing_written")
@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=pytest.mark.slow) if what in REPEATED else what for what in REFUSED]
)
def test_bad_input_is_refused_before_anything_is_written(what):
    words, said = REFUSED[what]
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        lcfl(*FIT, *words)
    missing = [word for word in said if word not in str(error.value)]
    assert not missing, f"{missing} is not in: {error.value}"


@pytest.mark.usefixtures("nothing_written")
@pytest.mark.parametrize("what", UNPARSED)
def test_bad_input_is_refused_by_the_parser(capsys, what):
    words, said = UNPARSED[what]
    message = failure(capsys, *FIT, *words)
    assert message.startswith("lcfl: error: ")
    missing = [word for word in said if word not in message]
    assert not missing, f"{missing} is not in: {message}"


def test_a_step_that_makes_the_pull_diverge_and_too_large_a_dimension_are_warnings():
    sgd = "model: {cluster_weight: 3.0, optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.6}}}"
    with pytest.warns(UserWarning) as warned:
        run = lcfl(*FIT, "--trainer.rounds=0", "-c", sgd, "--method.clustering.init_args.dimension=50")
    texts = "\n".join(str(warning.message) for warning in warned)
    assert re.search(r"learning rate 0\.6 .*= 3\.5 is >= 2.*Keep the product", texts)
    assert re.search(r"dimension=50, but 20 models span only 19.*using 19", texts)
    assert run.state.projection.shape[1] == 19


def test_a_client_that_diverges_is_named_left_out_and_counted(tmp_path):
    (tmp_path / "own_module.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "class Fragile(nn.CrossEntropyLoss):\n"
        "    def forward(self, scores, targets):\n"
        "        return super().forward(scores, targets) / (targets > 1).all()\n"  # fails for labels 0 and 1
    )
    args = (*FIT, "--trainer.clients_per_round=20", "--model.loss=own_module.Fragile")
    with pytest.warns(UserWarning) as warned:
        run = lcfl(*args)
    texts = [str(warning.message) for warning in warned]
    for number in (-1, 0, 1):  # one warning per round
        (line,) = [text for text in texts if text.startswith(f"round {number}: ")]
        assert "5 of 20 clients is not finite (0, 1, 2, 3, 4); they are left out" in line
    with open(run.path / "metrics.csv") as file:
        rows = [row for row in csv.DictReader(file) if row["train/failed_clients"]]
    assert [float(row["train/failed_clients"]) for row in rows] == [5.0] * 3
    assert run.state.participated.tolist() == [False] * 5 + [True] * 15
    assert run.state.centres.isfinite().all() and run.state.global_model.isfinite().all()


def test_unknown_monitored_metric_is_named_with_the_known_ones():
    with pytest.raises(ValueError, match=r"no metric val/nothing; the metrics are .*val/own_split/personal/acc"):
        lcfl(*FIT, "--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=val/nothing")


def test_trial_run_ignores_ckpt_path():
    with pytest.warns(UserWarning, match=r"fast_dev_run starts from the beginning and ignores ckpt_path"):
        lcfl(*FIT, "--trainer.fast_dev_run=true", "--ckpt_path=last")
