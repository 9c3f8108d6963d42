"""The programs of networks, and the networks that have none."""

from functools import partial

import pytest
import torch
from torch import nn

from lcfl.engines.forward_graph import Unsupported
from lcfl.engines.kernels import KIND
from lcfl.engines.tracing import trace
from lcfl.models import CNN, LeNet5, SplitNetwork
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


def layers(*middle, features=3 * 11 * 9):
    return lambda: SplitNetwork(nn.Sequential(*middle, nn.Flatten()), nn.Linear(features, 4))


class Shared(Plainly):
    def forward(self, x):
        return self.decision(self.one(self.one(x)).flatten(1))


class Branching(Shared):
    def forward(self, x):
        return self.decision((self.one(x) if x.sum() > 0 else x).flatten(1))


class Idle(Shared):
    def forward(self, x):
        return self.decision(x.flatten(1))


class Rooted(Shared):
    def forward(self, x):
        return self.decision(torch.sqrt(self.one(x)).flatten(1))


class Hooked(Shared):
    def __init__(self):
        super().__init__()
        self.decision.register_forward_hook(lambda *args: None)

    def forward(self, x):
        return self.decision(self.one(x).flatten(1))


class HookedItself(Plainly):
    def __init__(self):
        super().__init__()
        self.register_forward_hook(lambda module, inputs, scores: 3 * scores)


class HookedParameter(Plainly):
    def __init__(self):
        super().__init__()
        self.one.weight.register_hook(lambda slope: 3 * slope)


class HookedStage(Plainly):
    def __init__(self):
        super().__init__()
        self.stage = nn.Sequential(self.one)
        self.stage.register_full_backward_hook(lambda *args: None)

    def forward(self, x):
        return self.decision(self.stage(x).flatten(1))


class Probing(Plainly):
    def forward(self, x):
        with torch.no_grad():
            features = self.one(x)
        return self.decision(features.flatten(1))


class Choosing(Plainly):
    def forward(self, x):
        with torch.autocast("cpu"):
            return super().forward(x)


class Patched(Plainly):
    def __init__(self):
        super().__init__()
        self.one.forward = lambda x: 2 * x


class OtherInTraining(Plainly):
    def forward(self, x):
        return super().forward(x + x.relu() if self.training else x)


class KeptInEvaluation(Plainly):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(3)

    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x):
        return super().forward(self.norm(x))


class PreActivated(Plainly):
    """The shortcut reads what the ReLU has changed in place."""

    def forward(self, x):
        x = self.one(x)
        return self.decision((nn.functional.relu(x, inplace=True) + x).flatten(1))


class AddedInPlace(Plainly):
    """Another name holds the sum, too."""

    def forward(self, x):
        x = kept = self.one(x)
        x += torch.relu(x)
        return self.decision((x + kept).flatten(1))


class Scaled(Plainly):
    def forward(self, x):
        return self.decision(torch.add(x, 2, self.one(x)).flatten(1))


class FixedHead(Plainly):
    """A classifier that is a buffer."""

    def __init__(self, name="weight"):
        super().__init__()
        kept = getattr(self.decision, name).detach()
        delattr(self.decision, name)
        self.decision.register_buffer(name, kept)


class Watching(Plainly):
    def __init__(self):
        super().__init__()
        self.other = nn.Linear(297, 2)

    def forward(self, x):
        x = self.one(x)
        self.seen = self.other(x.flatten(1))
        return self.decision(x.flatten(1))


class Extra(Plainly):
    """A layer has another parameter, which its forward does not use."""

    def __init__(self):
        super().__init__()
        self.one.extra = nn.Parameter(torch.ones(5))


class OfOne(Plainly):
    """A bias of one number, which torch broadcasts."""

    def __init__(self):
        super().__init__()
        self.one.bias = nn.Parameter(torch.zeros(1))


class Tied(Plainly):
    def __init__(self):
        super().__init__()
        self.one = nn.GroupNorm(3, 3)
        self.one.bias = self.one.weight


class SizeOfBatch(Plainly):
    def forward(self, x):
        return self.decision(self.one(x).view(5, -1))


class SizeOfTwoBatches(Plainly):
    def forward(self, x):
        x = self.one(x)
        return self.decision(x.view(x.shape[0] * 1, -1))


class PooledByCode(Plainly):
    def forward(self, x):
        x = self.one(x)
        return self.decision(nn.functional.avg_pool2d(x, x.size(3) // 9).flatten(1))


class InFloat32(Plainly):
    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return super().forward(x)


class DroppingAlways(Plainly):
    def __init__(self, **options):
        super().__init__()
        self.options = options

    def forward(self, x):
        return self.decision(nn.functional.dropout(self.one(x), **self.options).flatten(1))


class LogSoftmax(Plainly):
    def __init__(self, *args, plus=False, **options):
        super().__init__()
        self.args, self.options, self.plus = args, options, plus

    def forward(self, x):
        x = super().forward(x)
        ended = x.log_softmax(*self.args, **self.options)
        return ended + x if self.plus else ended


class PatchedEnd(Plainly):
    def __init__(self):
        super().__init__()
        self.end = nn.LogSoftmax(1)
        self.end.forward = lambda x: x.log_softmax(1)

    def forward(self, x):
        return self.end(super().forward(x))


@pytest.mark.parametrize(
    ("network", "why"),
    [
        (layers(nn.Dropout(1.0)), "Dropout embedding.0 with unusual settings"),
        (layers(nn.Flatten(), nn.Dropout2d(0.5)), "Dropout2d embedding.1 with unusual settings"),
        (layers(nn.Dropout1d(0.5)), "the layer Dropout1d embedding.0"),
        (DroppingAlways, "calls dropout without training=self.training"),
        (partial(DroppingAlways, training=False), "calls dropout without training=self.training"),
        (layers(nn.LogSoftmax(1)), "log softmax is not over the classes of its output"),
        (layers(nn.Flatten(), nn.LogSoftmax(1)), "log softmax is not over the classes of its output"),
        (partial(LogSoftmax, 0), "log softmax is not over the classes of its output"),
        (partial(LogSoftmax, -1, plus=True), "log softmax is not over the classes of its output"),
        (partial(LogSoftmax, 1, torch.float64), "calls log_softmax"),
        (partial(LogSoftmax, dim=1, dtype=torch.float64), "calls log_softmax"),
        (PatchedEnd, "the layer LogSoftmax end"),
        (
            layers(nn.Conv2d(3, 1, 3), nn.Conv2d(1, 3, 1), nn.ReLU(), nn.Dropout(0.5)),
            "Dropout embedding.3 with unusual",
        ),
        (layers(nn.Conv2d(3, 3, 3, padding=2, dilation=2)), "Conv2d embedding.0 with unusual settings"),
        (layers(nn.Conv2d(3, 6, 1, groups=3)), "with unusual settings"),
        (layers(nn.Conv2d(3, 3, 4, padding="same")), "with unusual settings"),
        (layers(nn.LeakyReLU(-0.1)), "LeakyReLU embedding.0 with unusual settings"),
        (layers(nn.Conv1d(3, 3, 1)), "the layer Conv1d embedding.0"),
        (layers(nn.GELU("tanh")), "GELU embedding.0 with unusual settings"),
        (layers(nn.ELU(0.0)), "ELU embedding.0 with unusual settings"),
        (layers(nn.CELU()), "the layer CELU embedding.0"),
        (layers(nn.Conv2d(3, 3, 3, padding=1, padding_mode="circular")), "with unusual settings"),
        (layers(nn.MaxPool2d(1, 1, dilation=2)), "with unusual settings"),
        (layers(nn.AvgPool2d(1, 1, ceil_mode=True)), "with unusual settings"),
        (layers(nn.Flatten(), nn.AdaptiveAvgPool2d(2)), "with unusual settings"),
        (layers(nn.AdaptiveAvgPool2d((3,))), "with unusual settings"),
        (layers(nn.BatchNorm2d(3, momentum=None)), "with unusual settings"),
        (layers(nn.BatchNorm2d(3, track_running_stats=False)), "with unusual settings"),
        (layers(nn.Flatten(), nn.BatchNorm1d(297)), "BatchNorm1d embedding.1 with unusual settings"),
        (layers(nn.Flatten(), nn.GroupNorm(3, 297)), "GroupNorm embedding.1 with unusual settings"),
        (layers(nn.GroupNorm(3, 3, eps=0)), "GroupNorm embedding.0 with unusual settings"),
        (layers(nn.MaxPool2d(1, stride=())), "MaxPool2d embedding.0 with unusual settings"),
        (layers(nn.LayerNorm(9)), "LayerNorm embedding.0 with unusual settings"),
        (layers(nn.Flatten(), nn.LayerNorm(297)), "LayerNorm embedding.1 with unusual settings"),
        (layers(nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 3, 1))), "the layer Parametrized"),
        (Shared, "uses the layer Conv2d one twice"),
        (Branching, "cannot be traced"),
        (Idle, "parameter one.weight belongs to no operation"),
        (Rooted, "calls sqrt"),
        (Hooked, "its Linear decision has hooks"),
        (HookedItself, "it has hooks"),
        (HookedParameter, "its parameters have hooks"),
        (HookedStage, "its Sequential stage has hooks"),
        (Probing, "computes a part without gradients"),
        (Choosing, "chooses a precision with torch.autocast"),
        (Patched, "Conv2d one with its own forward"),
        (OtherInTraining, "differs between training and evaluation"),
        (KeptInEvaluation, r"its train\(\) leaves a layer in another mode"),
        (PreActivated, "changes in place what its forward pass reads again"),
        (AddedInPlace, "changes in place what its forward pass reads again"),
        (layers(nn.ReLU(), nn.ReLU(inplace=True)), "changes in place what torch keeps for the backward pass"),
        (layers(nn.Tanh(), nn.SiLU(inplace=True)), "changes in place what torch keeps for the backward pass"),
        (layers(nn.Conv2d(3, 3, (12, 1)), features=0), "a window that is larger than what it reads"),
        pytest.param(Scaled, "calls add", marks=pytest.mark.filterwarnings("ignore:This overload of add")),
        (FixedHead, "its Linear has a weight that is not a parameter"),
        (partial(FixedHead, "bias"), "its Linear has a bias that is not a parameter"),
        (Watching, "computes what its output does not depend on"),
        (Extra, "Conv2d one with other parameters"),
        (OfOne, "its Conv2d has a bias of another size"),
        (Tied, "GroupNorm one with other parameters"),
        (SizeOfBatch, "calls view"),
        (SizeOfTwoBatches, "computes with the size of a batch"),
        (PooledByCode, "calls floordiv"),
        (InFloat32, "chooses a precision with torch.autocast"),
    ],
)
def test_refuses_unsupported_networks(network, why):
    with pytest.raises(Unsupported, match=why):
        trace(network(), SHAPE)


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
