"""ResNet-9: its blocks one by one, and parameter counts as in FedClust's cost table."""

import pytest
import torch
from torch.nn import functional

from lcfl.core import rng
from lcfl.models import Layout, ResNet9


@pytest.mark.parametrize(("num_classes", "num_parameters"), [(100, 6_621_540), (10, 6_575_370)])
def test_parameter_counts(num_classes, num_parameters):
    layout = Layout.from_network(ResNet9(num_classes=num_classes))
    assert (layout.num_parameters, layout.num_embedding) == (num_parameters, 6_570_240)
    assert layout.size == num_parameters  # no buffers


def block(x, layers):
    x = functional.conv2d(x, layers.conv.weight, layers.conv.bias, padding=1)
    return functional.group_norm(x, 32, layers.norm.weight, layers.norm.bias).clamp(min=0)


def test_the_output_equals_that_of_the_blocks_one_by_one():
    with rng.seeded(0, "network"):
        network, inputs = ResNet9(num_classes=4), torch.randn(2, 3, 32, 32)
    layers = network.embedding
    x = block(inputs, layers.conv1)
    x = functional.max_pool2d(block(x, layers.conv2), 2)
    x = x + block(block(x, layers.residual1.blocks[0]), layers.residual1.blocks[1])
    x = functional.max_pool2d(block(x, layers.conv3), 2)
    x = functional.max_pool2d(block(x, layers.conv4), 2)
    x = x + block(block(x, layers.residual2.blocks[0]), layers.residual2.blocks[1])
    assert x.shape == (2, 512, 4, 4)
    x = x.amax(dim=(2, 3))
    expected = functional.linear(x, network.decision.weight, network.decision.bias)
    torch.testing.assert_close(network(inputs), expected)


@pytest.mark.parametrize(("channels", "side"), [(1, 28), (3, 8)])
def test_images_of_other_sizes(channels, side):
    assert ResNet9(channels, side)(torch.zeros(1, channels, side, side)).shape == (1, 10)


def test_the_smallest_image_has_8_pixels():
    with pytest.raises(ValueError, match=r"image_size 7 is too small for three pooling layers; use at least 8"):
        ResNet9(image_size=7)
