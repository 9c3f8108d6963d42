"""The entries of a flat vector that belong to some layers: the papers' counts, buffers, and complementary subsets."""

import pytest
import torch
from torch import nn

from lcfl.models import Layout, LeNet5, ResNet9, SplitNetwork
from lcfl.models.subset import ParameterSubset, embedding_subset, layer_subset, other_layers
from tests.helpers.builders import Normed


class Bare(SplitNetwork):
    """A network whose normalisation has buffers but no parameters: P = 15 + 8, Q = 7."""

    def __init__(self):
        super().__init__(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, affine=False)), nn.Linear(3, 2))


@pytest.mark.parametrize(
    ("network", "size"),
    [(LeNet5(), 11_014), (LeNet5(1, 28), 11_014), (ResNet9(num_classes=100), 52_324), (ResNet9(), 6_154)],
    ids=["LeNet-5", "LeNet-5 on MNIST", "ResNet-9, 100 classes", "ResNet-9, 10 classes"],
)
def test_sizes_of_the_last_two_layers(network, size):
    assert layer_subset(Layout.from_network(network), 2).size == size


def test_the_last_two_layers_of_lenet_are_fully_connected():
    network = LeNet5()
    layout = Layout.from_network(network)
    last = [module for module in network.modules() if isinstance(module, nn.Linear)][-2:]
    expected = torch.cat([each.detach().reshape(-1) for layer in last for each in (layer.weight, layer.bias)])
    assert torch.equal(layer_subset(layout, 2).take(layout.pack(network)), expected)
    names = list(layout.layers)
    assert len(names) == 5 and names[-1] == "decision"
    assert layer_subset(layout, names[-2:]) == layer_subset(layout, 2)


def test_buffers_are_included_with_their_layer():
    layout, vector = Layout.from_network(Normed()), torch.arange(30.0)
    assert embedding_subset(layout).take(vector).tolist() == [*range(15), *range(23, 30)]
    assert layer_subset(layout, 1).take(vector).tolist() == list(range(15, 23))
    assert layer_subset(layout, 2).take(vector).tolist() == list(range(9, 30))
    assert layer_subset(layout, ["embedding.1"]).take(vector).tolist() == [*range(9, 15), *range(23, 30)]
    assert layer_subset(layout, 3).size == layer_subset(layout, ["embedding", "decision"]).size == 30


def test_buffers_of_a_layer_without_parameters_are_included_by_name_or_with_all_layers():
    layout = Layout.from_network(Bare())
    assert (layout.num_parameters, layout.size) == (23, 30)
    assert embedding_subset(layout).size == 15
    assert layer_subset(layout, 1).size == 8
    assert layer_subset(layout, 2).size == 30
    assert layer_subset(layout, ["embedding"]).size == layer_subset(layout, ["embedding.1", "embedding.0"]).size == 22
    assert embedding_subset(Layout.from_network(Bare(), cut=None)).size == 30


@pytest.mark.parametrize("network", [LeNet5(), Normed()])
def test_embedding_and_decision_complement_each_other(network):
    layout = Layout.from_network(network)
    mask = torch.zeros(layout.size)
    for part in (embedding_subset(layout), layer_subset(layout, ["decision"])):
        mask += part.put(torch.ones(part.size), torch.zeros(layout.size))
    assert bool((mask == 1).all())


def test_take_and_put():
    part, vector = ParameterSubset((slice(1, 3), slice(4, 5))), torch.arange(6.0)
    assert part.size == 3
    assert part.take(vector).tolist() == [1, 2, 4]
    assert part.put(torch.tensor([7.0, 8, 9]), vector).tolist() == [0, 7, 8, 3, 9, 5]
    assert vector.tolist() == [0, 1, 2, 3, 4, 5]
    part.take(vector).zero_()
    assert vector[1] == 1
    assert ParameterSubset(()).take(vector).shape == (0,)
    with pytest.raises(ValueError, match="got 2 values for a subset of 3 entries"):
        part.put(torch.ones(2), vector)


def test_unknown_layers_and_too_many_layers_are_refused():
    layout = Layout.from_network(Normed())
    with pytest.raises(
        ValueError, match=r"got 4 layers; the network has 3 with parameters: embedding.0, embedding.1, d"
    ):
        layer_subset(layout, 4)
    with pytest.raises(ValueError, match=r"no layer or parameter 'embeddin', 'x'; its layers are embedding.0,"):
        layer_subset(layout, ["embeddin", "decision", "x"])
    for subset in (layer_subset, other_layers):
        with pytest.raises(ValueError, match=r"^got the text 'fc'; it must be a list of patterns, e.g. \['fc'\]"):
            subset(layout, "fc")


def test_parameters_of_the_network_itself_count_as_layers_with_the_name_of_the_parameter():
    class Scaled(SplitNetwork):
        def __init__(self):
            super().__init__(nn.Linear(2, 3), nn.Linear(3, 2))
            self.scale = nn.Parameter(torch.ones(1))

    layout = Layout.from_network(Scaled())
    assert list(layout.layers) == ["scale", "embedding", "decision"]
    assert layer_subset(layout, ["scale"]).slices == (slice(0, 1),)
