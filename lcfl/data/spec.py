"""What one sample of a data set looks like, known before any file is read. Shapes: B samples in a batch."""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["SampleSpec"]


@dataclass(frozen=True)
class SampleSpec:
    """Shapes and types of one sample, as a network and a loss get them.

    Attributes:
        shape: the shape of one input.
        dtype: the type of the inputs.
        num_classes: C, if each target is the number of a class; None for any other target.
        target_shape: the shape of one target: ``()`` for a class or a number, ``(L,)`` for L labels or numbers,
            ``(H, W)`` for a mask, ``(T,)`` for a token at each of T places.
        target_dtype: the type of the targets: int64 for classes and tokens, float32 for numbers.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    num_classes: int | None = None
    target_shape: tuple[int, ...] = ()
    target_dtype: torch.dtype = torch.int64

    def blank(self, number: int) -> tuple[Tensor, Tensor]:
        """Returns inputs ``[number, ...]`` of ones, because zeros often mean padding, and targets of zeros."""
        inputs = torch.ones(number, *self.shape, dtype=self.dtype)
        return inputs, torch.zeros(number, *self.target_shape, dtype=self.target_dtype)
