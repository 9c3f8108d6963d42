"""Partitions that give a sample to several clients on purpose, as their names say.

The split into training, validation and test samples is then made once for all clients, so no client is tested on a
sample that another client trains on. Shapes: S samples in the pool, N clients, C classes that occur in the pool.
"""

from dataclasses import dataclass

import numpy as np

from lcfl.data.partition.base import (
    ClientShares,
    Indices,
    Partition,
    Pool,
    check_fractions,
    draw_fractions,
    shuffled_classes,
)
from lcfl.data.partition.dirichlet import check_alpha, fill

__all__ = ["CopyPerGroup", "OverlappingFractions"]


@dataclass(frozen=True)
class CopyPerGroup(Partition):
    """Deals a copy of the whole pool out to each group of clients, IID within the group, as in IFCA's rotated data.

    Client i is in group floor(i K / N). A sample belongs to at most one client of every group. A client transform makes
    the groups differ. IFCA uses ``Rotation(by="group")``: MNIST with K = 4 angles and 2,400 clients of 100 images, and
    CIFAR-10 with 0 and 180 degrees and 200 clients of 500 images. The groups are known.

    Args:
        num_groups: K, at most N.
        samples_per_client: number of samples of a client. With None each copy is dealt out whole, in sizes that differ
            by at most one within a group.
    """

    num_groups: int
    samples_per_client: int | None = None

    def __post_init__(self) -> None:
        if self.num_groups < 1:
            raise ValueError(f"CopyPerGroup: num_groups must be at least 1, got {self.num_groups}")
        if self.samples_per_client is not None and self.samples_per_client < 1:
            raise ValueError(
                f"CopyPerGroup: samples_per_client must be at least 1 or null, got {self.samples_per_client}"
            )

    def split(self, pool: Pool, num_clients: int, generator: np.random.Generator) -> ClientShares:
        """Draws one permutation of the pool per group and cuts it into shares."""
        if self.num_groups > num_clients:
            raise ValueError(
                f"CopyPerGroup: num_groups {self.num_groups} is more than num_clients {num_clients}; lower it"
            )
        groups = np.arange(num_clients) * self.num_groups // num_clients
        indices: list[Indices] = []
        for members in np.bincount(groups).tolist():
            needed = len(pool) if self.samples_per_client is None else members * self.samples_per_client
            if needed > len(pool):
                raise ValueError(
                    f"CopyPerGroup: {members} clients of a group x samples_per_client {self.samples_per_client} need "
                    f"{needed} samples, but the pool has {len(pool)}; samples_per_client can be at most "
                    f"{len(pool) // members}"
                )
            indices += np.array_split(generator.permutation(len(pool))[:needed], members)
        return ClientShares(indices, groups, overlapping=True)


@dataclass(frozen=True)
class OverlappingFractions(Partition):
    """Draws a fraction of the whole pool for each client, independently of the other clients.

    AS-CFL (section 4.1) has client sizes of 10 % to 60 % of all samples, which 20 clients can only have if they share
    samples. ``Subsampled(ClassDirichlet(alpha), fractions=(0.1, 0.6))`` is the reading without overlap.

    Args:
        fractions: (low, high); client i holds n_i = round(r_i S) samples, at least one, with r_i ~ Uniform(low, high).
        alpha: the label distribution of each client is p_i ~ Dirichlet(alpha 1_C), as in `ClientDirichlet`. None means
            IID.
    """

    fractions: tuple[float, float]
    alpha: float | None = None

    def __post_init__(self) -> None:
        check_fractions("OverlappingFractions", self.fractions)
        if self.alpha is not None:
            check_alpha("OverlappingFractions", self.alpha)

    def split(self, pool: Pool, num_clients: int, generator: np.random.Generator) -> ClientShares:
        """Draws sizes, then the samples of each client independently. No sample occurs twice in a client."""
        fractions = draw_fractions(self.fractions, num_clients, generator)
        sizes = np.maximum(np.rint(fractions * len(pool)).astype(np.int64), 1)
        return ClientShares([self._drawn(pool, int(size), generator) for size in sizes], overlapping=True)

    def _drawn(self, pool: Pool, size: int, generator: np.random.Generator) -> Indices:
        if self.alpha is None:
            return generator.permutation(len(pool))[:size]
        members = shuffled_classes(pool.labels, generator)
        available = np.array([len(samples) for samples in members], dtype=np.int64)
        proportions = generator.dirichlet(np.full(len(members), self.alpha))
        counts = fill(generator.multinomial(size, proportions), available, proportions)
        return np.concatenate([samples[:count] for samples, count in zip(members, counts, strict=True)])
