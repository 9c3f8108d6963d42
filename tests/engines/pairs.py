"""Pairs of engines on the same data, what clients compute with them, and checks that both give the same."""

from functools import partial

import numpy as np
import pytest
import torch
from lightning.fabric import Fabric

from lcfl.core import rng
from lcfl.data.datasets import Tensors
from lcfl.data.partition import IID
from lcfl.engines import SequentialEngine, StackedEngine
from lcfl.models.module import FederatedModule
from tests.helpers.builders import blobs, loaded

TOLERANCE = {"rtol": 5e-5, "atol": 1e-5}
SIZES = [(32, 5, 17), (32, 32, 32, 9), (6,), (32, 17)]  # of the batches of four clients, in samples


def data_of(shape, number=160, words=None):
    """Returns random inputs of this shape, or of numbers below `words`, with four labels."""
    draw = torch.Generator().manual_seed(0)
    size = (number, *shape)
    inputs = torch.randint(words, size, generator=draw) if words else torch.randn(size, generator=draw)
    labels = torch.randint(4, (number,), generator=draw)
    return loaded(blobs(2, dataset=Tensors((inputs, labels)), partition=IID(), protocols=["own_split"]))


def with_frozen_values(module):
    """Returns a module whose frozen part is that of initial model 0 with seed 3."""
    if module.frozen_layout is not None:
        module.frozen_layout.unpack(module.initial_frozen(3), module.network)
    return module


def stacked_pair(
    network, shape, optimizer=None, kind=FederatedModule, data=None, precision="32-true", budget=None, **options
):
    """Makes a sequential and a stacked engine on the same data, each with its own module."""
    data = data or data_of(shape)
    fabric = Fabric(accelerator="cpu", devices=1, precision=precision)
    optimizer = optimizer or partial(torch.optim.SGD, lr=0.1)
    made = [with_frozen_values(kind(network, optimizer, **options)) for _ in range(2)]
    stacked = StackedEngine(fabric, made[1], data.samples, data.dataset.spec, 32, budget=budget)
    return SequentialEngine(fabric, made[0], data.samples), stacked


def near(model, seed=1):
    return model + 0.1 * torch.randn(len(model), generator=torch.Generator().manual_seed(seed))


def batches_of(client, sizes):
    draw = np.random.default_rng(client)
    return [draw.integers(0, 100, size) for size in sizes]


def both(pair, task, clients=range(4)):
    """Returns the results of the task for both engines: for each client, in its random stream, with its buffers."""

    def one(client, engine):
        engine.buffers = None if first is None else first + client
        with rng.seeded(0, "local", client):
            return task(client, engine), engine.buffers

    first = pair[0].module.initial_buffers(3)
    return [engine.run_all([partial(one, client) for client in clients]) for engine in pair]


def model_of(engine, client):
    return near(engine.module.initial_model(3), client)


def train(client, engine):
    return engine.run_optimizer(model_of(engine, client), batches_of(client, SIZES[client]))


def assert_same_runs(expected, actual, **tolerance):
    tolerance = {**TOLERANCE, **tolerance}
    for (one, kept), (other, own) in zip(expected, actual, strict=True):
        torch.testing.assert_close(other.model, one.model, **tolerance)
        assert other.loss == pytest.approx(one.loss, rel=1e-4)
        assert other.logged == pytest.approx(one.logged, rel=1e-4)
        if kept is not None:
            torch.testing.assert_close(own, kept, **tolerance)


def assert_same_training(pair, clients=range(4), **tolerance):
    """Checks that both engines train these clients in the same way."""
    assert_same_runs(*both(pair, train, clients), **tolerance)


def assert_only_this_client_diverges(pair, diverged):
    """Checks that a client whose model is not finite does not affect the others among four."""

    def task(client, engine):
        model = model_of(engine, client) * (float("inf") if client == diverged else 1)
        return engine.run_optimizer(model, batches_of(client, SIZES[client]))

    expected, actual = both(pair, task)
    assert not actual.pop(diverged)[0].model.isfinite().all()
    expected.pop(diverged)
    assert_same_runs(expected, actual, rtol=1e-3, atol=1e-4)


class Logging(FederatedModule):
    """Its step adds a term to the loss and logs values."""

    def training_step(self, batch, batch_idx=0):
        inputs, targets = batch
        scores = self(inputs)
        self.log("hits", (scores.argmax(dim=1) == targets).float().mean())
        if batch_idx == 1:
            self.log("second", scores.square().mean())
        return super().training_step(batch, batch_idx) + 0.01 * scores.square().mean()


class LoggingScores(FederatedModule):
    """Logs in `forward`, so that the training step is lcfl's."""

    def forward(self, inputs):
        scores = super().forward(inputs)
        if self.training:
            self.log("size", scores.detach().norm())
        return scores
