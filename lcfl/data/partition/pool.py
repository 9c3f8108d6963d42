"""The samples that a partition deals out. Shapes: S samples in the pool, M owners."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lcfl.data.owners import TEST, VAL, Owners

__all__ = ["Indices", "NoLabels", "Pool", "PoolOwners", "places_of"]

Indices = NDArray[np.int64]


class NoLabels(ValueError):
    """Raised by `Pool.labels` if targets are not classes."""


@dataclass(frozen=True, eq=False)
class PoolOwners:
    """Who owns the samples of a pool, and the test samples outside it.

    Args:
        names: the M owners.
        number: [S] the owner of each sample, as a place in ``names``.
        is_val: [S] whether its owner keeps the sample for validation.
        test: for each owner, its own test samples, as indices into all samples of the data set.
    """

    names: tuple[str, ...]
    number: Indices
    is_val: NDArray[np.bool_]
    test: list[Indices]


@dataclass(frozen=True, eq=False)
class Pool:
    """What a partition may know about the samples that it deals out.

    Args:
        size: S, the number of samples.
        classes: [S] class of every sample, >= 0; None if targets are not classes.
        owners: who owns the samples, if the data set knows.
    """

    size: int
    classes: Indices | None = None
    owners: PoolOwners | None = field(default=None, repr=False)

    @classmethod
    def of(cls, labels: "Pool | Indices | Any") -> "Pool":
        """Returns the pool of samples with these labels ``[S]``, or the pool itself.

        Raises:
            ValueError: if labels are not class numbers >= 0.
        """
        if isinstance(labels, Pool):
            return labels
        classes = np.asarray(labels)
        if classes.ndim != 1 or classes.dtype.kind not in "iu":
            raise ValueError(f"labels must be one integer per sample, got shape {classes.shape} of {classes.dtype}")
        if classes.size and classes.min() < 0:
            raise ValueError(f"labels must be class numbers >= 0, got the label {classes.min()}")
        return cls(len(classes), classes.astype(np.int64, copy=False))

    @classmethod
    def of_owners(cls, size: int, classes: Indices | None, owners: Owners | None, keeps_parts: bool) -> "Pool":
        """Returns the pool of the first `size` samples of a data set.

        Args:
            size: S.
            classes: the class of every sample of the data set, or None.
            owners: who owns every sample of the data set, or None.
            keeps_parts: whether the owners' own validation and test samples keep their parts.
        """
        if owners is None:
            return cls(size, None if classes is None else classes[:size])
        own_test: list[Indices] = [np.empty(0, dtype=np.int64)] * len(owners.names)
        if keeps_parts:
            tests = np.flatnonzero(owners.part == TEST)
            own_test = [tests[own] for own in places_of(owners.number[tests], len(owners.names))]
        is_val = (owners.part[:size] == VAL) & keeps_parts
        known = PoolOwners(owners.names, owners.number[:size], is_val, own_test)
        return cls(size, None if classes is None else classes[:size], known)

    def __len__(self) -> int:
        """Returns S."""
        return self.size

    @property
    def labels(self) -> Indices:
        """The class of every sample ``[S]``.

        Raises:
            NoLabels: If targets are not classes, so that no partition by label is possible.
        """
        if self.classes is None:
            raise NoLabels(
                "it deals samples out by their class, but this data set has no classes; if its targets are classes, "
                "set num_classes, else use IID, Quantity, ByOwner or FromFile, which do not look at targets"
            )
        return self.classes

    def take(self, part: Indices) -> "Pool":
        """Returns the pool of some of the samples. Their new index is their place in `part`."""
        owners = self.owners
        if owners is not None:
            owners = replace(owners, number=owners.number[part], is_val=owners.is_val[part])
        return Pool(len(part), None if self.classes is None else self.classes[part], owners)


def places_of(number: Indices, num_owners: int) -> list[Indices]:
    """Returns the places of each owner's samples in `number` ``[n]``, in ascending order."""
    order = np.argsort(number, kind="stable")
    return np.split(order, np.cumsum(np.bincount(number, minlength=num_owners))[:-1])
