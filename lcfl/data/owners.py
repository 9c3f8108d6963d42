"""The owners of samples: the clients that a data set already has, such as writers, hospitals or devices.

Shapes: S samples in all, M owners.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lcfl.data.names import in_order

__all__ = ["TEST", "TRAIN", "VAL", "Owners"]

TRAIN, VAL, TEST = 0, 1, 2  # the parts of an owner's samples


@dataclass(frozen=True, eq=False)
class Owners:
    """Who each sample belongs to.

    Args:
        names: the M owners, each once.
        number: [S] the owner of each sample, as a place in ``names``.
        part: [S] ``TRAIN``, ``VAL`` or ``TEST``: what its owner uses the sample for. Test samples are the data set's
            official test samples.
    """

    names: tuple[str, ...]
    number: NDArray[np.int64]
    part: NDArray[np.int8]

    @classmethod
    def of_column(cls, values: Sequence[object] | NDArray[np.generic], num_train: int) -> "Owners":
        """Returns the owners that a column names, in the order of `in_order`.

        Args:
            values: [S] the owner of each sample, as text or number.
            num_train: the number of training samples, which come first. The others are test samples.

        Raises:
            ValueError: if a sample has no owner.
        """
        given = values.tolist() if isinstance(values, np.ndarray) else list(values)
        column = np.asarray(values)
        if column.dtype.kind == "f" and all(isinstance(value, int) for value in given):  # too large for int64
            column = np.array(given, dtype=object)
        missing = [n for n, value in enumerate(given) if _is_missing(value)]
        if missing:
            raise ValueError(
                f"{len(missing)} of {len(column)} samples have no owner (the first is sample {missing[0]}); give each "
                "sample an owner, or leave these samples out"
            )
        if column.dtype.kind == "S":
            column = np.char.decode(column, "utf-8")
        distinct, number = np.unique(column if column.dtype.kind in "iuf" else column.astype(str), return_inverse=True)
        part = np.where(np.arange(len(column)) < num_train, TRAIN, TEST).astype(np.int8)
        found = [str(each) for each in distinct.tolist()]
        names = found if column.dtype.kind in "iuf" else in_order(found)
        place = {name: position for position, name in enumerate(names)}
        return cls(tuple(names), np.array([place[name] for name in found], dtype=np.int64)[number], part)


def _is_missing(value: object) -> bool:
    try:
        return value is None or (isinstance(value, str) and not value.strip()) or bool(value != value)
    except TypeError:  # pandas' NA, which is neither equal nor unequal to anything
        return True
