"""Partitions without a rule of their own about labels: IID, and a cut of another partition to given sizes."""

from dataclasses import dataclass

import numpy as np

from lcfl.data.partition.base import Indices, Partition, Shares, check_sizes, draw_sizes

__all__ = ["IID", "Subsampled"]


@dataclass(frozen=True)
class IID(Partition):
    """Every client draws from the same distribution.

    Args:
        samples_per_client: how many samples each client gets; None deals out the whole pool, in sizes that
            differ by at most one.
    """

    samples_per_client: int | None = None

    def __post_init__(self) -> None:
        if self.samples_per_client is not None and self.samples_per_client < 1:
            raise ValueError(f"IID: samples_per_client must be at least 1 or null, got {self.samples_per_client}")

    def split(self, labels: Indices, num_clients: int, generator: np.random.Generator) -> Shares:
        """One permutation of the pool, cut into N pieces."""
        order = generator.permutation(len(labels))
        if self.samples_per_client is not None:
            needed = num_clients * self.samples_per_client
            if needed > len(labels):
                raise ValueError(
                    f"IID: {num_clients} clients x samples_per_client {self.samples_per_client} need {needed} samples, "
                    f"the pool has {len(labels)}; samples_per_client can be at most {len(labels) // num_clients}"
                )
            order = order[:needed]
        return Shares(np.array_split(order, num_clients))


@dataclass(frozen=True)
class Subsampled(Partition):
    """Another partition with each client cut to a size of its own: the other reading of FedAC's 50..350 samples.

    FedAC (section 5.1) fixes client sizes and names a class-wise Dirichlet, which cannot both be met exactly.
    ``ClientDirichlet(alpha, sizes)`` meets the sizes; this keeps the labels' rule and cuts.

    Args:
        base: the partition to cut.
        sizes: (low, high); client i keeps n_i ~ Uniform{low, ..., high} random samples of its share, or the
            whole share where that is smaller.
    """

    base: Partition
    sizes: tuple[int, int]

    def __post_init__(self) -> None:
        check_sizes("Subsampled", self.sizes)

    def split(self, labels: Indices, num_clients: int, generator: np.random.Generator) -> Shares:
        """Runs ``base``, then draws the sizes and the samples that stay."""
        whole = self.base(labels, num_clients, generator)
        sizes = draw_sizes(self.sizes, num_clients, generator)
        kept = [generator.permutation(share)[:size] for share, size in zip(whole.indices, sizes, strict=True)]
        return Shares(kept, whole.groups)
