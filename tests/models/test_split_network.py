"""The flat vector [phi | h | buffers]: the positions of its parts, and conversion without loss."""

from collections import OrderedDict

import pytest
import torch
from torch import nn
from torchvision.models import resnet18

from lcfl.models import Layout, LeNet5, SplitNetwork, split
from tests.helpers.builders import Normed, linear


def test_the_vector_holds_phi_then_h_then_buffers():
    network = Normed()
    layout = Layout.from_network(network)
    assert (layout.num_parameters, layout.num_embedding, layout.size) == (23, 15, 30)
    names = ["embedding.0.weight", "embedding.0.bias", "embedding.1.weight", "embedding.1.bias"]
    assert [name for name, _ in layout.parameters] == [*names, "decision.weight", "decision.bias"]
    parts = [*network.embedding.parameters(), *network.decision.parameters()]
    norm = network.embedding[1]
    parts += [norm.running_mean, norm.running_var, norm.num_batches_tracked]
    expected = torch.cat([part.detach().reshape(-1).float() for part in parts])
    assert torch.equal(layout.pack(network), expected)
    assert torch.equal(layout.embedding_of(expected), expected[:15])


def test_only_the_counter_is_an_integer_buffer():
    assert Layout.from_network(Normed()).integer_slices() == [slice(29, 30)]
    assert Layout.from_network(linear()).integer_slices() == []


def test_unpack_restores_a_trained_network_with_its_counters():
    trained, other = Normed(), Normed()
    layout = Layout.from_network(trained)
    for _ in range(3):
        trained(torch.randn(8, 2))
    assert layout.unpack(layout.pack(trained), other) is other
    assert other.embedding[1].num_batches_tracked.dtype == torch.int64
    assert int(other.embedding[1].num_batches_tracked) == 3
    inputs = torch.randn(4, 2)
    assert torch.equal(trained.eval()(inputs), other.eval()(inputs))


def test_pack_is_a_copy():
    network = linear()
    vector = Layout.from_network(network).pack(network)
    before = vector.clone()
    with torch.no_grad():
        network.decision.bias.add_(1)
    assert torch.equal(vector, before)
    vector.zero_()
    assert bool(network.decision.weight.any())


def test_buffers_that_are_not_persistent_are_not_in_the_vector():
    network = linear()
    network.register_buffer("scratch", torch.zeros(5), persistent=False)
    assert Layout.from_network(network).size == Layout.from_network(linear()).size


def test_a_tied_weight_is_in_the_vector_once():
    network = SplitNetwork(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    network.decision.weight = network.embedding.weight
    with pytest.raises(ValueError, match="the layer 'decision' of SplitNetwork shares its parameters with an earlier"):
        Layout.from_network(network)
    assert Layout.from_network(network, None).size == 9


def test_a_cut_at_an_inner_layer_includes_all_following_layers():
    network = LeNet5()
    assert Layout.from_network(network, "embedding.fc2").num_embedding == 62_006 - 850 - 120 * 84 - 84
    with pytest.warns(UserWarning, match=r"LeNet5 registers 'embedding' before all .* assign it last in __init__"):
        assert Layout.from_network(network, "embedding").num_embedding == 0


@pytest.mark.filterwarnings("error")
def test_an_embedding_without_parameters_causes_no_warning():
    assert Layout.from_network(SplitNetwork(nn.Flatten(), nn.Linear(4, 2))).num_embedding == 0


def test_a_vector_of_another_network_is_refused():
    with pytest.raises(ValueError, match="got a model of 5 numbers, but this LeNet5 has 62006; use the network"):
        Layout.from_network(LeNet5()).unpack(torch.zeros(5), LeNet5())


def test_without_a_cut_everything_is_embedding():
    layout = Layout.from_network(LeNet5(), None)
    assert layout.num_embedding == layout.num_parameters == 62_006


def test_a_layer_whose_name_begins_with_the_cut_is_another_layer():
    network = nn.Sequential(OrderedDict(fc10=nn.Linear(2, 2), fc1=nn.Linear(2, 2)))
    assert Layout.from_network(network, "fc1").num_embedding == 6


def test_resnet18_cut_at_fc():
    network = resnet18(num_classes=10)
    layout = Layout.from_network(network, "fc")
    assert layout.num_parameters == 11_181_642
    assert layout.num_parameters - layout.num_embedding == 5_130
    assert layout.size - layout.num_parameters == 2 * 4_800 + 20  # running means and variances, 20 counters
    assert len(layout.integer_slices()) == 20
    vector = torch.arange(layout.size, dtype=torch.float32)
    layout.unpack(vector, network)
    assert torch.equal(layout.pack(network), vector)
    assert network.fc.weight[0, 0].item() == layout.num_embedding


@pytest.mark.parametrize("cut", ["fc", "embedding.relu1", "", "dec"])
def test_an_unknown_cut_names_the_layers(cut):
    with pytest.raises(ValueError, match=r"model\.cut") as error:
        Layout.from_network(LeNet5(), cut)
    assert f"LeNet5 has no layer {cut!r}" in str(error.value)
    assert "embedding.conv1, embedding.conv2, embedding.fc1, embedding.fc2, decision" in str(error.value)


def test_parameters_must_be_float32():
    with pytest.raises(ValueError, match=r"'embedding.weight' is torch.float64.*torch.float32.*trainer.precision"):
        Layout.from_network(linear().double())


def test_split_makes_new_modules_every_time():
    make = [lambda: nn.Linear(2, 3), lambda: nn.Linear(3, 2)]
    one, other = split(*make), split(*make)
    assert isinstance(one, SplitNetwork)
    assert not torch.equal(one.embedding.weight, other.embedding.weight)
    inputs = torch.randn(4, 2)
    assert torch.equal(one(inputs), one.decision(one.embedding(inputs)))
