"""Tests of targets that are not classes: numbers, several labels, masks and tokens."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torchmetrics import MeanAbsoluteError, MeanMetric
from torchmetrics.classification import MultilabelF1Score

from lcfl.cli.commands import partition
from lcfl.core import rng
from lcfl.data.augmentation import CropAndFlip
from lcfl.data.datamodule import FederatedDataModule
from lcfl.data.dataset_samples import DatasetSamples
from lcfl.data.datasets import Datasets, Tensors
from lcfl.data.datasets.bundled import RandomLike
from lcfl.data.partition import IID, ByOwner, Quantity, Shards
from lcfl.data.samples import TensorSamples
from lcfl.data.transforms import LabelPermutation, Rotation
from lcfl.federation.federation import Federation
from lcfl.federation.trial import check_network
from lcfl.models.module import FederatedModule
from tests.helpers.builders import fedavg, loaded

CPU = torch.device("cpu")
ONE_OUTPUT = partial(nn.Linear, 2, 1)
INPUTS = torch.arange(12.0).reshape(6, 2)


def module(network=ONE_OUTPUT, **options):
    return FederatedModule(network, cut=None, **{"report": "loss", "loss": nn.MSELoss(), **options})


def numbers(size=60):
    draw = torch.Generator().manual_seed(0)
    return Tensors((torch.randn(size, 2, generator=draw), torch.randn(size, 1, generator=draw)))


@pytest.mark.parametrize(
    ("targets", "shape", "dtype"),
    [
        (torch.arange(6.0), (), torch.float32),
        (torch.arange(6.0)[:, None].double(), (1,), torch.float32),
        (torch.eye(6), (6,), torch.float32),
        (torch.zeros(6, 4, 5, dtype=torch.uint8), (4, 5), torch.int64),
        (np.zeros((6, 3), dtype=bool), (3,), torch.int64),
    ],
)
def test_tensors_know_what_a_target_looks_like_and_batches_have_it(targets, shape, dtype):
    dataset = Tensors((INPUTS, targets))
    assert (dataset.num_classes, dataset.target_shape, dataset.target_dtype) == (None, shape, dtype)
    samples = dataset.load()
    assert samples.labels is None and len(samples) == 6
    found = samples.batch(np.array([4, 1]), CPU)[1]
    assert found.dtype == dtype and torch.equal(found, torch.as_tensor(targets)[[4, 1]].to(dtype))
    assert torch.equal(samples.targets(np.array([4, 1])), found)
    blank = dataset.spec.blank(3)[1]
    assert blank.shape == (3, *shape) and blank.dtype == dtype


def test_a_subset_keeps_the_targets_of_its_samples():
    samples = TensorSamples(INPUTS, 10 * torch.arange(6.0), 6, None)
    subset = samples.subset(np.array([1, 5]))
    assert subset is not samples and subset.targets(np.array([5, 1])).tolist() == [50.0, 10.0]


def test_the_fingerprint_covers_the_targets():
    prints = {TensorSamples(INPUTS, torch.full((6,), value), 6, None).fingerprint() for value in (0.0, 0.0, 1.0)}
    assert len(prints) == 2


class Pairs(torch.utils.data.Dataset):
    """Images and masks that a random transform flips together."""

    def __init__(self, masks, flip=False):
        self.masks, self.flip = masks, flip

    def __len__(self):
        return len(self.masks)

    def __getitem__(self, index):
        mask = self.masks[index]
        if self.flip and torch.rand(()) < 0.5:
            mask = mask.flip(-1)
        return mask[None] * 1.0, mask


def test_items_are_read_with_their_targets_so_a_random_transform_changes_both_alike():
    masks = torch.arange(8 * 12).reshape(8, 3, 4)
    with rng.seeded(0, "test"):
        samples = DatasetSamples(Pairs(masks, flip=True), None, None)
        batches = [samples.batch(np.arange(8), CPU) for _ in range(3)]
    assert samples.labels is None
    assert all(torch.equal(inputs[:, 0], targets * 1.0) for inputs, targets in batches)
    assert not torch.equal(batches[0][1], batches[1][1])
    assert {tuple(dataset.target_shape) for dataset in [Datasets(Pairs(masks))]} == {(3, 4)}


def test_the_fingerprint_of_items_covers_their_targets():
    items = [[(INPUTS[0], torch.tensor([value]))] for value in (0.0, 1.0)]
    assert len({DatasetSamples(each, None, None).fingerprint() for each in items}) == 2


def test_rotation_turns_masks_with_their_images():
    masks = torch.arange(8 * 9).reshape(8, 3, 3)
    data = loaded(
        FederatedDataModule(
            Tensors((masks[:, None] * 1.0, masks)), IID(), 2, client_transforms=[Rotation(by="client", angles=(0, 90))]
        )
    )
    inputs, targets = data.seen_by(1).batch(np.arange(4), CPU)
    assert torch.equal(inputs[:, 0], targets * 1.0) and torch.equal(targets, torch.rot90(masks[:4], 1, (-2, -1)))
    assert torch.equal(data.seen_by(1).targets(np.arange(4)), targets)


def test_a_split_without_labels_is_random_and_complete():
    data = loaded(FederatedDataModule(numbers(), Quantity(1.0, min_samples=3), 5))
    population = data.population
    every = np.concatenate([*population.train, *population.val, *population.test["own_split"]])
    assert sorted(every.tolist()) == list(range(60))
    assert population.label_counts is None and "labels" not in population.summary()
    shares = zip(population.train, population.val, population.test["own_split"], strict=True)
    for train, val, test in shares:
        total = len(train) + len(val) + len(test)
        assert len(test) == max(round(0.25 * total), 1) and len(val) == round(0.1 * (total - len(test)))


def test_random_stand_ins_have_targets_of_the_same_form():
    samples = RandomLike(numbers(), 8).load()
    assert samples.batch(np.arange(2), CPU)[1].shape == (2, 1) and samples.labels is None


def test_the_command_partition_prints_and_draws_sizes(tmp_path, capsys):
    (tmp_path / "forty_numbers.py").write_text(
        "import torch\n"
        "class Numbers(torch.utils.data.TensorDataset):\n"
        "    def __init__(self):\n"
        "        super().__init__(torch.arange(40.0)[:, None], torch.arange(40.0)[:, None])\n"
    )
    layer = "{data: {dataset: {class_path: Datasets, init_args: {train: forty_numbers.Numbers}}, num_clients: 4, "
    layer += "partition: {class_path: Quantity, init_args: {alpha: 1.0, min_samples: 2}}}}"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        partition.main(["-c", layer, "--out", str(tmp_path / "out")])
    said = capsys.readouterr().out
    assert "train samples" in said and "majority" not in said
    assert (tmp_path / "out/partition.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: loaded(FederatedDataModule(numbers(), Shards(2), 5)),
            "Shards: it deals samples out by their class",
        ),
        (
            lambda: loaded(
                FederatedDataModule(Tensors(*[numbers()._parts[0]] * 2), IID(), 5, protocols=["label_view"])
            ),
            "the protocol label_view chooses test samples by their class",
        ),
        (
            lambda: loaded(FederatedDataModule(numbers(), IID(), 5, client_transforms=[LabelPermutation(2, "client")])),
            "LabelPermutation: needs targets that are classes",
        ),
        (
            lambda: Tensors((torch.zeros(2, 1, 4, 4), torch.zeros(2, 4, 4).long()), augmentation=CropAndFlip(1)),
            "augmentation changes inputs alone",
        ),
        (lambda: Tensors((INPUTS, torch.tensor([0.0, 1, 2, float("nan"), 4, 5]))), r"the first at \[3\]"),
        (lambda: Tensors((INPUTS, torch.full((6, 2), float("inf")))), r"the first at \[0, 0\]"),
        (lambda: Datasets([(INPUTS[0], torch.tensor([float("nan")]))]), "item 0 of train: the targets hold NaN"),
        (lambda: Datasets([(INPUTS[0], "high")]), "item 0 of train: a target must be a tensor, a numpy array"),
        (
            lambda: Datasets([(INPUTS[0], [1.0]), (INPUTS[1], [1.0, 2.0])]).load(),
            r"item 1 of train has a target of shape \(2,\) and type torch.float32, but item 0 of train has",
        ),
        (lambda: Datasets([(INPUTS[0], [1.0])], 3), "a label must be one integer.*leave num_classes out"),
    ],
)
def test_what_does_not_fit_is_refused_in_words(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def small(targets):
    return FederatedDataModule(Tensors((INPUTS, targets)), IID(), 2)


@pytest.mark.parametrize(
    ("made", "targets", "words"),
    [
        (module(), torch.zeros(6), r"targets \[2\].*give the targets the shape \[n, 1\]"),
        (module(partial(nn.Linear, 2, 3)), torch.zeros(6, 1), "must return outputs in the shape of the targets"),
        (
            module(report="acc"),
            torch.zeros(6, 1),
            "model.metrics.acc: the accuracy needs targets that are classes",
        ),
        (
            module(partial(nn.Linear, 2, 4), loss=nn.BCEWithLogitsLoss(), metrics={"f1": MultilabelF1Score(3)}),
            torch.zeros(6, 4),
            r"model.metrics.f1: MultilabelF1Score cannot take outputs \[2, 4\] and targets \[2, 4\]",
        ),
        (module(loss=nn.CrossEntropyLoss()), torch.zeros(6, 1), "CrossEntropyLoss of a single score is always 0"),
        (
            module(partial(nn.Linear, 2, 3), loss=nn.CrossEntropyLoss()),
            torch.zeros(6),
            r"Classes must be whole numbers: convert them with \.long",
        ),
    ],
)
def test_loss_and_metrics_that_the_targets_do_not_fit_are_refused_before_training(made, targets, words):
    with pytest.raises(ValueError, match=words):
        check_network(made, small(targets))


def test_fitting_parts_pass_the_check():
    check_network(module(metrics={"mae": MeanAbsoluteError()}, report="mae"), small(torch.zeros(6, 1)))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"report": "mae"}, "model.report: got mae, which is not measured; allowed are acc, loss and the names in"),
        (
            {"report": "own", "metrics": {"own": MeanMetric()}},
            "the metric own does not say whether larger values are better; set model.larger_is_better",
        ),
    ],
)
def test_the_reported_metric_must_be_measured_and_have_a_direction(options, words):
    with pytest.raises(ValueError, match=words):
        module(**options)


def test_the_direction_is_that_of_the_metric_or_the_one_that_is_given():
    mae = {"mae": MeanAbsoluteError()}
    assert module(metrics=mae, report="mae").reported.larger_is_better is False
    assert module(metrics=mae, report="mae", larger_is_better=True).reported.larger_is_better is True
    assert module().reported.larger_is_better is False
    assert "acc" not in module().metrics and "acc" in module(report="acc").metrics


class Letters(nn.Sequential):
    """Scores ``[B, 3, T]`` of three tokens at each of T places."""

    def __init__(self):
        super().__init__(nn.Embedding(9, 2), nn.Linear(2, 3))

    def forward(self, tokens):
        return super().forward(tokens).transpose(1, 2)


@pytest.mark.parametrize("by_items", [False, True])
def test_a_token_without_a_score_is_refused_before_training_with_the_name_of_the_client(tmp_path, by_items):
    tokens = torch.zeros(8, 4, dtype=torch.int64)
    tokens[4:] = 3  # the network has scores for 0, 1 and 2
    dataset = Tensors((tokens, tokens), owners=[*"aaaabbbb"])
    if by_items:
        dataset = Datasets(list(zip(tokens, tokens, strict=True)))
        dataset.train = Owned(dataset.train)
    data = FederatedDataModule(dataset, ByOwner("ward" if by_items else None), val_fraction=0.0)
    federation = Federation(rounds=1, default_root_dir=tmp_path, devices=1)
    with pytest.raises(ValueError, match=r"refuses the target 3 of client 1 \(b\): the network has scores for the 3 c"):
        federation.fit(module(Letters, loss=nn.CrossEntropyLoss()), data, fedavg())
    assert not list(tmp_path.iterdir())


class Wrapped(nn.Module):
    """Ignores targets, and does not say which."""

    def forward(self, scores, targets):
        return nn.functional.cross_entropy(scores, targets)


def test_the_accuracy_needs_to_know_which_targets_a_loss_of_ones_own_ignores(tmp_path):
    tokens = torch.zeros(8, 4, dtype=torch.int64)
    tokens[:, 2:] = -100
    data = FederatedDataModule(Tensors((tokens.clamp(min=0), tokens)), IID(), 2, val_fraction=0.0)
    federation = Federation(rounds=1, default_root_dir=tmp_path, devices=1)
    with pytest.raises(ValueError, match=r"acc would count targets of client 0 that are no class .* ignore_index"):
        federation.fit(module(Letters, loss=Wrapped(), report="acc"), data, fedavg())
    loss = Wrapped()
    loss.ignore_index = -100
    assert federation.fit(module(Letters, loss=loss, report="acc"), data, fedavg()).metrics


class Owned(list):
    ward = (*"aaaabbbb",)
