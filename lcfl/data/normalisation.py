"""Normalisation of raw inputs by a scale and a shift per channel."""

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["Affine", "affine_of", "normalised", "unnormalised"]

# Scale and shift of raw values, shaped to broadcast over a batch; None if the values are used unchanged.
Affine = tuple[Tensor, Tensor] | None


def affine_of(inputs: Tensor, mean: Sequence[float] | None, std: Sequence[float] | None) -> Affine:
    """Returns the scale and shift that normalise raw values, shaped to broadcast over a batch."""
    full = 255.0 if inputs.dtype == torch.uint8 else 1.0
    if mean is None and std is None:
        return None if full == 1.0 else (torch.tensor(1 / full), torch.tensor(0.0))
    channels = inputs.shape[1] if inputs.ndim > 1 else 1
    if mean is None or std is None or not len(mean) == len(std) == channels or min(std) <= 0:
        raise ValueError(
            f"mean and std must each give {channels} numbers (one per channel), std > 0; got {mean}, {std}"
        )
    if inputs.dtype != torch.uint8 and not inputs.is_floating_point():
        raise ValueError(f"only uint8 and floating-point inputs can be normalised, got {inputs.dtype}; leave mean out")
    shape = (1, channels) + (1,) * (inputs.ndim - 2)
    deviations = torch.tensor(std, dtype=torch.float64)
    scale = (1 / (full * deviations)).float().reshape(shape)
    shift = (-torch.tensor(mean, dtype=torch.float64) / deviations).float().reshape(shape)
    return scale, shift


def normalised(inputs: Tensor, affine: Affine) -> Tensor:
    """Applies scale and shift, in place if the inputs are floating-point numbers."""
    if affine is None:
        return inputs
    scale, shift = affine
    return (inputs if inputs.is_floating_point() else inputs.float()).mul_(scale).add_(shift)


def unnormalised(inputs: Tensor, affine: Affine) -> Tensor:
    """Undoes scale and shift, up to rounding."""
    if affine is None:
        return inputs
    scale, shift = (coefficient.to(inputs.device) for coefficient in affine)
    return (inputs - shift) / scale
