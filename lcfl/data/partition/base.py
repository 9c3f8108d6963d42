"""The base class of all partitions, and the checks before and after each partition.

Shapes: S samples in the pool, N clients, C classes that occur in the pool.
"""

import inspect
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lcfl.core.validation import CheckedFields
from lcfl.data.partition.pool import Indices, NoLabels, Pool

__all__ = [
    "Indices",
    "Partition",
    "Pool",
    "ClientShares",
    "check_fractions",
    "check_sizes",
    "draw_fractions",
    "draw_sizes",
    "shuffled_classes",
]


@dataclass(frozen=True, eq=False)
class ClientShares:
    """Which samples of the pool each client holds.

    Args:
        indices: for each client, its sample indices, int64, ascending. No index occurs twice in a client.
        groups: [N] true group of each client if the partition knows the groups, else None.
        overlapping: whether an index may belong to several clients. Only partitions whose names say so may set it.
        names: the name of each client, if clients have names; no two are equal.
        val: for each client, which of its indices it keeps for validation. A client without any gets a random part.
        test: for each client, its own test samples, which are official test samples of the data set. A client without
            any is tested on a random part of its share.
    """

    indices: list[Indices]
    groups: Indices | None = None
    overlapping: bool = False
    names: tuple[str, ...] | None = None
    val: list[Indices] | None = None
    test: list[Indices] | None = None


class Partition(CheckedFields, ABC):
    """Deals the samples of a pool out to clients, as a pure function of pool, number of clients and generator."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "labels" in inspect.signature(cls.split).parameters:
            raise TypeError(
                f"{cls.__name__}.split: it takes a pool instead of labels since lcfl 0.2. Rename the argument to pool; "
                "pool.labels are the labels, and len(pool) is the number of samples."
            )

    def __call__(self, pool: Pool | Indices, num_clients: int, generator: np.random.Generator) -> ClientShares:
        """Deals the samples out and checks the result.

        Args:
            pool: the samples, or only their labels [S]: the integer class of every sample, >= 0.
            num_clients: N, at least 1.
            generator: source of all draws; equal generators give equal shares.

        Returns:
            N shares, each sorted and not empty. No index occurs twice, or if shares overlap, twice within a client.

        Raises:
            ValueError: if the arguments are unusable, or if these samples do not allow the partition.
        """
        name = type(self).__name__
        pool = _checked_pool(name, pool, num_clients)
        try:
            shares = self.split(pool, num_clients, generator)
        except NoLabels as error:
            raise ValueError(f"{name}: {error}") from None
        shares = _as_arrays(name, shares)
        _check_shares(name, shares, len(pool), num_clients)
        groups = None if shares.groups is None else np.asarray(shares.groups, dtype=np.int64)
        return replace(shares, indices=[np.sort(share) for share in shares.indices], groups=groups)

    @property
    def owner_column(self) -> str | None:
        """The column of the data set that names the owners of samples; None for the data set's own owners."""
        return None

    def num_clients(self, pool: Pool) -> int | None:
        """Returns the number of clients if the partition knows it; None if ``data.num_clients`` must say it.

        Args:
            pool: the samples, perhaps without their labels, because nothing has been loaded yet.
        """
        return None

    @abstractmethod
    def split(self, pool: Pool, num_clients: int, generator: np.random.Generator) -> ClientShares:
        """Applies the rule itself to checked arguments. Shares need not be sorted, and the caller checks them."""


def shuffled_classes(labels: Indices, generator: np.random.Generator) -> list[Indices]:
    """Returns the samples of each class that occurs, in random order. Classes are in ascending order."""
    order = np.argsort(labels, kind="stable")
    _, starts = np.unique(labels[order], return_index=True)
    return [generator.permutation(members) for members in np.split(order, starts[1:])]


def check_sizes(name: str, sizes: tuple[int, int] | None, minimum: int = 1) -> None:
    """Raises a ``ValueError`` unless ``sizes`` is None or ``(low, high)`` with minimum <= low <= high < 2**31."""
    if sizes is not None and not (len(sizes) == 2 and minimum <= sizes[0] <= sizes[1] < 2**31):
        raise ValueError(f"{name}: sizes must be (low, high) with {minimum} <= low <= high < 2**31, got {tuple(sizes)}")


def draw_sizes(sizes: tuple[int, int], num_clients: int, generator: np.random.Generator) -> Indices:
    """Draws client sizes [N] n_i ~ Uniform{low, ..., high}, both ends included."""
    return generator.integers(sizes[0], sizes[1], size=num_clients, endpoint=True)


def check_fractions(name: str, fractions: tuple[float, float] | None) -> None:
    """Raises a ``ValueError`` unless ``fractions`` is None or a range ``(low, high)`` with 0 < low <= high <= 1."""
    if fractions is not None and not (len(fractions) == 2 and 0 < fractions[0] <= fractions[1] <= 1):
        raise ValueError(f"{name}: fractions must be (low, high) with 0 < low <= high <= 1, got {tuple(fractions)}")


def draw_fractions(
    fractions: tuple[float, float], num_clients: int, generator: np.random.Generator
) -> NDArray[np.float64]:
    """Draws fractions [N] r_i ~ Uniform(low, high)."""
    return generator.uniform(fractions[0], fractions[1], size=num_clients)


def _checked_pool(name: str, samples: Pool | Indices, num_clients: int) -> Pool:
    try:
        pool = Pool.of(samples)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    if len(pool) == 0:
        raise ValueError(f"{name}: got no samples to deal out")
    if num_clients < 1:
        raise ValueError(f"{name}: num_clients must be at least 1, got {num_clients}")
    if num_clients > len(pool):
        raise ValueError(
            f"{name}: {num_clients} clients cannot share {len(pool)} samples; lower num_clients to at most {len(pool)}"
        )
    return pool


def _as_arrays(name: str, shares: ClientShares) -> ClientShares:
    """Returns the result of a partition with arrays of int64, whatever lists or tensors of integers it gives."""
    if not isinstance(shares, ClientShares):
        raise ValueError(
            f"{name}: split returned {type(shares).__name__}; it must return ClientShares(indices), with the indices "
            "of one client's samples after the other's."
        )
    val = None if shares.val is None else _indices(name, "val", shares.val)
    test = None if shares.test is None else _indices(name, "test", shares.test)
    return replace(shares, indices=_indices(name, "indices", shares.indices), val=val, test=test)


def _indices(name: str, part: str, lists: list[Any]) -> list[Indices]:
    arrays = [np.asarray(own) for own in lists]
    for client, own in enumerate(arrays):
        if own.ndim != 1 or (own.size and own.dtype.kind not in "iu"):  # numpy reads [] as floats
            advice = "; for a mask, give np.flatnonzero(mask)" if own.dtype.kind == "b" else ""
            raise ValueError(
                f"{name}: ClientShares.{part} of client {client} has dtype {own.dtype} and shape {list(own.shape)}; it "
                f"must be a list of integers{advice}."
            )
    return [own.astype(np.int64, copy=False) for own in arrays]


def _check_shares(name: str, shares: ClientShares, num_samples: int, num_clients: int) -> None:
    if len(shares.indices) != num_clients:
        raise ValueError(
            f"{name}: holds {len(shares.indices)} clients, but num_clients is {num_clients}; make them equal"
        )
    if shares.groups is not None and len(shares.groups) != num_clients:
        raise ValueError(f"{name}: gives {len(shares.groups)} groups for {num_clients} clients; give one per client")
    if shares.names is not None and not len(set(shares.names)) == len(shares.names) == num_clients:
        raise ValueError(
            f"{name}: gives {len(shares.names)} names, {len(set(shares.names))} of them different, for {num_clients} "
            "clients; every client needs a name of its own"
        )
    empty = [client for client, share in enumerate(shares.indices) if len(share) == 0]
    if empty:
        raise ValueError(
            f"{name}: {len(empty)} of {num_clients} clients got no samples (the first is client {empty[0]}); "
            "use fewer clients or more samples"
        )
    for client, share in enumerate(shares.indices):
        outside = share[(share < 0) | (share >= num_samples)]
        if outside.size:
            raise ValueError(
                f"{name}: index {outside[0]} of client {client} is outside the pool, whose indices are 0 to "
                f"{num_samples - 1}"
            )
    all_indices = np.concatenate(shares.indices)
    if shares.val is not None or shares.test is not None:
        _check_own_parts(name, shares, all_indices)
    repeated = _repeated(all_indices)
    if shares.overlapping:
        repeated = np.concatenate([_repeated(share) for share in shares.indices])
    if repeated.size:
        owners = [client for client, share in enumerate(shares.indices) if repeated[0] in share]
        raise ValueError(
            f"{name}: {repeated.size} indices occur more than once (index {repeated[0]} at client(s) "
            f"{', '.join(map(str, owners))}); an index may "
            f"{'occur only once in a client' if shares.overlapping else 'belong to only one client'}"
        )


def _repeated(indices: Indices) -> Indices:
    values, counts = np.unique(indices, return_counts=True)
    return values[counts > 1]


def _check_own_parts(name: str, shares: ClientShares, held: Indices) -> None:
    """Checks that validation samples are a client's own, and that no client holds test samples."""
    is_held = np.zeros(held.max() + 1, dtype=bool)
    is_held[held] = True
    for part, lists in (("validation", shares.val), ("test", shares.test)):
        if lists is None:
            continue
        if shares.overlapping:
            raise ValueError(f"{name}: shares that overlap cannot have {part} samples of their own; leave these out")
        if len(lists) != len(shares.indices):
            raise ValueError(
                f"{name}: gives {part} samples for {len(lists)} of {len(shares.indices)} clients; give a list for each"
            )
        for client, (own, share) in enumerate(zip(lists, shares.indices, strict=True)):
            if part == "validation":
                wrong, rule = own[~np.isin(own, share)], "is not one of its samples"
            else:
                inside = own[(own >= 0) & (own < len(is_held))]
                wrong, rule = np.concatenate([own[own < 0], inside[is_held[inside]]]), "is held by a client, or below 0"
            if wrong.size:
                raise ValueError(f"{name}: the {part} sample {wrong[0]} of client {client} {rule}")
