"""User-defined data sets."""

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from lcfl.core import rng
from lcfl.data.augmentation import Augmentation
from lcfl.data.conversion import as_input, check_map_style, network_dtype, read_item
from lcfl.data.datasets.base import FederatedDataset
from lcfl.data.samples import DatasetSamples, Samples, TensorSamples

__all__ = ["Datasets", "Tensors"]


class Tensors(FederatedDataset):
    """User-defined data as tensors or numpy arrays, for use from Python.

    Args:
        train: inputs [S, ...] and integer labels [S]. uint8 inputs are scaled to 0..1, floating-point inputs become
            float32, and other integers keep their type.
        test: the official test samples in the same form, if there are any.
        num_classes: number of labels; None for the largest label + 1.
        augmentation: changes the inputs of training batches.

    Raises:
        ValueError: If ``train`` or ``test`` is not a pair, there are no samples, or inputs and labels do not fit
            together.
    """

    def __init__(
        self,
        train: tuple[Tensor | NDArray[Any], Tensor | NDArray[Any]],
        test: tuple[Tensor | NDArray[Any], Tensor | NDArray[Any]] | None = None,
        num_classes: int | None = None,
        augmentation: Augmentation | None = None,
    ) -> None:
        self.augmentation = augmentation
        self._parts = [_pair_of_tensors("train", train)]
        if test is not None:
            self._parts.append(_pair_of_tensors("test", test))
        first, _ = self._parts[0]
        self.shape, self.dtype = tuple(first.shape[1:]), network_dtype(first)
        for inputs, targets in self._parts:
            if len(inputs) != len(targets) or tuple(inputs.shape[1:]) != self.shape or inputs.dtype != first.dtype:
                raise ValueError(
                    f"Tensors: expected as many inputs as labels, each input {self.shape} of {first.dtype}; got inputs "
                    f"{tuple(inputs.shape)} of {inputs.dtype} and {len(targets)} labels"
                )
        labels = torch.cat([targets for _, targets in self._parts])
        if num_classes is None and len(labels) == 0:
            raise ValueError("Tensors: got no samples; give at least one training sample")
        self.num_classes = int(labels.max()) + 1 if num_classes is None else num_classes

    def load(self) -> Samples:
        """Returns the training samples, then the test samples."""
        inputs, targets = (torch.cat(tensors) for tensors in zip(*self._parts, strict=True))
        num_train = len(self._parts[0][1])
        return TensorSamples(inputs, targets, num_train, self.num_classes, augmentation=self.augmentation)


class Datasets(FederatedDataset):
    """User-defined map-style data sets of (input, label) pairs, from Python or as class paths in YAML.

    An input is a tensor, a numpy array, a number or a list of numbers. All inputs must have the same shape and type.
    Floating-point inputs become float32, uint8 inputs are scaled to 0..1, and other integers keep their type. A label
    is one integer.

    Args:
        train: the training samples.
        num_classes: number of labels.
        test: the official test samples, if there are any.

    Raises:
        ValueError: If a data set cannot be read by position or its first item is unusable.
    """

    # Dataset has no type argument, because jsonargparse accepts no init_args for subclasses of Dataset[Any].
    def __init__(self, train: Dataset, num_classes: int, test: Dataset | None = None) -> None:  # type: ignore[type-arg]
        for part in (train,) if test is None else (train, test):
            check_map_style(part)
        self.train, self.test, self.num_classes = train, test, num_classes
        with rng.seeded(0, "read items"):
            first, _ = read_item(train, "train", 0)
        self.shape, self.dtype = tuple(first.shape), network_dtype(first)

    def load(self) -> Samples:
        """Returns the data sets unchanged, under one index."""
        return DatasetSamples(self.train, self.test, self.num_classes)


def _pair_of_tensors(name: str, pair: Any) -> tuple[Tensor, Tensor]:
    """Returns inputs and labels as tensors."""
    if not (isinstance(pair, tuple | list) and len(pair) == 2):
        raise ValueError(f"Tensors: {name} must be a pair (inputs, labels), got {type(pair).__name__}")
    inputs, labels = as_input(pair[0], f"Tensors: {name} inputs"), as_input(pair[1], f"Tensors: {name} labels")
    if inputs.ndim == 0 or labels.ndim != 1:
        raise ValueError(
            f"Tensors: {name} must be inputs [S, ...] and labels [S], got shapes {tuple(inputs.shape)} and "
            f"{tuple(labels.shape)}"
        )
    return inputs, labels
