"""FedClust, which groups clients once, before training, by the last layers of briefly trained models.

Legend: N clients, n clients with a vector, K clusters, P parameters, P_L parameters in the compared layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor

from lcfl import figures
from lcfl.core.messages import Downlink, Uplink
from lcfl.core.schema import Array, Forms
from lcfl.core.state import FederationState
from lcfl.methods.clustering.agglomerative import Choose, Linkage, check_options, cut_tree, pairwise_distances
from lcfl.methods.clustering.base import (
    NOTHING_USABLE,
    Clustering,
    ExtraRound,
    NewcomerInterface,
    ServerInterface,
    check_num_clusters,
)
from lcfl.methods.exchange import NamedLayers
from lcfl.methods.local.training import LocalTraining
from lcfl.models.layout import Layout

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["OneShotHierarchical"]


@dataclass
class OneShotHierarchical(Clustering):
    """Agglomerative clustering of last-layer weights in one warm-up round (FedClust Algorithm 1, lines 2 to 7).

    All clients train from the common initial model theta^0 and upload only their last layer. The server clusters the
    Euclidean distances M_pq = |theta_p - theta_q| (Eq. 3). Every cluster's model begins at theta^0, and the clusters
    stay. With `ClusterModel` and `ClusterMean` over participants, each cluster is a separate FedAvg.

    A client without a finite vector joins the largest cluster.

    Args:
        linkage: the distance of two clusters: average, complete, single, weighted or ward. The paper does not state it
            (reading A7).
        threshold: lambda. Clusters farther apart than this are not joined. Distances grow with the learning rate, the
            local work and the layer, so a threshold for one setting says nothing about another.
        num_clusters: K instead of a threshold; at most the number of vectors.
        choose: how the data determine K instead: ``gap``, the largest gap between the heights of consecutive merges, or
            ``silhouette``, the largest mean silhouette. Both find at least two clusters. ``silhouette_or_one`` (ours)
            is ``silhouette``, but one cluster if the largest mean silhouette is below 0.5.
        layers: patterns of the layers that are compared, each with everything inside it. None for the last layer,
            weights and bias (section 4.1).
        warmup_epochs: epochs of the warm-up round. If this and `warmup_steps` are None, it is one ordinary local run
            (reading A8).
        warmup_steps: mini-batches of the warm-up round, instead of epochs.
        restart: whether every cluster begins at theta^0 (line 7). False begins at theta^0 with the compared layers
            replaced by the mean of the members' layers, which is all that the server has received.
        reference: what a newcomer's layers are compared with. ``warm_up``: the mean of what the cluster's members
            sent in the warm-up round, which began at theta^0 as the newcomer does. ``model``: the layers of the trained
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
    newcomer_rule: ClassVar[str] = "the cluster whose layers are nearest to the newcomer's layers after its warm-up"
    remembers: ClassVar[Forms] = {
        "vectors": Array(("clients", None)),
        "known": Array(("clients",), torch.bool),
    }

    def __post_init__(self) -> None:
        name = type(self).__name__
        check_options(name, self.linkage, self.threshold, self.num_clusters, self.choose)
        if self.layers is not None and not self.layers:
            raise ValueError(f"{name}: got layers=[]; name at least one layer, or give null for the last one.")
        if self.warmup_epochs is not None and self.warmup_steps is not None:
            raise ValueError(
                f"{name}: got warmup_epochs={self.warmup_epochs} and warmup_steps={self.warmup_steps}; give at "
                "most one and set the other to null."
            )
        for option in ("warmup_epochs", "warmup_steps"):
            number = getattr(self, option)
            if number is not None and number < 1:
                raise ValueError(f"{name}: got {option}={number}; it must be at least 1, or null.")
        self.forget()

    def forget(self) -> None:
        """Forgets the last run."""
        self._vectors = torch.zeros(0, 0)  # uploads of the warm-up round [N, P_L]
        self._known = torch.zeros(0, dtype=torch.bool)  # whether there is a vector of each client [N]

    def check(self, num_clients: int) -> None:
        """Checks that K is at most N."""
        check_num_clusters(self, self.num_clusters, num_clients)

    def check_layout(self, layout: Layout) -> None:
        """Checks that the layers exist."""
        try:
            NamedLayers(self.layers).subset(layout)
        except ValueError as error:
            raise ValueError(f"method.clustering: {type(self).__name__}.layers: {error}") from None

    def warmup_rounds(self, num_clients: int) -> list[ExtraRound]:
        """Returns the warm-up round of all clients."""
        return [ExtraRound(range(num_clients), self._warm_up(), NamedLayers(self.layers))]

    def on_extra_round_end(self, server: ServerInterface, state: FederationState, uploads: Sequence[Uplink]) -> None:
        """Sets R and the first cluster models."""
        if not uploads:
            raise ValueError(f"{type(self).__name__}: got no usable layers from the warm-up round; {NOTHING_USABLE}")
        clients = [upload.client for upload in uploads]
        vector_nL = torch.stack([upload.payload["layers"] for upload in uploads])
        number = None if self.num_clusters is None else min(self.num_clusters, len(clients))
        cut = cut_tree(pairwise_distances(vector_nL), self.linkage, self.threshold, number, self.choose)
        label_n = torch.as_tensor(cut.labels)
        state.assignment = torch.where(state.active, int(label_n.bincount().argmax()), -1)
        state.assignment[clients] = label_n
        self._vectors = torch.zeros(state.num_clients, vector_nL.shape[1])
        self._vectors[clients] = vector_nL
        self._known = torch.zeros(state.num_clients, dtype=torch.bool)
        self._known[clients] = True

        state.centres = state.initial.repeat(cut.num_clusters, 1)
        if not self.restart:
            self._replace_layers(state, server.layout)
        server.log("cluster/count", cut.num_clusters)
        server.log("cluster/threshold", cut.threshold)
        if cut.silhouette is not None:
            server.log("cluster/silhouette", cut.silhouette)

    def place_newcomer(self, newcomer: NewcomerInterface, state: FederationState) -> int:
        """Returns the cluster nearest to the layers of the newcomer's warm-up (Algorithm 2, Eq. 4).

        This sends P floats down and P_L up.
        """
        uplink = newcomer.run(Downlink({"model": state.initial}), NamedLayers(self.layers), self._warm_up())
        vector_L = uplink.payload["layers"].double()
        references = self._means(state)
        if not references:  # all clients whose layers are known have left
            return super().place_newcomer(newcomer, state)
        if self.reference == "model":
            part = NamedLayers(self.layers).subset(newcomer.layout)
            references = {cluster: part.take(state.centres[cluster]).double() for cluster in references}
        return min(references, key=lambda cluster: float((references[cluster] - vector_L).norm()))

    def figures(self, state: FederationState) -> "dict[str, Figure]":
        """Returns the figure ``distances``: the proximity matrix M, ordered by cluster.

        If there are more than 256 clients, it shows 256 clients.
        """
        known = torch.nonzero(self._known).flatten()
        known = known[figures.shown(len(known))]
        title = f"Distance of the clients' {', '.join(self.layers or ['last layer'])} after the warm-up"
        return {
            "distances": figures.distance_matrix(
                pairwise_distances(self._vectors[known]), state.assignment[known], title
            )
        }

    def _warm_up(self) -> LocalTraining | None:
        if self.warmup_epochs is None and self.warmup_steps is None:
            return None
        return LocalTraining(steps=self.warmup_steps, epochs=self.warmup_epochs)

    def _means(self, state: FederationState) -> dict[int, Tensor]:
        """Returns the mean vector ``[P_L]`` of each cluster in float64, over its members that have not left."""
        counted = self._known & state.active
        return {
            cluster: self._vectors[counted & (state.assignment == cluster)].double().mean(dim=0)
            for cluster in state.assignment[counted].unique().tolist()
        }

    def _replace_layers(self, state: FederationState, layout: Layout) -> None:
        part = NamedLayers(self.layers).subset(layout)
        for cluster, mean_L in self._means(state).items():
            state.centres[cluster] = part.put(mean_L.float(), state.centres[cluster])
