"""What every data set is."""

from abc import ABC, abstractmethod

import torch

from lcfl.data.augmentation import Augmentation
from lcfl.data.samples import Samples

__all__ = ["FederatedDataset"]


class FederatedDataset(ABC):
    """A source of ``Samples`` that knows its shape and classes before a file is read.

    Attributes:
        shape: of one input, images as (channels, height, width).
        num_classes: number of labels.
        dtype: type of the inputs that a network gets.
        augmentation: what changes the inputs of training batches; None for nothing.
    """

    shape: tuple[int, ...]
    num_classes: int
    dtype: torch.dtype = torch.float32
    augmentation: Augmentation | None = None

    def prepare(self) -> None:  # noqa: B027 - most sources have nothing to prepare
        """Downloads, or verifies that the files are there; called once, on one process. Does nothing by default.

        Raises:
            FileNotFoundError: files are missing; the message says where and how to get them.
        """

    @abstractmethod
    def load(self) -> Samples:
        """Reads everything; called on every process after ``prepare``."""
