"""Tests of the client's choice among models by its training loss."""

from math import isnan, nan
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from lcfl.core.clients import ClientState
from lcfl.core.messages import Downlink
from lcfl.engines import SequentialEngine
from lcfl.methods.local import LeastLoss, LeastLossTraining
from lcfl.methods.local.least_loss import least_loss
from lcfl.methods.local.training import LocalData
from tests.helpers.builders import blobs, dealt, engine, linear_module, linear_step, loaded, two_sided
from tests.helpers.clustered import normed_module

DATA = LocalData(np.arange(3), 2, 0, 0)


def reporting(losses):
    """Returns an engine that reports these losses for models 0, 1, ... on all training samples, more than a batch."""

    def loss(model, indices):
        assert indices.tolist() == [0, 1, 2]
        return losses[int(model)]

    return SimpleNamespace(loss=loss)


@pytest.mark.parametrize(
    ("losses", "chosen"),
    [([3.0, 1.0, 2.0], 1), ([2.0, 1.0, 1.0], 1), ([1.0, 1.0], 0), ([nan, 2.0], 1), ([nan, nan], 0)],
)
def test_the_least_loss_wins_and_the_lowest_number_breaks_ties(losses, chosen):
    assert least_loss(torch.arange(float(len(losses))), DATA, reporting(losses))[0] == chosen


def test_choosing_trains_nothing_and_draws_no_samples():
    state, down = ClientState(None, 7), Downlink({"centres": torch.arange(2.0)})
    trained = LeastLoss()(state, down, DATA, reporting([2.0, 1.0]))
    assert (float(trained.model), trained.loss, trained.consumed, int(trained.extras["cluster"])) == (1.0, 1.0, 7, 1)
    assert LeastLoss().cost(40, 10) == 40
    assert LeastLossTraining(steps=3).cost(40, 10) == 70


def test_the_loss_is_the_mean_over_all_samples_in_batches(monkeypatch):
    monkeypatch.setattr("lcfl.engines.sequential.SCORED_BATCH", 4)
    inputs, targets, train, test = two_sided(1, size=10)
    module = linear_module()
    model = module.initial_model(0)
    found = engine(module, dealt(inputs, targets, train, test=test)).loss(model, train[0])
    assert found == pytest.approx(linear_step(model.numpy(), inputs[train[0]], targets[train[0]])[0], rel=1e-5)


@pytest.mark.parametrize("weight", [None, torch.tensor([0.1, 1.0])])
def test_the_loss_weighs_batches_by_the_targets_that_count(monkeypatch, weight):
    """The first batch has no target that counts, and the others have few."""
    monkeypatch.setattr("lcfl.engines.sequential.SCORED_BATCH", 4)
    inputs, targets, train, test = two_sided(1, size=11)
    targets = np.where(np.isin(np.arange(len(targets)), [*range(5), 8]), -100, targets)
    loss = nn.CrossEntropyLoss(weight=weight)
    module = linear_module(loss=loss)
    data = dealt(inputs, np.zeros(len(targets), dtype=np.int64), train, test=test)
    trainer = engine(module, data)
    trainer.samples._targets = torch.as_tensor(targets)
    model = module.initial_model(0)
    scores, _ = trainer.scores(model, trainer.samples, train[0])
    expected = float(loss(scores, torch.as_tensor(targets[train[0]])))
    assert trainer.loss(model, train[0]) == pytest.approx(expected, rel=1e-5)
    trainer.samples._targets, trainer.samples._placed = torch.full((len(targets),), -100), {}
    assert isnan(trainer.loss(model, train[0]))


def test_the_loss_uses_stored_batch_statistics_and_changes_nothing():
    module, data = normed_module(), loaded(blobs(4))
    trainer: SequentialEngine = engine(module, data)
    model, indices = module.initial_model(0), data.population.train[0]
    module.train()
    whole = trainer.loss(model, indices)
    assert torch.equal(trainer.layout.pack(module.network), model)
    parts = [trainer.loss(model, part) * len(part) for part in np.array_split(indices, 3)]
    assert whole == pytest.approx(sum(parts) / len(indices), rel=1e-5)
