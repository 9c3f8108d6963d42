"""Networks with dropout."""

import torch
import torch.nn.functional as F
from torch import nn
from torchvision.ops import StochasticDepth

from lcfl.models import SplitNetwork


class Dropping(SplitNetwork):
    """Dropout of different probabilities between fully connected layers, one of them in place."""

    def __init__(self):
        embedding = nn.Sequential(
            nn.Conv2d(3, 4, 3),
            nn.Dropout(0),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(0.2),
            nn.Linear(4 * 9 * 7, 21),
            nn.Dropout(0.5, inplace=True),
            nn.ReLU(),
        )
        super().__init__(embedding, nn.Linear(21, 4))


class DroppingSignal(SplitNetwork):
    """Dropout of a signal, and of whole channels."""

    def __init__(self):
        embedding = nn.Sequential(nn.Conv1d(3, 5, 2), nn.Dropout(0.4), nn.ReLU(), nn.Dropout1d(0.3), nn.Flatten())
        super().__init__(embedding, nn.Linear(40, 4))


class DroppingCausal(nn.Module):
    """Dropout of a part of a signal, as after convolutions with zeros on both sides whose last results are cut off."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Conv1d(3, 7, 3, padding=2), nn.Conv1d(7, 6, 3, padding=4, dilation=2)
        self.drop, self.channels, self.decision = nn.Dropout(0.3), nn.Dropout1d(0.2), nn.Linear(5 * 10, 4)

    def forward(self, x):
        x = self.drop(F.relu(self.one(x)[:, :, :-2].contiguous()))
        x = self.channels(self.drop(self.two(x)[:, :, :-4]))
        return self.decision(self.drop(x[:, 1:]).flatten(1) * 2)


class DroppingImage(SplitNetwork):
    """Dropout of an image, and of whole channels. With four channels or more, torch has them innermost."""

    def __init__(self, channels):
        embedding = nn.Sequential(
            nn.Conv2d(3, channels, 3),
            nn.Dropout(0.2),
            nn.Conv2d(channels, 6, 3, padding=1),
            nn.MaxPool2d(2),
            nn.Dropout2d(0.4, inplace=True),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Flatten(),
        )
        super().__init__(embedding, nn.Linear(72, 4))


class DroppingJoined(nn.Module):
    """Dropout after a concatenation and after gates."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.gate = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(16, 16, 1), nn.Sigmoid())
        self.drop = nn.Dropout(0.2)
        self.three, self.decision = nn.Conv2d(16, 6, 3), nn.Linear(6, 4)

    def forward(self, x):
        x = self.one(x)
        x = self.drop(torch.cat([x, self.two(x)], 1))
        x = self.drop(self.gate(x) * x)
        return self.decision(self.three(x).mean((2, 3)))


class DroppingAnyOrder(nn.Module):
    """Dropout of values that torch has with channels outermost, because their order was not defined before.

    Images of one pixel have the same order either way.
    """

    def __init__(self, kind):
        super().__init__()
        self.kind, self.drop = kind, nn.Dropout(0.5)
        self.one, self.two = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.gate = nn.Conv2d(8, 1, 1) if kind == "gate" else None
        self.decision = nn.Linear(8 if kind in ("pooled", "pixel") else 10 if kind == "range" else 9, 4)

    def forward(self, x):
        y = self.two(self.one(x))
        if self.kind == "input":
            y = torch.cat([x, y], 1)
        elif self.kind == "gate":
            y = torch.cat([torch.sigmoid(self.gate(y)), y], 1)
        elif self.kind == "range":
            return self.decision(torch.cat([self.drop(y[:, :2]), y], 1).mean((2, 3)))
        elif self.kind == "shuffled":
            y = torch.cat([x, F.channel_shuffle(y, 2)], 1)
        elif self.kind == "contiguous":
            return self.decision(self.drop(y.contiguous()).mean((2, 3)))
        elif self.kind == "pixel":
            return self.decision(self.drop(F.adaptive_avg_pool2d(F.channel_shuffle(y, 2), 1)).flatten(1))
        else:
            y = F.adaptive_avg_pool2d(F.relu(F.adaptive_avg_pool2d(y, 1)), 6)
        return self.decision(self.drop(y).mean((2, 3)))


class DroppingByFunctions(nn.Module):
    """Functions that drop in training alone, and a log softmax."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.decision = nn.Conv2d(3, 5, 3), nn.Conv2d(5, 6, 3), nn.Linear(210, 4)

    def forward(self, x):
        x = F.relu(F.dropout2d(self.one(x), training=self.training))
        x = F.dropout(self.two(x), 0.3, self.training).flatten(1)
        return F.log_softmax(self.decision(F.dropout(F.relu(x), p=0.1, training=self.training)), dim=1)


class DroppingSamples(nn.Module):
    """Drops blocks for some samples and for whole batches, and numbers after a convolution with groups."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.samples, self.batch, self.never = (
            StochasticDepth(0.4, "row"),
            StochasticDepth(0.4, "batch"),
            StochasticDepth(0, "row"),
        )
        self.drop, self.decision = nn.Dropout(0.2), nn.Linear(8, 4)

    def forward(self, x):
        x = self.one(x)
        x = x + self.never(self.samples(self.drop(self.two(x))))
        x = x.mean((2, 3))
        return self.decision(x + self.batch(torch.tanh(x)))


class DroppingReshaped(nn.Module):
    """Drops numbers of images that come from a flat input."""

    def __init__(self):
        super().__init__()
        self.one, self.drop, self.two = nn.Conv2d(1, 8, 3), nn.Dropout(0.3), nn.Conv2d(8, 6, 3)
        self.decision = nn.Linear(6, 4)

    def forward(self, x):
        x = self.two(self.drop(self.one(x.view(-1, 1, 8, 7))))
        return self.decision(self.drop(x).mean((2, 3)))


class DroppingNormalised(SplitNetwork):
    """Drops numbers after an instance normalisation, whose result torch has with channels outermost."""

    def __init__(self):
        embedding = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.InstanceNorm2d(8), nn.Dropout(0.3), nn.Flatten()
        )
        super().__init__(embedding, nn.Linear(8 * 7 * 5, 4))


class DroppingTurned(nn.Module):
    """Drops numbers after linear layers over tokens, which torch has in the order of their dimensions."""

    def __init__(self):
        super().__init__()
        self.patches, self.drop = nn.Conv2d(3, 18, 3, stride=3), nn.Dropout(0.3)
        self.tokens = nn.Sequential(nn.Linear(9, 5), nn.GELU(), nn.Dropout(0.2), nn.Linear(5, 9))
        self.channels = nn.Sequential(nn.Linear(18, 7), nn.Tanh(), nn.Dropout(0.4))
        self.blocks, self.decision = StochasticDepth(0.4, "row"), nn.Linear(7, 4)

    def forward(self, x):
        x = self.patches(x).flatten(2)  # [B, 18, 9]
        x = x + self.blocks(self.drop(self.tokens(x)))
        return self.decision(self.drop(self.channels(x.transpose(1, 2)).mean(1)))


class DroppingMoved(nn.Module):
    """Drops numbers of tensors whose dimensions are not in memory as they are in the shape."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.drop = kind, nn.Dropout(0.5)
        self.one, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.LayerNorm(8)
        self.rows = nn.Linear(9, 9)
        self.decision = nn.Linear(9 if kind == "columns" else 8, 4)

    def forward(self, x):
        x = self.one(x)
        if self.kind == "columns":
            return self.decision(self.drop(x.permute(0, 3, 1, 2)).mean((2, 3)))
        if self.kind == "channels":
            return self.decision(self.drop(x.permute(0, 2, 3, 1)).mean((1, 2)))
        if self.kind == "rows":
            return self.decision(self.drop(F.max_pool2d(self.rows(x), 2)).mean((2, 3)))
        if self.kind == "moved":
            return self.decision(self.drop(F.relu(self.rows(x).permute(0, 2, 3, 1))).mean((1, 2)))
        if self.kind == "pixels":
            return self.decision(self.drop(x.flatten(2)).mean(2))
        if self.kind == "back":
            return self.decision(self.drop(self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)).mean((2, 3)))
        return self.decision(self.drop(x.flatten(2).transpose(1, 2)).mean(1))
