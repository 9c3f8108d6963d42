"""Hierarchical clustering of the updates of all clients, once during training (FL+HC).

Legend: N clients, K clusters, P parameters.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from lcfl.core.messages import Uplink
from lcfl.core.schema import Forms
from lcfl.core.state import FederationState
from lcfl.methods.clustering.agglomerative import Choose, Linkage, Metric, check_options, cut_tree, pairwise_distances
from lcfl.methods.clustering.base import NOTHING_USABLE, Clustering, ExtraRound, ServerInterface, check_num_clusters

__all__ = ["HierarchicalUpdates"]


@dataclass
class HierarchicalUpdates(Clustering):
    """Clusters all clients by their updates Delta_i = w_i - w after n_pre rounds of FedAvg (FL+HC).

    Before training round `after` there is one extra round in which every client trains from the common model w. The
    agglomerative clustering of the updates of this extra round is final, and every cluster begins at w. A client whose
    update is not finite gets no cluster.

    Args:
        after: n_pre, the number of training rounds before the clustering.
        metric: the distance of two updates: ``l2``, ``l1`` or ``cosine``. For l1 and l2 it equals the distance of the
            models.
        linkage: ``ward`` (l2 only), ``average``, ``complete``, ``single`` or ``weighted``.
        threshold: clusters farther apart than this are not joined.
        num_clusters: K instead of a threshold.
        choose: how the data determine K instead; see `OneShotHierarchical`.
    """

    has_extra_rounds: ClassVar[bool] = True
    remembers: ClassVar[Forms] = {"is_done": bool}

    after: int = 10
    metric: Metric = "l2"
    linkage: Linkage = "ward"
    threshold: float | None = None
    num_clusters: int | None = 4
    choose: Choose | None = None

    def __post_init__(self) -> None:
        name = type(self).__name__
        if self.after < 0:
            raise ValueError(f"{name}: got after={self.after}; it must be at least 0.")
        euclidean = self.metric == "l2"
        check_options(name, self.linkage, self.threshold, self.num_clusters, self.choose, euclidean)
        self.forget()

    def forget(self) -> None:
        """Forgets the last run."""
        self._is_done = False

    @property
    def begins(self) -> int:
        """The round before which all clients train once more and are clustered."""
        return self.after

    def check(self, num_clients: int) -> None:
        """Checks that K is at most N."""
        check_num_clusters(self, self.num_clusters, num_clients)

    def extra_round(self, state: FederationState, sampled: Sequence[int]) -> ExtraRound | None:
        """Returns the extra round in which all clients train once from the common model, if it is due."""
        if self._is_done or state.round < self.after:
            return None
        return ExtraRound(torch.nonzero(state.active).flatten().tolist(), sends_own=True)

    def on_extra_round_end(self, server: ServerInterface, state: FederationState, uploads: Sequence[Uplink]) -> None:
        """Sets R, and K centres at the common model."""
        if self._is_done or state.round < self.after:
            return
        if not uploads:
            raise ValueError(f"HierarchicalUpdates: got no usable model; {NOTHING_USABLE}")
        common = state.centres[0]
        num_parameters = server.layout.num_parameters
        update_nP = torch.stack([(upload.payload["model"] - common)[:num_parameters] for upload in uploads])
        number = None if self.num_clusters is None else min(self.num_clusters, len(uploads))
        distance_nn = pairwise_distances(update_nP, self.metric)
        cut = cut_tree(distance_nn, self.linkage, self.threshold, number, self.choose)
        state.assignment = torch.full_like(state.assignment, -1)
        state.assignment[[upload.client for upload in uploads]] = torch.from_numpy(cut.labels)
        state.centres = common.repeat(cut.num_clusters, 1)
        server.log("cluster/threshold", cut.threshold)
        if cut.silhouette is not None:
            server.log("cluster/silhouette", cut.silhouette)
        self._is_done = True
