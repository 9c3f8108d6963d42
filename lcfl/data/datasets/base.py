"""The base class of all data sets."""

from abc import ABC, abstractmethod

import torch

from lcfl.core.validation import CheckedFields
from lcfl.data.augmentation import Augmentation
from lcfl.data.samples import Samples

__all__ = ["FederatedDataset"]


class FederatedDataset(CheckedFields, ABC):
    """A source of `Samples` that knows its shape and classes before any file is read.

    Attributes:
        shape: shape of one input; (channels, height, width) for images.
        num_classes: number of labels.
        dtype: type in which a network gets the inputs.
        augmentation: changes the inputs of training batches; None if nothing changes them.
    """

    shape: tuple[int, ...]
    num_classes: int
    dtype: torch.dtype = torch.float32
    augmentation: Augmentation | None = None

    def prepare(self) -> None:
        """Downloads the files or verifies that they exist. Does nothing by default.

        It is called once, on one process.

        Raises:
            FileNotFoundError: If files are missing. The message says where they belong and how to get them.
        """

    @abstractmethod
    def load(self) -> Samples:
        """Reads all samples. It is called on every process after ``prepare``."""
