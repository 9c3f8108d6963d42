"""Tests that descriptions are equal exactly if the configurations are, and that differences are named."""

import dataclasses
import enum
import functools
import json
import logging
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
import yaml
from torch import nn

from lcfl.core.callback import Callback
from lcfl.core.schema import Number
from lcfl.data.datasets import Datasets
from lcfl.federation.federation import Federation
from lcfl.methods.clustering import LowRankCosine
from lcfl.models import MLP, SplitNetwork
from lcfl.models.module import FederatedModule
from lcfl.runs.checkpoint import CheckpointError
from lcfl.runs.identity import describe, describe_module, differences, needed_for
from tests.helpers.builders import blobs, blobs_module, fedavg


@dataclasses.dataclass
class Part:
    rate: float
    steps: int | None = None


class Plain:
    def __init__(self, weight):
        self.weight = weight
        self._scratch = object()


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Word(enum.StrEnum):
    YES = "y"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (0, 1),
        (1, 2.5),
        (None, 0),
        ("a", "b"),
        ([1, 2], [2, 1]),
        ({"a": 1}, {"a": 2}),
        ({"a": 1}, {"b": 1}),
        (Part(0.1), Part(0.2)),
        (Part(0.1), Part(0.1, 3)),
        (Part(0.1), Plain(0.1)),
        (Plain(Part(1)), Plain(Part(2))),
        (nn.Linear(2, 3), nn.Linear(2, 4)),
        (nn.Linear, nn.Conv2d),
        (torch.relu, torch.tanh),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0])),
        (np.array([1, 2]), np.array([1, 3])),
        (np.int64(1), np.int64(2)),
        (np.bool_(True), np.bool_(False)),
        ({1, 2}, {1, 3}),
        (Path("a"), Path("b")),
        (Colour.RED, Colour.BLUE),
        (functools.partial(pow, 2), functools.partial(pow, 3)),
        (functools.partial(pow, 2), functools.partial(max, 2)),
        (functools.partial(MLP, 4, num_classes=2), functools.partial(MLP, 4, num_classes=3)),
    ],
)
def test_different_values_are_described_differently(one, other):
    assert describe(one) != describe(other)
    assert differences(describe(one), describe(other))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((1, 2), [1, 2]),
        (Part(0.5), Part(0.5)),
        (Plain(1), Plain(1)),
        (nn.Linear(2, 3), nn.Linear(2, 3)),
        (np.float64(0.5), 0.5),
        ({3, 1, 2}, {2, 3, 1}),
        (functools.partial(MLP, 4, num_classes=2), functools.partial(MLP, 4, num_classes=2)),
    ],
)
def test_equal_values_are_described_equally(one, other):
    assert describe(one) == describe(other)


def test_a_description_survives_json():
    value = {
        "part": Part(1e-17, None),
        "list": (1, True, "x", Plain([Colour.RED])),
        4: {np.int64(3)},
        "tensor": torch.eye(2),
        "number": np.float64(0.1),
        "word": Word.YES,
    }
    description = describe(value)
    assert json.loads(json.dumps(description)) == yaml.safe_load(yaml.safe_dump(description)) == description


def test_objects_are_described_by_class_and_public_fields():
    name = f"{__name__}.Plain"
    assert describe(Plain(3)) == {"class": name, "weight": 3}
    assert describe(Part(0.5)) == {"class": f"{__name__}.Part", "rate": 0.5, "steps": None}


class Leaky(SplitNetwork):
    """A network with an argument, the slope, that the text of no layer shows."""

    def __init__(self, slope):
        super().__init__(nn.Linear(4, 5), nn.Linear(5, 3))
        self.slope = slope


class Renaming(SplitNetwork):
    """A network that keeps its argument under another name."""

    def __init__(self, slope):
        super().__init__(nn.Linear(4, 5), nn.Linear(5, 3))
        self._s = slope


class Focal(nn.CrossEntropyLoss):
    """A loss that keeps its argument under another name."""

    def __init__(self, gamma):
        super().__init__()
        self._g, self._log, self._calls = gamma, logging.getLogger("focal"), object()


class Clipped(torch.optim.SGD):
    """An optimizer whose argument is in no group."""

    def __init__(self, parameters, most):
        super().__init__(parameters, lr=0.1)
        self.most = most


class Watching(Callback):
    """A callback that keeps its argument as a private attribute, and remembers another one."""

    remembers: ClassVar = {"seen": Number(int)}

    def __init__(self, at, seen=0):
        self._at, self._seen = at, seen
        self._log = logging.getLogger("watching")  # which has references in a circle


def test_arguments_that_a_callback_keeps_privately_are_compared():
    assert describe(Watching(3)) == describe(Watching(3, seen=4)) != describe(Watching(4))


class Counting(Leaky):
    """A network with a counter of its calls, and an object."""

    def __init__(self, slope):
        super().__init__(slope)
        self.calls, self.made = 0, object()

    def forward(self, inputs):
        self.calls += 1
        return super().forward(inputs)


def test_settings_are_those_of_a_new_network():
    made = FederatedModule(lambda: Counting(0.5))
    before = describe_module(made)
    made(torch.zeros(2, 4))
    assert made.network.calls == 1 and describe_module(made) == before
    assert before["network_settings"] == {"slope": 0.5} and before["numbers_kept"] == {"calls": 0}
    assert needed_for("prediction", {"model": before, "method": 0})["model"].keys() == {
        "network",
        "network_settings",
        "num_embedding",
    }


def test_missing_settings_in_an_old_checkpoint_are_no_difference():
    now = describe_module(FederatedModule(lambda: Leaky(0.5)))
    before = {key: value for key, value in now.items() if key != "network_settings"}
    assert differences({"model": before}, {"model": now}) == []
    assert differences({"model": now}, {"model": before}) != []


class Split(FederatedModule):
    """A module with a separate learning rate for the decision head."""

    def __init__(self, rate):
        super().__init__(lambda: MLP(4, hidden=(5,), num_classes=3))
        self._rate = rate

    def configure_optimizers(self):
        halves = self.network.embedding, self.network.decision
        groups = [
            {"params": half.parameters(), "lr": rate} for half, rate in zip(halves, (0.1, self._rate), strict=True)
        ]
        return torch.optim.SGD(groups)


@pytest.mark.parametrize(
    ("make", "place"),
    [
        (lambda slope: FederatedModule(lambda: Leaky(slope)), "model.network_settings.slope"),
        (lambda slope: FederatedModule(lambda: Renaming(slope)), "model.numbers_kept._s"),
        (lambda gamma: FederatedModule(lambda: Leaky(1.0), loss=Focal(gamma)), "model.loss._g"),
        (lambda most: FederatedModule(lambda: Leaky(1.0), partial(Clipped, most=most)), "model.optimizer.most"),
        (Split, "model.optimizer.other_groups.0.lr"),
    ],
)
def test_settings_that_the_text_of_no_layer_shows_are_compared(make, place):
    one, other = ({"model": describe_module(make(value))} for value in (0.0, 9.0))
    assert differences(one, {"model": describe_module(make(0.0))}) == []
    assert differences(one, other) == [f"{place}: the checkpoint has 0.0, this run 9.0"]


def module(width=5, rate=0.1, momentum=0.0, cut="decision", **kwargs):
    return FederatedModule(
        lambda: MLP(4, hidden=(width,), num_classes=3),
        lambda parameters: torch.optim.SGD(parameters, lr=rate, momentum=momentum),
        cut,
        **kwargs,
    )


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"width": 6}, "network"),
        ({"rate": 0.2}, "optimizer.lr"),
        ({"momentum": 0.5}, "optimizer.momentum"),
        ({"cut": None}, "num_embedding"),
        ({"cluster_weight": 0.1}, "cluster_weight"),
        ({"global_weight": 0.1}, "global_weight"),
        ({"loss": nn.MultiMarginLoss()}, "loss.text"),
        ({"loss": nn.CrossEntropyLoss(label_smoothing=0.1)}, "loss.label_smoothing"),
        ({"loss": nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 3.0]))}, "loss.weight"),
    ],
)
def test_a_description_has_everything_that_affects_the_bits_of_a_model(change, place):
    assert differences(describe_module(module()), describe_module(module())) == []
    found = differences(describe_module(module()), describe_module(module(**change)))
    assert place in [line.partition(":")[0] for line in found]


def test_the_classes_of_optimizer_and_module_are_compared():
    class Mine(FederatedModule):
        pass

    def network():
        return MLP(4, hidden=(5,), num_classes=3)

    adam = describe_module(FederatedModule(network, torch.optim.Adam))
    assert "optimizer.class: the checkpoint has 'SGD', this run 'Adam'" in differences(describe_module(module()), adam)
    assert differences(adam, describe_module(Mine(network, torch.optim.Adam)))[0].startswith("class: ")


class Tempered(FederatedModule):
    """A module with typical attributes of a user-defined module, and those given in addition."""

    def __init__(self, **added):
        super().__init__(functools.partial(MLP, 16, [16], 8))
        self.temperature = 2.0
        self.register_buffer("class_weights", torch.tensor([1.0, 3.0]))
        self.teacher = nn.Linear(4, 2)
        self.path = Path("here")
        self._count = 0
        for name, value in added.items():
            setattr(self, name, value)


@pytest.mark.parametrize(
    ("added", "place"),
    [
        ({"temperature": 3.0}, "temperature"),
        ({"temperature": None}, "temperature"),
        ({"class_weights": torch.tensor([1.0, 4.0])}, "class_weights.1"),
        ({"teacher": nn.Linear(4, 3)}, "teacher"),
        ({"schedule": {"warm": [1, Colour.RED]}}, "schedule"),
        ({"path": "here"}, "path"),
        ({"augment": torch.relu}, "augment"),
        ({"odd": Plain(1)}, "odd"),
    ],
)
def test_attributes_that_a_subclass_adds_are_in_the_description(added, place):
    assert differences(describe_module(Tempered()), describe_module(Tempered())) == []
    found = differences(describe_module(Tempered()), describe_module(Tempered(**added)))
    assert [line.partition(":")[0] for line in found] == [place]


@pytest.mark.parametrize("added", [{"_count": 3}, {"path": Path("there")}, {"teacher": nn.Linear(4, 2)}])
def test_private_attributes_paths_and_contents_of_objects_are_not_compared(added):
    assert describe_module(Tempered(**added)) == describe_module(Tempered())
    assert describe_module(Tempered(odd=Plain(1))) == describe_module(Tempered(odd=Plain(2)))


def test_saved_hyperparameters_are_described():
    class LoadedCheckpoint(FederatedModule):
        def __init__(self, temperature):
            super().__init__(functools.partial(MLP, 4, [5], 3))
            self.save_hyperparameters()

    found = differences(describe_module(LoadedCheckpoint(1.0)), describe_module(LoadedCheckpoint(2.0)))
    assert found == ["hparams.temperature: the checkpoint has 1.0, this run 2.0"]


def test_a_plain_module_has_no_added_attributes_and_describing_draws_no_random_numbers():
    plain, state = module(), torch.get_rng_state()
    names = {"class", "network", "num_embedding", "loss", "cluster_weight", "global_weight", "optimizer"}
    assert set(describe_module(plain)) == names
    assert torch.equal(torch.get_rng_state(), state)


def trained(root, data, model=None, rounds=1, ckpt_path=None):
    federation = Federation(rounds, devices=1, logger=False, enable_progress_bar=False, default_root_dir=root)
    return federation.fit(model or blobs_module(), data, fedavg(), ckpt_path)


def test_a_run_with_a_different_module_attribute_is_not_resumed(tmp_path):
    trained(tmp_path, blobs(), Tempered())
    with pytest.raises(CheckpointError, match=r"model.temperature: the checkpoint has 2.0, this run 3.0"):
        trained(tmp_path, blobs(), Tempered(temperature=3.0), 2, "last")
    assert trained(tmp_path, blobs(), Tempered(), 2, "last").state.round == 2


def own_data(scale=1.0):
    """Returns map-style data with random noise in every item. The labels do not depend on `scale`."""

    class Noisy(torch.utils.data.Dataset):
        def __len__(self):
            return 240

        def __getitem__(self, index):
            return scale * (torch.arange(16) == index % 8) + 0.1 * torch.randn(16), index % 8

    return blobs(dataset=Datasets(Noisy(), num_classes=8))


def test_a_run_with_different_data_but_equal_labels_is_not_resumed(tmp_path):
    trained(tmp_path, own_data())
    with pytest.raises(CheckpointError, match=r"\n  data: the checkpoint has '\w+', this run '\w+'\n"):
        trained(tmp_path, own_data(scale=2.0), rounds=2, ckpt_path="last")
    assert trained(tmp_path, own_data(), rounds=2, ckpt_path="last").state.round == 2


def test_nan_is_equal_to_nan():
    assert differences({"fill": float("nan")}, {"fill": float("nan")}) == []
    assert differences({"fill": float("nan")}, {"fill": 0.0}) == ["fill: the checkpoint has nan, this run 0.0"]


def test_differences_name_the_path():
    saved = {"seed": 1, "method": {"parts": [{"k": 3}, {"k": 4}]}, "gone": 1, "same": [1, {"a": None}]}
    now = {"seed": 1, "method": {"parts": [{"k": 3}, {"k": 5}]}, "new": 2, "same": [1, {"a": None}]}
    assert differences(saved, now) == [
        "method.parts.1.k: the checkpoint has 4, this run 5",
        "gone: the checkpoint has 1, this run None",
        "new: the checkpoint has None, this run 2",
    ]


def test_lists_of_different_lengths_are_shown_whole():
    assert differences({"a": [1, 2]}, {"a": [1]}) == ["a: the checkpoint has [1, 2], this run [1]"]
    assert differences([1], {"a": 1}, "x") == ["x: the checkpoint has [1], this run {'a': 1}"]


def test_options_that_an_earlier_version_did_not_have_differ_only_if_they_are_used():
    saved = {"sigma": 1.0}
    assert differences(saved, {"sigma": 1.0, "before": "upload", "secure": False}) == []
    assert differences(saved, {"sigma": 1.0, "before": "aggregation", "secure": False}) == [
        "before: the checkpoint has None, this run 'aggregation'"
    ]


def test_an_option_of_a_later_version_differs_unless_it_has_the_value_that_was_implied():
    now = describe(LowRankCosine())
    saved = {key: value for key, value in now.items() if key != "similarity"}
    assert differences(saved, now) == []
    (line,) = differences(saved, describe(LowRankCosine(similarity="l2")))
    assert line == "similarity: the checkpoint has None, this run 'l2'"
    (line,) = differences(describe(LowRankCosine(similarity="l2")), now)
    assert "has 'l2', this run 'low_rank_cosine'" in line
