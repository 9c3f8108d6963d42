"""In bf16-mixed, the compiled engine computes what autograd computes with factors that are rounded to bfloat16."""

import shlex
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn.grad import conv2d_input, conv2d_weight

from lcfl.engines import choose_engine, kernels
from lcfl.engines.compiled import check_compiled
from lcfl.engines.forward_graph import Unsupported
from lcfl.engines.tracing import trace
from lcfl.models import SplitNetwork
from lcfl.models.module import FederatedModule
from tests.engines.pairs import batches_of, data_of
from tests.helpers.builders import named_engine

SHAPE = (3, 7, 6)
SGD = partial(torch.optim.SGD, lr=0.1)


def rounded(values):
    return values.bfloat16().float()


class RoundedProducts(torch.autograd.Function):
    """A convolution whose factors are in bfloat16 and whose sums are in float32, in both directions."""

    @staticmethod
    def forward(ctx, inputs, weight, bias, stride, padding):
        inputs, weight = rounded(inputs), rounded(weight)
        ctx.save_for_backward(inputs, weight)
        ctx.window = {"stride": stride, "padding": padding}
        return nn.functional.conv2d(inputs, weight, bias, **ctx.window)

    @staticmethod
    def backward(ctx, slope):
        inputs, weight = ctx.saved_tensors
        factors = rounded(slope)
        back = conv2d_input(inputs.shape, weight, factors, **ctx.window)
        return back, conv2d_weight(inputs, weight.shape, factors, **ctx.window), slope.sum((0, 2, 3)), None, None


class RoundedConv2d(nn.Conv2d):
    def forward(self, inputs):
        return RoundedProducts.apply(inputs, self.weight, self.bias, self.stride, self.padding)


class RoundedLinear(nn.Linear):
    def forward(self, inputs):
        parts = inputs[..., None, None], self.weight[..., None, None], self.bias, 1, 0
        return RoundedProducts.apply(*parts).flatten(1)


EXACT, ROUNDED = (nn.Conv2d, nn.Linear), (RoundedConv2d, RoundedLinear)


def convolved(kinds, before, after, kernel, padding, stride=1):
    """Returns a network with a convolution between two layers that are too narrow for bfloat16."""
    conv, _ = kinds
    layers = nn.Conv2d(3, before, 1), nn.ReLU(), conv(before, after, kernel, stride, padding), nn.Flatten()
    embedding = nn.Sequential(*layers)
    return SplitNetwork(embedding, nn.Linear(embedding(torch.zeros(1, *SHAPE)).numel(), 4))


def connected(kinds, channels, *widths):
    """Returns a network with linear layers of these widths behind a narrow convolution."""
    _, linear = kinds
    layers = [nn.Conv2d(3, channels, 1), nn.Flatten()]
    for before, after in pairwise((channels * SHAPE[1] * SHAPE[2], *widths)):
        layers += [linear(before, after), nn.ReLU()]
    return SplitNetwork(nn.Sequential(*layers), nn.Linear(widths[-1], 4))


def wide(kinds=EXACT):
    return convolved(kinds, 16, 16, 3, 1)


def narrow():
    return connected(EXACT, 2, 15)


@pytest.fixture(scope="module")
def bfloat16():
    """Skips a test if the processor has neither AMX nor AVX512-bf16."""
    try:
        check_compiled(FederatedModule(wide, SGD), data_of(SHAPE, 4).dataset.spec, precision="bf16-mixed")
    except Unsupported as reason:
        pytest.skip(str(reason))


HERE = pytest.mark.usefixtures("bfloat16")


@HERE
@pytest.mark.parametrize("size", [1, 7, 15, 17, 31, 32, 33, 70])
@pytest.mark.parametrize(
    ("network", "settings"),
    [
        (convolved, (16, 16, 3, 1)),
        (convolved, (17, 33, (3, 2), (1, 0))),
        (convolved, (48, 20, 1, 0)),
        (convolved, (32, 32, 5, 2)),
        (convolved, (33, 64, (2, 4), (0, 3))),
        (convolved, (64, 33, (7, 6), 0)),  # a single pixel, and two groups of output channels
        (convolved, (20, 40, (1, 6), 0)),  # pixels below one another
        (convolved, (16, 40, 3, 1, 2)),
        (convolved, (33, 17, 1, 0, 2)),
        (convolved, (20, 20, (4, 3), 1, (2, 3))),
        (convolved, (17, 48, (2, 5), (1, 2), (3, 2))),
        (connected, (1, 16, 16)),
        (connected, (2, 33, 50, 17)),
        (connected, (30, 70, 32)),  # more inputs than a run of the gradient
    ],
)
def test_gradients_and_scores_are_those_of_rounded_factors(network, settings, size):
    data = data_of(SHAPE)
    module = FederatedModule(partial(network, ROUNDED, *settings), SGD)
    expected = named_engine("sequential", module, data)
    module = FederatedModule(partial(network, EXACT, *settings), SGD)
    actual = named_engine("compiled", module, data, "bf16-mixed")
    model = module.initial_model(3)
    (batch,) = batches_of(0, [size])
    one, other = (engine.gradient(model, batch) for engine in (expected, actual))
    for name, place in module.layout.places.items():
        assert_near(other.vector[place], one.vector[place], name)
    assert_near(*(engine.scores(model, data.samples, batch)[0] for engine in (actual, expected)), "scores")


def assert_near(actual, expected, what):
    """Few factors are rounded to another number because autograd adds in another order."""
    assert float((actual - expected).abs().max()) < 2e-3 * float(expected.abs().max()), what


@pytest.mark.slow
@HERE
@pytest.mark.skipif("amx_bf16" not in kernels._processor(), reason="all other tests are without AMX here")
def test_without_amx_they_are_the_same(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", shlex.join([*kernels.compiler_command(), "-mno-amx-bf16"]))
    monkeypatch.setattr(kernels, "load", kernels.load.__wrapped__)
    for size in (10, 33):
        test_gradients_and_scores_are_those_of_rounded_factors(convolved, (17, 48, (2, 5), (1, 2), (3, 2)), size)
        test_gradients_and_scores_are_those_of_rounded_factors(connected, (2, 33, 50, 17), size)


@HERE
def test_training_and_gradient_take_the_same_step():
    data = data_of(SHAPE)
    engine = named_engine("compiled", FederatedModule(wide, SGD), data, "bf16-mixed")
    model = engine.module.initial_model(3)
    (batch,) = batches_of(0, [20])
    stepped = engine.run_optimizer(model, [batch]).model
    torch.testing.assert_close(stepped, model - 0.1 * engine.gradient(model, batch).vector)
    assert torch.equal(stepped, engine.run_optimizer(model, [batch]).model)


def normalised():
    layers = nn.Conv2d(3, 16, 1), nn.Conv2d(16, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU()
    return SplitNetwork(
        nn.Sequential(*layers, nn.Conv2d(16, 16, 3, 2, 1), nn.ReLU(), nn.Flatten()), nn.Linear(16 * 4 * 3, 4)
    )


@HERE
@pytest.mark.parametrize("network", [wide, normalised])
@pytest.mark.parametrize("value", [1.0, torch.nan])
def test_a_gradient_does_not_depend_on_what_was_trained_before(network, value):
    """In a batch of 40, the last vector of samples is idle. Here it held those of a batch of 64."""
    data = data_of(SHAPE)
    fresh, used = (named_engine("compiled", FederatedModule(network, SGD), data, "bf16-mixed") for _ in range(2))
    model = fresh.module.initial_model(3)
    larger, batch = batches_of(0, [64, 40])
    used.gradient(model * value, larger)
    assert torch.equal(used.gradient(model, batch).vector, fresh.gradient(model, batch).vector)


@HERE
def test_other_layers_and_32_true_stay_in_float32():
    program = trace(wide(), SHAPE, FederatedModule(wide, SGD).layout)
    assert kernels.OpenProgram(program.arguments, True).is_in_bfloat16
    assert not kernels.OpenProgram(program.arguments).is_in_bfloat16


@HERE
def test_auto_takes_it_in_bf16_mixed_only_for_wide_layers():
    data = data_of(SHAPE, 8)
    assert choose_engine("auto", FederatedModule(wide, SGD), data, "cpu", "bf16-mixed").name == "compiled"
    assert choose_engine("auto", FederatedModule(narrow, SGD), data, "cpu", "bf16-mixed").name == "sequential"


def test_without_it_bf16_mixed_is_sequential(monkeypatch):
    monkeypatch.setattr(kernels.OpenProgram, "__init__", lambda self, *_: setattr(self, "is_in_bfloat16", False))
    data = data_of(SHAPE, 8)
    assert choose_engine("auto", FederatedModule(wide, SGD), data, "cpu", "bf16-mixed").name == "sequential"
    with pytest.raises(
        ValueError, match=r"got compiled, but in bf16-mixed it needs a processor with AMX or AVX512-bf16"
    ):
        choose_engine("compiled", FederatedModule(wide, SGD), data, "cpu", "bf16-mixed")
