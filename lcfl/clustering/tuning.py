"""The number of clusters, tuned during training: FedAC's Algorithm 3, and a criterion that stops at the right number.

Legend: N clients, n of them with a model, K clusters, P parameters, D components.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf, isnan, nan
from typing import Any, ClassVar, Literal

import torch
from sklearn.metrics import silhouette_score
from torch import Tensor
from torch.nn.functional import normalize

from lcfl import rng
from lcfl.aggregation import mean_model
from lcfl.clustering.base import Clustering, ServerView
from lcfl.clustering.first import spherical_kmeans
from lcfl.similarity import principal_components, project
from lcfl.state import FederationState

__all__ = ["ClusterNumberTuning", "granularity"]

SMALLEST_TO_SPLIT = 4  # clients of a cluster that may be split
COMPONENTS = 50  # of the codes where no clustering keeps any
SEEN = 0.9  # of the clients have taken part before anything is tuned


def granularity(state: FederationState, num_parameters: int) -> tuple[Tensor, Tensor]:
    """Dist_intra and Dist_inter of every cluster, ``[K]`` each, float64 (FedAC Algorithm 3, lines 2 and 3).

    Squared L2 distances of whole models: of the members that have taken part to their centre (nan for a
    cluster without any), and of the centre to the others, the mean over K - 1 of them (nan for K = 1).
    """
    centre_KP = state.centres[:, :num_parameters].double()
    num_clusters = len(centre_KP)
    inter_K = torch.cdist(centre_KP, centre_KP).square().sum(dim=1) / (num_clusters - 1 or nan)
    intra = []
    for cluster, centre_P in enumerate(centre_KP):
        members = state.members(cluster)
        total = sum(float((state.model_of(i)[:num_parameters].double() - centre_P).square().sum()) for i in members)
        intra.append(total / len(members) if members else nan)
    return torch.tensor(intra, dtype=torch.float64), inter_K


@dataclass(frozen=True)
class Move:
    """Joins the clusters `cluster` and `other`, or (other None) cuts `cluster` along `second_half`."""

    cluster: int
    other: int | None = None
    second_half: tuple[int, ...] = ()


@dataclass
class ClusterNumberTuning(Clustering):
    """Merges and splits clusters after the round's aggregation (FedAC section 4.5, Algorithm 3).

    ``ratio`` is the paper's criterion: G_k = Dist_intra / Dist_inter; a cluster with G_k < a is merged
    into the closest one, one with G_k > b is split by two new centres and one re-clustering pass. As
    printed it does not stop at the right number: tight, well separated clusters have a G near 0, and a
    singleton has 0, so it merges exactly the clusters that are right. Hence the safeguards below.

    ``silhouette`` proposes the same moves - join the closest pair, cut a cluster by two centres - and
    takes the one, or none, that raises the mean silhouette (cosine distance) of the low-rank models by
    more than a margin; a single cluster is left when a cut in two scores above a threshold.

    Where a clustering keeps codes they are used, else the models' own principal components. Clients
    that never took part go with their cluster; in a split they stay in the first half. Clusters that
    nobody is assigned to are dropped.

    Args:
        criterion: ``ratio`` or ``silhouette``.
        lower: a of `ratio`.
        upper: b of `ratio`.
        margin: of `silhouette`: how much better a move must be.
        single_threshold: of `silhouette`: the score from which on a single cluster is cut in two.
        literal: of `ratio`: Algorithm 3 to the letter: one cluster after the other, distances computed anew
            each time, any number of moves, no bounds.
        start: the first round that may move anything; None: the first after 90 % of the clients took part.
        interval: rounds between two looks.
        cooldown: rounds without a move after a move.
        min_clusters: fewest K to go on with; the most is half of the clients that have taken part.
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
    uses_stored: ClassVar[bool] = True

    def __post_init__(self) -> None:
        name = type(self).__name__
        if self.criterion not in ("ratio", "silhouette"):
            raise ValueError(f"{name}: got criterion={self.criterion!r}; allowed are ratio and silhouette.")
        if not 0 <= self.lower < self.upper:
            raise ValueError(f"{name}: got lower={self.lower}, upper={self.upper}; needed is 0 <= lower < upper.")
        if self.literal and self.criterion != "ratio":
            raise ValueError(f"{name}: literal is about criterion=ratio; set that, or literal=false.")
        for option, least in (("interval", 1), ("cooldown", 0), ("min_clusters", 1), ("margin", 0)):
            if getattr(self, option) < least:
                raise ValueError(f"{name}: got {option}={getattr(self, option)}; it must be at least {least}.")
        self._moved = -inf

    def on_fit_start(self, server: ServerView, state: FederationState) -> None:
        """Forgets an earlier run of this object."""
        if not state.callbacks:
            self._moved = -inf

    def on_aggregated(self, server: ServerView, state: FederationState) -> None:
        """Drops empty clusters, logs G, and moves what is due."""
        _drop_empty(state)
        ratio_K = self._log_granularity(server, state)
        if not self._is_due(state):
            return
        if self.literal:
            moved = self._literal(server, state)
        else:
            moves = self._by_ratio(server, state, ratio_K) if self.criterion == "ratio" else self._best(server, state)
            for move in moves:
                _apply(move, server, state)
            moved = bool(moves)
        if moved:
            self._moved = state.round

    def state_dict(self) -> dict[str, Any]:
        """The round of the last move."""
        return {"moved": self._moved}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Puts back the round of the last move."""
        self._moved = state["moved"]

    def _is_due(self, state: FederationState) -> bool:
        seen = state.participated[state.active].float().mean()
        begun = state.round >= self.start if self.start is not None else seen >= SEEN
        return bool(begun) and state.round % self.interval == 0 and state.round - self._moved > self.cooldown

    def _log_granularity(self, server: ServerView, state: FederationState) -> Tensor:
        intra_K, inter_K = granularity(state, server.layout.num_parameters)
        ratio_K = intra_K / inter_K
        known = ratio_K[~ratio_K.isnan()]
        for cluster, ratio in enumerate(ratio_K.tolist()):
            if not isnan(ratio):
                server.log(f"cluster/granularity_{cluster:02d}", ratio)
        if len(known):
            server.log("cluster/granularity", float(known.mean()))
        return ratio_K

    def _by_ratio(self, server: ServerView, state: FederationState, ratio_K: Tensor) -> list[Move]:
        """At most one split and one merge, of one snapshot; the split first, which renumbers nothing."""
        smallest, largest = _extreme(ratio_K, lowest=True), _extreme(ratio_K, lowest=False)
        if smallest is None or largest is None:
            return []
        moves, closest = [], None
        if ratio_K[smallest] < self.lower and state.num_clusters > self.min_clusters:
            closest = _closest(state.centres[:, : server.layout.num_parameters], smallest)
        may_split = len(state.members(largest)) >= SMALLEST_TO_SPLIT and largest != closest
        if ratio_K[largest] > self.upper and may_split and state.num_clusters < int(state.participated.sum()) // 2:
            moves += _cut(state, largest, _seeded_halves(server, state, largest))
        if closest is not None:
            moves.append(Move(smallest, closest))
        return moves

    def _literal(self, server: ServerView, state: FederationState) -> bool:
        """Algorithm 3, lines 1 to 10."""
        moved = False
        for centre in list(state.centres):
            found = [k for k in range(state.num_clusters) if torch.equal(state.centres[k], centre)]
            if not found or state.num_clusters == 1:
                continue  # merged with another one in the meantime; or G is not defined
            cluster = found[0]
            intra_K, inter_K = granularity(state, server.layout.num_parameters)
            ratio = float(intra_K[cluster] / inter_K[cluster])
            moves = []
            if ratio < self.lower:
                moves = [Move(cluster, _closest(state.centres[:, : server.layout.num_parameters], cluster))]
            elif ratio > self.upper and len(state.members(cluster)) > 1:
                moves = _cut(state, cluster, _seeded_halves(server, state, cluster))
            for move in moves:
                _apply(move, server, state)
                moved = True
        return moved

    def _best(self, server: ServerView, state: FederationState) -> list[Move]:
        """The move that raises the mean silhouette most, if by more than the margin."""
        known = torch.nonzero(state.participated).flatten()
        code_nD = normalize(_codes(server, state, known).double(), dim=1)
        label_n = state.assignment[known]
        to_beat = self.single_threshold if state.num_clusters == 1 else _silhouette(code_nD, label_n) + self.margin
        best: list[Move] = []
        for move, moved_n in self._proposals(server, state, known, code_nD, label_n):
            score = _silhouette(code_nD, moved_n)
            if score > to_beat:
                to_beat, best = score, [move]
        return best

    def _proposals(
        self, server: ServerView, state: FederationState, known: Tensor, code_nD: Tensor, label_n: Tensor
    ) -> Iterator[tuple[Move, Tensor]]:
        """The closest pair joined; every cluster that is large enough cut in two: move and labels after it."""
        present = label_n.unique().tolist()
        if len(present) > self.min_clusters:
            centre_KD = torch.stack([code_nD[label_n == cluster].mean(dim=0) for cluster in present])
            similarity_KK = normalize(centre_KD, dim=1) @ normalize(centre_KD, dim=1).T
            place = int(similarity_KK.fill_diagonal_(-inf).argmax())
            cluster, other = present[place // len(present)], present[place % len(present)]
            yield Move(cluster, other), torch.where(label_n == cluster, other, label_n)
        if len(present) < len(known) // 2:
            for cluster in present:
                members = torch.nonzero(label_n == cluster).flatten()
                if len(members) < SMALLEST_TO_SPLIT:
                    continue
                half_n = spherical_kmeans(code_nD[members], 2, server.seed, state.round, cluster)
                second = members[half_n == 1]
                moved_n = label_n.clone()
                moved_n[second] = state.num_clusters
                yield Move(cluster, second_half=tuple(known[second].tolist())), moved_n


def _silhouette(code_nD: Tensor, label_n: Tensor) -> float:
    """The mean silhouette of directions; -1 where it is not defined."""
    if not 1 < len(label_n.unique()) < len(label_n):
        return -1.0
    return float(silhouette_score(code_nD.numpy(), label_n.numpy(), metric="cosine"))


def _codes(server: ServerView, state: FederationState, known: Tensor) -> Tensor:
    """Low-rank models ``[n, D]`` of the clients `known`."""
    if state.codes is not None:
        return state.codes[known]
    num_parameters = server.layout.num_parameters
    model_nP = torch.stack([state.model_of(client)[:num_parameters] for client in known.tolist()])
    return project(model_nP, principal_components(model_nP, COMPONENTS))


def _seeded_halves(server: ServerView, state: FederationState, cluster: int) -> list[int]:
    """The members nearer to the second of two new centres: a k-means++ pair in the reduced space, one pass."""
    members = state.members(cluster)
    code_nD = normalize(_codes(server, state, torch.tensor(members)).double(), dim=1)
    draw = rng.generator(server.seed, "split", state.round, cluster)
    first = int(draw.integers(len(members)))
    square_n = (code_nD - code_nD[first]).square().sum(dim=1).numpy()
    if not square_n.sum() > 0:
        return []
    second = int(draw.choice(len(members), p=square_n / square_n.sum()))
    to_second = (code_nD @ code_nD[second] > code_nD @ code_nD[first]).tolist()
    return [client for client, moves in zip(members, to_second, strict=True) if moves]


def _cut(state: FederationState, cluster: int, second_half: list[int]) -> list[Move]:
    """The split, unless one of its halves is empty."""
    if not 0 < len(second_half) < len(state.members(cluster)):
        return []
    return [Move(cluster, second_half=tuple(second_half))]


def _apply(move: Move, server: ServerView, state: FederationState) -> None:
    """Changes assignment and centres; centres of changed clusters are the means of their stored models."""
    assignment, centres = state.assignment.clone(), state.centres.clone()
    if move.other is None:
        changed = [move.cluster, state.num_clusters]
        assignment[list(move.second_half)] = state.num_clusters
        centres = torch.cat([centres, centres[move.cluster : move.cluster + 1]])
    else:
        changed = [move.other]
        assignment[assignment == move.cluster] = move.other
    state.assignment, state.centres = assignment, centres
    for cluster in changed:
        models = [state.model_of(client) for client in state.members(cluster)]
        if models:
            state.centres[cluster] = mean_model(models, [1] * len(models), server.layout)
    _drop_empty(state)


def _drop_empty(state: FederationState) -> None:
    """Removes clusters that no client is assigned to; the numbers of the others close up."""
    used = state.assignment[state.active].unique()
    if len(used) < state.num_clusters:
        state.assignment = torch.searchsorted(used, state.assignment).clamp(max=len(used) - 1)
        state.centres = state.centres[used]


def _extreme(ratio_K: Tensor, lowest: bool) -> int | None:
    """The cluster with the smallest or the largest G; None where no G is defined."""
    if bool(ratio_K.isnan().all()):
        return None
    filled_K = ratio_K.nan_to_num(nan=inf if lowest else -inf)
    return int(filled_K.argmin() if lowest else filled_K.argmax())


def _closest(centre_KP: Tensor, cluster: int) -> int:
    """The other cluster whose centre is nearest (L2)."""
    distance_K = (centre_KP.double() - centre_KP[cluster].double()).norm(dim=1)
    distance_K[cluster] = inf
    return int(distance_K.argmin())
