"""Tests of the constant predictions that every method is compared with."""

from functools import partial
from math import log

import numpy as np
import pytest
import torch
from torch import nn
from torchmetrics import MeanAbsoluteError, MeanSquaredError
from torchmetrics.classification import MulticlassF1Score

from lcfl.data.datamodule import FederatedDataModule
from lcfl.data.datasets import Datasets, Tensors
from lcfl.data.partition import ByOwner
from lcfl.distributed.trivial_baseline import constant_output, trivial_baselines
from lcfl.models.module import FederatedModule
from lcfl.server.metrics import trivial_metrics
from tests.helpers.builders import blobs, blobs_module, loaded


def own_data(targets, owners=None, **options):
    inputs = torch.arange(float(len(targets)))[:, None]
    owners = ["a", "b"] * (len(targets) // 2) if owners is None else owners
    dataset = Tensors((inputs, targets), owners=owners)
    return loaded(blobs(None, dataset=dataset, partition=ByOwner(), val_fraction=0.0, **options))


def trivial_baseline(module, data, clients, seed=0):
    return trivial_metrics(trivial_baselines(module, data, clients, seed), module.reported)


def test_scores_of_classes_are_logarithms_of_their_shares():
    scores = constant_output(torch.tensor([0, 2, 2]), torch.Size([4]), nn.CrossEntropyLoss())
    torch.testing.assert_close(scores.exp(), torch.tensor([2 / 7, 1 / 7, 3 / 7, 1 / 7]))


def test_scores_of_tokens_are_the_same_at_every_place_and_leave_out_what_the_loss_ignores():
    tokens = torch.tensor([[0, 1, 1, -100], [1, -100, -100, -100]])
    scores = constant_output(tokens, torch.Size([3, 4]), nn.CrossEntropyLoss())
    assert scores.shape == (3, 4)
    torch.testing.assert_close(scores.exp(), torch.tensor([2 / 7, 4 / 7, 1 / 7])[:, None].expand(3, 4))


@pytest.mark.parametrize("ignored", [-100, 0])
def test_classes_that_the_loss_ignores_are_neither_predicted_nor_counted(ignored):
    data = own_data(torch.tensor([0, 0, 0, 0, 0, 1, 1, 2, 2, 2]), owners=[*"aaaaaaaaaa"], test_fraction=0.5)
    module = FederatedModule(partial(nn.Linear, 1, 3), cut=None, loss=nn.CrossEntropyLoss(ignore_index=ignored))
    labels = data.samples.labels
    train, test = labels[data.population.train[0]], labels[data.population.test["own_split"][0]]
    guess = np.bincount(train[train != ignored]).argmax()
    expected = (test[test != ignored] == guess).mean()
    (found,) = trivial_baselines(module, data, [0])
    assert found["own_split"] == pytest.approx(expected)


def test_numbers_are_predicted_by_their_mean():
    targets = torch.tensor([[1.0, 4.0], [3.0, 8.0]])
    assert constant_output(targets, torch.Size([2]), nn.MSELoss()).tolist() == [2.0, 6.0]


def test_logits_of_several_labels_are_finite_even_for_a_label_that_is_always_there():
    targets = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    logits = constant_output(targets, torch.Size([2]), nn.BCEWithLogitsLoss())
    torch.testing.assert_close(logits, torch.tensor([log(3.0), 0.0]))  # (2 + 1) / (2 + 2) and (1 + 1) / (2 + 2)


def test_rates_whose_outputs_are_logarithms_get_the_logarithm_of_their_mean():
    counts = torch.tensor([[1.0], [2.0], [6.0]])
    for loss, expected in ((nn.PoissonNLLLoss(), log(3.0)), (nn.PoissonNLLLoss(log_input=False), 3.0)):
        best = constant_output(counts, torch.Size([1]), loss)
        assert best.item() == pytest.approx(expected)
        losses = [float(loss((best + shift).expand(3, 1), counts)) for shift in (-0.1, 0.0, 0.1)]
        assert min(losses) == losses[1]
    assert constant_output(torch.zeros(2, 1), torch.Size([1]), nn.PoissonNLLLoss()).isfinite().all()


@pytest.mark.parametrize(
    ("targets", "shape"),
    [(torch.zeros(3, 2), [5]), (torch.tensor([0, 7]), [3]), (torch.zeros(2, 4, dtype=torch.int64), [3, 5])],
)
def test_there_is_no_constant_for_outputs_of_another_shape(targets, shape):
    assert constant_output(targets, torch.Size(shape), nn.MSELoss()) is None


def test_of_numbers_by_hand():
    targets = torch.tensor([0.0, 10.0, 2.0, 20.0, 4.0, 30.0, 6.0, 40.0])[:, None]
    data = own_data(targets)
    module = FederatedModule(
        partial(nn.Linear, 1, 1), cut=None, loss=nn.MSELoss(), metrics={"mae": MeanAbsoluteError()}, report="mae"
    )
    expected = []
    for client in (0, 1):
        own, test = data.population.train[client], data.population.test["own_split"][client]
        expected.append((targets[test] - targets[own].mean()).abs().mean().item())
    baseline = trivial_baseline(module, data, [0, 1])
    assert baseline == {"test/own_split/trivial/mae": pytest.approx(np.mean(expected))}


@pytest.mark.parametrize("metric", [MeanAbsoluteError, MeanSquaredError])
def test_of_several_numbers(metric):
    targets = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    data = own_data(targets)
    module = FederatedModule(
        partial(nn.Linear, 1, 3), cut=None, loss=nn.MSELoss(), metrics={"far": metric()}, report="far"
    )
    own, test = data.population.train[0], data.population.test["own_split"][0]
    constant = targets[own].mean(dim=0).expand(len(test), 3).contiguous()
    assert trivial_baseline(module, data, [0])["test/own_split/trivial/far"] == pytest.approx(
        float(metric()(constant, targets[test]))
    )


def test_a_metric_that_fails_on_a_constant_costs_no_result():
    class Picky(MeanAbsoluteError):
        def update(self, outputs, targets):
            raise RuntimeError("constant")

    module = FederatedModule(
        partial(nn.Linear, 1, 1), cut=None, loss=nn.MSELoss(), metrics={"mae": Picky()}, report="mae"
    )
    data = own_data(torch.randn(8, 1, generator=torch.Generator().manual_seed(0)))
    with pytest.warns(
        UserWarning, match=r"mae cannot measure a constant output \(RuntimeError: constant\), so there is"
    ):
        found = trivial_baselines(module, data, [0, 1])
    assert all(np.isnan(each["own_split"]) for each in found)


def test_of_the_loss_is_the_loss_of_the_best_constant():
    """The mean is the constant with the least squared error: no other one has a smaller loss on training targets."""
    targets = torch.randn(8, 1, generator=torch.Generator().manual_seed(0))
    best = constant_output(targets, torch.Size([1]), nn.MSELoss())
    loss = nn.MSELoss()
    for other in (-0.1, 0.1):
        assert loss(best.expand(8, 1), targets) < loss((best + other).expand(8, 1), targets)


def test_of_a_metric_of_classes_agrees_with_the_metric_of_the_most_frequent_class():
    data = loaded(blobs(val_fraction=0.0))
    f1 = partial(MulticlassF1Score, num_classes=8, average="macro")
    found = trivial_baseline(blobs_module(metrics={"f1": f1()}, report="f1"), data, [0, 3])
    expected = []
    for client in (0, 3):
        guess = data.population.label_counts[client].argmax()
        labels = torch.from_numpy(data.samples.labels[data.population.test["own_split"][client]])
        expected.append(f1()(torch.full_like(labels, guess), labels).item())
    assert found == {"test/own_split/trivial/f1": pytest.approx(np.mean(expected))}


def test_of_accuracies_is_that_of_the_majority_class_and_equals_the_general_way():
    data = loaded(blobs(val_fraction=0.0))
    found = trivial_baseline(blobs_module(), data, list(range(12)))
    majority = data.population.majority_accuracy("own_split", data.samples.labels)
    assert found == {"test/own_split/trivial/acc": float(majority.mean())}
    general = trivial_baseline(
        blobs_module(metrics={"also": blobs_module().metrics["acc"].clone()}, report="also"), data, list(range(12))
    )
    assert general["test/own_split/trivial/also"] == pytest.approx(float(majority.mean()))


def test_there_is_none_if_no_constant_is_known():
    class Scalar(nn.Linear):
        def forward(self, inputs):
            return super().forward(inputs)[:, 0]

    def squared(outputs, targets):
        return (outputs[:, None] - targets).square().mean()

    data = own_data(torch.randn(8, 1, generator=torch.Generator().manual_seed(0)))
    loss = nn.Module()
    loss.forward = squared
    module = FederatedModule(partial(Scalar, 1, 1), cut=None, loss=loss, report="loss")
    assert trivial_baseline(module, data, [0, 1]) == {}


class Items(list):
    """A data set that is read item by item and knows its owners."""

    ward = (*"aaaab",)


@pytest.mark.parametrize("item_by_item", [False, True])
def test_a_client_without_test_samples_does_not_count(item_by_item):
    targets = torch.tensor([1.0, 3.0, 5.0, 7.0, 9.0])[:, None]
    data = own_data(targets, owners=Items.ward)
    if item_by_item:
        items = Datasets(Items((target, target) for target in targets))
        data = loaded(FederatedDataModule(items, ByOwner("ward"), val_fraction=0.0))
    module = FederatedModule(
        partial(nn.Linear, 1, 1), cut=None, loss=nn.MSELoss(), metrics={"mse": MeanSquaredError()}, report="mse"
    )
    assert len(data.population.test["own_split"][1]) == 0
    assert trivial_baseline(module, data, [0, 1]) == trivial_baseline(module, data, [0])


def test_targets_that_no_class_has_give_no_baseline():
    assert constant_output(torch.tensor([0, 1]), torch.Size([]), nn.MSELoss()) is not None  # numbers
    assert constant_output(torch.tensor([[-5, 1]]), torch.Size([3, 2]), nn.Module()) is None


class Cropped(torch.utils.data.Dataset):
    """Masks of which a random transform shows one half."""

    ward = (*"aaaabbbb",)

    def __len__(self):
        return 8

    def __getitem__(self, index):
        mask = torch.arange(4) % 2 if torch.rand(()) < 0.5 else torch.zeros(4, dtype=torch.int64)
        return mask[None, None] * 1.0, mask[None]


def test_items_that_are_random_are_read_in_the_same_way_each_time():
    data = loaded(FederatedDataModule(Datasets(Cropped()), ByOwner("ward"), val_fraction=0.0))
    module = FederatedModule(partial(nn.Conv2d, 1, 2, 1), cut=None)
    first = trivial_baseline(module, data, [0, 1], seed=3)
    torch.manual_seed(5)
    assert trivial_baseline(module, data, [0, 1], seed=3) == first
