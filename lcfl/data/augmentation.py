"""Random changes of training images, drawn for every image of a batch at once. Shapes: B images of C x H x W."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from lcfl.core.validation import check_choices

__all__ = ["Augmentation", "CropAndFlip"]


class Augmentation(ABC):
    """Changes the images of a training batch, never those of an evaluation.

    It draws from torch's global generator of the images' device. Within a federation that is the stream of the
    client's local run (`rng.scope`), so what is drawn depends on seed, round, client and step alone.
    """

    @abstractmethod
    def __call__(self, images: Tensor) -> Tensor:
        """New images [B, C, H, W] of the same type, from raw ones that are not normalised yet."""


@dataclass(frozen=True)
class CropAndFlip(Augmentation):
    """A random crop of the padded image, then a horizontal flip of every second one on average.

    Each image is padded by ``padding`` pixels on all sides and cut back to its size at a place drawn uniformly. The
    usual augmentation of CIFAR: LG-FedAvg trains with it (padded by zeros) and NIID-Bench (by reflection); PACFL, so
    FedClust, does not.

    Args:
        padding: in pixels, on each side; 0 flips only.
        fill: pad with ``zeros``, which is black, or ``reflect`` the image at its edges.

    Raises:
        ValueError: a negative padding, or an unknown fill.
    """

    padding: int = 4
    fill: Literal["zeros", "reflect"] = "zeros"

    def __post_init__(self) -> None:
        check_choices("CropAndFlip", self)
        if self.padding < 0:
            raise ValueError(f"CropAndFlip: got padding={self.padding}; it must be at least 0.")

    def __call__(self, images: Tensor) -> Tensor:
        """Draws place and flip of every image, then reads all pixels in one gather."""
        if images.ndim != 4 or (self.fill == "reflect" and self.padding >= min(images.shape[2:])):
            raise ValueError(
                f"CropAndFlip: got shape {tuple(images.shape)} with padding {self.padding}; needed are images "
                "[batch, channels, height, width], larger than a padding that reflects them"
            )
        batch, channels, height, width = images.shape
        device = images.device
        top, left = torch.randint(2 * self.padding + 1, (2, batch, 1), device=device)
        rows = top + torch.arange(height, device=device)
        columns = left + torch.arange(width, device=device)
        flipped = torch.rand(batch, 1, device=device) < 0.5
        columns = torch.where(flipped, columns.flip(1), columns)
        if self.fill == "zeros":
            images = functional.pad(images, [self.padding] * 4)
        else:
            rows, columns = _reflected(rows - self.padding, height), _reflected(columns - self.padding, width)
        pixels = (rows[:, :, None] * images.shape[3] + columns[:, None, :]).reshape(batch, 1, -1)
        return images.flatten(2).gather(2, pixels.expand(-1, channels, -1)).reshape(batch, channels, height, width)


def _reflected(places: Tensor, size: int) -> Tensor:
    """Places outside of 0, ..., size - 1 mirrored at the outermost pixels, which are not doubled."""
    last = size - 1
    return last - (last - places.abs()).abs()
