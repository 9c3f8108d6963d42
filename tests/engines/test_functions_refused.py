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


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (overwrite_chunk, "changes in place what its forward pass reads again"),
        (overwrite_whole, "changes in place what its forward pass reads again"),
        (overwrite_view, "changes in place what its forward pass reads again"),
        (lambda x: torch.cat(x.chunk(3, 1), 1), "calls cat"),
        (lambda x: torch.relu(x.chunk(3, 1)), "calls relu"),
        (lambda x: x.split([1, 1], 1)[0], "calls split"),
        (lambda x: x.chunk(3, 2)[0], "calls chunk"),
        (lambda x: x[:, ::2], "calls getitem"),
        (lambda x: torch.cat([x, x[:, 2:1]], 1), "has an empty tensor"),
        (lambda x: torch.cat(list(x.split([0, 3], 1)), 1), "cannot be traced"),
        (lambda x: x[:, 1], "calls getitem"),
        (lambda x: x[1:], "calls getitem"),
        (lambda x: x[:, 1:, :, :, :], "calls getitem in a way that has no operation"),
        (lambda x: nn.functional.adaptive_avg_pool2d(x, (0, 2)), "with unusual settings"),
        (lambda x: x.unsqueeze(1), "calls unsqueeze"),
        (lambda x: x[:, :, 1:], "calls getitem"),
        (lambda x: x.view(-1, 3, 99), "has both images and signals"),
        (lambda x: x.view(-1, 3, 5, 33), "gives a tensor of 297 numbers the shape"),
        (lambda x: x.view(-1, 3, 3, 3, 11), "calls view"),
        (lambda x: x.view(-1, 3, 1, 11, 9).flatten(1), "calls flatten"),
        (lambda x: x.view(-1, 3, 1, 11, 9).view(-1, 3, 11, 9), "calls view"),
        (lambda x: x.transpose(1, 2), "calls transpose"),
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
