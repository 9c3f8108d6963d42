"""Networks with all layers that the kernels support, written in the usual ways."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from lcfl.models import CNN, MLP, LeNet5, SplitNetwork
from tests.engines.padded_networks import PADDED
from tests.engines.turned_networks import TURNED

SHAPE = (3, 11, 9)


class Plain(SplitNetwork):
    """Odd sizes and numbers of channels; padded, strided and overlapping windows; GroupNorm without weights."""

    def __init__(self):
        embedding = nn.Sequential(
            nn.Conv2d(3, 7, (5, 3), padding=(2, 1)),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, padding=1),
            nn.Conv2d(7, 5, 3, stride=2, padding=1, bias=False),
            nn.GroupNorm(5, 5, affine=False),
            nn.Flatten(),
            nn.Linear(45, 20),
            nn.ReLU(),
        )
        super().__init__(embedding, nn.Linear(20, 4))


class Normal(SplitNetwork):
    """Batch normalisation of images and of features, group normalisation, average pooling."""

    def __init__(self):
        embedding = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8, momentum=0.3),
            nn.ReLU(),
            nn.AvgPool2d(2),
            nn.Conv2d(8, 6, 1),
            nn.GroupNorm(3, 6),
            nn.Identity(),
            nn.AdaptiveAvgPool2d((1, 2)),
            nn.Flatten(),
            nn.Linear(12, 5, bias=False),
            nn.BatchNorm1d(5, affine=False),
        )
        super().__init__(embedding, nn.Linear(5, 4))


class Functional(nn.Module):
    """A network in functional style, with a shortcut and a value that two layers read."""

    def __init__(self):
        super().__init__()
        self.one = nn.Conv2d(3, 6, 3, padding=1)
        self.two = nn.Conv2d(6, 6, 3, padding=1)
        self.decision = nn.Linear(6 * 5 * 4, 4)

    def forward(self, x):
        x = F.relu(self.one(x))
        x = x + torch.relu(self.two(x))
        x = F.max_pool2d(x, 2)
        return self.decision(x.view(x.size(0), -1))


class Tiled(nn.Module):
    """Convolutions of 3 x 3 that are computed in tiles: odd sizes and channels, three paddings, and a shortcut."""

    def __init__(self):
        super().__init__()
        self.one = nn.Conv2d(3, 17, 3, padding=1)  # its input has too few channels for tiles
        self.two = nn.Conv2d(17, 17, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(17)
        self.three = nn.Conv2d(17, 25, 3, padding=2)
        self.four = nn.Conv2d(25, 18, 3, stride=2, padding=1)
        self.five = nn.Conv2d(18, 16, 3, padding=1)  # 4 x 3 pixels
        self.six = nn.Conv2d(16, 16, 3)  # 2 x 1 pixels, too few for tiles
        self.decision = nn.Linear(16, 4)

    def forward(self, x):
        x = F.relu(self.one(x))
        y = self.norm(self.two(x))
        y += x
        x = F.relu(y)
        x = F.max_pool2d(F.relu(self.three(x)), 2, padding=1)
        x = F.relu(self.five(F.relu(self.four(x))))
        x = F.adaptive_avg_pool2d(F.relu(self.six(x)), 1)
        return self.decision(torch.flatten(x, 1))


class Signal(nn.Module):
    """Windows that move over a signal, with padding, strides and both normalisations."""

    def __init__(self):
        super().__init__()
        self.one = nn.Sequential(nn.Conv1d(3, 7, 5, padding=2), nn.BatchNorm1d(7), nn.ReLU(), nn.MaxPool1d(3, 2, 1))
        self.two = nn.Sequential(nn.Conv1d(7, 17, 4, stride=2, bias=False), nn.GroupNorm(1, 17), nn.LeakyReLU())
        self.three = nn.Conv1d(17, 6, 3, padding="same")
        self.decision = nn.Linear(6, 4)

    def forward(self, x):
        x = self.two(self.one(x))  # [B, 17, 5]
        x = F.adaptive_avg_pool1d(F.avg_pool1d(torch.tanh(self.three(x)), 2), 2)
        return self.decision(x.mean(-1))


class Activated(nn.Module):
    """Every activation, also after layers whose gradients need their results, and a normalisation of features."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Sequential(
            nn.Conv2d(3, 5, 3, padding="same"),
            nn.MaxPool2d(2),
            nn.Tanh(),
            nn.Conv2d(5, 18, 3, padding="valid"),
            nn.ReLU(),
            nn.Sigmoid(),
            nn.GELU(),
            nn.MaxPool2d(2),
            nn.LeakyReLU(0.3, inplace=True),
            nn.Flatten(),
            nn.Linear(18, 20),
            nn.LayerNorm(20),
            nn.SiLU(),
        )
        self.decision = nn.Linear(20, 4)

    def forward(self, x):
        x = self.embedding(x)
        return torch.sigmoid(self.decision(F.leaky_relu(x, negative_slope=0.5) + x.tanh()))


class Depthwise(nn.Module):
    """Inverted residual blocks, with all kinds of windows that have a kernel for each channel."""

    def __init__(self):
        super().__init__()
        self.one = nn.Sequential(nn.Conv2d(3, 18, 1), nn.BatchNorm2d(18), nn.ReLU6(inplace=True))
        self.two = nn.Sequential(
            nn.Conv2d(18, 18, 3, padding=1, groups=18, bias=False), nn.ReLU6(), nn.Conv2d(18, 18, 1)
        )
        self.three = nn.Conv2d(18, 18, (5, 4), stride=(1, 2), padding=(2, 3), groups=18)  # 11 x 6 pixels
        self.four = nn.Conv2d(18, 18, (2, 1), stride=3, groups=18)  # 4 x 2 pixels; does not read each pixel
        self.five = nn.Conv2d(18, 18, 7, padding=3, groups=18)  # a kernel that is larger than its input
        self.decision = nn.Linear(18, 4)

    def forward(self, x):
        x = self.one(x)
        x = F.elu(x + self.two(x), alpha=0.7)
        x = self.four(self.three(x))
        y = F.relu6(self.five(x))
        y += x  # torch does not need the result of a ReLU6 again
        return self.decision(y.mean((2, 3)))


class Joined(nn.Module):
    """Branches that are concatenated, channels and features with gates, and windows that depend on the place."""

    def __init__(self):
        super().__init__()
        self.one = nn.Sequential(nn.Conv2d(3, 5, 3, padding=1), nn.Hardswish(), nn.MaxPool2d(3, 2, ceil_mode=True))
        self.two = nn.Conv2d(5, 6, 1)
        self.three = nn.Sequential(nn.BatchNorm2d(11), nn.ReLU(), nn.Conv2d(11, 17, 3, padding=1))
        self.gate = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(17, 4, 1), nn.ReLU(), nn.Conv2d(4, 17, 1))
        self.hidden = nn.Linear(17 * 3 * 7, 6)
        self.decision = nn.Linear(17 * 3 * 7 + 6, 4)

    def forward(self, x):
        x = self.one(x)  # [B, 5, 5, 4]
        x = self.three(torch.cat([x, self.two(x)], 1))
        x = F.hardsigmoid(self.gate(x)) * x
        x = F.adaptive_avg_pool2d(x, (3, 7)).flatten(1)
        y = self.hidden(x)
        y = torch.tanh(y) * y
        y = y * y + (y + y)
        return self.decision(torch.cat((x, y), dim=1))


class Divided(nn.Module):
    """Parts of the channels: chunks, pieces, ranges, groups of convolutions, and groups that are shuffled."""

    def __init__(self):
        super().__init__()
        self.one = nn.Conv2d(3, 12, 3, padding=1)
        self.two = nn.Conv2d(12, 18, (3, 2), stride=2, padding=1, groups=3)
        self.three = nn.Conv2d(6, 36, 1, groups=2, bias=False)
        self.shuffle, self.norm = nn.ChannelShuffle(3), nn.InstanceNorm2d(12, affine=True)
        self.hidden, self.decision = nn.Linear(177, 9), nn.Linear(7, 4)

    def forward(self, x):
        x = self.norm(self.one(x))
        a, b = x.chunk(2, dim=1)
        x = torch.cat([b, a, x[:, 3:-8]], 1)[:, 1:]  # reads some channels once, and some twice
        samples, channels, height, width = x.size()
        x = x.view(samples, 4, channels // 4, height, width).transpose(1, 2).contiguous()
        x = F.relu(self.shuffle(x.view(samples, -1, height, width)))  # [B, 12, 11, 9]
        a, b, c = torch.split(self.two(x), [6, 5, 7], dim=1)
        x = self.three(a) - torch.cat([a, b, c, b, c, a], dim=1)
        x = F.adaptive_max_pool2d(x, (1, 5))
        x = self.hidden(x.reshape(-1, 180)[:, 3:])
        a, _, c = x.split(4, 1)
        return self.decision(torch.cat([a, c, torch.selu(c), F.celu(c, 0.6)], dim=1))


class Reshaped(nn.Module):
    """Images in a flat input, and numbers in the forward pass."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.decision = nn.Conv2d(3, 6, 3), nn.Conv2d(2, 5, 3), nn.Linear(60, 4)

    def forward(self, x):
        x = self.one((1 - x / 2).view(-1, 3, 7, 5))  # [B, 6, 5, 3]
        x = x - 0.5
        x *= 0.1
        x = F.relu(-x).reshape(x.size(0), 2, 3, 15)
        x = 3 + self.two(x)  # [B, 5, 1, 13]
        x /= 4.0
        x -= 1
        return self.decision(x.flatten(1)[:, :-5])


class ReshapedSignal(nn.Module):
    """Signals in a flat input, and the other names of operations that have several."""

    def __init__(self):
        super().__init__()
        self.one = nn.Sequential(nn.Conv1d(1, 6, 4), nn.InstanceNorm1d(6), nn.AdaptiveMaxPool1d(9))
        self.two = nn.Sequential(nn.Conv1d(6, 9, 3, stride=2, groups=3), nn.Flatten(), nn.Unflatten(1, (9, -1)))
        self.decision = nn.Linear(18 + 13, 4)

    def forward(self, x):
        x = self.two(self.one(x.unsqueeze(1)))  # [B, 9, 4]
        x = torch.concat([torch.neg(x), torch.div(x, 2), torch.sub(x, 1)], 1)[:, 4:22]
        return self.decision(torch.cat([x.mean(2), x[:, 5:].mean(2)], -1))


class Plainly(nn.Module):
    """The smallest network, for tests that change one thing in it."""

    def __init__(self):
        super().__init__()
        self.one = nn.Conv2d(3, 3, 1)
        self.decision = nn.Linear(3 * 11 * 9, 4)

    def forward(self, x):
        return self.decision(self.one(x).flatten(1))


class Pixels(SplitNetwork):
    """A network without a linear layer: the class scores are the pixels of the last map."""

    def __init__(self):
        super().__init__(
            nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU()), nn.Sequential(nn.Conv2d(5, 1, (8, 6)), nn.Flatten())
        )


class Strided(SplitNetwork):
    """Convolutions with all kinds of strides: wider than the kernel or not, in one dimension, with much padding."""

    def __init__(self):
        embedding = nn.Sequential(
            nn.Conv2d(3, 7, (5, 4), stride=(2, 3), padding=(4, 3)),  # 8 x 4 pixels
            nn.ReLU(),
            nn.Conv2d(7, 19, 3, stride=(1, 2), padding=1, bias=False),  # 8 x 2 pixels
            nn.ReLU(),
            nn.Conv2d(19, 5, (2, 1), stride=3),  # does not read each pixel
            nn.Conv2d(5, 6, 1, stride=2),
            nn.Flatten(),
        )
        super().__init__(embedding, nn.Linear(12, 4))


class Scratch(Normal):
    """A network with a buffer that is not persistent, and so in no model, before the others."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scratch", torch.full((3,), 5.0), persistent=False)


class Inner(nn.Module):
    """A network for feature vectors."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(7, 19), nn.ReLU())
        self.decision = nn.Linear(19, 4)

    def forward(self, x):
        return self.decision(self.body(x))


class Frozen(Inner):
    """One of the parameters is not trained, and two are not used."""

    def __init__(self):
        super().__init__()
        self.body[0].weight.requires_grad_(False)
        self.unused = nn.Linear(3, 2)


class Counting(Inner):
    """Counts its steps, and has a buffer that never changes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("factor", torch.full((), 2.0))

    def forward(self, x):
        if self.training:
            self.steps += 1
        return super().forward(x) * self.factor


class Watching(Inner):
    """Keeps a mean of its inputs, which no score in training depends on."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.seen.mul_(0.9).add_(0.1 * x.detach().mean())
        return super().forward(x)


class Replacing(Inner):
    """Keeps a mean of its inputs in a buffer that it replaces, and uses it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.seen = 0.9 * self.seen + 0.1 * x.detach().mean()
        return super().forward(x - self.seen)


class CountingApart(Inner):
    """Counts its steps in a buffer that is in no model."""

    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros(()), persistent=False)

    def forward(self, x):
        if self.training:
            self.steps += 1
        return super().forward(x) / self.steps.clamp(min=1)


class CountingInPython(Inner):
    """Counts its steps in an attribute."""

    steps = 0

    def forward(self, x):
        self.steps += self.training
        return super().forward(x) / max(1, self.steps)


# A name, a network, and the shape of its inputs.
NETWORKS = {
    "strided": (Strided, SHAPE),
    "pixels": (Pixels, SHAPE),
    "plain": (Plain, SHAPE),
    "normal": (Normal, SHAPE),
    "functional": (Functional, SHAPE),
    "tiled": (Tiled, SHAPE),
    "signal": (Signal, (3, 23)),
    "depthwise": (Depthwise, SHAPE),
    "joined": (Joined, SHAPE),
    "divided": (Divided, SHAPE),
    "reshaped": (Reshaped, (105,)),
    "reshaped signal": (ReshapedSignal, (21,)),
    "activated": (Activated, SHAPE),
    "inner": (Inner, (7,)),
    "LeNet5": (partial(LeNet5, 1, 20, 4), (1, 20, 20)),
    "CNN": (partial(CNN, 3, 9, 4, channels=(5, 9), hidden=(11,), batch_norm=True), (3, 9, 9)),
    "MLP": (partial(MLP, 3 * 11 * 9, (33,), 4), SHAPE),
    "logistic regression": (partial(MLP, 7, (), 4), (7,)),
    **TURNED,
    **PADDED,
}
