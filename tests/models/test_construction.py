"""A network whose layers have impossible sizes is refused in words, before memory is allocated for it."""

from functools import partial

import pytest
import torch
from torch import nn

from lcfl.models import CNN, MLP, LeNet5, ResNet9
from lcfl.models.construction import checked_network, constructed


@pytest.mark.parametrize(
    ("network", "says"),
    [
        (
            partial(MLP, 16, [-3]),
            r"it cannot be made with its arguments \(RuntimeError: .*-3.*\)\. Sizes of layers must be",
        ),
        (partial(MLP, 16, num_classes=-1), r"it cannot be made with its arguments \(RuntimeError: .*-1"),
        (partial(MLP, 16, None), r"it cannot be made with its arguments \(TypeError: "),
        (MLP, r".*missing 1 required .*'in_features'\)\. It is called without arguments: .*partial\(MyNet, \.\.\.\)"),
        (lambda: nn.Sequential(nn.Linear(3)), r".*missing 1 required .*'out_features'\)\. Sizes of layers"),
        (partial(MLP, 16, depth=2), r".*unexpected keyword argument 'depth'\)\. It is called without arguments"),
        (partial(LeNet5, in_channels=-1), r"it cannot be made with its arguments \(RuntimeError: "),
        (partial(CNN, padding=2**62), r"it cannot be made with its arguments \(TypeError: [^\n]*$"),
        (partial(MLP, 16, num_classes=0), r"MLP has the parameter decision.weight of shape \[0, 64\], which is empty"),
        (partial(CNN, kernel_size=0), "CNN has the parameter embedding.conv1.weight of shape .* which is empty"),
        (partial(ResNet9, in_channels=0), "ResNet9 has the parameter embedding.conv1.conv.weight of shape"),
        (partial(MLP, 16, [10**9, 10**9]), r"its layers need at least [\d,]+ GiB of memory, but this machine has"),
        (partial(MLP, 16, [2**62]), r"its layers need at least [\d,]+ GiB of memory"),
        (lambda: nn.Sequential(*(nn.Linear(10**6, 10**6) for _ in range(10**3))), r"its layers need at least"),
    ],
)
def test_impossible_layers_are_refused_before_they_are_allocated(network, says):
    with pytest.raises(ValueError, match=rf"^model\.network: {says}"):
        constructed(network)


def test_the_check_changes_no_bit():
    torch.manual_seed(3)
    plain = MLP(16).state_dict()
    torch.manual_seed(3)
    checked = constructed(partial(MLP, 16)).state_dict()
    assert all(torch.equal(plain[name], checked[name]) for name in plain)


def test_an_error_in_the_users_code_is_raised_as_it_is():
    def broken():
        raise KeyError("own")

    with pytest.raises(KeyError, match="own"):
        constructed(broken)


class Lazy(nn.Module):
    """A network whose layers get their sizes from the first input, which may be part of its construction."""

    def __init__(self, layer, is_called):
        super().__init__()
        self.layer = layer()
        if is_called:
            self.layer(torch.zeros(2, 3))


@pytest.mark.parametrize(
    ("layer", "name"),
    [(partial(nn.LazyLinear, 2), "layer.weight"), (partial(nn.LazyBatchNorm1d, affine=False), "layer.running_mean")],
)
def test_a_layer_that_waits_for_its_input_is_refused_unless_it_was_called(layer, name):
    assert isinstance(checked_network(lambda: Lazy(layer, True)).layer, nn.Module)
    with pytest.raises(ValueError, match=rf"^model\.network: Lazy has {name}, .* call the layers once"):
        checked_network(lambda: Lazy(layer, False))
