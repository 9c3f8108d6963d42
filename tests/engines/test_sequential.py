"""The engine agrees with gradients computed in numpy, and no state passes from one client to the next."""

from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from lcfl.core.clients import ClientState
from lcfl.core.messages import Downlink
from lcfl.data.datamodule import FederatedDataModule
from lcfl.data.datasets import CIFAR10, RandomLike, Tensors
from lcfl.data.partition import IID
from lcfl.methods.local import LocalTraining
from lcfl.methods.local.training import LocalData
from lcfl.models import LeNet5, SplitNetwork
from lcfl.models.module import FederatedModule
from lcfl.models.pulls import Pulls
from tests.helpers.builders import (
    LogsNumber,
    Normed,
    blobs,
    dealt,
    engine,
    linear,
    linear_module,
    linear_step,
    loaded,
    without_gradients,
)
from tests.helpers.points import DATA, INPUTS, TARGETS, TRAIN, batch, start


def test_means_over_the_steps():
    module = LogsNumber(linear, partial(torch.optim.SGD, lr=0.0))
    w = start(module)
    _, loss, logged = engine(module, DATA).run_optimizer(w, [batch(0, 1), batch(2, 3), batch(0, 1)])
    alone = [engine(module, DATA).run_optimizer(w, [batch(*rows)]).loss for rows in ((0, 1), (2, 3))]
    assert loss == pytest.approx((2 * alone[0] + alone[1]) / 3)
    assert logged == {"number": 1.0}


def test_one_step_by_hand():
    module = linear_module(lr=0.5)
    w = start(module)
    model, loss, _ = engine(module, DATA).run_optimizer(w, [batch(3, 0, 5)])
    expected, slope = linear_step(w, INPUTS[[3, 0, 5]], TARGETS[[3, 0, 5]])
    np.testing.assert_allclose(model, w.double().numpy() - 0.5 * slope, atol=1e-6)
    assert loss == pytest.approx(expected, rel=1e-5)


def test_a_correction_is_added_to_every_gradient_and_not_to_the_loss():
    module = linear_module(lr=0.2)
    w, correction = start(module), torch.linspace(-1, 2, 17)
    model, loss, _ = engine(module, DATA).run_optimizer(w, [batch(0, 1), batch(2, 3)], Pulls(correction=correction))
    v, losses = w.double().numpy(), []
    for rows in ([0, 1], [2, 3]):
        part, slope = linear_step(v, INPUTS[rows], TARGETS[rows])
        losses.append(part)
        v = v - 0.2 * (slope + correction.numpy())
    np.testing.assert_allclose(model, v, atol=1e-6)
    assert loss == pytest.approx(np.mean(losses), rel=1e-5)


@pytest.mark.parametrize(("part", "trained"), [("embedding", slice(0, 9)), ("head", slice(9, 17))])
def test_a_part_of_the_model_is_trained_by_hand(part, trained):
    optimizer = partial(torch.optim.SGD, lr=0.2, momentum=0.5, weight_decay=0.1)
    module = FederatedModule(linear, optimizer, cluster_weight=0.6)
    w, centre = start(module), torch.linspace(-1, 1, 17)
    model, loss, _ = engine(module, DATA).run_optimizer(w, [batch(0, 1), batch(2, 3)], Pulls(centre), part=part)
    v, velocity, losses = w.double().numpy(), np.zeros(17), []
    for rows in ([0, 1], [2, 3]):
        value, slope = linear_step(v, INPUTS[rows], TARGETS[rows])
        losses.append(value + 0.3 * ((v - centre.numpy()) ** 2).sum())  # the pull of the whole model
        velocity[trained] = (0.5 * velocity + slope + 0.6 * (v - centre.numpy()) + 0.1 * v)[trained]
        v = v - 0.2 * velocity
    np.testing.assert_allclose(model, v, atol=1e-6)
    assert loss == pytest.approx(np.mean(losses), rel=1e-5)


@pytest.mark.parametrize("part", ["embedding", "head"])
@pytest.mark.parametrize(
    "optimizer",
    [
        partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.5),
        partial(torch.optim.AdamW, lr=0.1, weight_decay=0.5),
        partial(torch.optim.Rprop, lr=0.1),
    ],
    ids=lambda optimizer: optimizer.func.__name__,
)
def test_untrained_parameters_keep_their_bits_and_all_buffers_are_updated(optimizer, part):
    module = FederatedModule(Normed, optimizer)
    w, rest = start(module), torch.ones(30, dtype=torch.bool)
    rest[module.layout.range_of(part)] = rest[23:] = False
    model, *_ = engine(module, DATA).run_optimizer(w, [batch(0, 1, 2), batch(3, 4, 5)] * 3, part=part)
    assert torch.equal(model[rest], w[rest])
    assert (model[~rest] != w[~rest]).float().mean() > 0.5 and (model[23:29] != w[23:29]).all()
    whole, *_ = engine(module, DATA).run_optimizer(w, [batch(0, 1, 2)], part="all")
    short, *_ = engine(module, DATA).run_optimizer(w, [batch(0, 1, 2)], part=part)
    assert torch.equal(short[~rest], whole[~rest])


def test_a_step_with_both_pulls_by_hand():
    module = linear_module(lr=0.2, cluster_weight=0.6, global_weight=0.4)
    w, centre, phi = start(module), torch.linspace(-1, 1, 17), torch.linspace(2, 1, 9)
    model, loss, _ = engine(module, DATA).run_optimizer(w, [batch(0, 1), batch(2, 3)], Pulls(centre, phi))
    v, losses = w.double().numpy(), []
    for rows in ([0, 1], [2, 3]):
        part, slope = linear_step(v, INPUTS[rows], TARGETS[rows])
        to_centre, to_phi = v - centre.numpy(), v[:9] - phi.numpy()
        losses.append(part + 0.3 * (to_centre**2).sum() + 0.2 * (to_phi**2).sum())
        slope = slope + 0.6 * to_centre
        slope[:9] += 0.4 * to_phi
        v = v - 0.2 * slope
    np.testing.assert_allclose(model, v, atol=1e-6)
    assert loss == pytest.approx(np.mean(losses), rel=1e-5)


def test_momentum_starts_at_zero_in_every_run():
    module = FederatedModule(linear, partial(torch.optim.SGD, lr=0.5, momentum=0.9))
    w, rows = start(module), list(range(6))
    slope_of = lambda v: linear_step(v, INPUTS[rows], TARGETS[rows])[1]  # noqa: E731
    v0 = w.double().numpy()
    v1 = v0 - 0.5 * slope_of(v0)
    steps = engine(module, DATA)
    first, *_ = steps.run_optimizer(w, [batch(*rows)])
    second, *_ = steps.run_optimizer(first, [batch(*rows)])
    np.testing.assert_allclose(second, v1 - 0.5 * slope_of(v1), atol=1e-6)
    at_once, *_ = steps.run_optimizer(w, [batch(*rows)] * 2)
    np.testing.assert_allclose(at_once, v1 - 0.5 * (0.9 * slope_of(v0) + slope_of(v1)), atol=1e-6)


def test_the_rate_scale_multiplies_the_learning_rate_of_one_run():
    w, steps = start(linear_module(0.5)), engine(linear_module(0.5), DATA)
    scaled, *_ = steps.run_optimizer(w, [batch(0, 1), batch(2, 3)], rate_scale=0.25)
    slow, *_ = engine(linear_module(0.125), DATA).run_optimizer(w, [batch(0, 1), batch(2, 3)])
    assert torch.equal(scaled, slow)
    after, *_ = steps.run_optimizer(w, [batch(0, 1)])
    fresh, *_ = engine(linear_module(0.5), DATA).run_optimizer(w, [batch(0, 1)])
    assert torch.equal(after, fresh)


def test_nothing_passes_from_one_client_to_the_next():
    module = FederatedModule(Normed, partial(torch.optim.Adam, lr=0.1), cluster_weight=0.5)
    w = start(module)
    fresh, *_ = engine(module, DATA).run_optimizer(w, [batch(0, 1, 2), batch(3, 4)])
    busy = engine(module, DATA)
    busy.run_optimizer(w + 1, [batch(5, 6, 7)], Pulls(w, w[:15]))
    module.eval()
    again, *_ = busy.run_optimizer(w, [batch(0, 1, 2), batch(3, 4)])
    assert torch.equal(fresh, again)


class Remembering(SplitNetwork):
    """Subtracts the mean of all inputs so far, which is in a buffer that is not persistent."""

    def __init__(self):
        super().__init__(nn.Linear(2, 3), nn.Linear(3, 2))
        self.embedding.register_buffer("seen", torch.zeros(2), persistent=False)

    def forward(self, inputs):
        self.embedding.seen = (self.embedding.seen + inputs.mean(dim=0)) / 2
        return super().forward(inputs - self.embedding.seen)


def test_late_and_shared_buffers_are_reset_in_place():
    """One buffer is None at first, one tensor is in two layers, and the network keeps a view of it."""
    table = torch.arange(4.0)

    class Late(Remembering):
        def __init__(self):
            super().__init__()
            shared = table.clone()
            self.embedding.register_buffer("late", None, persistent=False)
            self.embedding.register_buffer("table", shared, persistent=False)
            self.decision.register_buffer("table", shared, persistent=False)
            self.tail = self.decision.table[2:]

    module = FederatedModule(Late, cut="decision")
    network, w = module.network, start(module)
    network.embedding.late = torch.ones(3)
    network.embedding.table.mul_(7)
    module.fill(network, w)
    assert network.embedding.late is None
    assert torch.equal(network.embedding.table, table) and torch.equal(network.tail, table[2:])
    assert network.embedding.table.data_ptr() == network.decision.table.data_ptr()
    del network.embedding.seen
    network.decision.table = None
    module.fill(network, w)
    assert torch.equal(network.embedding.seen, torch.zeros(2)) and torch.equal(network.decision.table, table)


def test_a_buffer_that_is_not_persistent_is_reset_for_every_model():
    module = FederatedModule(Remembering, cut="decision")
    runs, evaluated = [], []
    for _ in range(2):
        busy = engine(module, DATA)
        runs += [busy.run_optimizer(start(module), [batch(0, 1), batch(2, 3)]).model for _ in range(2)]
        evaluated.append(busy.loss(start(module), batch(4, 5)))
    assert all(torch.equal(each, runs[0]) for each in runs) and evaluated[0] == evaluated[1]


def test_two_runs_of_five_steps_equal_one_of_ten():
    module, data = linear_module(), dealt(INPUTS, TARGETS, TRAIN, batch_size=4)
    steps = engine(module, data)
    local = LocalData(data.population.train[1], 4, seed=0, client=1)
    state = ClientState(start(module))
    first = LocalTraining(steps=5)(state, Downlink({}), local, steps)
    second = LocalTraining(steps=5)(ClientState(first.model, first.consumed), Downlink({}), local, steps)
    whole = LocalTraining(steps=10)(state, Downlink({}), local, steps)
    assert torch.equal(second.model, whole.model)
    assert second.consumed == whole.consumed
    assert not torch.equal(first.model, second.model)


def test_the_model_contains_running_statistics_and_counters():
    module = FederatedModule(Normed)
    w = start(module)
    model, *_ = engine(module, DATA).run_optimizer(w, [batch(0, 1, 2), batch(3, 4, 5), batch(6, 7)])
    assert model[29] == 3
    assert not torch.equal(model[23:29], w[23:29])
    more, *_ = engine(module, DATA).run_optimizer(model, [batch(0, 1)])
    assert more[29] == 4


def test_a_centre_may_carry_buffers():
    module = FederatedModule(Normed, cluster_weight=0.5)
    w = start(module)
    short, *_ = engine(module, DATA).run_optimizer(w, [batch(0, 1)], Pulls(torch.ones(23)))
    whole, *_ = engine(module, DATA).run_optimizer(w, [batch(0, 1)], Pulls(torch.ones(30)))
    assert torch.equal(short, whole)


def test_max_steps_cuts_a_run():
    module = linear_module()
    w = start(module)
    cut, *_ = engine(module, DATA, max_steps=1).run_optimizer(w, [batch(0, 1), batch(2, 3)])
    one, *_ = engine(module, DATA).run_optimizer(w, [batch(0, 1)])
    assert torch.equal(cut, one)


def test_hooks_of_the_optimizer_and_of_parameters_take_part_in_a_step():
    module = FederatedModule(linear, without_gradients)
    w = start(module)
    assert torch.equal(engine(module, DATA).run_optimizer(w, [batch(0, 1)]).model, w)

    def hooked():
        network = linear()
        for each in network.parameters():
            each.register_post_accumulate_grad_hook(
                lambda parameter: setattr(parameter, "grad", torch.zeros_like(parameter))
            )
        return network

    module = FederatedModule(hooked, partial(torch.optim.SGD, lr=0.5))
    assert torch.equal(engine(module, DATA).run_optimizer(w, [batch(0, 1)]).model, w)


def test_a_step_runs_in_fabrics_precision_and_the_model_stays_float32():
    seen = []

    class Watched(FederatedModule):
        def training_step(self, batch, batch_idx=0):
            seen.append(self(batch[0]).dtype)
            return super().training_step(batch, batch_idx)

    for precision, dtype in (("32-true", torch.float32), ("bf16-mixed", torch.bfloat16)):
        module = Watched(linear)
        model, *_ = engine(module, DATA, precision=precision).run_optimizer(start(module), [batch(0, 1)])
        assert (seen.pop(), model.dtype) == (dtype, torch.float32)


def test_a_custom_step_gets_inputs_in_their_usual_memory_order():
    """A `view` does not accept the memory order that the convolutions of a wide network read fastest."""

    class Own(FederatedModule):
        def training_step(self, batch, batch_idx=0):
            self.log("brightness", batch[0].view(len(batch[0]), -1).mean())
            return super().training_step(batch, batch_idx)

    data = loaded(blobs(2, dataset=RandomLike(CIFAR10(), 40), partition=IID()))
    for kind, innermost in ((Own, False), (FederatedModule, True)):
        sequential = engine(kind(LeNet5), data)
        descent = sequential.run_optimizer(sequential.module.initial_model(0), [np.arange(8)])
        assert sequential._channels_last is innermost
    assert np.isfinite(descent.loss)


@pytest.mark.parametrize(
    ("pixels", "precision", "innermost"),
    [(8, "32-true", True), (5, "32-true", True), (5, "bf16-mixed", False), (2, "32-true", False)],
)
def test_channels_are_innermost_unless_weights_outnumber_the_values_between_layers(pixels, precision, innermost):
    """36,864 weights, and 2 x 64 values for each pixel, which count 16 or 8 times."""
    inputs = torch.randn(8, 64, pixels, pixels, generator=torch.Generator().manual_seed(0))
    data = loaded(FederatedDataModule(Tensors((inputs, torch.arange(8) % 2)), IID(), 1))

    def network():
        return SplitNetwork(nn.Conv2d(64, 64, 3, padding=1), nn.Sequential(nn.Flatten(), nn.Linear(64 * pixels**2, 2)))

    sequential = engine(FederatedModule(network), data, precision=precision)
    sequential.run_optimizer(sequential.module.initial_model(0), [np.arange(8)])
    assert sequential._channels_last is innermost


class Scaling(SplitNetwork):
    """Scales its inputs, which have one channel, in place."""

    def __init__(self):
        super().__init__(nn.Sequential(nn.Conv2d(1, 8, 3), nn.Conv2d(8, 8, 3), nn.Flatten()), nn.Linear(32, 2))

    def forward(self, x):
        x -= 0.5
        return super().forward(x)


def test_the_choice_of_the_memory_order_changes_no_sample():
    inputs = torch.randn(8, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    data = loaded(FederatedDataModule(Tensors((inputs, torch.arange(8) % 2)), IID(), 1))
    sequential = engine(FederatedModule(Scaling), data)
    model = sequential.module.initial_model(0)
    first, second = (sequential.gradient(model, np.arange(8)).vector for _ in range(2))
    assert sequential._channels_last and torch.equal(first, second)


def test_one_sample_has_the_gradient_of_an_instance_normalisation():
    """With channels innermost, torch 2.14 computes another one."""

    def network():
        embedding = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8, affine=True), nn.Tanh(), nn.Conv2d(8, 8, 3), nn.Flatten()
        )
        return SplitNetwork(embedding, nn.Linear(32, 2))

    inputs = torch.randn(8, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    data = loaded(FederatedDataModule(Tensors((inputs, torch.arange(8) % 2)), IID(), 1))
    sequential = engine(FederatedModule(network), data)
    model = sequential.module.initial_model(0)
    module = FederatedModule(network)
    module.layout.unpack(model, module.network)
    exact = module.network.double()
    F.cross_entropy(exact(inputs[:1].double()), torch.tensor([0])).backward()
    expected = torch.cat([each.grad.flatten() for each in exact.parameters()]).float()
    torch.testing.assert_close(sequential.gradient(model, np.arange(1)).vector, expected, rtol=1e-4, atol=1e-6)


class Recomputing(SplitNetwork):
    """Recomputes its activations in a second pass that starts within the first one's backward pass."""

    def forward(self, inputs):
        return checkpoint(super().forward, inputs.requires_grad_(), use_reentrant=True)


@pytest.mark.parametrize("part", ["all", "head"])
def test_activations_may_be_recomputed(part):
    def trained(kind):
        module = FederatedModule(lambda: kind(nn.Linear(2, 3), nn.Linear(3, 2)), partial(torch.optim.SGD, lr=0.1))
        return engine(module, DATA).run_optimizer(start(module), [batch(0, 1), batch(2, 3)], part=part).model

    assert torch.equal(trained(Recomputing), trained(SplitNetwork))


def test_a_gradient_that_leaves_out_what_is_recomputed_is_refused():
    module = FederatedModule(lambda: Recomputing(nn.Linear(2, 3), nn.Linear(3, 2)), partial(torch.optim.SGD, lr=0.1))
    made, w = engine(module, DATA), start(module)
    with pytest.raises(ValueError, match="Set use_reentrant=False"):
        made.gradient(w, batch(0, 1))
    with pytest.raises(ValueError, match="Set use_reentrant=False"):
        made.hessian_vector_product(w, batch(0, 1), torch.ones_like(w))


def test_the_start_is_not_changed():
    module = linear_module()
    w = start(module)
    before = w.clone()
    engine(module, DATA).run_optimizer(w, [batch(0, 1)])
    assert torch.equal(w, before)


def test_only_a_single_optimizer_is_accepted():
    class Scheduled(FederatedModule):
        def configure_optimizers(self):
            return [torch.optim.SGD(self.network.parameters(), lr=0.1)], []

    module = Scheduled(linear)
    with pytest.raises(ValueError, match=r"Scheduled.configure_optimizers: got tuple; .*one torch.optim.Optimizer"):
        engine(module, DATA).run_optimizer(start(module), [batch(0, 1)])
