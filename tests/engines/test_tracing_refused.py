"""Networks that a trace refuses, with the reason."""

from functools import partial

import pytest
import torch
from torch import nn
from torchvision.ops import StochasticDepth

from lcfl.engines.forward_graph import Unsupported
from lcfl.engines.tracing import trace
from lcfl.models import SplitNetwork
from tests.engines.networks import SHAPE, Plainly


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


class ByAxis(Plainly):
    def forward(self, x):
        return self.decision(torch.cat([self.one(x)], axis=1).flatten(1))


class Holding(Plainly):
    """Reads a parameter that is named like an operation."""

    def __init__(self):
        super().__init__()
        self.cat = nn.Parameter(torch.ones(3, 11, 9))

    def forward(self, x):
        return self.decision((self.one(x) + self.cat).flatten(1))


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
        return self.decision(nn.functional.avg_pool2d(x, x.size(0) // x.size(3)).flatten(1))


class InPlace(Plainly):
    def __init__(self, *middle):
        super().__init__()
        self.middle = nn.Sequential(*middle)

    def forward(self, x):
        x = self.middle(self.one(x))
        x *= 2
        return self.decision(x.flatten(1))


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
            "dropout of tensors whose order in memory is not known",
        ),
        (layers(nn.Conv2d(3, 3, 3, padding=2, dilation=2)), "Conv2d embedding.0 with unusual settings"),
        (layers(nn.ConstantPad2d(1, 0.5), nn.Conv2d(3, 3, 3)), "ConstantPad2d embedding.0 with unusual settings"),
        (layers(nn.ZeroPad2d(-1), nn.Conv2d(3, 3, 3, padding=2)), "ZeroPad2d embedding.0 with unusual settings"),
        (layers(nn.ReflectionPad2d(1), nn.Conv2d(3, 3, 3)), "the layer ReflectionPad2d embedding.0"),
        (layers(nn.ZeroPad2d(1), nn.MaxPool2d(3, 1)), "pads what its MaxPool2d reads"),
        (
            layers(nn.ZeroPad2d((3, 0, 0, 0)), nn.Conv2d(3, 3, 3), features=3 * 9 * 10),
            "has windows that meet only zeros",
        ),
        (
            layers(nn.ZeroPad2d((0, 3, 0, 0)), nn.Conv2d(3, 3, 3), features=3 * 9 * 10),
            "has windows that meet only zeros",
        ),
        (layers(nn.LeakyReLU(-0.1)), "LeakyReLU embedding.0 with unusual settings"),
        (layers(nn.Conv1d(3, 3, 1)), "the layer Conv1d embedding.0"),
        (layers(nn.GELU("tanh")), "GELU embedding.0 with unusual settings"),
        (layers(nn.PReLU()), "the layer PReLU embedding.0"),
        (layers(nn.Conv2d(3, 3, 3, padding=1, padding_mode="circular")), "with unusual settings"),
        (layers(nn.MaxPool2d(1, 1, dilation=2)), "with unusual settings"),
        (layers(nn.AvgPool2d(1, 1, ceil_mode=True)), "with unusual settings"),
        (layers(nn.AvgPool2d(1, 1, divisor_override=-1)), "with unusual settings"),
        (layers(nn.Flatten(), nn.AdaptiveAvgPool2d(2)), "with unusual settings"),
        (layers(nn.AdaptiveAvgPool2d((3,))), "with unusual settings"),
        (layers(nn.BatchNorm2d(3, momentum=None)), "with unusual settings"),
        (layers(nn.BatchNorm2d(3, track_running_stats=False)), "with unusual settings"),
        (layers(nn.Flatten(), nn.BatchNorm1d(297)), "BatchNorm1d embedding.1 with unusual settings"),
        (layers(nn.Flatten(), nn.GroupNorm(3, 297)), "GroupNorm embedding.1 with unusual settings"),
        (layers(nn.GroupNorm(3, 3, eps=0)), "GroupNorm embedding.0 with unusual settings"),
        (layers(nn.MaxPool2d(1, stride=())), "MaxPool2d embedding.0 with unusual settings"),
        (layers(nn.LayerNorm((11, 9))), "LayerNorm embedding.0 with unusual settings"),
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
        (layers(nn.Sigmoid(), nn.SiLU(inplace=True)), "changes in place what torch keeps for the backward pass"),
        (layers(nn.Conv2d(3, 3, (12, 1)), features=0), "has an empty tensor, from a window larger than what it reads"),
        (layers(nn.Conv2d(3, 3, 12, groups=3), nn.Conv2d(3, 6, 1, groups=3), features=0), "has an empty tensor"),
        pytest.param(Scaled, "calls add", marks=pytest.mark.filterwarnings("ignore:This overload of add")),
        (FixedHead, "its Linear has a weight that is not a parameter"),
        (partial(FixedHead, "bias"), "its Linear has a bias that is not a parameter"),
        (Watching, "computes what its output does not depend on"),
        (ByAxis, "calls cat"),
        (Holding, "its forward pass calls add in a way that has no operation"),
        (Extra, "Conv2d one with other parameters"),
        (OfOne, "its Conv2d has a bias of another size"),
        (Tied, "GroupNorm one with other parameters"),
        (SizeOfBatch, "calls view"),
        (SizeOfTwoBatches, "computes with the size of a batch"),
        (PooledByCode, "computes with the size of a batch"),
        *(
            (partial(InPlace, each(inplace=True)), "changes in place what torch keeps for the backward pass")
            for each in (nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU)
        ),
        (layers(nn.CELU(-1)), "CELU embedding.0 with unusual settings"),
        (layers(nn.AdaptiveMaxPool2d((2, 9))), "AdaptiveMaxPool2d embedding.0 with unusual settings"),
        (layers(nn.InstanceNorm2d(3, track_running_stats=True)), "InstanceNorm2d embedding.0 with unusual settings"),
        (layers(nn.Conv2d(3, 3, (11, 9)), nn.InstanceNorm2d(3)), "InstanceNorm2d embedding.1 with unusual settings"),
        (layers(nn.ChannelShuffle(2)), "ChannelShuffle embedding.0 with unusual settings"),
        (layers(nn.Unflatten(1, (3, 1))), "Unflatten embedding.0 with unusual settings"),
        (layers(StochasticDepth(1.0, "row")), "StochasticDepth with unusual settings"),
        (InFloat32, "chooses a precision with torch.autocast"),
    ],
)
def test_refuses_unsupported_networks(network, why):
    with pytest.raises(Unsupported, match=why):
        trace(network(), SHAPE)
