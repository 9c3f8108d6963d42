"""Augmentation: random changes of training images, drawn for all images of a batch at once.

Shapes: B images of C x H x W.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from lcfl.core.validation import CheckedFields

__all__ = ["Augmentation", "CropAndFlip"]


class Augmentation(CheckedFields, ABC):
    """Changes the images of training batches. Images that a model is evaluated on stay unchanged.

    It draws from torch's global generator of the images' device. In a federation this generator is the stream of the
    client's local run (`rng.seeded`), so the draws depend only on seed, round, client and step.
    """

    @abstractmethod
    def __call__(self, images: Tensor) -> Tensor:
        """Returns new images [B, C, H, W] of the same type from raw images, which are not normalised yet."""


@dataclass(frozen=True)
class CropAndFlip(Augmentation):
    """Crops each padded image at random, then flips it horizontally with probability 1/2.

    Each image is padded by ``padding`` pixels on all sides and cut back to its size at a position drawn uniformly. This
    is the usual augmentation of CIFAR. LG-FedAvg (padding with zeros) and NIID-Bench (padding by reflection) train with
    it. PACFL, and therefore FedClust, does not.

    Args:
        padding: in pixels, on each side; with 0 the images are only flipped.
        fill: ``zeros`` pads with black pixels, ``reflect`` reflects the image at its edges.

    Raises:
        ValueError: if the padding is negative or the fill is unknown.
    """

    padding: int = 4
    fill: Literal["zeros", "reflect"] = "zeros"

    def __post_init__(self) -> None:
        if self.padding < 0:
            raise ValueError(f"CropAndFlip: got padding={self.padding}; it must be at least 0.")

    def __call__(self, images: Tensor) -> Tensor:
        """Draws position and flip of every image, then reads all pixels in one gather."""
        if images.ndim != 4:
            raise ValueError(
                f"CropAndFlip: got inputs of shape {tuple(images.shape[1:])}; it changes images of channels, height "
                "and width. Set augmentation to null."
            )
        if self.fill == "reflect" and self.padding >= min(images.shape[2:]):
            raise ValueError(
                f"CropAndFlip: got padding {self.padding} for images of {images.shape[2]} x {images.shape[3]} pixels; "
                "with fill: reflect, images must be larger than the padding."
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


def _reflected(positions: Tensor, size: int) -> Tensor:
    """Mirrors positions outside of 0, ..., size - 1 at the outermost pixels, which are not doubled."""
    last = size - 1
    return last - (last - positions.abs()).abs()
