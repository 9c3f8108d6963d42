"""Tests of the batches of Per-FedAvg's steps and of refused settings. Its numbers are in test_by_hand_baselines.py."""

from functools import partial

import numpy as np
import pytest
import torch

from lcfl.core.clients import ClientState
from lcfl.core.messages import Downlink
from lcfl.methods.local import GradientStep, MetaTraining
from lcfl.methods.local.training import LocalData
from lcfl.models.module import FederatedModule
from tests.helpers.builders import Normed, dealt, engine, linear, linear_module, two_sided

INPUTS, TARGETS, TRAIN, _ = two_sided(size=14)
DATA = dealt(INPUTS, TARGETS, TRAIN)


class Recording:
    """An engine that records its calls."""

    def __init__(self, module, max_steps=None):
        self.engine, self.asked = engine(module, DATA, max_steps), []

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def gradient(self, model, batch, number=0):
        self.asked.append(("g", len(batch), number))
        self.last = batch
        return self.engine.gradient(model, batch, number)

    def hessian_vector_product(self, model, batch, direction, number=0):
        self.asked.append(("H", len(batch), number))
        return self.engine.hessian_vector_product(model, batch, direction, number)


def run(update, num_samples=14, batch_size=4, consumed=0, module=None, max_steps=None):
    module = module or linear_module()
    recording = Recording(module, max_steps)
    local = LocalData(TRAIN[0][:num_samples], batch_size, seed=0, client=0)
    trained = update(ClientState(consumed=consumed), Downlink({"model": module.initial_model(0)}), local, recording)
    return recording.asked, trained


def test_a_pass_of_four_batches_is_two_pairs():
    asked, trained = run(MetaTraining(epochs=1))
    assert asked == [("g", 4, 0), ("g", 4, 0), ("g", 4, 1), ("g", 2, 1)]
    assert (trained.consumed, trained.num_steps) == (14, 2)


def test_a_pass_of_four_batches_with_the_hessian_is_one_group_of_three():
    asked, trained = run(MetaTraining(epochs=2, hessian=True))
    assert asked == [("g", 4, 0), ("g", 4, 0), ("H", 4, 0), ("g", 4, 1), ("g", 4, 1), ("H", 4, 1)]
    assert (trained.consumed, trained.num_steps) == (28, 2)


def test_two_batches_with_the_hessian_repeat_the_first():
    asked, _ = run(MetaTraining(epochs=1, hessian=True), num_samples=7)
    assert asked == [("g", 4, 0), ("g", 3, 0), ("H", 4, 0)]


def test_steps_continue_in_the_batch_order():
    first, trained = run(MetaTraining(steps=1))
    second, again = run(MetaTraining(steps=1), consumed=trained.consumed)
    both, whole = run(MetaTraining(steps=2))
    assert (first, second) == ([("g", 4, 0)] * 2, [("g", 4, 0), ("g", 2, 0)])
    assert [size for _, size, _ in both] == [4, 4, 4, 2]
    assert again.consumed == whole.consumed == 14


def test_a_trial_run_takes_one_step():
    asked, trained = run(MetaTraining(steps=5), max_steps=1)
    assert len(asked) == 2 and trained.num_steps == 1


@pytest.mark.parametrize("update", [MetaTraining(steps=2), MetaTraining(epochs=2), MetaTraining(steps=2, hessian=True)])
@pytest.mark.parametrize("num_samples", [14, 12, 4])
def test_the_cost_is_about_the_number_of_drawn_samples(update, num_samples):
    _, trained = run(update, num_samples)
    assert trained.consumed <= update.cost(num_samples, 4) <= 3 * trained.consumed


def test_the_personal_model_is_one_step_on_the_next_training_batch():
    step = MetaTraining(steps=1, inner_lr=0.25).adaptation
    assert step == GradientStep(0.25)
    asked, trained = run(step, consumed=12)
    assert asked == [("g", 2, 0)]
    assert (trained.consumed, trained.num_steps, step.cost(14, 4)) == (14, 1, 4)


def test_buffers_see_every_batch_and_the_model_comes_back_to_the_cpu():
    module = FederatedModule(Normed, partial(torch.optim.SGD, lr=0.1))
    _, trained = run(MetaTraining(steps=2), module=module)
    assert trained.model[-1] == 4  # two steps with two batches each
    assert trained.model.device.type == "cpu"
    assert not trained.model.requires_grad


def test_the_personal_model_is_one_step_of_the_inner_rate():
    update, module = MetaTraining(steps=1, inner_lr=0.3, outer_lr=0.7), linear_module()
    w, local = module.initial_model(0), LocalData(TRAIN[0], 14, seed=0, client=0)
    recording = Recording(module)
    personal = update.adaptation(ClientState(), Downlink({"model": w}), local, recording).model
    slope = recording.engine.gradient(w, recording.last).vector
    torch.testing.assert_close(personal, w - 0.3 * slope)


def test_logged_values_are_those_of_the_outer_steps():
    class Logs(FederatedModule):
        def training_step(self, batch, batch_idx=0):
            loss = super().training_step(batch, batch_idx)
            self.log("seen", loss)
            return loss

    _, trained = run(MetaTraining(steps=3), module=Logs(linear))
    assert trained.logged["seen"] == pytest.approx(trained.loss)


def test_no_momentum_passes_from_one_participation_to_the_next():
    update = MetaTraining(steps=1, outer_momentum=0.9, inner_lr=0.1)
    module = linear_module()
    shared = Recording(module)
    local = LocalData(TRAIN[0], 14, seed=0, client=0)
    downlink = Downlink({"model": module.initial_model(0)})
    first, second = (update(ClientState(), downlink, local, shared).model for _ in range(2))
    assert torch.equal(first, second)
    assert np.abs((first - module.initial_model(0)).numpy()).max() > 0


@pytest.mark.parametrize("arguments", [{"inner_lr": -1}, {"outer_lr": -0.1}, {"outer_momentum": 1.0}])
def test_rates_and_momentum_are_checked(arguments):
    text = r"method.local_update: got inner_lr=.*; allowed are rates >= 0 and a momentum"
    with pytest.raises(ValueError, match=text):
        MetaTraining(**{"steps": 1, **arguments})
    with pytest.raises(ValueError, match=r"GradientStep: got rate=-1; it must be at least 0"):
        GradientStep(-1)


def test_without_an_outer_rate_the_optimizer_must_have_one():
    class Rateless(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {})

        def step(self, closure=None): ...

    module = FederatedModule(linear, Rateless)
    MetaTraining(steps=1, outer_lr=0.1).check(module)
    with pytest.raises(ValueError, match="got outer_lr=None, but Rateless has no learning rate to use instead"):
        MetaTraining(steps=1).check(module)
