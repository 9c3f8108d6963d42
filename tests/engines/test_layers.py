"""Layers of the compiled engine with many settings, and at the corners of their functions."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lcfl.data.datasets import Tensors
from lcfl.data.partition import IID
from lcfl.engines.forward_graph import Unsupported
from lcfl.engines.tracing import trace
from lcfl.models import SplitNetwork
from lcfl.models.module import FederatedModule
from tests.engines.test_compiled import SGD, assert_same_gradient, batches_of, engines
from tests.helpers.builders import blobs, loaded, named_engine


def windows(number):
    """Returns random windows of convolutions: kernel, stride, padding."""
    draw = np.random.default_rng(0)
    sides = [(draw.integers(1, 5, 2), draw.integers(1, 5, 2)) for _ in range(number)]
    return [tuple(tuple(each.tolist()) for each in (*side, draw.integers(0, side[0]))) for side in sides]


@pytest.mark.parametrize("size", [7, 16, 33])
@pytest.mark.parametrize("groups", [1, 3, 18])
@pytest.mark.parametrize(("kernel", "stride", "padding"), windows(12))
def test_gradient_for_every_window_of_a_convolution(kernel, stride, padding, groups, size):
    def network():
        channels = {1: 17, 3: 6, 18: 18}[groups]
        window = nn.Conv2d(channels, 18, kernel, stride, padding, groups=groups)
        embedding = nn.Sequential(nn.Conv2d(3, channels, 1), nn.ReLU(), window, nn.Flatten())
        return SplitNetwork(embedding, nn.Linear(embedding(torch.zeros(1, 3, 7, 6)).numel(), 4))

    assert_same_gradient(network, (3, 7, 6), size)


@pytest.mark.parametrize("size", [10, 33])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(
    ("sides", "kernel", "stride", "padding"),
    [
        ((1, 1), (1, 1), (1, 1), (0, 0)),  # the whole image
        ((3, 2), (3, 2), (2, 1), (0, 0)),
        ((1, 1), (3, 3), (1, 1), (1, 1)),  # one tap meets it
        ((1, 1), (5, 3), (2, 3), (4, 1)),
        ((2, 2), (3, 3), (2, 2), (1, 1)),  # some taps do
        ((1, 4), (3, 5), (1, 2), (1, 2)),
        ((2, 3), (5, 4), (3, 2), (3, 3)),
        ((2, 2), (1, 1), (1, 1), (0, 0)),  # in one row
        ((3, 5), (1, 1), (2, 2), (0, 0)),
        ((9, 8), (1, 1), (1, 1), (0, 0)),
    ],
)
def test_gradient_of_a_convolution_of_a_small_image(sides, kernel, stride, padding, groups, size):
    def network():
        first, window = nn.Conv2d(3, 6, 1), nn.Conv2d(6, 10, kernel, stride, padding, groups=groups)
        embedding = nn.Sequential(first, nn.Tanh(), window, nn.Tanh(), nn.Flatten())
        return SplitNetwork(embedding, nn.Linear(embedding(torch.zeros(1, 3, *sides)).numel(), 4))

    with torch.backends.mkldnn.flags(enabled=False):  # oneDNN computes some of them wrongly, in torch 2.14.1
        assert_same_gradient(network, (3, *sides), size)


@pytest.mark.parametrize("size", [10, 33])
@pytest.mark.parametrize("groups", [1, 3, 18])
@pytest.mark.parametrize(
    ("kernel", "dilation", "length", "zeros"),
    [
        (3, 2, 8, (4, 0)),  # causal
        (5, 3, 9, (6, 6)),
        (2, 4, 4, (4, 0)),  # a row of one column
        (3, 8, 8, (8, 8)),
        (4, 1, 7, (1, 2)),
        (3, 5, 15, (0, 0)),
        (1, 7, 10, (0, 0)),  # the only tap is not apart from another
        (7, 2, 120, (12, 0)),  # several vectors in a row
    ],
)
def test_gradient_of_a_dilated_convolution(kernel, dilation, length, zeros, groups, size):
    def network():
        window = nn.Conv1d(18, 18, kernel, dilation=dilation, groups=groups)
        embedding = nn.Sequential(nn.Conv1d(3, 18, 1), nn.Tanh(), nn.ZeroPad1d(zeros), window, nn.Tanh(), nn.Flatten())
        return SplitNetwork(embedding, nn.Linear(embedding(torch.zeros(1, 3, length)).numel(), 4))

    assert_same_gradient(network, (3, length), size)


@pytest.mark.parametrize(
    ("window", "why"),
    [
        (nn.Conv1d(3, 6, 3, dilation=3, padding=3), "dilation 3 reads 8 steps with 3 zeros before and 3 after them"),
        (nn.Conv1d(3, 6, 3, dilation=2, padding=1), "dilation 2 reads 8 steps with 1 zeros before and 1 after them"),
        (nn.Conv1d(3, 6, 3, dilation=2, stride=2), r"Conv1d embedding\.0 with unusual settings: Conv1d\(3, 6"),
    ],
)
def test_dilated_convolutions_that_the_kernels_do_not_know(window, why):
    def network():
        embedding = nn.Sequential(window, nn.Flatten())
        return SplitNetwork(embedding, nn.Linear(embedding(torch.zeros(1, 3, 8)).numel(), 4))

    with pytest.raises(Unsupported, match=why):
        trace(network(), (3, 8))


@pytest.mark.parametrize(
    "pool",
    [
        nn.AvgPool2d(3, 1, 1),
        nn.AvgPool2d((3, 2), (1, 3), (1, 0), count_include_pad=False),
        nn.AvgPool2d((2, 5), padding=(1, 2), divisor_override=3),
    ],
    ids=str,
)
def test_gradient_of_an_average_with_padding(pool):
    def network():
        embedding = nn.Sequential(nn.Conv2d(3, 5, 1), pool, nn.Flatten())
        return SplitNetwork(embedding, nn.Linear(embedding(torch.zeros(1, 3, 7, 6)).numel(), 4))

    assert_same_gradient(network, (3, 7, 6), 17)


def test_gradient_of_a_convolution_whose_input_does_not_stay_in_the_second_level_cache():
    """Then several blocks of channels use a part of the taps in turn, and here the last of them are not full."""

    def network():
        return SplitNetwork(nn.Sequential(nn.Conv2d(64, 50, 4, 2), nn.Flatten()), nn.Linear(50 * 7 * 7, 4))

    assert_same_gradient(network, (64, 16, 16), 20)


ACTIVATIONS = (
    nn.ReLU(),
    nn.ReLU6(),
    nn.LeakyReLU(0.3),
    nn.ELU(0.6),
    nn.ELU(-0.6),
    nn.SELU(),
    nn.CELU(0.6),
    nn.Hardsigmoid(),
    nn.Hardswish(),
    nn.Tanh(),
    nn.SiLU(),
)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_activations_at_their_corners_and_far_from_them(activation):
    corners = torch.tensor([-1e4, -30, -3, -0.1, -1e-5, 0, 1e-5, 2.9, 2.9999998, 3, 6, 7, 1e4])

    def network():
        return SplitNetwork(nn.Sequential(nn.Linear(13, 13), activation), nn.Linear(13, 4))

    data = loaded(blobs(2, dataset=Tensors((corners.repeat(40, 1), torch.arange(40) % 4)), partition=IID()))
    pair = [named_engine(name, FederatedModule(network, SGD), data) for name in ("sequential", "compiled")]
    model = pair[0].module.initial_model(3)
    model[:169], model[169:182] = torch.eye(13).flatten(), 0
    expected, actual = (engine.gradient(model, np.arange(20)) for engine in pair)
    torch.testing.assert_close(actual.vector, expected.vector, rtol=2e-5, atol=1e-6)


class Growing(nn.Module):
    """Squares values that are far from 0 before they are normalised."""

    def __init__(self):
        super().__init__()
        self.norms, self.decision = nn.ModuleList([nn.BatchNorm1d(8) for _ in range(5)]), nn.Linear(8, 4)

    def forward(self, x):
        for norm in self.norms:
            x = norm(x)
            x = x * F.hardswish(x)
        return self.decision(x)


@pytest.mark.parametrize("trainable", [None, ["decision"]])
def test_values_stay_finite_in_lanes_without_a_sample(trainable):
    """These would begin with (0 - mean) / deviation, where the deviation of the first feature is next to nothing."""
    inputs = torch.randn(160, 8, generator=torch.Generator().manual_seed(0)) + 10
    inputs[:, 0] = -1000
    data = loaded(blobs(2, dataset=Tensors((inputs, torch.arange(160) % 4)), partition=IID()))
    options = {"trainable": trainable, "cut": "decision"}
    pair = [named_engine(name, FederatedModule(Growing, SGD, **options), data) for name in ("sequential", "compiled")]
    model, (batch,) = pair[0].module.initial_model(3), batches_of(5)
    expected, actual = (engine.gradient(model, batch) for engine in pair)
    assert expected.vector.isfinite().all()
    torch.testing.assert_close(
        actual.vector, expected.vector, rtol=1e-3, atol=1e-3 * float(expected.vector.abs().max())
    )


def test_windows_over_long_signals():
    """Here, the number of a window times the length of the signal is beyond 2^31."""

    def network():
        return nn.Sequential(nn.AdaptiveAvgPool1d(25_000), nn.Flatten(), nn.Linear(25_000, 4))

    pair = engines(network, (1, 96_001), number=10, cut=None)
    model, batch = pair[0].module.initial_model(3), np.arange(3)
    expected, actual = (engine.gradient(model, batch).vector for engine in pair)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("activation", [nn.ELU(), nn.Tanh(), nn.GELU(), nn.SiLU(), nn.Hardswish()], ids=str)
def test_activations_of_small_numbers_are_exact(activation):
    """The layer behind them makes them large again."""
    pair = engines(lambda: SplitNetwork(nn.Sequential(nn.Linear(7, 12), activation), nn.Linear(12, 4)), (7,))
    model = pair[0].module.initial_model(3)
    model[: 7 * 12 + 12] *= 1e-4
    model[7 * 12 + 12 :] *= 1e4
    inputs, _ = pair[0].samples.batch(np.arange(20), torch.device("cpu"))
    expected, actual = (engine.scorer(model)(inputs) for engine in pair)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
