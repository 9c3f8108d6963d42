"""What `Folders` asks of a reader, and what all readers share.

Shapes: S samples in all, those of the parts one after another.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any, ClassVar, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lcfl.core.validation import CheckedFields, abbreviated, shortened
from lcfl.data.datasets.client_files import PartFiles, refuse
from lcfl.data.names import composed

__all__ = ["Contents", "Reader", "number_classes", "refuse_non_finite", "refuse_unreadable"]

LEADING_ZERO = re.compile(r"\s*[+-]?0\d")


@dataclass(frozen=True, eq=False)
class Contents:
    """What the files of all clients hold.

    Attributes:
        counts: the number of samples of each part.
        shape: the shape of one input, as a network gets it.
        dtype: the type in which a network gets the inputs.
        targets: [S, ...] class numbers or other targets.
        classes: the names of the classes; None if targets are not classes.
        inputs: a function that returns the inputs [S, ...] of all samples. Ranks may be started with it, so it must be
            picklable.
        mean: subtracted from each channel of the inputs.
        std: by which each channel is divided.
        columns: the names of the numbers in an input and in a target; None if they have none.
        in_files: the number of samples of each file, in the order of the paths of the parts; None if it is not known.
    """

    counts: list[int]
    shape: tuple[int, ...]
    dtype: torch.dtype
    targets: Tensor | NDArray[Any]
    classes: tuple[str, ...] | None
    inputs: Callable[[], Tensor]
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    columns: tuple[str, ...] | None = None
    in_files: Sequence[int] | None = None

    def among(self, classes: Sequence[str]) -> "Contents":
        """Returns the same with the numbers that the classes have in a longer list.

        Raises:
            ValueError: if targets are not classes, or if the list does not name a class once that has samples.
        """
        if self.classes is None:
            raise ValueError("classes: the targets are not classes; leave it out")
        if len(set(classes)) < len(classes):
            raise ValueError(f"classes: got {abbreviated(classes)}; name each class once")
        if unknown := [name for name in self.classes if name not in classes]:
            number = (np.asarray(self.targets) == self.classes.index(unknown[0])).sum()
            raise ValueError(
                f"classes: got {abbreviated(classes)}, but {number} samples are {unknown[0]!r}. Name this class, too, "
                "or correct the files"
            )
        number = np.array([list(classes).index(name) for name in self.classes], dtype=np.int64)
        return replace(self, targets=number[np.asarray(self.targets)], classes=tuple(classes))


class Reader(CheckedFields, ABC):
    """Reads the samples of clients from files of one kind.

    Attributes:
        suffixes: the ends, in small letters, of the names of files with samples.
    """

    suffixes: ClassVar[tuple[str, ...]]

    @abstractmethod
    def open(self, parts: Sequence[PartFiles]) -> Contents:
        """Finds out what the files hold. Inputs may be read later, by ``Contents.inputs``.

        Args:
            parts: the parts of all clients, in the order of the samples.

        Raises:
            ValueError: if a file is unusable or does not fit the first one. The message names the client and the file.
        """

    def new_inputs(self, part: PartFiles, first: PartFiles) -> tuple[Tensor, list[int]]:
        """Reads inputs whose targets need not be known.

        Args:
            part: the files.
            first: the first part of the data set, whose inputs they must be like.

        Returns:
            The inputs [n, ...] as ``Contents.inputs`` returns them, and the number of samples of each file.

        Raises:
            ValueError: if this reader cannot do so, or if a file is unusable. The message names the file.
        """
        raise ValueError(
            f"{type(self).__name__} has no method new_inputs, which reads inputs without targets. Define it, or write "
            "a model with lcfl export --format torch_export and give it the inputs in Python."
        )


def refuse_unreadable(part: PartFiles, path: str, error: Exception) -> NoReturn:
    """Raises a ValueError for a file that cannot be read."""
    refuse(part.client, path, f"it cannot be read ({type(error).__name__}: {shortened(str(error), 200)})")


def refuse_non_finite(part: PartFiles, path: str, values: NDArray[Any], name: Callable[..., str]) -> None:
    """Refuses NaN and infinity in an array of numbers.

    Args:
        part: the part that the file belongs to.
        path: the file.
        values: the array [n, ...].
        name: turns the index of a value into words.
    """
    if values.dtype.kind != "f" or np.isfinite(values).all():
        return
    place = tuple(int(each) for each in np.argwhere(~np.isfinite(values))[0])
    refuse(part.client, path, f"{name(*place)} is {values[place]}; drop or replace such values")


def number_classes(values: Iterable[str]) -> tuple[tuple[str, ...], NDArray[np.int64]]:
    """Numbers classes 0, ..., C - 1 in sorted order: by number if all of them are whole numbers.

    Args:
        values: [S] the class of each sample. Whole numbers may be written in several ways, such as 1 and 1.0. A leading
            zero makes a code of it, which is text.

    Returns:
        The names of the classes, and the number of the class of each sample [S].
    """
    column = list(values)
    distinct = set(column)
    whole = {value: _whole(value) for value in distinct}
    if all(number is not None for number in whole.values()):
        name_of = {value: str(number) for value, number in whole.items()}
        names = tuple(sorted(set(name_of.values()), key=int))
    else:
        name_of = {value: composed(value) for value in distinct}
        names = tuple(sorted(set(name_of.values())))
    number_of = {name: number for number, name in enumerate(names)}
    place = {value: number_of[name] for value, name in name_of.items()}
    return names, np.fromiter(map(place.__getitem__, column), dtype=np.int64, count=len(column))


def _whole(value: str) -> int | None:
    """Returns the whole number that a text stands for, or None."""
    if "_" in value or LEADING_ZERO.match(value):  # Python reads 1_0 and 010 as 10
        return None
    try:
        return int(value)
    except ValueError:
        pass
    try:
        number = float(value)
    except ValueError:
        return None
    return int(number) if isfinite(number) and number.is_integer() else None
