"""Tests of training by Moreau envelopes: a run in numpy, buffers, cost and refused settings."""

import numpy as np
import pytest
import torch

from lcfl.core.clients import ClientState
from lcfl.core.messages import Downlink
from lcfl.methods.local import EnvelopeTraining
from lcfl.methods.local.training import LocalData
from tests.helpers.builders import blobs, dealt, engine, linear_module, linear_step, loaded, two_sided
from tests.helpers.clustered import normed_module


def test_a_run_in_numpy():
    inputs, targets, train, test = two_sided(1, size=7)
    module, data = linear_module(lr=9.0), dealt(inputs, targets, train, test=test)  # the optimizer is not used
    update = EnvelopeTraining(steps=3, inner_steps=2, inner_lr=0.2, outer_lr=0.1, penalty=4.0)
    start = module.initial_model(0)
    local = LocalData(train[0], 100, 0, 0)
    found = update(ClientState(torch.full_like(start, 5.0)), Downlink({"model": start}), local, engine(module, data))
    w = theta = start.double().numpy()
    losses = []
    for _ in range(3):
        for _ in range(2):
            loss, slope = linear_step(theta, inputs[train[0]], targets[train[0]])
            losses.append(loss)
            theta = theta - 0.2 * (slope + 4.0 * (theta - w))
        w = w - 0.1 * 4.0 * (w - theta)
    np.testing.assert_allclose(found.model, theta, atol=1e-6)
    np.testing.assert_allclose(found.extras["model"], w, atol=1e-6)
    assert found.loss == pytest.approx(np.mean(losses), rel=1e-5)
    assert (found.consumed, found.num_steps) == (21, 6)
    assert np.abs(w - theta).max() > 0.01


def test_the_personal_and_the_sent_model_share_the_statistics_of_the_last_batch():
    module, data = normed_module(), loaded(blobs(4))
    local = LocalData(data.population.train[0], 10, 0, 0)
    start = module.initial_model(0)
    update = EnvelopeTraining(steps=2, inner_steps=3)
    found = update(ClientState(start), Downlink({"model": start}), local, engine(module, data))
    end, sent = module.layout.num_parameters, found.extras["model"]
    assert torch.equal(found.model[end:], sent[end:]) and not torch.equal(found.model[:end], sent[:end])
    assert found.model[module.layout.integer_slices()[0]].item() == 6


def test_cost_and_refused_settings():
    assert EnvelopeTraining(steps=2, inner_steps=3).cost(40, 10) == 60
    assert EnvelopeTraining(epochs=2, inner_steps=3).cost(40, 10) == 240
    with pytest.raises(ValueError, match="inner_steps=0"):
        EnvelopeTraining(steps=1, inner_steps=0)
    with pytest.raises(ValueError, match="must be below 2"):
        EnvelopeTraining(steps=1, inner_lr=0.2, penalty=10.0)
    with pytest.warns(UserWarning, match="jumps beyond"):
        EnvelopeTraining(steps=1, inner_lr=0.1, penalty=15.0)
