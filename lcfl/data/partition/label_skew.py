"""Label skew by label sets, in which each client owns n labels, drawn at random or around a ring.

Shapes: N clients, C classes that occur in the pool.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lcfl.data.partition.allocation import check_demand, check_num_classes, share_out, take
from lcfl.data.partition.base import ClientShares, Indices, Partition, Pool, check_sizes, shuffled_classes

__all__ = ["LabelRing", "LabelSkew"]


@dataclass(frozen=True)
class LabelSkew(Partition):
    """Gives each client n random labels and deals each label out to its owners in equal parts.

    FedClust's label skew of delta percent has n = delta C / 100 (section 5.2: 2 and 3 of 10, 20 and 30 of 100
    classes). The text of the paper allows two readings, which differ little; see ``draw``.

    Args:
        num_labels: n, at least 1 and at most the number of classes.
        draw: with ``cyclic`` client i owns class i mod C and n - 1 other random classes, so N >= C clients use every
            class (NIID-Bench, "noniid-#label", and pacfl). With ``random`` a client owns n random classes, as FedClust
            puts it (FL-bench assigns classes in this way, too); a class that no client drew is not used.
        sizes: (low, high); client i holds n_i ~ Uniform{low, ..., high} samples, spread evenly over its labels. With
            None every owned class is dealt out whole.
    """

    num_labels: int
    draw: Literal["cyclic", "random"] = "cyclic"
    sizes: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.num_labels < 1:
            raise ValueError(f"LabelSkew: num_labels must be at least 1, got {self.num_labels}")
        check_sizes("LabelSkew", self.sizes, minimum=self.num_labels)

    def split(self, pool: Pool, num_clients: int, generator: np.random.Generator) -> ClientShares:
        """Draws label sets, then a count for each owned label, then the samples."""
        members = shuffled_classes(pool.labels, generator)
        check_num_classes("LabelSkew", "num_labels", self.num_labels, len(members))
        owns = np.zeros((num_clients, len(members)), dtype=np.int64)
        for client in range(num_clients):
            order = generator.permutation(len(members))
            if self.draw == "cyclic":
                own = client % len(members)
                order = np.concatenate([[own], order[order != own]])
            owns[client, order[: self.num_labels]] = 1
        return ClientShares(share_out("LabelSkew", owns, members, self.sizes, generator))


@dataclass(frozen=True)
class LabelRing(Partition):
    """Gives client u the labels u, u + 1, ..., u + n - 1 modulo C, so that neighbours share labels (pFedMe).

    CGPFL is derived from pFedMe's code, so FedAC's "consistent with previous research" may mean this partition.
    Neighbours overlap, so there are no true groups, although clients u and u + C own the same labels.

    Args:
        num_labels: n, at least 1 and at most the number of classes.
        sizes: (low, high); client u holds n_u ~ Uniform{low, ..., high} samples, spread evenly over its labels. With
            None every owned class is dealt out whole, as defined by ``log_std``.
        log_std: without sizes, every owner of a class gets ``min_per_label`` samples of it and a part of the rest in
            proportion to a log-normal weight with this standard deviation of the logarithm. 2 is pFedMe's power law
            (without the random factors and terms that it applies afterwards), 0 gives equal parts.
        min_per_label: without sizes, smallest number of samples of a client in each of its labels, at least 1.
    """

    num_labels: int
    sizes: tuple[int, int] | None = None
    log_std: float = 2.0
    min_per_label: int = 10

    def __post_init__(self) -> None:
        if self.num_labels < 1 or self.min_per_label < 1:
            raise ValueError(
                "LabelRing: num_labels and min_per_label must be at least 1, "
                f"got num_labels {self.num_labels} and min_per_label {self.min_per_label}"
            )
        if not 0 <= self.log_std < math.inf:
            raise ValueError(f"LabelRing: log_std must be a finite number >= 0, got {self.log_std}")
        check_sizes("LabelRing", self.sizes, minimum=self.num_labels)

    def split(self, pool: Pool, num_clients: int, generator: np.random.Generator) -> ClientShares:
        """Draws label sets, then a count for each owned label, then the samples."""
        members = shuffled_classes(pool.labels, generator)
        check_num_classes("LabelRing", "num_labels", self.num_labels, len(members))
        owns = np.zeros((num_clients, len(members)), dtype=np.int64)
        for client in range(num_clients):
            owns[client, (client + np.arange(self.num_labels)) % len(members)] = 1
        if self.sizes is not None:
            return ClientShares(share_out("LabelRing", owns, members, self.sizes, generator))
        return ClientShares(take(members, self._power_law(owns, members, generator)))

    def _power_law(self, owns: Indices, members: list[Indices], generator: np.random.Generator) -> Indices:
        """Draws counts [N, C] that use up every owned class.

        What rounding down leaves over goes to the owner with the largest weight.
        """
        available = np.array([len(samples) for samples in members], dtype=np.int64)
        check_demand("LabelRing", self.min_per_label * owns.sum(axis=0), available)
        counts = self.min_per_label * owns
        for label in np.flatnonzero(owns.any(axis=0)):
            owners = np.flatnonzero(owns[:, label])
            logarithms = self.log_std * generator.standard_normal(len(owners))
            weights = np.exp(logarithms - logarithms.max())
            rest = int(available[label]) - self.min_per_label * len(owners)
            parts = np.floor(rest * (weights / weights.sum())).astype(np.int64)
            parts[weights.argmax()] += rest - parts.sum()
            counts[owners, label] += parts
        return counts
