"""Partitions that do not depend on labels: IID, unequal sizes, and parts of another partition."""

from dataclasses import dataclass, replace

import numpy as np

from lcfl.data.partition.base import (
    ClientShares,
    Indices,
    Partition,
    Pool,
    check_fractions,
    check_sizes,
    draw_fractions,
    draw_sizes,
)
from lcfl.data.partition.dirichlet import check_alpha

__all__ = ["IID", "PartOfPool", "Quantity", "Subsampled"]


@dataclass(frozen=True)
class IID(Partition):
    """Lets every client draw from the same distribution.

    Args:
        samples_per_client: number of samples of each client. With None the whole pool is dealt out, in sizes that
            differ by at most one.
    """

    samples_per_client: int | None = None

    def __post_init__(self) -> None:
        if self.samples_per_client is not None and self.samples_per_client < 1:
            raise ValueError(f"IID: samples_per_client must be at least 1 or null, got {self.samples_per_client}")

    def split(self, pool: Pool, num_clients: int, generator: np.random.Generator) -> ClientShares:
        """Cuts one permutation of the pool into N pieces."""
        order = generator.permutation(len(pool))
        if self.samples_per_client is not None:
            needed = num_clients * self.samples_per_client
            if needed > len(pool):
                raise ValueError(
                    f"IID: {num_clients} clients x samples_per_client {self.samples_per_client} need {needed} samples, "
                    f"but the pool has {len(pool)}; samples_per_client can be at most {len(pool) // num_clients}"
                )
            order = order[:needed]
        return ClientShares(np.array_split(order, num_clients))


@dataclass(frozen=True)
class Quantity(Partition):
    """Gives clients different sizes but the same label distribution (NIID-Bench, quantity skew).

    With p ~ Dirichlet(alpha 1_N) over clients, the permuted pool is cut at floor(cumsum(p) S). p is drawn again until
    the smallest client has ``min_samples``. Every sample is used.

    Args:
        alpha: concentration, > 0; small values give few large clients and many small ones.
        min_samples: smallest number of samples of a client, at least 1.
        max_tries: largest number of times that sizes are drawn.
    """

    alpha: float
    min_samples: int = 10
    max_tries: int = 100

    def __post_init__(self) -> None:
        check_alpha("Quantity", self.alpha)
        if self.min_samples < 1 or self.max_tries < 1:
            raise ValueError(
                "Quantity: min_samples and max_tries must be at least 1, "
                f"got min_samples {self.min_samples} and max_tries {self.max_tries}"
            )

    def split(self, pool: Pool, num_clients: int, generator: np.random.Generator) -> ClientShares:
        """Draws sizes until every client has ``min_samples``, at most ``max_tries`` times."""
        order = generator.permutation(len(pool))
        for _ in range(self.max_tries):
            proportions = generator.dirichlet(np.full(num_clients, self.alpha))
            indices = np.split(order, np.floor(np.cumsum(proportions)[:-1] * len(pool)).astype(np.int64))
            if min(map(len, indices)) >= self.min_samples:
                return ClientShares(indices)
        raise ValueError(
            f"Quantity: none of {self.max_tries} draws with alpha {self.alpha} gave each of num_clients {num_clients} "
            f"at least min_samples {self.min_samples} of {len(pool)} samples; lower min_samples or num_clients, or "
            "raise alpha or max_tries"
        )


@dataclass(frozen=True)
class Subsampled(Partition):
    """Cuts each client's share of another partition to a size that is drawn for the client.

    FedAC (section 5.1) fixes client sizes of 50..350 samples and names a Dirichlet draw, which fits these sizes exactly
    only per client, as in ``ClientDirichlet(alpha, sizes)``. ``sizes`` of this class allows the other reading, a draw
    per class: it keeps the base's rule for labels and cuts the shares. ``fractions`` of (0.1, 0.6) are the reading of
    AS-CFL's client sizes of 10 % to 60 % (section 4.1) in which a client keeps that part of its share.

    Args:
        base: the partition to cut.
        sizes: (low, high); client i keeps n_i ~ Uniform{low, ..., high} random samples of its share, or the whole share
            if it is smaller.
        fractions: (low, high); client i keeps the part r_i ~ Uniform(low, high) of its share, rounded, at least one
            sample. Give either this or ``sizes``.
    """

    base: Partition
    sizes: tuple[int, int] | None = None
    fractions: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if (self.sizes is None) == (self.fractions is None):
            raise ValueError(f"Subsampled: give either sizes or fractions, got {self.sizes} and {self.fractions}")
        check_sizes("Subsampled", self.sizes)
        check_fractions("Subsampled", self.fractions)

    def split(self, pool: Pool, num_clients: int, generator: np.random.Generator) -> ClientShares:
        """Runs ``base``, then draws the sizes and the samples that are kept."""
        whole = self.base(pool, num_clients, generator)
        kept = [share[:0] for share in whole.indices] if whole.val is None else whole.val
        shares = [np.setdiff1d(share, val) for share, val in zip(whole.indices, kept, strict=True)]
        sizes = self._sizes(np.array([len(share) for share in shares]), generator)
        cut = [generator.permutation(share)[:size] for share, size in zip(shares, sizes, strict=True)]
        return replace(whole, indices=[np.concatenate(both) for both in zip(cut, kept, strict=True)])

    @property
    def owner_column(self) -> str | None:
        """That of ``base``."""
        return self.base.owner_column

    def num_clients(self, pool: Pool) -> int | None:
        """Returns the number that ``base`` knows."""
        return self.base.num_clients(pool)

    def _sizes(self, whole: Indices, generator: np.random.Generator) -> Indices:
        if self.sizes is not None:
            return draw_sizes(self.sizes, len(whole), generator)
        assert self.fractions is not None
        fractions = draw_fractions(self.fractions, len(whole), generator)
        return np.maximum(np.rint(fractions * whole).astype(np.int64), 1)


@dataclass(frozen=True)
class PartOfPool(Partition):
    """Applies another partition to a random part of the pool, such as the 10,000 images of the official CFL notebook.

    Args:
        base: the partition to apply.
        num_samples: size of the part, at least 1 and at most the size of the pool.
    """

    base: Partition
    num_samples: int

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise ValueError(f"PartOfPool: num_samples must be at least 1, got {self.num_samples}")

    def split(self, pool: Pool, num_clients: int, generator: np.random.Generator) -> ClientShares:
        """Draws the part, then runs ``base`` on it."""
        if self.num_samples > len(pool):
            raise ValueError(
                f"PartOfPool: num_samples is {self.num_samples}, but the pool has {len(pool)} samples; lower it"
            )
        part = np.sort(generator.permutation(len(pool))[: self.num_samples])
        shares = self.base(pool.take(part), num_clients, generator)
        val = None if shares.val is None else [part[own] for own in shares.val]
        return replace(shares, indices=[part[share] for share in shares.indices], val=val)

    @property
    def owner_column(self) -> str | None:
        """That of ``base``."""
        return self.base.owner_column

    def num_clients(self, pool: Pool) -> int | None:
        """Returns the number that ``base`` knows."""
        return self.base.num_clients(pool)
