"""User-defined data sets."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from lcfl.core import rng
from lcfl.data.augmentation import Augmentation
from lcfl.data.conversion import as_input, as_targets, check_map_style, network_dtype, read_item, target_dtype
from lcfl.data.dataset_samples import DatasetSamples
from lcfl.data.datasets.base import FederatedDataset
from lcfl.data.owners import Owners
from lcfl.data.samples import Samples, TensorSamples

__all__ = ["Datasets", "Tensors"]

MOST_CLASSES = 10_000  # that labels without num_classes may mean, unless there are as many samples


class Tensors(FederatedDataset):
    """User-defined data as tensors or numpy arrays, for use from Python.

    Args:
        train: inputs [S, ...] and targets [S, ...]. uint8 inputs are scaled to 0..1, floating-point inputs become
            float32, and other integers keep their type. Targets of one integer each are labels, the numbers of classes.
            Others are whatever the loss takes: numbers, vectors, masks, tokens.
        test: the official test samples in the same form, if there are any.
        num_classes: number of classes; None for the largest label + 1, and for targets that are not classes.
        augmentation: changes the inputs of training batches.
        owners: who each sample belongs to, as text or number: training samples first, then test samples. `ByOwner`
            makes each owner a client.

    Raises:
        ValueError: if ``train`` or ``test`` is not a pair, there are no samples, or inputs, targets and owners do not
            fit together.
    """

    def __init__(
        self,
        train: tuple[Tensor | NDArray[Any], Tensor | NDArray[Any]],
        test: tuple[Tensor | NDArray[Any], Tensor | NDArray[Any]] | None = None,
        num_classes: int | None = None,
        augmentation: Augmentation | None = None,
        owners: Sequence[object] | NDArray[Any] | None = None,
    ) -> None:
        self.augmentation = augmentation
        self._parts = [_pair_of_tensors("train", train)]
        if test is not None:
            self._parts.append(_pair_of_tensors("test", test))
        first, first_targets = self._parts[0]
        self.shape, self.dtype = tuple(first.shape[1:]), network_dtype(first)
        self.target_shape, self.target_dtype = tuple(first_targets.shape[1:]), target_dtype(first_targets)
        for inputs, targets in self._parts:
            if len(inputs) != len(targets) or tuple(inputs.shape[1:]) != self.shape or inputs.dtype != first.dtype:
                raise ValueError(
                    f"Tensors: expected as many inputs as targets, each input {self.shape} of {first.dtype}; got "
                    f"inputs {tuple(inputs.shape)} of {inputs.dtype} and {len(targets)} targets"
                )
            if tuple(targets.shape[1:]) != self.target_shape or target_dtype(targets) != self.target_dtype:
                raise ValueError(
                    f"Tensors: targets of train and test must be alike, got {tuple(first_targets.shape)} of "
                    f"{first_targets.dtype} and {tuple(targets.shape)} of {targets.dtype}"
                )
        total = sum(len(targets) for _, targets in self._parts)
        if total == 0:
            raise ValueError("Tensors: got no samples; give at least one training sample")
        has_labels = self.target_shape == () and self.target_dtype == torch.int64
        if num_classes is not None and not has_labels:
            raise ValueError(
                f"Tensors: labels must be one integer per sample, got shape {tuple(first_targets.shape)} of "
                f"{first_targets.dtype}; convert labels with .long(), or leave num_classes out if they are no classes"
            )
        if num_classes is None and has_labels:
            largest = max(int(targets.to(torch.int64).max()) for _, targets in self._parts if len(targets))
            if largest >= max(MOST_CLASSES, total):
                raise ValueError(
                    f"Tensors: got the label {largest} among {total} samples; labels are numbers of classes from 0 on: "
                    "renumber them, or set num_classes if there are so many"
                )
            num_classes = 1 + largest
        self.num_classes = num_classes
        if augmentation is not None and len(self.target_shape) > 1:
            raise ValueError(
                "Tensors: an augmentation changes inputs alone, so these masks would no longer fit; augment both in a "
                "data set of your own (Datasets)"
            )
        if owners is not None and len(owners) != total:
            raise ValueError(f"Tensors: got {len(owners)} owners for {total} samples; give one for each")
        self._owners = None if owners is None else Owners.of_column(owners, len(first))

    def load(self) -> Samples:
        """Returns the training samples, then the test samples."""
        inputs, targets = (torch.cat(tensors) for tensors in zip(*self._parts, strict=True))
        num_train = len(self._parts[0][1])
        return TensorSamples(inputs, targets, num_train, self.num_classes, augmentation=self.augmentation)

    def owners(self, by: str | None = None) -> Owners | None:
        """Returns the owners that were given."""
        if by is not None:
            raise ValueError(f"Tensors: there is no column {by!r}; give owners, and no column")
        return self._owners


class Datasets(FederatedDataset):
    """User-defined map-style data sets of (input, target) pairs, from Python or as class paths in YAML.

    An input is a tensor, a numpy array, a number or a list of numbers. All inputs must have the same shape and type.
    Floating-point inputs become float32, uint8 inputs are scaled to 0..1, and other integers keep their type. A target
    is one integer, the number of a class, if there is a ``num_classes``. Otherwise it is whatever the loss takes, in
    the same form as an input. The owners of samples, for `ByOwner`, are an attribute of the data sets, with one entry
    per item.

    Args:
        train: the training samples.
        num_classes: number of classes; None if targets are not classes.
        test: the official test samples, if there are any.

    Raises:
        ValueError: if a data set cannot be read by position or its first item is unusable.
    """

    # Dataset has no type argument, because jsonargparse accepts no init_args for subclasses of Dataset[Any].
    def __init__(
        self,
        train: Dataset,  # type: ignore[type-arg]
        num_classes: int | None = None,
        test: Dataset | None = None,  # type: ignore[type-arg]
    ) -> None:
        for part in (train,) if test is None else (train, test):
            check_map_style(part)
        self.train, self.test, self.num_classes = train, test, num_classes
        with rng.seeded(0, "read items"):
            first, target = read_item(train, "train", 0, num_classes is not None)
        self.shape, self.dtype = tuple(first.shape), network_dtype(first)
        self.target_shape, self.target_dtype = tuple(target.shape), target_dtype(target)

    def load(self) -> Samples:
        """Returns the data sets unchanged, under one index."""
        return DatasetSamples(self.train, self.test, self.num_classes)

    def owners(self, by: str | None = None) -> Owners | None:
        """Returns the owners in the attribute `by` of the data sets."""
        if by is None:
            return None
        columns = []
        for name, part in {"train": self.train, "test": self.test}.items():
            column = None if part is None else getattr(part, by, None)
            if part is not None and (column is None or len(column) != len(part)):  # type: ignore[arg-type]
                raise ValueError(
                    f"Datasets: {name} has no attribute {by!r} with one owner for each of its "
                    f"{len(part)} items; add it to your data set"  # type: ignore[arg-type]
                )
            columns += [] if column is None else [np.asarray(column)]
        return Owners.of_column(np.concatenate(columns), len(columns[0]))


def _pair_of_tensors(name: str, pair: Any) -> tuple[Tensor, Tensor]:
    """Returns inputs and targets as tensors."""
    if not (isinstance(pair, tuple | list) and len(pair) == 2):
        raise ValueError(f"Tensors: {name} must be a pair (inputs, targets), got {type(pair).__name__}")
    inputs, targets = as_input(pair[0], f"Tensors: {name} inputs"), as_targets(pair[1], f"Tensors: {name} targets")
    if inputs.ndim == 0 or targets.ndim == 0:
        raise ValueError(
            f"Tensors: {name} must be inputs [S, ...] and targets [S, ...], got shapes {tuple(inputs.shape)} and "
            f"{tuple(targets.shape)}"
        )
    return inputs, targets
