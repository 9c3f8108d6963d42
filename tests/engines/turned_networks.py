"""Networks whose tensors have the channels last in places, and whose dimensions change places."""

import torch
import torch.nn.functional as F
from torch import nn


class Sensors(nn.Module):
    """Steps of sensors ``[L, F]``: a linear layer for each step, convolutions over steps, and parts of the time."""

    def __init__(self):
        super().__init__()
        self.one = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.LayerNorm(7))
        self.two = nn.Conv1d(7, 18, 3, padding=2)
        self.three = nn.Sequential(nn.Conv1d(18, 6, 3, padding=2), nn.BatchNorm1d(6), nn.ReLU())
        self.weights, self.decision = nn.Parameter(torch.linspace(0, 2, 78)), nn.Linear(78 + 6 + 18 + 6 + 1, 4)

    def forward(self, x):
        y = self.two(self.one(x).transpose(1, 2))[:, :, :-2].contiguous()  # causal
        z = self.three(y)[..., 2:].permute(0, 2, 1)  # [B, 13, 6]
        a, b = torch.cat([z[:, :6], z[:, 6:]], dim=1).split([4, 9], dim=1)
        z = torch.cat([torch.cat([b, a], 1), z], 2)[:, :, 3:9] * 2
        best = F.max_pool1d(y, y.size(2)).squeeze(-1)
        parts = [self.weights * z.flatten(1), z[:, -1], best, z.mean(1), x.mean((1,))[:, :1]]
        return self.decision(torch.cat(parts, 1))


class Mixer(nn.Module):
    """Patches of an image as tokens, mixed over tokens and over channels in turn."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 19, (3, 2), stride=2)  # 5 x 4 pixels
        self.norms = nn.ModuleList([nn.LayerNorm(19), nn.LayerNorm(19, bias=False), nn.LayerNorm(19)])
        self.tokens = nn.Sequential(nn.Linear(20, 6), nn.GELU(), nn.Linear(6, 20))
        self.channels = nn.Sequential(nn.Linear(19, 33, bias=False), nn.SiLU(), nn.Linear(33, 19))
        self.size, self.decision = nn.Parameter(torch.linspace(0.5, 1.5, 19)), nn.Linear(19, 4)

    def forward(self, x):
        x = self.patches(x).flatten(2).swapaxes(1, 2)  # [B, 20, 19]
        x = x + self.tokens(self.norms[0](x).transpose(-1, -2)).transpose(1, 2)
        x = x + self.size * self.channels(self.norms[1](x))
        return self.decision(self.norms[2](x).mean(dim=1))


class Turning(nn.Module):
    """A block as in ConvNeXt, functional forms of layers, and images with rows, or columns, as channels."""

    def __init__(self):
        super().__init__()
        self.deep = nn.Sequential(nn.Conv2d(3, 10, 3), nn.Conv2d(10, 10, 5, padding=2, groups=10))  # 9 x 7 pixels
        self.norm, self.one, self.two = nn.LayerNorm(10, eps=1e-3), nn.Linear(10, 34), nn.Linear(34, 10)
        self.factor = nn.Parameter(torch.linspace(-1, 1, 10).view(10, 1, 1))
        self.rows, self.columns = nn.Conv2d(9, 5, (2, 3)), nn.Linear(7, 6)
        self.decision = nn.Linear(5 * 6 * 5 + 10 * 9 * 6 + 10, 4)

    def forward(self, x):
        x = self.deep(x)
        y = F.layer_norm(x.permute(0, 2, 3, 1), (10,), self.norm.weight, self.norm.bias, eps=1e-3)
        y = F.gelu(F.linear(y, self.one.weight, self.one.bias)).permute((0, 2, 3, 1)).permute(0, 3, 1, 2)
        y = self.two(y).mul(2).permute(0, 3, 1, 2) * self.factor
        x = x.add(y).sub(0.5).div(2)
        a = self.rows(torch.permute(x, (0, 2, 3, 1)))  # [B, 5, 6, 8] of [B, 9, 7, 10]
        b = self.columns(x)  # [B, 10, 9, 6]
        c = b.permute(0, 2, 3, 1)
        c = c * torch.sigmoid(c.mean((1, 2), keepdim=True))
        return self.decision(torch.cat([a[..., 1:6].flatten(1), c.flatten(1), b.mean((-1, -2))], 1))


TURNED = {
    "sensors": (Sensors, (13, 5)),
    "mixer": (Mixer, (3, 11, 9)),
    "turning": (Turning, (3, 11, 9)),
}
