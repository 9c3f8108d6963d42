"""Tuning of the number of clusters by FedAC's Algorithm 3, or by a criterion that stops at the right number.

Legend: N clients, n clients with a model, K clusters, P parameters, D components.
"""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from math import inf, isnan, nan
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize

from lcfl.core import rng
from lcfl.core.clients import ClientStore
from lcfl.core.model_sums import squared_distance
from lcfl.core.schema import Forms
from lcfl.core.state import FederationState
from lcfl.methods.aggregation import mean_model
from lcfl.methods.clustering.base import Clustering, ServerInterface
from lcfl.methods.clustering.cluster_moves import (
    ClusterGeometry,
    ClusterMove,
    apply_one_by_one,
    drop_empty,
    ratio_moves,
    silhouette_moves,
)
from lcfl.methods.clustering.initialisation import spherical_kmeans
from lcfl.methods.clustering.similarity import cosine_silhouette, principal_components, project, project_all, spread

__all__ = ["ClusterNumberTuning", "StoredModelGeometry", "ClusterTuning", "granularity"]

COMPONENTS = 50  # dimension of the codes if no clustering keeps codes
SEEN = 0.9  # share of the clients that must have taken part before anything is tuned


def granularity(state: FederationState, num_parameters: int) -> tuple[Tensor, Tensor]:
    """Returns Dist_intra and Dist_inter of every cluster, ``[K]`` each, in float64 (FedAC Algorithm 3, lines 2 and 3).

    Both are mean squared L2 distances of whole models. Dist_intra is that of the members that have taken part to their
    centre. Dist_inter is that of the centre to the K - 1 other centres, and nan for K = 1. A cluster without members
    that have taken part has no model. It does not count, and both are nan for it.
    """
    centre_KP = state.centres[:, :num_parameters].double()
    intra = []
    for cluster, centre_P in enumerate(centre_KP):
        members = state.members(cluster)
        parts = state.clients.at_owners(functools.partial(_squared_distances, centre_P=centre_P), members)
        intra.append(sum(itertools.chain(*parts)) / len(members) if members else nan)
    intra_K = torch.tensor(intra, dtype=torch.float64)
    counts_K = ~intra_K.isnan()
    square_KK = torch.cdist(centre_KP, centre_KP[counts_K]).square()
    inter_K = square_KK.sum(dim=1) / (int(counts_K.sum()) - 1 or nan)
    return intra_K, torch.where(counts_K, inter_K, nan)


def _squared_distances(store: ClientStore, clients: list[int], centre_P: Tensor) -> list[float]:
    """Returns the squared distance of each client's stored model to a centre."""
    return [squared_distance(state.stored_model[: len(centre_P)], centre_P) for state in store.states(clients)]


@dataclass
class ClusterTuning(Clustering):
    """Base class that decides when a criterion is applied, and with which settings.

    `ClusterGeometry` holds the clusters.

    Args:
        criterion: ``ratio`` or ``silhouette``.
        lower: the value below which ``ratio`` merges a cluster.
        upper: the value above which ``ratio`` splits a cluster of at least four known clients.
        margin: for ``silhouette``, how much better a move must be.
        single_threshold: for ``silhouette``, the score above which a single cluster is cut in two.
        literal: for ``ratio``, whether to follow the papers' algorithms to the letter: each cluster in turn, even one
            that has just absorbed another, distances recomputed after each move, any number of moves, no bounds.
        start: the first round in which anything may move. None for the round in which 90 % of the clients have taken
            part.
        interval: the number of rounds from one check to the next.
        cooldown: the number of rounds without a move after a move.
        min_clusters: the smallest K. The largest K is half the number of clients whose models or updates are known.
    """

    criterion: Literal["ratio", "silhouette"] = "ratio"
    lower: float = 0.2
    upper: float = 0.8
    margin: float = 0.01
    single_threshold: float = 0.25
    literal: bool = False
    start: int | None = None
    interval: int = 1
    cooldown: int = 0
    min_clusters: int = 2

    reads: ClassVar[tuple[str, ...]] = ()
    remembers: ClassVar[Forms] = {"moved": (int, float)}

    def __post_init__(self) -> None:
        name = type(self).__name__
        if not 0 <= self.lower < self.upper:
            raise ValueError(f"{name}: got lower={self.lower}, upper={self.upper}; 0 <= lower < upper must hold.")
        if self.literal and self.criterion != "ratio":
            raise ValueError(f"{name}: literal=true works with criterion=ratio only; set that, or literal=false.")
        least = {"start": 0, "interval": 1, "cooldown": 0, "min_clusters": 1, "margin": 0}
        for option, value in least.items():
            if getattr(self, option) is not None and getattr(self, option) < value:
                raise ValueError(f"{name}: got {option}={getattr(self, option)}; it must be at least {value}.")
        self.forget()

    def forget(self) -> None:
        """Forgets the last run."""
        self._moved = -inf

    @property
    def begins(self) -> int:
        """The first round in which anything may move; 0 if `start` is None."""
        return self.start or 0

    def tune(self, server: ServerInterface, state: FederationState, look: Callable[[], ClusterGeometry]) -> None:
        """Drops empty clusters. In a round in which moves are due, logs G and makes the moves.

        G takes a pass over all stored models, so it is not computed in other rounds.
        """
        drop_empty(state)
        if not self._is_due(state):
            return
        groups = look()
        ratio_K = groups.ratio()
        _log_ratio(server, ratio_K)
        if self.literal:
            moved = apply_one_by_one(look, groups, ratio_K, self.lower, self.upper)
        else:
            if self.criterion == "ratio":
                moves = ratio_moves(groups, ratio_K, self.lower, self.upper, self.min_clusters)
            else:
                moves = silhouette_moves(groups, self.margin, self.single_threshold, self.min_clusters)
            for move in moves:
                groups.apply(move)
            moved = bool(moves)
        if moved:
            self._moved = state.round

    def _is_due(self, state: FederationState) -> bool:
        seen = state.participated[state.active].float().mean()
        begun = state.round >= self.start if self.start is not None else seen >= SEEN
        return bool(begun) and state.round % self.interval == 0 and state.round - self._moved > self.cooldown


@dataclass
class ClusterNumberTuning(ClusterTuning):
    """Merges and splits clusters after the round's aggregation (FedAC section 4.5, Algorithm 3).

    ``ratio`` is the paper's criterion, G_k = Dist_intra / Dist_inter. A cluster with G_k < a (`lower`) is merged into
    the closest one. A cluster with G_k > b (`upper`) is split by two new centres and one re-clustering pass. The rule
    as printed does not stop at the right number. Tight, well separated clusters have a G near 0, and a singleton has 0,
    so it merges exactly the clusters that are right. This is why `ClusterTuning` has safeguards.

    ``silhouette`` proposes the same moves: it joins the closest pair, or cuts a cluster by two centres. It makes the
    move, if any, that raises the mean silhouette (cosine distance) of the low-rank models most and by more than a
    margin. A single cluster is cut in two if the cut scores above a threshold.

    If a clustering keeps codes, they are used, otherwise the models' own principal components. Clients that never took
    part follow their cluster. In a split they stay in the first half. Clusters that no client is assigned to are
    dropped.

    The arguments are those of `ClusterTuning`.
    """

    @property
    def uses_stored_models(self) -> bool:
        """Always true, because it needs the models of all clients that ever took part."""
        return True

    def on_aggregated(self, server: ServerInterface, state: FederationState) -> None:
        """Tunes the clusters by the stored models, once the round has been aggregated."""
        self.tune(server, state, lambda: StoredModelGeometry(server, state))


class StoredModelGeometry(ClusterGeometry):
    """The clusters by the stored models of their members that ever took part, and by the codes of these models."""

    def __init__(self, server: ServerInterface, state: FederationState) -> None:
        known = state.participated & (state.assignment >= 0)
        super().__init__(state, torch.nonzero(known).flatten().tolist())
        self.server = server

    @property
    def centre_KP(self) -> Tensor:
        """Omega without buffers."""
        return self.state.centres[:, : self.server.layout.num_parameters]

    @functools.cached_property
    def code_nD(self) -> Tensor:
        """Directions of the low-rank models of all clients that took part."""
        return self.directions(self.clients)

    def ratio(self) -> Tensor:
        """Returns G_k = Dist_intra / Dist_inter."""
        intra_K, inter_K = granularity(self.state, self.server.layout.num_parameters)
        return intra_K / inter_K

    def members(self, cluster: int) -> list[int]:
        """Returns the clients of a cluster that took part."""
        return self.state.members(cluster)

    def closest(self, cluster: int) -> int:
        """Returns the closest other cluster that has a model, by the L2 distance of the centres."""
        others = [other for other in self.label_n.unique().tolist() if other != cluster]
        centre_KP = self.centre_KP.double()
        return int(others[(centre_KP[others] - centre_KP[cluster]).norm(dim=1).argmin()])

    def seeded_half(self, cluster: int) -> list[int]:
        """Returns the second half in the space of the codes' directions."""
        members = self.members(cluster)
        code_nD = self.directions(members)
        draw = rng.generator(self.server.seed, "split", self.state.round, cluster)
        first = int(draw.integers(len(members)))
        square_n = (code_nD - code_nD[first]).square().sum(dim=1).numpy()
        if not square_n.sum() > 0:
            return []
        second = int(draw.choice(len(members), p=square_n / square_n.sum()))
        to_second = (code_nD @ code_nD[second] > code_nD @ code_nD[first]).tolist()
        return [client for client, moves in zip(members, to_second, strict=True) if moves]

    def silhouette(self, label_n: Tensor) -> float:
        """Returns the mean silhouette of directions by their cosine distance."""
        if not 1 < len(label_n.unique()) < len(label_n):
            return -1.0
        return cosine_silhouette(self.code_nD, label_n)

    def closest_pair(self, present: list[int]) -> tuple[int, int]:
        """Returns the closest pair by the cosine of the clusters' mean directions."""
        centre_KD = torch.stack([self.code_nD[self.label_n == cluster].mean(dim=0) for cluster in present])
        similarity_KK = normalize(centre_KD, dim=1) @ normalize(centre_KD, dim=1).T
        largest = int(similarity_KK.fill_diagonal_(-inf).argmax())
        return present[largest // len(present)], present[largest % len(present)]

    def half_of(self, members: Tensor, cluster: int) -> Tensor:
        """Cuts a cluster in two by spherical k-means."""
        return spherical_kmeans(self.code_nD[members], 2, self.server.seed, self.state.round, cluster)

    def apply(self, move: ClusterMove) -> None:
        """Applies a move. Centres of changed clusters become the means of their stored models."""
        state = self.state
        assignment, origins = state.assignment.clone(), list(range(state.num_clusters))
        if move.other is None:
            changed = [move.cluster, state.num_clusters]
            assignment[list(move.second_half)] = state.num_clusters
            origins.append(move.cluster)
        else:
            changed = [move.other]
            assignment[assignment == move.cluster] = move.other
        state.assignment = assignment
        state.take_clusters(origins)
        for cluster in changed:
            if members := state.members(cluster):
                models = state.stored_models(members)
                state.centres[cluster] = mean_model(models, [1] * len(members), self.server.layout)
        drop_empty(state)

    def directions(self, clients: list[int]) -> Tensor:
        """Returns the directions ``[n, D]`` of the clients' codes.

        If there are no codes, the clients' models in their own principal components are used. They are fitted to
        1,000 models at most.
        """
        if self.state.codes is not None:
            return normalize(self.state.codes[clients].double(), dim=1)
        num_parameters, fitted = self.server.layout.num_parameters, spread(clients)
        model_nP = torch.stack([model[:num_parameters] for model in self.state.stored_models(fitted)])
        basis_PD = principal_components(model_nP, COMPONENTS)
        if len(fitted) == len(clients):
            code_nD = project(model_nP, basis_PD)
        else:
            del model_nP
            code_nD = project_all(self.state.stored_models(clients), basis_PD)
        return normalize(code_nD.double(), dim=1)


def _log_ratio(server: ServerInterface, ratio_K: Tensor) -> None:
    known = ratio_K[~ratio_K.isnan()]
    for cluster, ratio in enumerate(ratio_K.tolist()):
        if not isnan(ratio):
            server.log(f"cluster/granularity_{cluster:02d}", ratio)
    if len(known):
        server.log("cluster/granularity", float(known.mean()))
