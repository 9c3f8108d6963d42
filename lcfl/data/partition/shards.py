"""Label skew by shards: the pool is cut into shards of similar labels, and every client gets some shards.

Shapes: N clients, C classes that occur in the pool.
"""

from dataclasses import dataclass

import numpy as np

from lcfl.data.partition.allocation import share_out
from lcfl.data.partition.base import ClientShares, Indices, Partition, Pool, check_sizes, shuffled_classes

__all__ = ["Shards"]


@dataclass(frozen=True)
class Shards(Partition):
    """Gives every client s random shards, each of samples with similar labels.

    Args:
        shards_per_client: s, at least 1.
        by_class: with False the pool, sorted by label, is cut into s N equal shards (McMahan et al., 2017), so a shard
            may hold the end of one class and the beginning of the next. With True every class is cut into s N / C
            shards (LG-FedAvg), so a client has at most s labels. If C does not divide s N, random classes are cut into
            one more shard.
        sizes: (low, high), only with ``by_class``; client i holds n_i ~ Uniform{low, ..., high} samples, spread evenly
            over its shards. With None the whole pool is dealt out.
    """

    shards_per_client: int
    by_class: bool = False
    sizes: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.shards_per_client < 1:
            raise ValueError(f"Shards: shards_per_client must be at least 1, got {self.shards_per_client}")
        check_sizes("Shards", self.sizes, minimum=self.shards_per_client)
        if self.sizes is not None and not self.by_class:
            raise ValueError("Shards: sizes apply only with by_class: true; set it, or cut the shares with Subsampled")

    def split(self, pool: Pool, num_clients: int, generator: np.random.Generator) -> ClientShares:
        """Cuts the pool into shards, then deals them out in random order."""
        members = shuffled_classes(pool.labels, generator)
        number = num_clients * self.shards_per_client
        if self.by_class:
            owns = self._owned_classes(number, len(members), generator)
            return ClientShares(share_out("Shards", owns, members, self.sizes, generator))
        if number > len(pool):
            raise ValueError(
                f"Shards: {num_clients} clients x shards_per_client {self.shards_per_client} need at least {number} "
                f"samples, but the pool has {len(pool)}; lower shards_per_client or num_clients"
            )
        shards = np.array_split(np.concatenate(members), number)
        dealt = generator.permutation(number).reshape(num_clients, self.shards_per_client)
        return ClientShares([np.concatenate([shards[shard] for shard in row]) for row in dealt])

    def _owned_classes(self, number: int, num_classes: int, generator: np.random.Generator) -> Indices:
        """Draws the number of shards [N, C] of each class for each client."""
        if number < num_classes:
            raise ValueError(
                f"Shards: {number} shards leave some of the {num_classes} classes without a shard; raise "
                "shards_per_client or num_clients"
            )
        per_class = np.full(num_classes, number // num_classes)
        per_class[generator.permutation(num_classes)[: number % num_classes]] += 1
        classes = generator.permutation(np.repeat(np.arange(num_classes), per_class))
        rows = classes.reshape(-1, self.shards_per_client)
        return np.stack([np.bincount(row, minlength=num_classes) for row in rows])
