"""lcfl's accuracy of a single batch is that of torchmetrics, bit for bit."""

from functools import partial

import pytest
import torch
from torch import nn
from torchmetrics import MeanAbsoluteError
from torchmetrics.classification import BinaryAccuracy, MulticlassRecall, MultilabelAccuracy, MultilabelRecall

from lcfl.distributed.worker import measure, measure_once
from lcfl.models import MLP
from lcfl.models.metrics import weight_in_loss
from lcfl.models.module import FederatedModule

NETWORK = partial(MLP, 16, (), 8)


def drawn(*shape):
    draw = torch.Generator().manual_seed(len(shape))
    return torch.randn(shape[0], 8, *shape[1:], generator=draw), torch.randint(8, shape, generator=draw)


@pytest.mark.parametrize("shape", [(1,), (7,), (333,), (5, 3), (4, 3, 2)])
@pytest.mark.parametrize("ignored", [None, 3])
def test_accuracy_of_a_single_batch(shape, ignored):
    loss = nn.CrossEntropyLoss() if ignored is None else nn.CrossEntropyLoss(ignore_index=ignored)
    module, (scores, targets) = FederatedModule(NETWORK, loss=loss), drawn(*shape)
    assert measure_once(module, scores, targets) == pytest.approx(measure(module, [(scores, targets)]), abs=0, rel=0)
    assert measure_once(module, 10 * nn.functional.one_hot(targets, 8).movedim(-1, 1).float(), targets)["acc"] > 0


@pytest.mark.parametrize("ignored", [-100, -1])
def test_tokens_that_the_loss_ignores_do_not_count(ignored):
    module, (scores, _) = FederatedModule(NETWORK, loss=nn.CrossEntropyLoss(ignore_index=ignored)), drawn(4, 5)
    targets = scores.argmax(dim=1)
    targets[:, 2:] = ignored
    assert measure_once(module, scores, targets)["acc"] == 1 == measure(module, [(scores, targets)])["acc"]


def test_no_target_counts_and_scores_that_are_not_finite():
    module = FederatedModule(NETWORK, loss=nn.CrossEntropyLoss(ignore_index=3))
    scores = torch.full((2, 8), torch.nan)
    assert measure_once(module, scores, torch.tensor([3, 3])) == {}
    assert measure(module, [(scores, torch.tensor([3, 3]))]) == {}
    targets = torch.tensor([0, 1])
    assert measure_once(module, scores, targets)["acc"] == measure(module, [(scores, targets)])["acc"]


@pytest.mark.parametrize("number", [41, 47, 55, 61, 82, 1999])
def test_a_perfect_client_has_1(number):
    module, targets = FederatedModule(NETWORK), torch.zeros(number, dtype=torch.int64)
    scores = nn.functional.one_hot(targets, 8).float()
    assert measure_once(module, scores, targets)["acc"] == 1 == measure(module, [(scores, targets)])["acc"]


def test_other_metrics_are_measured_as_torchmetrics_does():
    module = FederatedModule(NETWORK, cut=None, loss=nn.MSELoss(), metrics={"mae": MeanAbsoluteError()}, report="mae")
    outputs, targets = torch.ones(4, 8), torch.zeros(4, 8)
    assert measure_once(module, outputs, targets) == {"loss": 1.0, "mae": 1.0}


def test_a_metric_does_not_depend_on_which_client_was_measured_first():
    recalls = {f"r{share}": MultilabelRecall(8, threshold=share / 100) for share in (70, 90)}
    module = FederatedModule(NETWORK, loss=nn.BCEWithLogitsLoss(), metrics=recalls, report="r70")
    targets = torch.ones(4, 8)
    equal, apart = torch.full((4, 8), 5.0), torch.full((4, 8), 2.0)  # probabilities of 0.99 and 0.88
    assert measure(module, [(equal, targets)])["r90"] == 1
    assert measure(module, [(apart, targets)])["r90"] == 0 == measure_once(module, apart, targets)["r90"]


def test_a_weight_of_ones_own_loss_need_not_be_one_of_classes():
    class Focal(nn.Module):
        weight, ignore_index = 0.25, -100

    assert weight_in_loss(Focal(), torch.tensor([1, 0, -100])) == 2
    assert weight_in_loss(nn.CrossEntropyLoss(torch.tensor([1.0, 3.0])), torch.tensor([1, 0, -100])) == 4


def test_weights_of_terms_are_not_those_of_classes():
    class Terms(nn.Module):
        ignore_index = 255

        def __init__(self):
            super().__init__()
            self.register_buffer("weight", torch.tensor([1.0, 0.5]))

    assert weight_in_loss(Terms(), torch.tensor([2, 0, 255])) == 2


def test_a_client_whose_classes_weigh_nothing_lacks_the_loss_and_no_other_metric():
    loss = nn.CrossEntropyLoss(torch.tensor([0.0, 1.0, 1.0]))
    module = FederatedModule(
        partial(MLP, 16, (), 3), loss=loss, metrics={"recall": MulticlassRecall(3, average="micro")}
    )
    outputs, targets = torch.eye(3)[[0, 0, 1]], torch.tensor([0, 0, 0])
    assert measure(module, [(outputs, targets)]) == pytest.approx({"acc": 2 / 3, "recall": 2 / 3})
    plain = FederatedModule(partial(MLP, 16, (), 3), loss=loss)
    assert measure_once(plain, outputs, targets) == measure(plain, [(outputs, targets)])
    assert measure_once(plain, outputs, targets) == pytest.approx({"acc": 2 / 3})
    assert measure_once(plain, outputs, torch.full((3,), -100)) == {}


class OfProbabilities(BinaryAccuracy):
    def update(self, outputs, targets):
        super().update(outputs.sigmoid(), targets)


@pytest.mark.parametrize("metric", [BinaryAccuracy(), MultilabelAccuracy(2), OfProbabilities()])
def test_logits_from_0_to_1_are_not_read_as_probabilities(metric):
    loss = nn.BCEWithLogitsLoss()
    module = FederatedModule(partial(MLP, 16, (), 2), loss=loss, metrics={"right": metric}, report="right")
    logits, targets = torch.tensor([[0.3, 0.1], [0.4, 0.2], [-1.0, 1.0]]), torch.tensor([[1.0, 1], [1, 1], [0, 1]])
    for rows in (slice(2), slice(3)):
        assert measure(module, [(logits[rows], targets[rows])])["right"] == 1
