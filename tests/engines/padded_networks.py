"""Networks with zeros on some sides of what their convolutions read, and with dilated convolutions of signals."""

import torch
import torch.nn.functional as F
from torch import nn


class Causal(nn.Module):
    """Dilated convolutions of a signal, none of which sees a later step, and one that sees both sides."""

    def __init__(self):
        super().__init__()
        self.one = nn.Sequential(nn.ZeroPad1d((2, 0)), nn.Conv1d(3, 18, 3), nn.BatchNorm1d(18), nn.ReLU())
        self.two = nn.Conv1d(18, 18, 3, dilation=2)
        self.three = nn.Conv1d(18, 18, 2, dilation=4, padding=4, groups=18)
        self.four = CausalConv1d(18, 6, 3, dilation=6, groups=2)
        self.decision = nn.Linear(6 * 24, 4)

    def forward(self, x):
        x = self.one(x)
        x = x + F.relu(self.two(F.pad(x, (4, 0))))
        x = torch.tanh(self.three(x))[:, :, :-4]
        return self.decision(self.four(x).flatten(1))


class CausalConv1d(nn.Conv1d):
    """A layer as many users write it."""

    def forward(self, x):
        return super().forward(F.pad(x, (self.dilation[0] * (self.kernel_size[0] - 1), 0)))


class Uneven(nn.Module):
    """Strides over images with more zeros behind them than before them, as TensorFlow has them."""

    def __init__(self):
        super().__init__()
        self.one = nn.Conv2d(3, 17, 3, stride=2)
        self.two = nn.Sequential(nn.ConstantPad2d((0, 2, 1, 0), 0.0), nn.Conv2d(17, 17, (2, 3), groups=17), nn.GELU())
        self.three = nn.Parameter(torch.randn(18, 17, 4, 4, generator=torch.Generator().manual_seed(0)) / 16)
        self.four = nn.Sequential(nn.ReLU(inplace=True), nn.ZeroPad2d(1), nn.Conv2d(18, 5, 3, 2, padding=1))
        self.decision = nn.Linear(5 * 4 * 3, 4)

    def forward(self, x):
        x = F.relu(self.one(nn.functional.pad(x, [0, 1, 0, 1])))  # [B, 17, 5, 4]
        return self.decision(self.four(F.conv2d(self.two(x), self.three, padding="same")).flatten(1))


PADDED = {"causal": (Causal, (3, 24)), "uneven": (Uneven, (3, 11, 9))}
