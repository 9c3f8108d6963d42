"""Moves that change the number of clusters, the two criteria that choose them, and the numbers of clusters.

`ClusterGeometry` hides what a cluster consists of, which is stored models or this round's updates. FedAC and AS-CFL
share the rest.

Legend: n clients whose vectors are known, K clusters.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from math import isnan

import torch
from torch import Tensor

from lcfl.core.state import FederationState

__all__ = [
    "ClusterGeometry",
    "ClusterMove",
    "apply_one_by_one",
    "drop_empty",
    "keep_numbers",
    "ratio_moves",
    "silhouette_moves",
]

SMALLEST_TO_SPLIT = 4  # fewest clients of a cluster that may be split


@dataclass(frozen=True)
class ClusterMove:
    """A move that joins the clusters `cluster` and `other`, or, if `other` is None, cuts `cluster` in two.

    `second_half` holds the clients that a cut moves to a new cluster.
    """

    cluster: int
    other: int | None = None
    second_half: tuple[int, ...] = ()


class ClusterGeometry(ABC):
    """The current clusters, and the distances that a criterion needs.

    Args:
        state: the state, which holds the assignment.
        clients: the n clients whose vectors are known, in ascending order.
    """

    def __init__(self, state: FederationState, clients: list[int]) -> None:
        self.state = state
        self.clients = clients

    @property
    def label_n(self) -> Tensor:
        """The cluster of each known client."""
        return self.state.assignment[self.clients]

    @property
    def num_clusters(self) -> int:
        """K, the number of clusters with a known client. The others do not count."""
        return len(self.label_n.unique())

    @abstractmethod
    def ratio(self) -> Tensor:
        """Returns G_k ``[K]`` of every cluster of the state in float64; nan where it is not defined."""

    @abstractmethod
    def members(self, cluster: int) -> list[int]:
        """Returns the known clients of a cluster in ascending order."""

    @abstractmethod
    def closest(self, cluster: int) -> int:
        """Returns the other cluster whose centre is nearest."""

    @abstractmethod
    def seeded_half(self, cluster: int) -> list[int]:
        """Returns the members nearer to the second of two new centres, a k-means++ pair, after one pass."""

    @abstractmethod
    def silhouette(self, label_n: Tensor) -> float:
        """Returns the mean silhouette of the known clients under these labels; -1 where it is not defined."""

    @abstractmethod
    def closest_pair(self, present: list[int]) -> tuple[int, int]:
        """Returns the two closest of the clusters `present`."""

    @abstractmethod
    def half_of(self, members: Tensor, cluster: int) -> Tensor:
        """Returns 0 or 1 for each of the rows `members` of a cluster, the best cut in two."""

    @abstractmethod
    def apply(self, move: ClusterMove) -> None:
        """Changes the assignment and the centres in the state."""


def ratio_moves(
    groups: ClusterGeometry, ratio_K: Tensor, lower: float, upper: float, min_clusters: int
) -> list[ClusterMove]:
    """Returns at most one split and one merge, based on one snapshot.

    The cluster with the smallest G is merged into the closest one, and of the other clusters that are large enough the
    one with the largest G is split. The split comes first, because it renumbers nothing.
    """
    ratios = {cluster: ratio for cluster, ratio in enumerate(ratio_K.tolist()) if not isnan(ratio)}
    moves, closest = [], None
    tight = [cluster for cluster, ratio in ratios.items() if ratio < lower]
    if tight and groups.num_clusters > min_clusters:
        tightest = min(tight, key=ratios.__getitem__)
        closest = groups.closest(tightest)
        moves.append(ClusterMove(tightest, closest))
    scattered = [
        cluster
        for cluster, ratio in ratios.items()
        if ratio > upper and cluster != closest and len(groups.members(cluster)) >= SMALLEST_TO_SPLIT
    ]
    if scattered and groups.num_clusters < len(groups.clients) // 2:
        moves = _cut(groups, max(scattered, key=ratios.__getitem__)) + moves
    return moves


def apply_one_by_one(
    look: Callable[[], ClusterGeometry], groups: ClusterGeometry, ratio_K: Tensor, lower: float, upper: float
) -> bool:
    """Applies the ratio rule to every cluster in turn, and returns whether anything has moved.

    Implements FedAC Algorithm 3, lines 1 to 10, and AS-CFL Algorithm 1, lines 19 to 24, to the letter. Every cluster of
    the K at the beginning is visited once, also one that has absorbed another before its turn. A cluster that has been
    merged into another is gone, and the halves of a split are not visited again. Distances are those after the moves so
    far, and any number of moves is allowed.

    Args:
        look: returns the clusters as they are at the moment.
        groups: the clusters at the beginning.
        ratio_K: their G.
        lower: the value of G below which a cluster is merged into the closest one.
        upper: the value of G above which a cluster is divided into two.
    """
    moved = False
    original = list(range(groups.state.num_clusters))  # for each cluster its number at the beginning, -1 if it is new
    for number in list(original):
        if number not in original:
            continue
        cluster = original.index(number)
        moves = []
        if ratio_K[cluster] < lower:
            moves = [ClusterMove(cluster, groups.closest(cluster))]
        elif ratio_K[cluster] > upper and len(groups.members(cluster)) > 1:
            moves = _cut(groups, cluster)
        for move in moves:
            groups.apply(move)
            if move.other is None:
                original.append(-1)
            else:
                original.remove(number)
            groups, moved = look(), True
            ratio_K = groups.ratio()
    return moved


def silhouette_moves(
    groups: ClusterGeometry, margin: float, single_threshold: float, min_clusters: int
) -> list[ClusterMove]:
    """Returns the move that raises the mean silhouette most, if it does so by more than the margin."""
    is_single = len(groups.label_n.unique()) == 1  # a cluster without models does not count
    to_beat = single_threshold if is_single else groups.silhouette(groups.label_n) + margin
    best: list[ClusterMove] = []
    for move, moved_n in _proposals(groups, min_clusters):
        score = groups.silhouette(moved_n)
        if score > to_beat:
            to_beat, best = score, [move]
    return best


def _proposals(groups: ClusterGeometry, min_clusters: int) -> Iterator[tuple[ClusterMove, Tensor]]:
    """Yields moves with the labels after them.

    The moves join the closest pair, and cut each cluster that is large enough in two.
    """
    label_n, clients = groups.label_n, torch.tensor(groups.clients)
    present = label_n.unique().tolist()
    if len(present) > min_clusters:
        cluster, other = groups.closest_pair(present)
        yield ClusterMove(cluster, other), torch.where(label_n == cluster, other, label_n)
    if len(present) < len(clients) // 2:
        for cluster in present:
            members = torch.nonzero(label_n == cluster).flatten()
            if len(members) < SMALLEST_TO_SPLIT:
                continue
            second = members[groups.half_of(members, cluster) == 1]
            moved_n = label_n.clone()
            moved_n[second] = groups.state.num_clusters
            yield ClusterMove(cluster, second_half=tuple(clients[second].tolist())), moved_n


def drop_empty(state: FederationState) -> None:
    """Removes clusters that no client is assigned to, and renumbers the others without gaps."""
    clustered = state.assignment >= 0
    used = state.assignment[clustered].unique()
    if len(used) < state.num_clusters:
        state.assignment = torch.where(clustered, torch.searchsorted(used, state.assignment), -1)
        state.take_clusters(used.tolist())


def keep_numbers(state: FederationState, clients: Sequence[int], label_n: Tensor) -> Tensor:
    """Renumbers new clusters one to one, so that as many clients as possible keep the number of their cluster.

    A clustering that forms its clusters anew needs it, because ``state.centres`` is indexed by number: a cluster with
    another number goes on from another cluster's centre. A cluster that shares no client with an old one gets the
    smallest number that neither another cluster nor a client without a label has. A number from K on is a new cluster,
    which needs a row in ``state.centres``.

    Args:
        state: the state before the new clusters; nothing in it is changed.
        clients: the n clients in the order of the labels.
        label_n: the new cluster of each of them ``[n]``, in any numbers.

    Returns:
        The cluster of each client ``[n]``, int64.
    """
    from scipy.optimize import linear_sum_assignment  # imported here because only some methods need it

    names, row_n = label_n.unique(return_inverse=True)
    before_n = state.assignment[list(clients)]
    shared = torch.zeros(len(names), state.num_clusters, dtype=torch.int64)
    for row in range(len(names)):
        own_n = before_n[row_n == row]
        shared[row] = torch.bincount(own_n[own_n >= 0], minlength=state.num_clusters)
    pairs = zip(*linear_sum_assignment(shared.numpy(), maximize=True), strict=True)
    number_of = {int(row): int(number) for row, number in pairs if shared[row, number] > 0}
    others = torch.ones(len(state.assignment), dtype=torch.bool)
    others[list(clients)] = False
    held = {*number_of.values(), *state.assignment[others].tolist()}
    free = (number for number in count() if number not in held)
    kept = [number_of[row] if row in number_of else next(free) for row in range(len(names))]
    return torch.tensor(kept, dtype=torch.int64)[row_n]


def _cut(groups: ClusterGeometry, cluster: int) -> list[ClusterMove]:
    """Returns the split of a cluster, or no move if one of its halves is empty."""
    second_half = groups.seeded_half(cluster)
    if not 0 < len(second_half) < len(groups.members(cluster)):
        return []
    return [ClusterMove(cluster, second_half=tuple(second_half))]
