"""The programs of networks, and the networks that have none."""

import pytest
import torch
from torch import nn

from lcfl.engines.forward_graph import Unsupported
from lcfl.engines.kernels import KIND
from lcfl.engines.tracing import trace
from lcfl.models import CNN, LeNet5
from tests.engines.networks import SHAPE, Functional, Plain, Plainly

NAMES = {number: name for name, number in KIND.items()}


def test_lenet_is_a_chain_with_relus_in_place():
    program = trace(LeNet5(), (3, 32, 32))
    kinds = [NAMES[op.kind] for op in program.ops]
    assert kinds == [*["conv", "relu", "max_pool"] * 2, *["linear", "relu"] * 2, "linear"]
    assert [op.input == op.output for op in program.ops if NAMES[op.kind] == "relu"] == [True] * 4
    shapes = [(value.channels, value.height, value.width) for value in program.values]
    assert shapes[program.output] == (10, 1, 1)
    assert (16, 5, 5) in shapes


def test_offsets_are_those_in_the_flat_vector():
    network = CNN(3, 9, 4, channels=(5,), hidden=(), batch_norm=True)
    program = trace(network, (3, 9, 9))
    conv, norm, *_, last = program.ops
    assert (conv.weight, conv.bias, norm.weight, norm.bias) == (0, 375, 380, 385)
    assert (norm.mean, norm.var, norm.tracked) == (0, 5, 10)
    assert last.bias == sum(each.numel() for each in network.parameters()) - 4


def test_a_value_that_is_read_twice_is_not_overwritten():
    program = trace(Functional(), SHAPE)
    first, second = (op for op in program.ops if NAMES[op.kind] == "relu")
    (added,) = (op for op in program.ops if NAMES[op.kind] == "add")
    assert {added.input, added.other} == {first.output, second.output}
    assert first.output != second.output


@pytest.mark.parametrize(
    "flat",
    [
        lambda x: torch.flatten(x, start_dim=1),
        lambda x: x.flatten(1, -1),
        lambda x: x.view(x.size(0), -1),
        lambda x: x.view(x.shape[0], 297),
        lambda x: x.view(-1, x.shape[1] * x.size(2) * x.shape[3]),
        lambda x: x.reshape(-1, 297),
    ],
)
def test_all_usual_ways_to_flatten(flat):
    class Flattening(Plainly):
        def forward(self, x):
            return self.decision(flat(self.one(x)))

    assert trace(Flattening(), SHAPE).num_outputs == 4


@pytest.mark.parametrize(
    ("average", "supported"),
    [
        (lambda x: x.mean((2, 3)), True),
        (lambda x: torch.mean(x, dim=[-1, -2]), True),
        (lambda x: x.mean((2, 3), keepdim=True).flatten(1), True),
        (lambda x: x.mean((2, 3), keepdim=True), False),
        (lambda x: x.mean(1).flatten(1), False),
        (lambda x: x.mean((0, 2, 3)), False),
        (lambda x: x.mean(), False),
        (lambda x: x.mean((2, 3), dtype=torch.float64).float(), False),
    ],
)
def test_the_mean_over_all_pixels(average, supported):
    class Averaging(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.decision = nn.Conv2d(3, 6, 1), nn.Linear(6, 4)

        def forward(self, x):
            return self.decision(average(self.one(x)))

    if supported:
        assert trace(Averaging(), SHAPE).num_outputs == 4
        return
    with pytest.raises(Unsupported, match=r"calls mean|unusual settings"):
        trace(Averaging(), SHAPE)


@pytest.mark.parametrize("sides", [lambda x: x.size()[2:], lambda x: (x.size(2), x.shape[3])])
def test_pools_over_the_size_that_the_code_reads(sides):
    class Pooling(nn.Module):
        def __init__(self):
            super().__init__()
            self.decision = nn.Linear(3, 4)

        def forward(self, x):
            return self.decision(nn.functional.avg_pool2d(x, sides(x)).flatten(1))

    pool, _ = trace(Pooling(), SHAPE).ops
    assert (pool.kernel_h, pool.kernel_w) == SHAPE[1:]


def test_does_not_change_the_network():
    network = Plain().train()
    trace(network, SHAPE)
    assert all(each.training for each in network.modules())


class SizesInPlace(Plainly):
    def forward(self, x):
        x = self.one(x)
        number = x.size(1)
        number *= x.size(2) * x.size(3)
        return self.decision(x.view(-1, number))


def test_a_product_of_sizes_may_be_computed_in_place():
    assert trace(SizesInPlace(), SHAPE).num_outputs == 4


def test_layers_may_be_called_with_a_keyword():
    class ByKeyword(Plainly):
        def forward(self, x):
            return self.decision(input=self.one(input=x).flatten(1))

    assert trace(ByKeyword(), SHAPE).num_outputs == 4


@pytest.mark.parametrize(
    "shuffle",
    [
        lambda x: x.view(-1, 2, 3, 11, 9).transpose(1, 2).contiguous().view(-1, 6, 11, 9),
        lambda x: x.view(x.size(0), 2, x.size(1) // 2, *SHAPE[1:]).transpose(2, 1).reshape(x.shape[0], -1, 11, 9),
        lambda x: torch.transpose(torch.reshape(x, (-1, 2, 3, 11, 9)), 1, 2).reshape((-1, 6, 11, 9)),
        lambda x: nn.functional.channel_shuffle(x, 2),
    ],
)
def test_all_usual_ways_to_shuffle_channels(shuffle):
    class Shuffling(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.decision = nn.Conv2d(3, 6, 1), nn.Linear(6 * 11 * 9, 4)

        def forward(self, x):
            return self.decision(shuffle(self.one(x)).flatten(1))

    _, op, _ = trace(Shuffling(), SHAPE).ops
    assert (NAMES[op.kind], op.groups) == ("shuffle", 2)


@pytest.mark.parametrize(
    ("parts", "bounds"),
    [
        (lambda x: x.chunk(4, 1), [(0, 2), (2, 4), (4, 5)]),
        (lambda x: torch.split(x, 3, dim=1), [(0, 3), (3, 5)]),
        (lambda x: x.split([1, 4], dim=1), [(0, 1), (1, 5)]),
        (lambda x: [x[:, :-4], x[:, -4:, :, :]], [(0, 1), (1, 5)]),
    ],
)
def test_all_usual_ways_to_take_parts_of_the_channels(parts, bounds):
    class Parting(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.decision = nn.Conv2d(3, 5, 1), nn.Linear(5 * 11 * 9, 4)

        def forward(self, x):
            found = parts(self.one(x))
            return self.decision(torch.cat([found[i] for i in range(len(bounds))], 1).flatten(1))

    program = trace(Parting(), SHAPE)
    taken = [op for op in program.ops if NAMES[op.kind] == "part"]
    begins = [op.place // 99 for op in taken]
    numbers = [program.values[op.output].channels for op in taken]
    assert [(begin, begin + number) for begin, number in zip(begins, numbers, strict=True)] == bounds
