"""VGG-16 with torchvision's convolutions and with fully connected layers for small images."""

import pytest
import torch
from torch import nn
from torchvision.models import vgg16

from lcfl.core import rng
from lcfl.models import VGG16, Layout

CONVOLUTIONS = 14_714_688  # parameters of the thirteen convolutions of VGG-16


def test_parameter_counts():
    layout = Layout.from_network(VGG16())
    hidden = 2 * (512 * 512 + 512)
    assert (layout.num_embedding, layout.num_parameters) == (CONVOLUTIONS + hidden, 15_245_130)
    assert layout.size == layout.num_parameters  # no buffers
    assert Layout.from_network(VGG16(), "embedding.fc14").num_embedding == CONVOLUTIONS
    with torch.device("meta"):
        grey = Layout.from_network(VGG16(in_channels=1, image_size=64, num_classes=100, hidden=[64]))
    assert grey.num_embedding == CONVOLUTIONS - 2 * 9 * 64 + 4 * 512 * 64 + 64
    assert grey.num_parameters - grey.num_embedding == 6_500


def test_convolutions_are_the_same_as_torchvisions():
    with torch.device("meta"):
        reference, network = list(vgg16().features), VGG16()
    ours = list(network.embedding[: len(reference)])
    assert [type(each) for each in ours] == [type(each) for each in reference]
    convolutions = [[repr(each) for each in layers if isinstance(each, nn.Conv2d)] for layers in (ours, reference)]
    assert convolutions[0] == convolutions[1] and len(convolutions[0]) == 13


def test_signals_reach_the_decision():
    with rng.seeded(0, "network"):
        network, inputs = VGG16().eval(), torch.randn(8, 3, 32, 32)
    with torch.no_grad():
        scores = network(inputs)
    assert scores.shape == (8, 10) and scores.std(dim=0).mean() > 1e-3


def test_torchvisions_network_can_be_cut_at_its_classifier():
    with torch.device("meta"):
        network = vgg16(num_classes=10)
    assert Layout.from_network(network, "classifier").num_embedding == CONVOLUTIONS
    layout = Layout.from_network(network, "classifier.6")
    assert layout.num_parameters - layout.num_embedding == 40_970


def test_the_smallest_image_has_32_pixels():
    with pytest.raises(ValueError, match=r"image_size 31 is too small for five pooling layers; use at least 32"):
        VGG16(image_size=31)
