"""Items of one's own data: what may be given, how it is read, and which type it reaches the network in."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import IterableDataset

__all__ = ["as_input", "as_integers", "check_map_style", "network_dtype", "read_item", "sampled"]

# So many items of a map-style data set are looked at before training, evenly spread from the first to the last.
SAMPLED_ITEMS = 32


def check_map_style(dataset: Any) -> None:
    """Raises a ValueError unless a data set can be read by position."""
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise ValueError(
            f"Datasets: data sets must be map-style (with __len__ and __getitem__), got {type(dataset).__name__}; "
            "read an iterable one into a list of (input, label) pairs first"
        )


def read_item(dataset: Any, name: str, index: int) -> tuple[Tensor, int]:
    """Input and label of one item of a map-style data set.

    Args:
        dataset: what is read.
        name: train or test, for messages.
        index: of the item.

    Raises:
        ValueError: there is no item, it is no pair, its input is nothing that ``as_input`` takes, or its label is no
            integer.
    """
    where = f"Datasets: item {index} of {name}"
    if len(dataset) == 0:
        raise ValueError(f"Datasets: {name} has no items; give at least one training sample, and no test for none")
    pair = dataset[index]
    if not (isinstance(pair, tuple | list) and len(pair) == 2):
        got = f"{type(pair).__name__} of {len(pair)}" if isinstance(pair, tuple | list) else type(pair).__name__
        raise ValueError(f"{where} is a {got}; an item must be a pair: return input, label")
    label = as_integers(pair[1])
    if label is None or label.ndim != 0:
        raise ValueError(
            f"{where} has the label {pair[1]!r:.80}; a label must be one integer: return input, int(label)"
        )
    return as_input(pair[0], where), int(label)


def as_input(value: Any, where: str) -> Tensor:
    """Numbers as a tensor: floating ones as float32, which is what networks compute in, all others in their own type.

    Args:
        value: a tensor, a numpy array, a number or (nested) lists of numbers.
        where: what it is, for messages.

    Raises:
        ValueError: for anything else.
    """
    if not isinstance(value, Tensor | np.ndarray | np.generic | list | tuple | int | float):
        is_picture = any(kind.__module__.partition(".")[0] == "PIL" for kind in type(value).__mro__)
        fix = "give the data set transform=torchvision.transforms.ToTensor()" if is_picture else "convert it"
        raise ValueError(
            f"{where}: an input must be a tensor, a numpy array or a list of numbers, got {type(value).__name__}"
            f"{' (a PIL image)' if is_picture else ''}; {fix}"
        )
    if not isinstance(value, Tensor):
        try:
            value = torch.from_numpy(np.array(value, order="C"))  # copied, because torch wants to write where it reads
        except (TypeError, ValueError) as error:
            raise ValueError(f"{where}: {type(value).__name__} cannot become a tensor: {error}") from error
    tensor: Tensor = value.detach().cpu()
    return tensor.float() if tensor.is_floating_point() else tensor


def network_dtype(inputs: Tensor) -> torch.dtype:
    """The type in which a network gets such inputs: uint8 ones are scaled to float32, all others used as they are."""
    return torch.float32 if inputs.dtype == torch.uint8 else inputs.dtype


def sampled(number: int) -> list[int]:
    """At most ``SAMPLED_ITEMS`` of 0, ..., number - 1, evenly spread, both ends included."""
    return sorted({round(float(place)) for place in np.linspace(0, number - 1, min(number, SAMPLED_ITEMS))})


def as_integers(value: Any) -> NDArray[Any] | None:
    """An array of integers, or None for what is something else."""
    try:
        array = np.asarray(value)
    except (TypeError, ValueError):
        return None
    return array if array.dtype.kind in "iu" else None
