"""The family of small networks: its layers one by one, and parameter counts as in the literature."""

import pytest
import torch
from torch.nn import functional

from lcfl.models import CNN, Layout

FEDAVG_CNN = {"padding": 0, "hidden": [512]}
CFL_CONVNET = {"in_channels": 1, "image_size": 28, "num_classes": 62, "channels": [6, 16], "padding": 0, "hidden": []}
LEAF_CNN = {"in_channels": 1, "image_size": 28, "num_classes": 62, "hidden": [2048]}
LG_CNN = {"channels": [6, 16], "padding": 0, "hidden": [120, 100]}
PACFL_SIMPLE_CNN_3 = {"num_classes": 100, "channels": [18, 48], "padding": 0, "hidden": [360, 252]}
IFCA_CNN = {"image_size": 24, "channels": [64, 64], "hidden": [384, 192]}
FLBENCH_LENET5 = {"channels": [6, 16], "padding": 0, "hidden": [120, 84], "batch_norm": True}


@pytest.mark.parametrize(
    ("arguments", "num_parameters", "num_decision"),
    [
        ({}, 4_778_954, 5_130),
        ({"num_classes": 100}, 4_825_124, 51_300),
        ({"in_channels": 1, "image_size": 28}, 3_794_314, 5_130),
        (FEDAVG_CNN, 878_538, 5_130),
        (CFL_CONVNET, 18_506, 15_934),
        (LEAF_CNN, 6_603_710, 127_038),
        (LG_CNN, 64_102, 1_010),
        (PACFL_SIMPLE_CNN_3, 571_648, 25_300),
        (IFCA_CNN, 1_068_298, 1_930),
        (FLBENCH_LENET5, 62_050, 850),
    ],
)
def test_parameter_counts(arguments, num_parameters, num_decision):
    network = CNN(**arguments)
    layout = Layout.from_network(network)
    assert layout.num_parameters == num_parameters
    assert layout.num_parameters - layout.num_embedding == num_decision
    buffers = 2 * (6 + 16) + 2 if arguments is FLBENCH_LENET5 else 0  # means, variances and two counters
    assert layout.size - layout.num_parameters == buffers
    side = arguments.get("image_size", 32)
    inputs = torch.zeros(2, arguments.get("in_channels", 3), side, side)
    assert network(inputs).shape == (2, arguments.get("num_classes", 10))


@pytest.mark.parametrize("batch_norm", [False, True])
def test_the_output_equals_that_of_the_layers_one_by_one(batch_norm):
    network = CNN(2, 12, 3, channels=[4, 5], kernel_size=3, padding=1, hidden=[7, 6], batch_norm=batch_norm)
    inputs = torch.randn(4, 2, 12, 12)
    x, layers = inputs, network.embedding
    for number in (1, 2):
        conv = getattr(layers, f"conv{number}")
        x = functional.conv2d(x, conv.weight, conv.bias, padding=1)
        if batch_norm:
            centred = x - x.mean(dim=(0, 2, 3), keepdim=True)
            x = centred / (centred.square().mean(dim=(0, 2, 3), keepdim=True) + 1e-5).sqrt()
        x = functional.max_pool2d(x.clamp(min=0), 2)
    x = x.flatten(1)
    for linear in (layers.fc1, layers.fc2):
        x = functional.linear(x, linear.weight, linear.bias).clamp(min=0)
    torch.testing.assert_close(network(inputs), functional.linear(x, network.decision.weight, network.decision.bias))


def test_the_convolutions_alone_can_be_the_embedding():
    assert Layout.from_network(CNN(), "embedding.fc1").num_embedding == 32 * 75 + 32 + 64 * 800 + 64


def test_images_must_be_large_enough_for_all_convolutions():
    assert CNN(1, 16, channels=[2, 2], padding=0)(torch.zeros(1, 1, 16, 16)).shape == (1, 10)
    with pytest.raises(ValueError, match=r"image_size 15 leaves no pixel after 2 convolutions with kernel_size 5"):
        CNN(1, 15, channels=[2, 2], padding=0)
