"""Clusters of this round's updates: EM, and the split and merge of AS-CFL (section 3.3).

Updates enter only through pairwise squared distances. Distances to means follow from these.

Legend: n clients that sent an update, K clusters, P parameters.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf, nan
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from lcfl.core import rng
from lcfl.core.messages import Uplink
from lcfl.core.state import FederationState
from lcfl.methods.clustering.base import Clustering, ServerInterface
from lcfl.methods.clustering.cluster_moves import ClusterGeometry, ClusterMove, drop_empty
from lcfl.methods.clustering.similarity import assign, squared_distances, squared_distances_to_means
from lcfl.methods.clustering.tuning import ClusterTuning

__all__ = ["SplitAndMerge", "UpdateEM", "dispersion", "em", "separation"]

TRIES = 10  # pairs of first centres that are tried for a cut in two
ITERATIONS = 10  # iterations of EM after each pair


@dataclass
class UpdateEM(Clustering):
    """Alternates ``R_i <- arg min_k |Delta_i - c_k|^2`` and c_k, the mean update of cluster k, until nothing changes.

    Implements AS-CFL Eq. 6 and 7. The paper writes w_k for c_k and also for the models; here these are two things
    (reading A11). c_k is the plain mean of the printed formula. In a tie a client stays in its cluster. Clients without
    an update in this round stay, too. A cluster that has lost all its clients is dropped.

    Args:
        max_iterations: the largest number of iterations, "typically 5 to 10" in the paper.
    """

    max_iterations: int = 10

    reads: ClassVar[tuple[str, ...]] = ("update",)

    def __post_init__(self) -> None:
        if self.max_iterations < 1:
            raise ValueError(f"UpdateEM: got max_iterations={self.max_iterations}; it must be at least 1.")

    def on_round_end(self, server: ServerInterface, state: FederationState, uploads: Sequence[Uplink]) -> None:
        """Runs EM over this round's updates, starting from the current clusters."""
        uploads = _of_clusters(uploads, state)
        if not uploads:
            return
        clients = [upload.client for upload in uploads]
        square_nn = squared_distances(updates_of(uploads, server))
        label_n = em(square_nn, state.assignment[clients], state.num_clusters, self.max_iterations)
        state.assignment = state.assignment.clone()
        state.assignment[clients] = label_n
        drop_empty(state)


@dataclass
class SplitAndMerge(ClusterTuning):
    """Splits scattered clusters and merges tight ones by the updates in them (AS-CFL section 3.3, lines 17 to 24).

    ``ratio`` is the paper's criterion, G_k = d_in / d_out: the members' mean distance to their centroid over the
    distance to the nearest other centroid. Neither is squared, whereas FedAC squares both and takes the mean over the
    other centroids (reading A25). A cluster with G_k > beta (`upper`) is split. A cluster with G_k < alpha (`lower`) is
    merged with the nearest. The paper does not define its split. Here two centres are drawn as in k-means++, and the
    members are assigned to them in one pass.

    As printed, the rule merges the clusters that are right, and singletons; see `ClusterNumberTuning`. ``silhouette``
    is the criterion defined there, with Euclidean distances of updates.

    Clients without an update in this round follow their cluster in a merge and stay in the first half of a split. A
    single cluster has no d_out, so ``ratio`` leaves it alone. The arguments are those of `ClusterTuning`.
    """

    reads: ClassVar[tuple[str, ...]] = ("update",)

    def on_round_end(self, server: ServerInterface, state: FederationState, uploads: Sequence[Uplink]) -> None:
        """Tunes the clusters by this round's updates, before they are aggregated."""
        if uploads := _of_clusters(uploads, state):
            square_nn = squared_distances(updates_of(uploads, server))
            clients = [upload.client for upload in uploads]
            self.tune(server, state, lambda: UpdateGeometry(server, state, clients, square_nn))


class UpdateGeometry(ClusterGeometry):
    """The clusters of the clients that sent an update."""

    def __init__(self, server: ServerInterface, state: FederationState, clients: list[int], square_nn: Tensor) -> None:
        super().__init__(state, clients)
        self.server, self.square_nn = server, square_nn

    @cached_property
    def separation_KK(self) -> Tensor:
        """Distances between the centroids."""
        return separation(self.square_nn, self.label_n, self.state.num_clusters)

    def ratio(self) -> Tensor:
        """Returns G_k = d_in(k) / d_out(k)."""
        nearest_K = self.separation_KK.min(dim=1).values
        ratio_K = dispersion(self.square_nn, self.label_n, self.state.num_clusters) / nearest_K
        return torch.where(nearest_K.isfinite(), ratio_K, nan)

    def members(self, cluster: int) -> list[int]:
        """Returns the members of a cluster that sent an update."""
        return [client for client, label in zip(self.clients, self.label_n.tolist(), strict=True) if label == cluster]

    def closest(self, cluster: int) -> int:
        """Returns the closest other cluster by the distance of the centroids."""
        return int(self.separation_KK[cluster].argmin())

    def seeded_half(self, cluster: int) -> list[int]:
        """Returns the second half in the space of updates."""
        rows = torch.nonzero(self.label_n == cluster).flatten()
        draw = rng.generator(self.server.seed, "split", self.state.round, cluster)
        half_n = _halves(self.square_nn[rows][:, rows], draw)
        return [self.clients[row] for row in rows[half_n == 1].tolist()]

    def silhouette(self, label_n: Tensor) -> float:
        """Returns the mean silhouette with Euclidean distances."""
        from sklearn.metrics import silhouette_score  # imported here because only some methods need it

        if not 1 < len(label_n.unique()) < len(label_n):
            return -1.0
        return float(silhouette_score(self.square_nn.sqrt().numpy(), label_n.numpy(), metric="precomputed"))

    def closest_pair(self, present: list[int]) -> tuple[int, int]:
        """Returns the closest pair by the distance of the centroids."""
        near_KK = self.separation_KK[present][:, present]
        nearest = int(near_KK.argmin())
        return present[nearest // len(present)], present[nearest % len(present)]

    def half_of(self, members: Tensor, cluster: int) -> Tensor:
        """Returns the tightest of ten cuts, each a k-means++ pair followed by EM."""
        inside_nn = self.square_nn[members][:, members]
        draw = rng.generator(self.server.seed, "halves", self.state.round, cluster)
        best_n, least = torch.zeros(len(members), dtype=torch.int64), inf
        for _ in range(TRIES):
            half_n = em(inside_nn, _halves(inside_nn, draw), 2, ITERATIONS)
            own_n = squared_distances_to_means(inside_nn, half_n, 2).gather(1, half_n.unsqueeze(1))
            if float(own_n.sum()) < least:
                best_n, least = half_n, float(own_n.sum())
        return best_n

    def apply(self, move: ClusterMove) -> None:
        """Changes the assignment. A new cluster begins with the model of the cluster that it was cut from."""
        state = self.state
        assignment = state.assignment.clone()
        if move.other is None:
            assignment[list(move.second_half)] = state.num_clusters
            state.take_clusters([*range(state.num_clusters), move.cluster])
        else:
            assignment[assignment == move.cluster] = move.other
        state.assignment = assignment
        drop_empty(state)


def _of_clusters(uploads: Sequence[Uplink], state: FederationState) -> list[Uplink]:
    """Returns the uploads of clients that have a cluster; an earlier clustering may have left some without one."""
    return [upload for upload in uploads if state.assignment[upload.client] >= 0]


def updates_of(uploads: Sequence[Uplink], server: ServerInterface) -> Tensor:
    """Returns Delta_i ``[n, P]`` without buffers."""
    return torch.stack([upload.payload["update"][: server.layout.num_parameters] for upload in uploads])


def em(square_nn: Tensor, label_n: Tensor, num_clusters: int, max_iterations: int) -> Tensor:
    """Returns labels ``[n]`` after alternating E-steps and M-steps from the given labels (AS-CFL Eq. 6 and 7)."""
    for _ in range(max_iterations):
        moved_n = assign(-squared_distances_to_means(square_nn, label_n, num_clusters), label_n)
        if torch.equal(moved_n, label_n):
            break
        label_n = moved_n
    return label_n


def dispersion(square_nn: Tensor, label_n: Tensor, num_clusters: int) -> Tensor:
    """Returns d_in(k) ``[K]``: the mean distance of the members to their centroid, not squared; nan without members."""
    own_n = (
        squared_distances_to_means(square_nn, label_n, num_clusters).gather(1, label_n.unsqueeze(1)).squeeze(1).sqrt()
    )
    total_K = torch.zeros(num_clusters, dtype=torch.float64).index_add(0, label_n, own_n)
    return total_K / torch.bincount(label_n, minlength=num_clusters)


def separation(square_nn: Tensor, label_n: Tensor, num_clusters: int) -> Tensor:
    """Returns |c_k - c_j| ``[K, K]``; infinite on the diagonal and to clusters without members.

    d_out(k) is the minimum of a row.
    """
    member_nK = torch.nn.functional.one_hot(label_n, num_clusters).double()
    share_nK = member_nK / member_nK.sum(dim=0)
    to_mean_nK = squared_distances_to_means(square_nn, label_n, num_clusters)
    spread_K = (share_nK * to_mean_nK).sum(dim=0)
    # The mean over a in k of |x_a - c_j|^2 is |c_k - c_j|^2 plus the spread of k around c_k.
    square_KK = (share_nK.T @ to_mean_nK - spread_K.unsqueeze(1)).clamp(min=0)
    return square_KK.sqrt().nan_to_num(nan=inf, posinf=inf).fill_diagonal_(inf)


def _halves(square_nn: Tensor, draw: np.random.Generator) -> Tensor:
    """Returns 0 or 1 for each row, the nearer of two rows that are drawn.

    The odds of the second row are proportional to its squared distance from the first.
    """
    first = int(draw.integers(len(square_nn)))
    odds_n = square_nn[first].numpy()
    if not odds_n.sum() > 0:
        return torch.zeros(len(square_nn), dtype=torch.int64)
    second = int(draw.choice(len(square_nn), p=odds_n / odds_n.sum()))
    return (square_nn[:, second] < square_nn[:, first]).long()
