"""Segmentation: which pixels of a fluorescence image are nuclei. Four regions of the image are the clients.

The image and the mask that experts drew come with the package stardist: ``pip install --no-deps stardist``.
"""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset

SIDE = 32  # pixels of a tile


def tiles(image: Tensor) -> Tensor:
    """Cuts an image [512, 512] into tiles [256, 32, 32], row by row."""
    return image.unfold(0, SIDE, SIDE).unfold(1, SIDE, SIDE).reshape(-1, SIDE, SIDE)


class Tiles(Dataset[tuple[Tensor, Tensor]]):
    """Pairs of image [1, 32, 32] and mask [32, 32] of 0 and 1. ``region`` names the quarter that a tile lies in."""

    def __init__(self) -> None:
        found = find_spec("stardist")
        if found is None or found.origin is None:
            raise ModuleNotFoundError("the image comes with a package: pip install --no-deps stardist")
        folder = Path(found.origin).parent / "data" / "images"
        image, mask = (np.asarray(Image.open(folder / name)).astype(np.float32) for name in ("img2d.tif", "mask2d.tif"))
        self.images = tiles(torch.from_numpy(image / image.max()))[:, None]
        self.masks = (tiles(torch.from_numpy(mask)) > 0).long()
        per_row = image.shape[1] // SIDE
        half = per_row // 2
        corners = [[f"{'north' if row < half else 'south'}-{'west' if column < half else 'east'}"
                    for column in range(per_row)] for row in range(per_row)]  # fmt: skip
        self.region = [corner for row in corners for corner in row]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index], self.masks[index]


class Net(nn.Module):
    """Three convolutions that keep the size: [B, 1, H, W] -> scores [B, 2, H, W]."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, width, 5, padding=2), nn.ReLU(), nn.Conv2d(width, width, 5, padding=2), nn.ReLU()
        )
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.head(self.body(images))
        return scores
