"""Pathological label skew, in which each client owns only a few classes."""

from dataclasses import dataclass

import numpy as np

from lcfl.data.partition.allocation import check_demand, check_num_classes, share_out, take
from lcfl.data.partition.base import ClientShares, Indices, Partition, Pool, check_sizes, shuffled_classes

__all__ = ["Pathological", "class_blocks"]


@dataclass(frozen=True)
class Pathological(Partition):
    """Makes exact blocks of clients with the same classes, as PFLlib's "pat" and the n classes of FedAC and LCFed.

    Each class, in ascending order, goes to the first ceil(N n / C) clients that still need one. N = 100, C = 10 and n =
    3 give clients 0-29 {0, 1, 2}, 30-59 {3, 4, 5}, 60-89 {6, 7, 8} and 90-99 only {9}. The groups are known.

    Args:
        classes_per_client: n, at least 1 and at most the number of classes.
        sizes: (low, high); client i holds n_i ~ Uniform{low, ..., high} samples, spread evenly over its classes
            ((50, 350) in FedAC). With None every class is dealt out whole to its owners.
        balanced: without sizes, whether the owners of a class get equal parts of it. False is PFLlib's default: all
            owners but the last get a random number between a tenth of an equal part and an equal part, and the last
            owner gets the rest. (PFLlib's further lower bound, which depends on its batch size, is left out.)
    """

    classes_per_client: int
    sizes: tuple[int, int] | None = None
    balanced: bool = True

    def __post_init__(self) -> None:
        if self.classes_per_client < 1:
            raise ValueError(f"Pathological: classes_per_client must be at least 1, got {self.classes_per_client}")
        # A client smaller than its label set could not hold every class of its group.
        check_sizes("Pathological", self.sizes, minimum=self.classes_per_client)
        if self.sizes is not None and not self.balanced:
            raise ValueError("Pathological: balanced: false applies only without sizes; remove sizes or balanced")

    def split(self, pool: Pool, num_clients: int, generator: np.random.Generator) -> ClientShares:
        """Forms blocks of classes, then draws a count for each owned class, then the samples."""
        members = shuffled_classes(pool.labels, generator)
        check_num_classes("Pathological", "classes_per_client", self.classes_per_client, len(members))
        owns = class_blocks(num_clients, len(members), self.classes_per_client)
        if self.balanced:
            indices = share_out("Pathological", owns, members, self.sizes, generator)
        else:
            indices = take(members, _uneven(owns, members, generator))
        return ClientShares(indices, _groups(owns))


def class_blocks(num_clients: int, num_classes: int, classes_per_client: int) -> Indices:
    """Returns [N, C] 0 or 1, the classes that each client owns under PFLlib's rule. Every client owns at least one."""
    owns = np.zeros((num_clients, num_classes), dtype=np.int64)
    # In integers, because the floating-point ceil of PFLlib can be one too high.
    owners_per_class = -(-num_clients * classes_per_client // num_classes)
    for label in range(num_classes):
        needy = np.flatnonzero(owns.sum(axis=1) < classes_per_client)
        owns[needy[:owners_per_class], label] = 1
    return owns


def _uneven(owns: Indices, members: list[Indices], generator: np.random.Generator) -> Indices:
    """Draws counts [N, C] for ``balanced: false``.

    All owners of a class but the last draw between a tenth of an equal part and an equal part.
    """
    available = np.array([len(samples) for samples in members], dtype=np.int64)
    check_demand("Pathological", owns.sum(axis=0), available)
    counts = np.zeros_like(owns)
    for label in np.flatnonzero(owns.any(axis=0)):
        owners = np.flatnonzero(owns[:, label])
        equal = available[label] // len(owners)
        parts = generator.integers(max(1, equal // 10), max(2, equal), size=len(owners) - 1)
        counts[owners, label] = np.append(parts, available[label] - parts.sum())
    return counts


def _groups(owns: Indices) -> Indices:
    """Returns the groups [N] of clients with the same classes, numbered in the order of their first client."""
    _, first, inverse = np.unique(owns, axis=0, return_index=True, return_inverse=True)
    rank = np.argsort(np.argsort(first))
    return np.asarray(rank[inverse.reshape(-1)], dtype=np.int64)
