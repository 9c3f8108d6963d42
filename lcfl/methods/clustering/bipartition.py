"""Recursive bipartition of clusters whose members pull in different directions (CFL).

Legend: N clients, n members of a cluster, K clusters, P parameters.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lcfl.core.messages import Uplink
from lcfl.core.schema import Array, Forms, Number
from lcfl.core.state import FederationState
from lcfl.methods.aggregation.base import Weights
from lcfl.methods.clustering.agglomerative import cut_tree, pairwise_distances
from lcfl.methods.clustering.base import Clustering, ServerInterface

__all__ = ["RecursiveBipartition", "bipartition_of"]


def bipartition_of(update_nP: Tensor, bipartition: Literal["complete", "optimal"]) -> tuple[NDArray[np.int64], float]:
    """Splits clients into two groups by the cosines of their updates.

    ``optimal`` makes the largest cosine across the groups (alpha_cross) as small as possible. It is the paper's
    bipartition, which merges by falling similarity until two groups are left, i.e. single linkage. ``complete`` merges
    by the smallest cosine within a group, as the authors' code does (reading A19).

    Returns:
        The group of each client ``[n]``, where group 0 holds the first client, and alpha_cross.
    """
    distance_nn = pairwise_distances(update_nP, "cosine")
    label_n = cut_tree(distance_nn, "complete" if bipartition == "complete" else "single", num_clusters=2).labels
    return label_n, 1.0 - float(distance_nn[label_n == 0][:, label_n == 1].min())


@dataclass
class RecursiveBipartition(Clustering):
    """Splits a cluster in two when its mean update vanishes while single updates do not (CFL).

    At the end of a round, with Delta_i = w_i - Omega_c, cluster c is split if ``|mean Delta_i| < eps1``,
    ``max |Delta_i| > eps2``, it has at least `min_size` members and the round is `min_round` or later. Both halves
    continue from Omega_c. This round's mean is already taken within each half.

    The paper does not cover partial participation. Here every member, sampled or not, counts with its latest update.
    A cluster is not split before each member has an update that is at most `stale_max` rounds old and was made after
    the cluster was formed. Old updates only decide about splits. They are never added to a model.

    Args:
        eps1: the length below which the mean update is small.
        eps2: the length above which an update is large.
        relative: whether `eps1` and `eps2` are shares of the largest |Delta_i| in round 0 instead of lengths.
        bipartition: ``complete`` or ``optimal``, see `bipartition_of`.
        gamma_max: split only if ``sqrt((1 - alpha_cross) / 2)`` is larger than this; None for no such condition.
        min_size: the smallest number of members of a cluster that may be split.
        min_round: the first round in which a cluster may be split.
        stale_max: the largest number of rounds that an update may be old.
        weights: ``uniform`` or ``samples`` (n_i), of the mean update. Its weights must be those of the aggregation,
            because only a mean that the cluster's model follows vanishes when training has converged.
    """

    remembers: ClassVar[Forms] = {
        "updates": {Number(int, 0, "N"): Array(("P",))},
        "rounds": {Number(int, 0, "N"): int},
        "samples": {Number(int, 0, "N"): int},
        "scale": (float, None),
    }

    eps1: float = 0.4
    eps2: float = 1.6
    relative: bool = False
    bipartition: Literal["complete", "optimal"] = "complete"
    gamma_max: float | None = None
    min_size: int = 3
    min_round: int = 20
    stale_max: int = 0
    weights: Weights = "uniform"

    def __post_init__(self) -> None:
        name = type(self).__name__
        if self.gamma_max is not None and not 0 <= self.gamma_max <= 1:
            raise ValueError(f"{name}: got gamma_max={self.gamma_max}; it must lie between 0 and 1, or be null.")
        for option, least in (("eps1", 0), ("eps2", 0), ("min_size", 2), ("min_round", 0), ("stale_max", 0)):
            if not getattr(self, option) >= least:
                raise ValueError(f"{name}: got {option}={getattr(self, option)}; it must be at least {least}.")
        self.forget()

    @property
    def begins(self) -> int:
        """The first round in which a cluster may be split."""
        return self.min_round

    @property
    def needs_everyone(self) -> str | None:
        """Only if `stale_max` is 0, when updates of other rounds do not count."""
        if self.stale_max > 0:
            return None
        return "a cluster changes only in a round in which all of its clients do. Set stale_max above 0."

    def forget(self) -> None:
        """Forgets the last run."""
        self._updates: dict[int, Tensor] = {}
        self._rounds: dict[int, int] = {}
        self._samples: dict[int, int] = {}
        self._scale: float | None = None

    def on_round_end(self, server: ServerInterface, state: FederationState, uploads: Sequence[Uplink]) -> None:
        """Stores the new updates, then tests every cluster."""
        self._remember(server, state, uploads)
        for cluster in range(state.num_clusters):
            member_n = torch.nonzero((state.assignment == cluster) & state.active).flatten()
            known = [client for client in member_n.tolist() if client in self._updates]
            if not known:
                continue
            update_nP = torch.stack([self._updates[client] for client in known])
            mean, largest = float(self._mean(known, update_nP).norm()), float(update_nP.norm(dim=1).max())
            server.log(f"cluster/mean_update_{cluster}", mean)
            server.log(f"cluster/max_update_{cluster}", largest)
            is_due = len(known) == len(member_n) >= self.min_size and state.round >= self.min_round
            scale = (self._scale or 0.0) if self.relative else 1.0
            if is_due and mean < self.eps1 * scale and largest > self.eps2 * scale:
                self._split(state, cluster, member_n, update_nP)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned.

        Raises:
            ValueError: if they are not of the same clients.
        """
        super().load_state_dict(state)
        if not self._updates.keys() == self._rounds.keys() == self._samples.keys():
            raise ValueError("updates, rounds and samples must be those of the same clients")

    def _mean(self, clients: Sequence[int], update_nP: Tensor) -> Tensor:
        """Returns the mean update ``[P]`` of clients."""
        if self.weights == "uniform":
            return update_nP.mean(dim=0)
        weight_n = torch.tensor([self._samples[client] for client in clients], dtype=update_nP.dtype)
        return weight_n @ update_nP / weight_n.sum()

    def _remember(self, server: ServerInterface, state: FederationState, uploads: Sequence[Uplink]) -> None:
        num_parameters = server.layout.num_parameters
        for upload in uploads:
            update = upload.payload["model"] - state.centre_of(upload.client)
            self._updates[upload.client] = update[:num_parameters].clone()
            self._rounds[upload.client] = state.round
            self._samples[upload.client] = upload.num_samples
        oldest = state.round - self.stale_max
        self._drop([i for i, number in self._rounds.items() if number < oldest or not state.active[i]])
        if self._scale is None and self._updates:
            self._scale = max(float(update.norm()) for update in self._updates.values())

    def _drop(self, clients: Sequence[int]) -> None:
        for client in clients:
            del self._updates[client], self._rounds[client], self._samples[client]

    def _split(self, state: FederationState, cluster: int, member_n: Tensor, update_nP: Tensor) -> None:
        """Moves the half without the first member to a new cluster.

        `member_n` holds client numbers, not positions in the cluster.
        """
        label_n, across = bipartition_of(update_nP, self.bipartition)
        if self.gamma_max is not None and not sqrt(max(1.0 - across, 0.0) / 2) > self.gamma_max:
            return
        assignment = state.assignment.clone()
        assignment[member_n[torch.from_numpy(label_n == 1)]] = state.num_clusters
        state.assignment = assignment
        state.take_clusters([*range(state.num_clusters), cluster])
        self._drop(member_n.tolist())
