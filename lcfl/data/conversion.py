"""Conversion of user-defined data: which items are accepted, how they are read, and which type the network gets."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import IterableDataset

from lcfl.core.validation import shortened

__all__ = [
    "as_input",
    "as_integers",
    "as_targets",
    "check_map_style",
    "evenly_spaced",
    "network_dtype",
    "read_item",
    "target_dtype",
]

# Number of items of a map-style data set that are inspected before training, evenly spread from the first to the last.
SAMPLED_ITEMS = 32


def check_map_style(dataset: Any) -> None:
    """Raises a ``ValueError`` unless a data set can be read by position."""
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise ValueError(
            f"Datasets: data sets must be map-style (with __len__ and __getitem__), got {type(dataset).__name__}; "
            "convert an iterable data set into a list of (input, target) pairs first"
        )


def read_item(
    dataset: Any, name: str, index: int, is_class: bool = True, source: str = "Datasets"
) -> tuple[Tensor, Tensor]:
    """Reads input and target of one item of a map-style data set.

    Args:
        dataset: the data set to read from.
        name: ``train`` or ``test``, for messages.
        index: position of the item.
        is_class: whether the target must be the number of a class.
        source: the class that the user has named, for messages.

    Raises:
        ValueError: if the data set has no items or fails, the item is not a pair, `as_input` does not accept its input,
            its label is not an integer, or `as_targets` does not accept its target.
    """
    where = f"{source}: item {index} of {name}"
    if len(dataset) == 0:
        raise ValueError(
            f"{source}: {name} has no items; give at least one training sample, and leave test out if there are no "
            "test samples"
        )
    try:
        item = dataset[index]
    except Exception as error:
        raise ValueError(f"{where} cannot be read: {type(error).__name__}: {shortened(str(error))}") from error
    if not (isinstance(item, tuple | list) and len(item) == 2):
        got = f"{type(item).__name__} of {len(item)}" if isinstance(item, tuple | list) else type(item).__name__
        raise ValueError(f"{where} is a {got}; an item must be a pair: return input, target")
    _refuse_several(item[0], f"{where}: an input")
    _refuse_several(item[1], f"{where}: a target")
    if not is_class:
        return as_input(item[0], where), as_targets(item[1], where)
    label = as_integers(item[1])
    if label is None or label.ndim != 0:
        raise ValueError(
            f"{where} has the label {item[1]!r:.80}; a label must be one integer: return input, int(label). If targets "
            "are not classes, leave num_classes out."
        )
    return as_input(item[0], where), torch.tensor(int(label))


def _refuse_several(value: Any, what: str) -> None:
    """Raises a ``ValueError`` for several tensors in place of one, which would be stacked if their shapes are equal."""
    if isinstance(value, tuple | list) and any(isinstance(each, Tensor | np.ndarray) and each.ndim for each in value):
        raise ValueError(
            f"{what} is a {type(value).__name__} of {len(value)} tensors; it must be one tensor. Join them, e.g. "
            "torch.stack([ids, mask]) or torch.cat([image.flatten(), age]), and take them apart in the network or loss"
        )


def as_targets(value: Any, where: str) -> Tensor:
    """Returns targets of any kind as a tensor: real numbers as float32, whole numbers in their own type.

    Args:
        value: a tensor, a numpy array, a number or (nested) lists of numbers.
        where: where the value stands, for messages.

    Raises:
        ValueError: if the value is anything else, or holds NaN or infinity.
    """
    targets = as_input(value, where, "a target")
    if targets.is_floating_point() and not targets.isfinite().all():
        broken = torch.nonzero(~targets.isfinite())[0].tolist()
        raise ValueError(
            f"{where}: the targets hold NaN or infinity{f' (the first at {broken})' if broken else ''}, which no loss "
            "can be computed of; drop or replace the samples"
        )
    return targets


def target_dtype(targets: Tensor) -> torch.dtype:
    """Returns the type in which a loss gets these targets: float32 for real numbers and int64 for whole ones."""
    return torch.float32 if targets.is_floating_point() else torch.int64


def as_input(value: Any, where: str, what: str = "an input") -> Tensor:
    """Returns numbers as a tensor.

    Floating-point numbers become float32, which networks compute in. All others keep their type.

    Args:
        value: a tensor, a numpy array, a number or (nested) lists of numbers.
        where: where the value stands, for messages.
        what: what the value is, for messages.

    Raises:
        ValueError: if the value is anything else.
    """
    if not isinstance(value, Tensor | np.ndarray | np.generic | list | tuple | int | float):
        is_picture = any(kind.__module__.partition(".")[0] == "PIL" for kind in type(value).__mro__)
        fix = "give the data set transform=torchvision.transforms.ToTensor()" if is_picture else "convert it"
        raise ValueError(
            f"{where}: {what} must be a tensor, a numpy array or a list of numbers, got {type(value).__name__}"
            f"{' (a PIL image)' if is_picture else ''}; {fix}"
        )
    if not isinstance(value, Tensor):
        try:
            array = np.array(value, order="C")  # copied, because torch requires writable memory
            first = next(array.flat, None) if array.dtype.kind == "O" else None  # a column of pandas
            if array.dtype.kind in "US" or isinstance(first, str):
                raise ValueError("it is text; number its values, e.g. with numpy.unique(texts, return_inverse=True)")
            value = torch.from_numpy(array)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{where}: {type(value).__name__} cannot become a tensor: {error}") from error
    tensor: Tensor = value.detach().cpu()
    return tensor.float() if tensor.is_floating_point() else tensor


def network_dtype(inputs: Tensor) -> torch.dtype:
    """Returns the type in which a network gets these inputs: float32 for uint8, which is scaled, else the same type."""
    return torch.float32 if inputs.dtype == torch.uint8 else inputs.dtype


def evenly_spaced(number: int) -> list[int]:
    """Returns at most ``SAMPLED_ITEMS`` of 0, ..., number - 1, evenly spread, both ends included."""
    return sorted({round(float(position)) for position in np.linspace(0, number - 1, min(number, SAMPLED_ITEMS))})


def as_integers(value: Any) -> NDArray[Any] | None:
    """Returns the value as an array of integers, or None if it is anything else."""
    try:
        array = np.asarray(value)
    except (TypeError, ValueError):
        return None
    return array if array.dtype.kind in "iu" else None
