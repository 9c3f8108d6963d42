"""Tests that engines train on targets of any kind: numbers, several labels, masks and tokens."""

from functools import partial

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn

from lcfl.data.datasets import Tensors
from lcfl.data.partition import IID
from lcfl.engines import SequentialEngine, StackedEngine, choose_engine
from lcfl.engines.compiled import check_compiled
from lcfl.engines.forward_graph import Unsupported
from lcfl.engines.stacked import check_stacked
from lcfl.models.module import FederatedModule
from tests.engines.pairs import assert_same_training
from tests.helpers.builders import blobs, loaded


class Tokens(nn.Sequential):
    """Scores ``[B, 5, T]`` of the next token at each of T places."""

    def __init__(self):
        super().__init__(nn.Embedding(5, 4), nn.Linear(4, 5))

    def forward(self, tokens):
        return super().forward(tokens).transpose(1, 2)


def drawn(*size, classes=None):
    draw = torch.Generator().manual_seed(len(size))
    return torch.randint(classes, size, generator=draw) if classes else torch.randn(*size, generator=draw)


TASKS = {
    "numbers": (partial(nn.Linear, 3, 2), drawn(160, 3), drawn(160, 2), nn.MSELoss()),
    "several labels": (partial(nn.Linear, 3, 4), drawn(160, 3), drawn(160, 4, classes=2) * 1.0, nn.BCEWithLogitsLoss()),
    "masks": (
        partial(nn.Conv2d, 1, 3, 3, padding=1),
        drawn(160, 1, 6, 5),
        drawn(160, 6, 5, classes=3).byte(),
        nn.CrossEntropyLoss(),
    ),
    "tokens": (Tokens, drawn(160, 7, classes=5), drawn(160, 7, classes=5), nn.CrossEntropyLoss()),
}


@pytest.fixture(params=TASKS)
def task(request):
    """Returns the data of a task and a function that makes its module."""
    network, inputs, targets, loss = TASKS[request.param]
    data = loaded(blobs(2, dataset=Tensors((inputs, targets)), partition=IID(), batch_size=32))
    sgd = partial(torch.optim.SGD, lr=0.1)
    return data, lambda: FederatedModule(network, sgd, cut=None, loss=loss, report="loss", cluster_weight=0.1)


def pair_of(task, kind):
    data, make = task
    fabric = Fabric(accelerator="cpu", devices=1)
    sequential = SequentialEngine(fabric, make(), data.samples)
    return sequential, kind(fabric, make(), data.samples, data.dataset.spec, 32)


def test_stacked_trains_as_sequential_does(task):
    check_stacked(task[1](), task[0].dataset.spec)
    assert_same_training(pair_of(task, StackedEngine))


def test_batches_of_masks_are_padded():
    network, inputs, targets, loss = TASKS["masks"]
    data = loaded(blobs(2, dataset=Tensors((inputs, targets)), partition=IID(), batch_size=32))
    sgd = partial(torch.optim.SGD, lr=0.1)
    pair = pair_of((data, lambda: FederatedModule(network, sgd, cut=None, loss=loss, report="loss")), StackedEngine)
    assert pair[1].batches.ignored is not None
    pair[1]._step = lambda parameters, buffers, batch, number, pulls: pair[1]._kernels(
        parameters, buffers, *pair[1].batches.lengthened(*batch), pulls
    )
    assert_same_training(pair, rtol=1e-3, atol=1e-4)


def test_compiled_trains_on_numbers_and_labels_and_refuses_masks_and_tokens(task):
    data, make = task
    module, name = make(), choose_engine("auto", make(), data, "cpu", "32-true").name
    if module.loss.__class__ is not nn.CrossEntropyLoss:
        assert name == "compiled"
        return
    assert name == "sequential"
    with pytest.raises(Unsupported, match=r"the targets are not classes|torch\.float32"):
        check_compiled(module, data.dataset.spec)
    with pytest.raises(ValueError, match=r"trainer\.engine: got compiled, but"):
        choose_engine("compiled", module, data, "cpu", "32-true")


def test_compiled_refuses_masks_though_the_loss_is_cross_entropy():
    network, inputs, targets, loss = TASKS["masks"]
    with pytest.raises(Unsupported, match="the targets are not classes"):
        check_compiled(FederatedModule(network, cut=None, loss=loss), Tensors((inputs, targets)).spec)
