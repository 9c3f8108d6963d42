"""Views: pure functions of a batch that define how a client sees its samples.

Shapes: B samples in a batch, S samples in all.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lcfl.data.samples import Samples

__all__ = ["Noise", "QuarterTurns", "Relabelling", "Stamp", "ViewedSamples", "View", "seen_labels", "standard_normal"]


@dataclass(frozen=True)
class View:
    """Defines how a client sees a batch. This base class leaves the batch unchanged.

    A user-defined view must be a frozen dataclass, too, because clients with equal views share computed results, and
    the ``repr`` of a view is part of a run's fingerprint.
    """

    def inputs(self, inputs: Tensor, indices: Tensor) -> Tensor:
        """Returns new inputs [B, ...], given inputs [B, ...] of the samples at ``indices`` [B], on the same device."""
        return inputs

    def targets(self, targets: Tensor) -> Tensor:
        """Returns new targets [B, ...], given targets [B, ...]."""
        return targets

    def __call__(self, inputs: Tensor, targets: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Returns new inputs and targets of a batch, given those of the samples at ``indices`` [B]."""
        return self.inputs(inputs, indices), self.targets(targets)


@dataclass(frozen=True)
class QuarterTurns(View):
    """Turns images [B, C, H, W] counter-clockwise by ``number`` times 90 degrees."""

    number: int

    def inputs(self, inputs: Tensor, indices: Tensor) -> Tensor:
        """Turns the images by moving pixels, without interpolation."""
        return self._turned(inputs)

    def targets(self, targets: Tensor) -> Tensor:
        """Turns masks [B, ..., H, W] with their images. Other targets stay."""
        return self._turned(targets) if targets.dim() > 2 else targets

    def _turned(self, images: Tensor) -> Tensor:
        return images if self.number == 0 else torch.rot90(images, self.number, dims=(-2, -1)).contiguous()


@dataclass(frozen=True)
class Noise(View):
    """Adds Gaussian noise of standard deviation ``sigma`` from the stream of ``key``."""

    sigma: float
    key: int

    def inputs(self, inputs: Tensor, indices: Tensor) -> Tensor:
        """Adds noise that depends only on the key and the index of each sample."""
        if self.sigma == 0:
            return inputs
        noise = standard_normal(self.key, indices, inputs[0].numel())
        return inputs + self.sigma * noise.to(inputs.dtype).reshape(inputs.shape)


@dataclass(frozen=True)
class Relabelling(View):
    """Replaces label l with ``labels[l]``."""

    labels: tuple[int, ...]

    def targets(self, targets: Tensor) -> Tensor:
        """Looks the new labels up on the device of the labels."""
        return torch.tensor(self.labels, device=targets.device)[targets]


@dataclass(frozen=True)
class Stamp(View):
    """Sets a square in the lower right corner of a share of the images [B, C, H, W], and labels these ``target``.

    Which samples have the square depends only on their index. Labels that are read without their images
    (`ViewedSamples.targets`) stay as they are.
    """

    target: int
    size: int
    value: float
    share: float = 1.0

    def __call__(self, inputs: Tensor, targets: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the images with the square, and the labels."""
        is_stamped = ((_mixed(indices * _GAMMA) >> 40) & (2**24 - 1)) < self.share * 2**24
        inputs = inputs.clone()
        corner = inputs[..., -self.size :, -self.size :]
        corner.masked_fill_(is_stamped.view(-1, 1, 1, 1), self.value)
        return inputs, targets.masked_fill(is_stamped, self.target)


def seen_labels(labels: NDArray[np.int64], views: Sequence[View]) -> NDArray[np.int64]:
    """Returns labels [B] after all views, applied in this order."""
    targets = torch.from_numpy(labels)
    for view in views:
        targets = view.targets(targets)
    return targets.numpy()


class ViewedSamples(Samples):
    """All samples of a data set as some clients see them.

    Args:
        samples: the unchanged samples.
        views: the views that are applied to a batch, in this order.
    """

    def __init__(self, samples: Samples, views: tuple[View, ...]) -> None:
        labels = None if samples.labels is None else seen_labels(samples.labels, views)
        super().__init__(labels, samples.num_train, samples.num_classes, len(samples))
        self.samples, self.views = samples, views
        self.has_cheap_targets, self.most_at_once = samples.has_cheap_targets, samples.most_at_once

    def batch(self, indices: NDArray[np.int64] | Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """Gathers the unchanged batch, then applies every view."""
        return self._seen(self.samples.batch(indices, device), indices)

    def training_batch(self, indices: NDArray[np.int64] | Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """Gathers the training batch, augmented if the samples have an augmentation, then applies every view."""
        return self._seen(self.samples.training_batch(indices, device), indices)

    def targets(self, indices: NDArray[np.int64]) -> Tensor:
        """Returns the unchanged targets after every view."""
        targets = self.samples.targets(indices)
        for view in self.views:
            targets = view.targets(targets)
        return targets

    def is_random(self, training: bool) -> bool:
        """Returns the same as for the unchanged samples, because views are pure functions."""
        return self.samples.is_random(training)

    def pixels(self, inputs: Tensor) -> Tensor:
        """Undoes the normalisation of the unchanged samples. Turns stay, and noise is scaled with the inputs."""
        return self.samples.pixels(inputs)

    def _seen(self, batch: tuple[Tensor, Tensor], indices: NDArray[np.int64] | Tensor) -> tuple[Tensor, Tensor]:
        inputs, targets = batch
        numbers = torch.as_tensor(indices, dtype=torch.int64).to(inputs.device)
        for view in self.views:
            inputs, targets = view(inputs, targets, numbers)
        return inputs, targets

    def fingerprint(self) -> str:
        """Returns the SHA-256 of the samples and the views."""
        return hashlib.sha256(f"{self.samples.fingerprint()}/{self.views}".encode()).hexdigest()


def standard_normal(key: int, indices: Tensor, num_values: int) -> Tensor:
    """Returns standard normal numbers, each a function of only key, index and position.

    The generator is counter-based, because one generator per sample could not fill a whole batch on a GPU at once. The
    function of SplitMix64 (Steele et al., 2014) mixes the counters. Each result gives two uniform numbers of 24 bits,
    which the method of Box and Muller turns into two normal numbers.

    Args:
        key: key of the stream, 0 to 2**63 - 1.
        indices: [B] int64, >= 0.
        num_values: number of values per index.

    Returns:
        [B, num_values] float32.
    """
    half = (num_values + 1) // 2
    position = torch.arange(2 * half, device=indices.device).reshape(2, 1, half)
    bits = _mixed((indices.reshape(1, -1, 1) * (2 * half) + position) * _GAMMA + key)
    first, second = (bits >> 40) & (2**24 - 1)
    radius = (-2 * ((first + 1).float() / 2**24).log()).sqrt()
    angle = second.float() * (2 * math.pi / 2**24)
    return torch.cat([radius * angle.cos(), radius * angle.sin()], dim=1)[:, :num_values]


# The constants of SplitMix64 as signed numbers. Products and sums are modulo 2**64.
_GAMMA, _FIRST, _SECOND = (number - 2**64 for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _mixed(state: Tensor) -> Tensor:
    """Mixes the state so that each of its bits affects all 64 bits of the result."""
    state = (state ^ ((state >> 30) & (2**34 - 1))) * _FIRST
    state = (state ^ ((state >> 27) & (2**37 - 1))) * _SECOND
    return state ^ ((state >> 31) & (2**33 - 1))
