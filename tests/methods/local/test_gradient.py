"""Tests of an engine's gradient and Hessian product against numpy, and that a computation leaves no traces."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from lcfl.methods.local.training import Gradient
from lcfl.models import SplitNetwork
from lcfl.models.module import FederatedModule
from lcfl.models.pulls import Pulls
from tests.helpers.builders import Normed, engine, linear, linear_module, linear_step
from tests.helpers.points import DATA, INPUTS, TARGETS, batch, start


def test_a_gradient_by_hand():
    module = linear_module()
    w = start(module)
    before = w.clone()
    found = engine(module, DATA).gradient(w, batch(3, 0, 5))
    loss, slope = linear_step(w, INPUTS[[3, 0, 5]], TARGETS[[3, 0, 5]])
    np.testing.assert_allclose(found.vector, slope, atol=1e-6)
    assert float(found.loss) == pytest.approx(loss, rel=1e-5)
    assert len(found.buffers) == 0
    assert torch.equal(w, before)
    assert not found.vector.requires_grad and not found.loss.requires_grad
    assert all(parameter.grad is None for parameter in module.parameters())


def test_a_gradient_with_both_pulls_by_hand():
    module = linear_module(cluster_weight=0.6, global_weight=0.4)
    w, centre, phi = start(module), torch.linspace(-1, 1, 17), torch.linspace(2, 1, 9)
    steps = engine(module, DATA)
    found = steps.gradient(w, batch(0, 1), 0, Pulls(centre, phi))
    v = w.double().numpy()
    loss, slope = linear_step(v, INPUTS[[0, 1]], TARGETS[[0, 1]])
    to_centre, to_phi = v - centre.numpy(), v[:9] - phi.numpy()
    np.testing.assert_allclose(steps.gradient(w, batch(0, 1)).vector, slope, atol=1e-6)  # the pulls do not persist
    slope = slope + 0.6 * to_centre
    slope[:9] += 0.4 * to_phi
    np.testing.assert_allclose(found.vector, slope, atol=1e-6)
    assert float(found.loss) == pytest.approx(loss + 0.3 * (to_centre**2).sum() + 0.2 * (to_phi**2).sum(), rel=1e-5)


def test_a_step_along_the_gradient_is_the_optimizers_step():
    module = FederatedModule(Normed, partial(torch.optim.SGD, lr=0.5))
    w = start(module)
    steps = engine(module, DATA)
    found = steps.gradient(w, batch(0, 1, 2))
    stepped = found.step_from(w, 0.5)
    torch.testing.assert_close(stepped, steps.run_optimizer(w, [batch(0, 1, 2)]).model, rtol=0, atol=1e-6)
    assert torch.equal(stepped[23:], found.buffers)
    assert found.buffers[-1] == 1  # one batch seen
    assert not torch.equal(found.buffers[:6], w[23:29])
    again = steps.gradient(stepped, batch(3, 4))
    assert again.buffers[-1] == 2


def test_a_step_by_hand():
    found = Gradient(torch.tensor([1.0, 2.0]), torch.tensor([7.0]), torch.tensor(0.0), {})
    assert found.step_from(torch.tensor([10.0, 10.0, 3.0]), 0.5).tolist() == [9.5, 9.0, 7.0]


def test_the_hessian_product_is_the_derivative_of_the_gradient():
    """Compares with central differences of the gradient in float64 numpy."""
    module = linear_module(cluster_weight=0.6)
    w, v = start(module), torch.linspace(-1, 2, 17)
    steps = engine(module, DATA)
    steps.gradient(w, batch(0), 0, Pulls(torch.ones(17)))  # this pull must not persist
    found = steps.hessian_vector_product(w, batch(0, 4, 8), v)
    rows, w64, v64, h = [0, 4, 8], w.double().numpy(), v.double().numpy(), 1e-5
    up, down = (linear_step(w64 + sign * h * v64, INPUTS[rows], TARGETS[rows])[1] for sign in (1, -1))
    np.testing.assert_allclose(found.vector, (up - down) / (2 * h), atol=1e-5)
    assert np.abs(found.vector.numpy()).max() > 0.05
    assert float(found.loss) == pytest.approx(linear_step(w, INPUTS[rows], TARGETS[rows])[0], rel=1e-5)


def test_parameters_without_a_gradient_have_zero_entries():
    class Half(SplitNetwork):
        def __init__(self):
            super().__init__(nn.Linear(2, 3), nn.Linear(3, 2))
            self.unused = nn.Parameter(torch.ones(4))

    whole, half = linear_module(), FederatedModule(Half)
    w = start(whole)
    steps = engine(half, DATA)
    assert half.layout.parameters[0][0] == "unused"  # a parameter of the network itself comes first
    model = torch.cat([torch.ones(4), w])
    found = steps.gradient(model, batch(0, 1)).vector
    expected = engine(whole, DATA).gradient(w, batch(0, 1)).vector
    assert found[:4].tolist() == [0.0] * 4
    assert torch.equal(found[4:], expected)
    v = torch.linspace(-1, 2, 21)
    product = steps.hessian_vector_product(model, batch(0, 1), v).vector
    torch.testing.assert_close(product[4:], engine(whole, DATA).hessian_vector_product(w, batch(0, 1), v[4:]).vector)
    assert product[:4].tolist() == [0.0] * 4


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_a_frozen_parameter_stays_as_it_is(optimizer):
    class Frozen(SplitNetwork):
        def __init__(self):
            super().__init__(nn.Linear(2, 3), nn.Linear(3, 2))
            self.embedding.weight.requires_grad_(False)

    module = FederatedModule(Frozen, partial(optimizer, lr=0.1, weight_decay=0.1))
    before, w = module.network.embedding.weight.clone(), start(module)
    trained = engine(module, DATA)
    model = trained.run_optimizer(w, [batch(0, 1), batch(2, 3)]).model
    assert torch.equal(trained.module.network.embedding.weight, before) and (model != w).all()


@pytest.mark.parametrize("derivative", ["gradient", "hessian_vector_product"])
def test_derivatives_leave_out_what_is_frozen(derivative):
    whole, part = linear_module(), linear_module(trainable=["embedding.bias", "decision"])
    w, v = start(whole), torch.linspace(-1, 2, 17)
    whole.layout.unpack(w, part.network)
    along = {"gradient": (), "hessian_vector_product": (torch.cat([torch.zeros(6), v[6:]]),)}[derivative]
    expected = getattr(engine(whole, DATA), derivative)(w, batch(0, 1), *along).vector
    found = getattr(engine(part, DATA), derivative)(w[6:], batch(0, 1), *(each[6:] for each in along)).vector
    torch.testing.assert_close(found, expected[6:])


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_no_state_passes_from_one_client_to_the_next(precision):
    module = FederatedModule(Normed, cluster_weight=0.5)
    w, v = start(module), torch.linspace(-1, 2, 23)
    fresh, busy = engine(module, DATA, precision=precision), engine(module, DATA, precision=precision)
    first = fresh.gradient(w, batch(0, 1, 2)), fresh.hessian_vector_product(w, batch(0, 1, 2), v)
    busy.run_optimizer(w + 1, [batch(5, 6, 7)], pulls=Pulls(w))
    busy.gradient(w - 1, batch(3, 4), 0, pulls=Pulls(w))
    module.eval()
    again = busy.gradient(w, batch(0, 1, 2)), busy.hessian_vector_product(w, batch(0, 1, 2), v)
    for one, other in zip(first, again, strict=True):
        assert torch.equal(one.vector, other.vector)
        assert torch.equal(one.buffers, other.buffers)
        assert float(one.loss) == float(other.loss)
        assert one.vector.dtype == one.buffers.dtype == torch.float32


def test_the_training_step_runs_in_fabrics_precision_and_logs():
    seen = []

    class Watched(FederatedModule):
        def training_step(self, batch, batch_idx=0):
            seen.append(self(batch[0]).dtype)
            self.log("number", batch_idx)
            return super().training_step(batch, batch_idx)

    found = {}
    for precision, dtype in (("32-true", torch.float32), ("bf16-mixed", torch.bfloat16)):
        module = Watched(linear)
        found[precision] = engine(module, DATA, precision=precision).gradient(start(module), batch(0, 1), number=3)
        assert seen.pop() == dtype
        assert {name: float(value) for name, value in found[precision].logged.items()} == {"number": 3.0}
    full, half = (each.vector for each in found.values())
    assert not torch.equal(full, half)
    torch.testing.assert_close(full, half, rtol=0, atol=0.02)
