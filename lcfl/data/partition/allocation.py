"""From the classes that each client owns to the samples that it gets.

Shapes: N clients, C classes that occur in the pool. ``owns`` [N, C] counts how many parts of a class a client owns:
0 or 1, or more where it may draw several shards of one class.
"""

import numpy as np

from lcfl.data.partition.base import Indices, draw_sizes

__all__ = ["check_demand", "check_num_classes", "share_out", "take"]


def share_out(
    name: str, owns: Indices, members: list[Indices], sizes: tuple[int, int] | None, generator: np.random.Generator
) -> list[Indices]:
    """Per client the samples of the classes that it owns.

    Args:
        name: of the partition, for errors.
        owns: [N, C], at least one part for every client.
        members: the samples of each class, in random order.
        sizes: (low, high): client i gets n_i ~ Uniform{low, ..., high} samples, spread evenly over its parts; None:
            every owned class is dealt out whole, in parts that differ by at most one sample.
        generator: source of every draw.

    Raises:
        ValueError: a class has fewer samples than its owners need.
    """
    available = np.array([len(each) for each in members], dtype=np.int64)
    if sizes is None:
        check_demand(name, owns.sum(axis=0), available)
        counts = _dealt(owns, available)
    else:
        counts = _spread(owns, draw_sizes(sizes, len(owns), generator), generator)
        check_demand(name, counts.sum(axis=0), available)
    return take(members, counts)


def take(members: list[Indices], counts: Indices) -> list[Indices]:
    """Per client the samples that ``counts`` [N, C] gives it: each goes on where the one before it stopped."""
    stops = np.cumsum(counts, axis=0)
    return [
        np.concatenate([each[stop - count : stop] for each, stop, count in zip(members, *row, strict=True)])
        for row in zip(stops, counts, strict=True)
    ]


def check_demand(name: str, demand: Indices, available: Indices) -> None:
    """Raises a ValueError where a class has fewer samples (``available`` [C]) than its owners need."""
    short = np.flatnonzero(demand > available)
    if short.size:
        label = int(short[0])
        raise ValueError(
            f"{name}: the owners of class number {label} need {demand[label]} samples of it, the pool has "
            f"{available[label]}; lower num_clients, sizes or the number of classes per client"
        )


def check_num_classes(name: str, option: str, wanted: int, num_classes: int) -> None:
    """Raises a ValueError where a client would need more classes than the pool has."""
    if wanted > num_classes:
        raise ValueError(f"{name}: {option} is {wanted}, the pool has {num_classes} classes; use at most that")


def _dealt(owns: Indices, available: Indices) -> Indices:
    """[N, C] counts when every owned class is dealt out whole."""
    counts = np.zeros_like(owns)
    for label in np.flatnonzero(owns.any(axis=0)):
        owners = np.repeat(np.arange(len(owns)), owns[:, label])
        np.add.at(counts[:, label], owners, _equal_parts(available[label], len(owners)))
    return counts


def _spread(owns: Indices, sizes: Indices, generator: np.random.Generator) -> Indices:
    """[N, C] counts with row sums ``sizes``, even over each client's parts; the remainder goes to random ones."""
    counts = np.zeros_like(owns)
    for client, size in enumerate(sizes):
        owned = generator.permutation(np.repeat(np.arange(owns.shape[1]), owns[client]))
        np.add.at(counts[client], owned, _equal_parts(size, len(owned)))
    return counts


def _equal_parts(total: int, number: int) -> Indices:
    """``total`` as a sum of ``number`` integers that differ by at most one, the larger ones first."""
    parts = np.full(number, total // number, dtype=np.int64)
    parts[: total % number] += 1
    return parts
