"""LeNet-5: its layers one by one, and parameter counts as in the literature."""

import pytest
import torch
from torch.nn import functional

from lcfl.models import Layout, LeNet5


@pytest.mark.parametrize(
    ("arguments", "num_parameters", "num_embedding"),
    [
        ((3, 32, 10), 62_006, 61_156),
        ((3, 32, 100), 69_656, 61_156),
        ((1, 28, 10), 44_426, 43_576),
        ((1, 28, 62), 48_846, 43_576),
        ((1, 28, 10, 2), 61_706, 60_856),
    ],
)
def test_parameter_counts(arguments, num_parameters, num_embedding):
    network = LeNet5(*arguments)
    layout = Layout.from_network(network)
    assert (layout.num_parameters, layout.num_embedding) == (num_parameters, num_embedding)
    assert layout.size == num_parameters  # no buffers
    channels, side, classes = arguments[:3]
    assert network(torch.zeros(2, channels, side, side)).shape == (2, classes)


def test_the_defaults_fit_cifar10():
    assert Layout.from_network(LeNet5()).num_parameters == 62_006


@pytest.mark.parametrize("padding", [0, 2])
def test_the_output_equals_that_of_the_layers_one_by_one(padding):
    network = LeNet5(3, 32, 10, padding)
    inputs = torch.randn(2, 3, 32, 32)
    x, layers = inputs, network.embedding
    for conv, pad in ((layers.conv1, padding), (layers.conv2, 0)):
        x = functional.conv2d(x, conv.weight, conv.bias, padding=pad)
        x = functional.max_pool2d(functional.relu(x), 2)
    x = x.flatten(1)
    for linear in (layers.fc1, layers.fc2):
        x = functional.relu(functional.linear(x, linear.weight, linear.bias))
    x = functional.linear(x, network.decision.weight, network.decision.bias)
    torch.testing.assert_close(network(inputs), x)


def test_the_smallest_image_has_16_pixels():
    assert LeNet5(1, 16)(torch.zeros(1, 1, 16, 16)).shape == (1, 10)
    with pytest.raises(ValueError, match=r"image_size 15 with padding 0 leaves no pixel; use at least 16"):
        LeNet5(1, 15)
