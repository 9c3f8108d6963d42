"""FedClust: clients are grouped once, before training, by the last layers of briefly trained models.

Legend: N clients, n of them with a vector, K clusters, P parameters, P_L of them in the layers that are compared.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from lcfl import figures
from lcfl.core.messages import Downlink, Uplink
from lcfl.core.state import FederationState
from lcfl.methods.clustering.agglomerative import Choose, Linkage, check_options, cut_tree, pairwise_distances
from lcfl.methods.clustering.base import Clustering, ExtraRound, NewcomerView, ServerView, check_num_clusters
from lcfl.methods.exchange import NamedLayers
from lcfl.methods.local.training import LocalTraining
from lcfl.models.layout import Layout

if TYPE_CHECKING:
    from matplotlib.figure import Figure
from lcfl.core.validation import check_choices

__all__ = ["OneShotHierarchical"]


@dataclass
class OneShotHierarchical(Clustering):
    """Agglomerative clustering of last-layer weights in one warm-up round (FedClust Algorithm 1, lines 2 to 7).

    All clients train from the common initial model theta^0 and send their last layer only; the server clusters
    the Euclidean distances M_pq = |theta_p - theta_q| (Eq. 3), every cluster's model begins at theta^0, and the
    clusters stay. With `ClusterModel` and `ClusterMean` over participants each of them is a FedAvg of its own.

    A client whose vector does not come in finite joins the largest cluster.

    Args:
        linkage: the distance of two clusters: average, complete, single, weighted or ward; not stated in the
            paper (reading A7).
        threshold: lambda: pairs of clusters farther apart are not joined. Distances grow with learning rate, local
            work and layer, so a threshold of one setting says nothing in another.
        num_clusters: K instead of a threshold; at most as many as there are vectors.
        choose: K by the data instead of either: ``gap``, the largest gap between the heights of consecutive
            merges, or ``silhouette``, the largest mean silhouette. Both find at least two clusters.
        layers: names of the layers that are compared, each with all that is inside it; None: the last layer, weights
            and bias (section 4.1).
        warmup_epochs: of the warm-up round; None, with `warmup_steps` None, for one ordinary local run (reading A8).
        warmup_steps: mini-batches of the warm-up round instead.
        restart: every cluster begins at theta^0 (line 7). False: at theta^0 with the compared layers replaced by
            the mean of the members' ones, which is all that the server has been sent.
        reference: what a newcomer's layers are compared with: ``warm_up``, the mean of what the cluster's members
            sent in the warm-up round, which began at theta^0 as the newcomer does; ``model``, the layers of the trained
            cluster model ("models of existing clusters", section 4.2; reading A33).
    """

    linkage: Linkage = "average"
    threshold: float | None = None
    num_clusters: int | None = None
    choose: Choose | None = "gap"
    layers: list[str] | None = None
    warmup_epochs: int | None = None
    warmup_steps: int | None = None
    restart: bool = True
    reference: Literal["warm_up", "model"] = "warm_up"

    reads: ClassVar[tuple[str, ...]] = ()
    newcomer_rule: ClassVar[str] = "the cluster whose layers are nearest to those of a newcomer that has warmed up"

    def __post_init__(self) -> None:
        name = type(self).__name__
        check_choices(name, self)
        check_options(name, self.linkage, self.threshold, self.num_clusters, self.choose)
        if self.layers is not None and not self.layers:
            raise ValueError(f"{name}: got layers=[]; name at least one layer, or null for the last one.")
        if self.warmup_epochs is not None and self.warmup_steps is not None:
            raise ValueError(
                f"{name}: got warmup_epochs={self.warmup_epochs} and warmup_steps={self.warmup_steps}; give one of "
                "them, or neither."
            )
        for option in ("warmup_epochs", "warmup_steps"):
            number = getattr(self, option)
            if number is not None and number < 1:
                raise ValueError(f"{name}: got {option}={number}; it must be at least 1, or null.")
        self._vectors: Tensor  # of the warm-up round [N, P_L]
        self._known: Tensor  # whose there are [N]
        self._forget()

    def check(self, num_clients: int) -> None:
        """K is at most N."""
        check_num_clusters(self, self.num_clusters, num_clients)

    def check_layout(self, layout: Layout) -> None:
        """The layers exist."""
        try:
            NamedLayers(self.layers).subset(layout)
        except ValueError as error:
            raise ValueError(f"method.clustering: {type(self).__name__}.layers: {error}") from None

    def warmup_rounds(self, num_clients: int) -> list[ExtraRound]:
        """The warm-up of all clients."""
        return [ExtraRound(range(num_clients), self._warm_up(), NamedLayers(self.layers))]

    def on_fit_start(self, server: ServerView, state: FederationState) -> None:
        """Forgets an earlier run of this object."""
        if not state.callbacks:
            self._forget()

    def on_extra_round_end(self, server: ServerView, state: FederationState, uploads: Sequence[Uplink]) -> None:
        """R and the first cluster models."""
        if not uploads:
            raise ValueError(
                f"{type(self).__name__}: none of the warm-up models came up finite. Lower the optimizer's learning "
                "rate."
            )
        clients = [upload.client for upload in uploads]
        vector_nL = torch.stack([upload.payload["layers"] for upload in uploads])
        wanted = None if self.num_clusters is None else min(self.num_clusters, len(clients))
        found = cut_tree(pairwise_distances(vector_nL), self.linkage, self.threshold, wanted, self.choose)
        label_n = torch.as_tensor(found.labels)
        state.assignment = torch.where(state.active, int(label_n.bincount().argmax()), -1)
        state.assignment[clients] = label_n
        self._vectors = torch.zeros(state.num_clients, vector_nL.shape[1])
        self._vectors[clients] = vector_nL
        self._known = torch.zeros(state.num_clients, dtype=torch.bool)
        self._known[clients] = True

        state.centres = state.initial.repeat(found.num_clusters, 1)
        if not self.restart:
            self._replace_layers(state, server.layout)
        server.log("cluster/count", found.num_clusters)
        server.log("cluster/threshold", found.threshold)

    def place_newcomer(self, newcomer: NewcomerView, state: FederationState) -> int:
        """The nearest cluster to the layers of the newcomer's own warm-up (Algorithm 2, Eq. 4): P down, P_L up."""
        uplink = newcomer.run(Downlink({"model": state.initial}), NamedLayers(self.layers), self._warm_up())
        vector_L = uplink.payload["layers"].double()
        references = self._means(state)
        if self.reference == "model":
            part = NamedLayers(self.layers).subset(newcomer.layout)
            references = {cluster: part.take(state.centres[cluster]).double() for cluster in references}
        return min(references, key=lambda cluster: float((references[cluster] - vector_L).norm()))

    def figures(self, state: FederationState) -> "dict[str, Figure]":
        """``distances``: the proximity matrix M, by cluster; of 256 clients if there are more."""
        known = torch.nonzero(self._known).flatten()
        known = known[figures.shown(len(known))]
        title = f"Distance of the clients' {', '.join(self.layers or ['last layer'])} after the warm-up"
        return {
            "distances": figures.distance_matrix(
                pairwise_distances(self._vectors[known]), state.assignment[known], title
            )
        }

    def state_dict(self) -> dict[str, Any]:
        """The vectors of the warm-up round ``[N, P_L]``, and whose there are."""
        return {"vectors": self._vectors, "known": self._known}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Puts back the vectors."""
        self._vectors, self._known = state["vectors"], state["known"]

    def _forget(self) -> None:
        self._vectors, self._known = torch.zeros(0, 0), torch.zeros(0, dtype=torch.bool)

    def _warm_up(self) -> LocalTraining | None:
        if self.warmup_epochs is None and self.warmup_steps is None:
            return None
        return LocalTraining(steps=self.warmup_steps, epochs=self.warmup_epochs)

    def _means(self, state: FederationState) -> dict[int, Tensor]:
        """The mean vector ``[P_L]`` of each cluster, over its members that are still there; in float64."""
        counted = self._known & state.active
        return {
            cluster: self._vectors[counted & (state.assignment == cluster)].double().mean(dim=0)
            for cluster in state.assignment[counted].unique().tolist()
        }

    def _replace_layers(self, state: FederationState, layout: Layout) -> None:
        part = NamedLayers(self.layers).subset(layout)
        for cluster, mean_L in self._means(state).items():
            state.centres[cluster] = part.put(mean_L.float(), state.centres[cluster])
