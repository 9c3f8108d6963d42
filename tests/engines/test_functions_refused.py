"""Functions and methods of tensors that a trace refuses, with the reason."""

import pytest
import torch
from torch import nn

from lcfl.engines.forward_graph import Unsupported
from lcfl.engines.tracing import trace
from tests.engines.networks import SHAPE, Plainly


class Calling(Plainly):
    """Calls a function with a value of three channels."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.decision(self.function(self.one(x)).flatten(1))


def overwrite_chunk(x):
    part, rest = x.chunk(2, 1)
    part += 1
    return torch.cat([part, rest], 1)


def overwrite_whole(x):
    part = x[:, :1]
    x -= 2
    return torch.cat([part, x[:, 1:]], 1)


def overwrite_view(x):
    other = x.view(-1, 9, 11, 3)
    other /= 2
    return x.reshape(-1, 9, 11, 3)


def overwrite_turned(x):
    """In torch, the features are a view of what the layer returns."""
    x = nn.functional.relu(x.permute(0, 2, 3, 1).contiguous())
    flat = x.flatten(1)
    flat *= 2
    return x + 1


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (overwrite_chunk, "changes in place what its forward pass reads again"),
        (overwrite_whole, "changes in place what its forward pass reads again"),
        (overwrite_view, "changes in place what its forward pass reads again"),
        (lambda x: torch.cat(x.chunk(3, 1), 1), "calls cat"),
        (lambda x: torch.relu(x.chunk(3, 1)), "calls relu"),
        (lambda x: x.split([1, 1], 1)[0], "calls split"),
        (lambda x: nn.functional.pad(x, (1, 1)) + 1, "calls add"),
        (lambda x: torch.cat([x, nn.functional.pad(x, (0, 0))], 1), "calls cat"),
        (
            lambda x: nn.functional.relu(nn.functional.pad(x, (0, 0))),
            "pads what its ReLU reads, which is no convolution",
        ),
        (lambda x: nn.functional.pad(x, (1, 1), mode="circular"), "calls pad"),
        (lambda x: nn.functional.pad(x, (0, 0, 0, 0, 1, 1)), "calls pad"),
        (lambda x: nn.functional.pad(x, (1, 1), value=0.5), "calls pad"),
        (lambda x: nn.functional.pad(x, (0, -1)), "calls pad"),
        (lambda x: nn.functional.conv2d(x, x), "calls conv2d"),
        (lambda x: nn.functional.pad(x, (0, 0)).view(x.size(0), -1), "calls view"),
        (lambda x: x.chunk(3, 2)[0], "calls chunk"),
        (lambda x: x[:, ::2], "calls getitem"),
        (lambda x: torch.cat([x, x[:, 2:1]], 1), "has an empty tensor"),
        (lambda x: torch.cat(list(x.split([0, 3], 1)), 1), "cannot be traced"),
        (lambda x: x[:, :, 1], "calls getitem"),
        (lambda x: x[:, 1:, :, 1], "calls getitem"),
        (lambda x: x[0], "calls getitem"),
        (lambda x: x[0, 1:], "calls getitem"),
        (lambda x: x[1:], "calls getitem"),
        (lambda x: x[:, 1:, :, :, :], "calls getitem in a way that has no operation"),
        (lambda x: nn.functional.adaptive_avg_pool2d(x, (0, 2)), "with unusual settings"),
        (lambda x: x.unsqueeze(0), "calls unsqueeze"),
        (lambda x: x.unsqueeze(1), "gives a tensor the shape"),
        (lambda x: x.squeeze(), "calls squeeze"),
        (lambda x: x.squeeze(1), "calls squeeze"),
        (lambda x: x.flatten(1).mean(1).squeeze(0), "calls mean"),
        (lambda x: x.mean((1, 3)), "calls mean"),
        (lambda x: x[:, :, 1:], "calls getitem"),
        (lambda x: x.view(-1, 3, 5, 33), "gives a tensor of 297 numbers the shape"),
        (lambda x: x.view(-1, 3, 3, 3, 11), "calls view"),
        (lambda x: x.view(-1, 3, 1, 11, 9).flatten(1), "calls flatten"),
        (lambda x: x.view(-1, 3, 1, 11, 9).view(-1, 3, 11, 9), "calls view"),
        (lambda x: x.transpose(1, 2), "permutes the dimensions of a tensor as"),
        (lambda x: x.permute(1, 0, 2, 3), "permutes the dimensions of a tensor as"),
        (lambda x: x.permute(0, 3, 2), "permutes the dimensions of a tensor as"),
        (overwrite_turned, "changes in place what its forward pass reads again"),
        (lambda x: x * nn.Parameter(torch.ones(3, 1, 1)), "cannot be traced"),
        (lambda x: torch.cat([x, x.permute(0, 2, 3, 1)], 1), "concatenates tensors of different shapes"),
        (lambda x: x + x.permute(0, 2, 3, 1), "adds tensors of different shapes"),
        (lambda x: 2 / x, "calls truediv"),
        (lambda x: x * 1e39, "a number beyond float32"),
        (lambda x: x + float("nan"), "a number beyond float32"),
        (lambda x: x / x.size(0), "calls truediv"),
        (lambda x: x * True + x * 1j, "calls mul"),
        (lambda x: nn.functional.adaptive_max_pool2d(x, (x.size(0), 1)), "with unusual settings"),
        (lambda x: nn.functional.max_pool2d(x, 2, stride=x.size(0)), "with unusual settings"),
        (lambda x: x[:, : x.size(0)], "calls getitem"),
        (lambda x: x * (x.shape[2] // (x.shape[2] // 16)), "computes with sizes in an unusual way"),
        (lambda x: x * x.shape[x.size(0)], "computes with sizes in an unusual way"),
        (lambda x: x * x.shape[4], "computes with sizes in an unusual way"),
    ],
)
def test_refuses_functions_and_arguments_that_it_does_not_know(function, why):
    with pytest.raises(Unsupported, match=why):
        trace(Calling(function), SHAPE)


class Reading(Plainly):
    """Calls a function with a value of three channels and a parameter of several shapes."""

    def __init__(self, function, *shape):
        super().__init__()
        self.function, self.factor = function, nn.Parameter(torch.ones(shape))

    def forward(self, x):
        return self.decision(self.function(self.one(x), self.factor).flatten(1))


@pytest.mark.parametrize(
    ("function", "shape", "why"),
    [
        (lambda x, factor: x * factor, (), "calls mul"),
        (lambda x, factor: x * factor, (3,), "calls mul"),
        (lambda x, factor: x * factor, (9,), "calls mul"),
        (lambda x, factor: x * factor, (1, 11, 1), "calls mul"),
        (lambda x, factor: x * factor, (1, 1, 3, 1, 1), "calls mul"),
        (lambda x, factor: x + factor, (3, 1, 1), "calls add"),
        (lambda x, factor: x + factor, (1,), "calls add"),
        (lambda x, factor: x / factor, (1,), "calls truediv"),
        (lambda x, factor: factor - x, (), "calls sub"),
        (lambda x, factor: x * factor.view(3, 1, 1), (3,), "calls view"),
        (lambda x, factor: x * factor * factor, (3, 1, 1), "uses the layer Scale twice"),
        (lambda x, factor: nn.functional.linear(x.flatten(1), factor.t()), (297, 4), "calls t"),
        (lambda x, factor: nn.functional.linear(x, factor), (9, 11), "with unusual settings"),
        (lambda x, factor: torch.relu(factor), (3,), "calls relu"),
        (lambda x, factor: nn.functional.conv2d(x, factor + 1), (3, 3, 1, 1), "calls add"),
        (lambda x, factor: nn.functional.conv_transpose2d(x, factor), (3, 3, 1, 1), "calls conv_transpose2d"),
    ],
)
def test_refuses_parameters_that_belong_to_no_layer(function, shape, why):
    with pytest.raises(Unsupported, match=why):
        trace(Reading(function, *shape), SHAPE)


def test_a_buffer_is_no_parameter():
    network = Reading(lambda x, factor: x * factor, 3, 1, 1)
    del network.factor
    network.register_buffer("factor", torch.ones(3, 1, 1))
    with pytest.raises(Unsupported, match="its forward pass reads factor"):
        trace(network, SHAPE)
