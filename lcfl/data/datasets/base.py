"""The base class of all data sets."""

from abc import ABC, abstractmethod

import torch

from lcfl.core.validation import CheckedFields
from lcfl.data.augmentation import Augmentation
from lcfl.data.owners import Owners
from lcfl.data.samples import Samples
from lcfl.data.spec import SampleSpec

__all__ = ["FederatedDataset"]


class FederatedDataset(CheckedFields, ABC):
    """A source of `Samples` that knows what a sample looks like before all of them are read.

    Attributes:
        shape: shape of one input; (channels, height, width) for images.
        num_classes: number of classes; None if targets are not classes.
        dtype: type in which a network gets the inputs.
        target_shape: shape of one target; () for a class.
        target_dtype: type in which a loss gets the targets.
        classes: names of the classes 0, ..., C - 1; None if they have none.
        columns: names of the numbers in an input, and then of those in a target; None if they have none.
        augmentation: changes the inputs of training batches; None if nothing changes them.
    """

    shape: tuple[int, ...]
    num_classes: int | None
    dtype: torch.dtype = torch.float32
    target_shape: tuple[int, ...] = ()
    target_dtype: torch.dtype = torch.int64
    classes: tuple[str, ...] | None = None
    columns: tuple[str, ...] | None = None
    augmentation: Augmentation | None = None

    @property
    def spec(self) -> SampleSpec:
        """What one sample looks like."""
        return SampleSpec(self.shape, self.dtype, self.num_classes, self.target_shape, self.target_dtype)

    def owners(self, by: str | None = None) -> Owners | None:
        """Returns who each sample belongs to; None if the data set does not know.

        It is called before ``load``, and more than once.

        Args:
            by: the name of a column or attribute with the owner of each sample; None for the data set's own owners.

        Raises:
            ValueError: if there is no such column.
        """
        return None

    def place_of(self, index: int) -> tuple[str, int] | None:
        """Returns the file of a sample and its row there, from 1; None if the data set does not know."""
        return None

    def new_samples(self, path: str) -> tuple[Samples, list[tuple[str, int]]]:
        """Reads samples that are not part of the data set, for ``lcfl predict --data``.

        Args:
            path: a file of such samples, or a folder of files.

        Returns:
            The samples, whose targets mean nothing, and for each its file and its row there, from 1.

        Raises:
            ValueError: if samples of this data set do not come from files, or if a file is unusable.
        """
        raise ValueError(
            f"{type(self).__name__} has no method new_samples, which reads samples that are not part of it. Write a "
            "model with lcfl export --format torch_export, and give it the inputs in Python."
        )

    def prepare(self) -> None:
        """Downloads the files or verifies that they exist. Does nothing by default.

        It is called once, on one process.

        Raises:
            FileNotFoundError: if files are missing. The message says where they belong and how to get them.
        """

    @abstractmethod
    def load(self) -> Samples:
        """Reads all samples. It is called on every process after ``prepare``."""
