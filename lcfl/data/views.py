"""How one client sees images: pure functions of a batch. Shapes: B images in a batch, S images in all."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lcfl.data.samples import Samples

__all__ = ["Noise", "QuarterTurns", "Relabelling", "ViewedSamples", "View", "seen_labels", "standard_normal"]


@dataclass(frozen=True)
class View:
    """How one client sees a batch: by itself, as it is.

    A view of one's own is a frozen dataclass, too, because clients with equal views share what is computed, and a
    view's text is part of a run's fingerprint.
    """

    def inputs(self, inputs: Tensor, indices: Tensor) -> Tensor:
        """New inputs [B, ...] from those [B, ...] of the images number ``indices`` [B]; on the inputs' device."""
        return inputs

    def targets(self, targets: Tensor) -> Tensor:
        """New labels [B] from labels [B]."""
        return targets


@dataclass(frozen=True)
class QuarterTurns(View):
    """Images [B, C, H, W] turned counter-clockwise by ``number`` times 90 degrees."""

    number: int

    def inputs(self, inputs: Tensor, indices: Tensor) -> Tensor:
        """Moves pixels only."""
        return inputs if self.number == 0 else torch.rot90(inputs, self.number, dims=(-2, -1)).contiguous()


@dataclass(frozen=True)
class Noise(View):
    """Added Gaussian noise of standard deviation ``sigma``, from the stream of ``key``."""

    sigma: float
    key: int

    def inputs(self, inputs: Tensor, indices: Tensor) -> Tensor:
        """The noise of an image depends on key and index alone."""
        if self.sigma == 0:
            return inputs
        noise = standard_normal(self.key, indices, inputs[0].numel())
        return inputs + self.sigma * noise.to(inputs.dtype).reshape(inputs.shape)


@dataclass(frozen=True)
class Relabelling(View):
    """Label l becomes ``labels[l]``."""

    labels: tuple[int, ...]

    def targets(self, targets: Tensor) -> Tensor:
        """A look-up on the labels' device."""
        return torch.tensor(self.labels, device=targets.device)[targets]


def seen_labels(labels: NDArray[np.int64], views: Sequence[View]) -> NDArray[np.int64]:
    """Labels [B] after every view, in this order."""
    targets = torch.from_numpy(labels)
    for view in views:
        targets = view.targets(targets)
    return targets.numpy()


class ViewedSamples(Samples):
    """All images of a data set as some clients see them.

    Args:
        samples: the images as they are.
        views: what their batches go through, in this order.
    """

    def __init__(self, samples: Samples, views: tuple[View, ...]) -> None:
        targets = torch.from_numpy(seen_labels(samples.targets, views))
        super().__init__(targets, samples.num_train, samples.num_classes)
        self.samples, self.views = samples, views

    def batch(self, indices: NDArray[np.int64] | Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """The batch as it is, then every view of it."""
        return self._seen(self.samples.batch(indices, device), indices)

    def training_batch(self, indices: NDArray[np.int64] | Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """The training batch, augmented where that is so, then every view of it."""
        return self._seen(self.samples.training_batch(indices, device), indices)

    def is_random(self, training: bool) -> bool:
        """As of the images themselves: views are functions."""
        return self.samples.is_random(training)

    def pixels(self, inputs: Tensor) -> Tensor:
        """As of the images themselves: turns stay, and noise is scaled back with them."""
        return self.samples.pixels(inputs)

    def _seen(self, batch: tuple[Tensor, Tensor], indices: NDArray[np.int64] | Tensor) -> tuple[Tensor, Tensor]:
        inputs, targets = batch
        numbers = torch.as_tensor(indices, dtype=torch.int64).to(inputs.device)
        for view in self.views:
            inputs, targets = view.inputs(inputs, numbers), view.targets(targets)
        return inputs, targets

    def fingerprint(self) -> str:
        """SHA-256 of the images and the views."""
        return hashlib.sha256(f"{self.samples.fingerprint()}/{self.views}".encode()).hexdigest()


def standard_normal(key: int, indices: Tensor, num_values: int) -> Tensor:
    """[B, num_values] standard normal numbers, each a function of key, index and position alone, in float32.

    A counter-based generator, because a generator for each image could not fill a batch on a GPU at once: the
    counters, mixed by the function of SplitMix64 (Steele et al., 2014), give two uniform numbers of 24 bits, and
    these two normal ones (Box and Muller).

    Args:
        key: of the stream, 0 to 2**63 - 1.
        indices: [B] int64, >= 0.
        num_values: per index.
    """
    half = (num_values + 1) // 2
    position = torch.arange(2 * half, device=indices.device).reshape(2, 1, half)
    bits = _mixed((indices.reshape(1, -1, 1) * (2 * half) + position) * _GAMMA + key)
    first, second = (bits >> 40) & (2**24 - 1)
    radius = (-2 * ((first + 1).float() / 2**24).log()).sqrt()
    angle = second.float() * (2 * math.pi / 2**24)
    return torch.cat([radius * angle.cos(), radius * angle.sin()], dim=1)[:, :num_values]


# Of SplitMix64, as signed numbers; products and sums are modulo 2**64.
_GAMMA, _FIRST, _SECOND = (number - 2**64 for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _mixed(state: Tensor) -> Tensor:
    """64 bits in which every bit of the state has a part."""
    state = (state ^ ((state >> 30) & (2**34 - 1))) * _FIRST
    state = (state ^ ((state >> 27) & (2**37 - 1))) * _SECOND
    return state ^ ((state >> 31) & (2**33 - 1))
