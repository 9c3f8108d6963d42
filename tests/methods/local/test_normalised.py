"""Tests of FedNova's normaliser against worked numbers, the paper's closed form and torch's SGD."""

from functools import partial

import pytest
import torch
from torch.optim import SGD, Adam

from lcfl.core.clients import ClientState
from lcfl.core.messages import Downlink
from lcfl.methods.local import NormalisedTraining
from lcfl.methods.local.normalised import normaliser
from lcfl.methods.local.training import LocalData
from lcfl.models.module import FederatedModule
from tests.helpers.builders import dealt, engine, linear, linear_module, two_sided


def test_each_plain_step_counts_one():
    assert [normaliser(tau) for tau in range(4)] == [0, 1, 2, 3]


@pytest.mark.parametrize("rho", [0.5, 0.9])
@pytest.mark.parametrize("tau", [1, 2, 7])
def test_the_closed_form_of_momentum(tau, rho):
    assert normaliser(tau, rho) == pytest.approx((tau - rho * (1 - rho**tau) / (1 - rho)) / (1 - rho))


def test_worked_numbers():
    assert normaliser(3, momentum=0.5) == 1 + 1.5 + 1.75
    assert normaliser(3, pull=0.5) == (0.5 * (0.5 * 1 + 1)) + 1 == 1.75  # a <- (1 - eta mu) a + 1
    assert normaliser(2, momentum=0.5, nesterov=True) == 1.5 + 1.75
    assert normaliser(2, momentum=0.5, dampening=0.5) == 1 + 1.0


@pytest.mark.parametrize(
    "settings",
    [
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True},
        {"momentum": 0.8, "dampening": 0.3},
        {"momentum": 0.7, "pull": 0.2},
        {"momentum": 0.7, "nesterov": True, "pull": 0.1},
    ],
)
def test_the_normaliser_is_how_far_torchs_sgd_goes_if_every_gradient_is_one(settings):
    pull, lr = settings.get("pull", 0.0), 0.25
    point = torch.nn.Parameter(torch.tensor(3.0, dtype=torch.float64))
    optimizer = SGD([point], lr, **{name: value for name, value in settings.items() if name != "pull"})
    for tau in range(1, 9):
        optimizer.zero_grad()
        (point + pull / lr / 2 * (point - 3) ** 2).backward()
        optimizer.step()
        assert normaliser(tau, **settings) == pytest.approx((3 - point.item()) / lr)


INPUTS, TARGETS, TRAIN, _ = two_sided(size=9)


def extras(module, update, max_steps=None, centre=True, round_=0):
    data = dealt(INPUTS, TARGETS, TRAIN)
    start = module.initial_model(0)
    downlink = Downlink({"centre" if centre else "model": start})
    local = LocalData(TRAIN[0], 4, seed=0, client=0, round=round_)
    trained = update(ClientState(), downlink, local, engine(module, data, max_steps))
    return trained.extras["normaliser"].tolist()


def test_rho_eta_and_mu_are_those_of_the_module():
    update = NormalisedTraining(steps=3, start="centre")
    assert extras(linear_module(0.5), update) == [3.0]
    module = FederatedModule(linear, partial(SGD, lr=0.5, momentum=0.5, weight_decay=0.1))
    assert extras(module, update) == [4.25]
    assert extras(linear_module(0.5, cluster_weight=1.0), update) == [1.75]
    assert extras(linear_module(0.5, cluster_weight=1.0), update, centre=False) == [3.0]  # nothing pulls
    assert extras(linear_module(0.5, cluster_weight=1.0), update, max_steps=1) == [1.0]


def test_a_decayed_learning_rate_pulls_less():
    update = NormalisedTraining(steps=3, start="centre", lr_decay=0.5)
    module = linear_module(0.5, cluster_weight=2.0)
    assert extras(module, update, round_=1) == [1.75]  # eta mu = 0.5
    assert extras(module, update) == [1.0]  # eta mu = 1


def test_the_authors_tau_is_sent_in_addition():
    update = NormalisedTraining(epochs=1, start="centre", effective_steps="steps")
    assert extras(linear_module(0.5, cluster_weight=1.0), update) == [1.75, 3.0]


@pytest.mark.parametrize(
    "optimizer",
    [
        partial(Adam, lr=0.1),
        partial(SGD, lr=0.1, maximize=True),
        lambda ps: SGD([{"params": [p], "lr": 0.1 * n + 0.1} for n, p in enumerate(ps)]),
    ],
)
def test_another_optimizer_is_refused(optimizer):
    with pytest.raises(ValueError, match=r"NormalisedTraining got the optimizer .*known only for torch.optim.SGD with"):
        NormalisedTraining(steps=1).check(FederatedModule(linear, optimizer))


def test_a_misspelt_word_is_refused():
    with pytest.raises(ValueError, match="got effective_steps='step'; allowed are normaliser and steps"):
        NormalisedTraining(steps=1, effective_steps="step")
    with pytest.raises(ValueError, match="exactly one must be"):
        NormalisedTraining()
