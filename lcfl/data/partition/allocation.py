"""Allocation of samples to clients, given the classes that each client owns.

Shapes: N clients, C classes that occur in the pool. ``owns`` [N, C] counts how many parts of a class a client owns:
0 or 1, or more if a client may draw several shards of one class.
"""

import numpy as np

from lcfl.data.partition.base import Indices, draw_sizes

__all__ = ["check_demand", "check_num_classes", "share_out", "take"]


def share_out(
    name: str, owns: Indices, members: list[Indices], sizes: tuple[int, int] | None, generator: np.random.Generator
) -> list[Indices]:
    """Gives each client samples of the classes that it owns.

    Args:
        name: name of the partition, for error messages.
        owns: [N, C] number of parts, at least one for every client.
        members: the samples of each class, in random order.
        sizes: (low, high); client i gets n_i ~ Uniform{low, ..., high} samples, spread evenly over its parts. With None
            every owned class is dealt out whole, in parts that differ by at most one sample.
        generator: source of all draws.

    Returns:
        The sample indices of each client.

    Raises:
        ValueError: if a class has fewer samples than its owners need.
    """
    available = np.array([len(samples) for samples in members], dtype=np.int64)
    if sizes is None:
        check_demand(name, owns.sum(axis=0), available)
        counts = _dealt(owns, available)
    else:
        counts = _spread(owns, draw_sizes(sizes, len(owns), generator), generator)
        check_demand(name, counts.sum(axis=0), available)
    return take(members, counts)


def take(members: list[Indices], counts: Indices) -> list[Indices]:
    """Takes ``counts`` [N, C] samples of each class for each client, starting where the previous client stopped."""
    stops = np.cumsum(counts, axis=0)
    return [
        np.concatenate([samples[stop - count : stop] for samples, stop, count in zip(members, *row, strict=True)])
        for row in zip(stops, counts, strict=True)
    ]


def check_demand(name: str, demand: Indices, available: Indices) -> None:
    """Raises a ``ValueError`` if a class has fewer samples (``available`` [C]) than its owners need."""
    short = np.flatnonzero(demand > available)
    if short.size:
        label = int(short[0])
        raise ValueError(
            f"{name}: the owners of class number {label} need {demand[label]} samples of it, but the pool "
            f"has {available[label]}; lower num_clients, sizes or the number of classes per client"
        )


def check_num_classes(name: str, option: str, wanted: int, num_classes: int) -> None:
    """Raises a ``ValueError`` if a client would need more classes than the pool has."""
    if wanted > num_classes:
        raise ValueError(f"{name}: {option} is {wanted}, but the pool has {num_classes} classes; use at most that many")


def _dealt(owns: Indices, available: Indices) -> Indices:
    """Returns the counts [N, C] if every owned class is dealt out whole."""
    counts = np.zeros_like(owns)
    for label in np.flatnonzero(owns.any(axis=0)):
        owners = np.repeat(np.arange(len(owns)), owns[:, label])
        np.add.at(counts[:, label], owners, _equal_parts(available[label], len(owners)))
    return counts


def _spread(owns: Indices, sizes: Indices, generator: np.random.Generator) -> Indices:
    """Returns counts [N, C] with row sums ``sizes``, spread evenly over each client's parts.

    The remainder goes to random parts.
    """
    counts = np.zeros_like(owns)
    for client, size in enumerate(sizes):
        owned = generator.permutation(np.repeat(np.arange(owns.shape[1]), owns[client]))
        np.add.at(counts[client], owned, _equal_parts(size, len(owned)))
    return counts


def _equal_parts(total: int, number: int) -> Indices:
    """Splits ``total`` into ``number`` integers that differ by at most one, larger ones first."""
    parts = np.full(number, total // number, dtype=np.int64)
    parts[: total % number] += 1
    return parts
