"""Agglomerative clustering of clients: distances, the tree of merges, and the rules that cut it.

Legend: N clients, P entries of a vector, K clusters. Suffixes name the axes.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import normalize

from lcfl.methods.clustering.similarity import squared_distances

__all__ = [
    "Choose",
    "TreeCut",
    "Linkage",
    "Metric",
    "check_options",
    "cut_tree",
    "pairwise_distances",
    "num_clusters_by_gap",
    "tree_labels",
    "linkage_tree",
    "mean_silhouettes",
]

Linkage = Literal["average", "complete", "single", "weighted", "ward"]
Metric = Literal["l2", "l1", "cosine"]
Choose = Literal["gap", "silhouette", "silhouette_or_one"]
REASONABLE = 0.5  # a smaller mean silhouette may come from chance (Kaufman and Rousseeuw 1990)
Merges = NDArray[np.float64]


def pairwise_distances(vector_NP: Tensor, metric: Metric = "l2") -> NDArray[np.float64]:
    """Returns the proximity matrix M ``[N, N]`` of vectors in float64.

    The matrix is symmetric with a diagonal of zeros. ``l2`` is FedClust Eq. 3. ``cosine`` is 1 - cos, which lies
    between 0 and 2. It is 1 between a vector of zeros and any other vector.
    """
    rows_NP = normalize(vector_NP.double(), dim=1, eps=1e-150) if metric == "cosine" else vector_NP
    total_NN = squared_distances(rows_NP, 1.0 if metric == "l1" else 2.0)
    # For unit vectors, |a - b|^2 = 2 (1 - cos).
    if metric == "cosine":
        zero_N = (rows_NP == 0).all(dim=1).double()
        total_NN += zero_N[:, None] + zero_N
    distance_NN = {"l2": total_NN.sqrt(), "l1": total_NN, "cosine": total_NN / 2}[metric]
    matrix: NDArray[np.float64] = distance_NN.fill_diagonal_(0.0).numpy()
    return np.maximum(matrix, matrix.T)


def linkage_tree(distance_NN: NDArray[np.float64], linkage: Linkage) -> Merges:
    """Builds the tree ``[N - 1, 4]`` of agglomerative clustering.

    Starts with every client alone and joins the closest pair until one cluster is left (FedClust section 3.4).
    Each row holds the two clusters that are joined and the height of this merge. The rows have scipy's form and are in
    ascending order of height.

    Args:
        distance_NN: the distances, which are finite and symmetric with a diagonal of zeros.
        linkage: the distance of two clusters: ``average`` (UPGMA), ``complete``, ``single``, ``weighted``
            (WPGMA), or ``ward``, which is only right for Euclidean distances of vectors.
    """
    from scipy.cluster import hierarchy  # imported here because only some methods need it
    from scipy.spatial.distance import squareform

    assert np.isfinite(distance_NN).all() and (distance_NN == distance_NN.T).all()
    if len(distance_NN) == 1:
        return np.empty((0, 4))
    tree: Merges = hierarchy.linkage(squareform(distance_NN, checks=False), linkage)
    return tree


def tree_labels(tree: Merges, num_clusters: int) -> NDArray[np.int64]:
    """Returns the cluster of each client ``[N]`` once K clusters are left.

    The clusters are numbered from 0 in the order of their smallest client.
    """
    num_clients = len(tree) + 1
    assert 1 <= num_clusters <= num_clients
    members = {client: [client] for client in range(num_clients)}
    for number, (one, other) in enumerate(tree[: num_clients - num_clusters, :2].astype(int).tolist()):
        members[num_clients + number] = members.pop(one) + members.pop(other)
    label_N = np.empty(num_clients, dtype=np.int64)
    for cluster, clients in enumerate(sorted(members.values(), key=min)):
        label_N[clients] = cluster
    return label_N


def num_clusters_by_gap(tree: Merges) -> int:
    """Returns K at the largest gap between the heights of consecutive merges; the smallest such K in a tie.

    The result is at least 2 and at most N - 1, or N for N below 3. A single gap cannot be compared with anything.
    """
    heights = tree[:, 2]
    if len(heights) < 2:
        return len(heights) + 1
    gaps = np.diff(heights)  # gaps[m] follows merge m + 1, which leaves N - 1 - m clusters
    return len(heights) - int(np.flatnonzero(gaps == gaps.max())[-1])


def mean_silhouettes(tree: Merges, distance_NN: NDArray[np.float64]) -> dict[int, float]:
    """Returns the mean silhouette of the clusters by their number K, from 2 to N - 1; empty for N below 3."""
    from sklearn.metrics import silhouette_score  # imported here because only some methods need it

    return {
        number: float(silhouette_score(distance_NN, tree_labels(tree, number), metric="precomputed"))
        for number in range(2, len(distance_NN))
    }


@dataclass(frozen=True)
class TreeCut:
    """The clusters that result from cutting a tree.

    Attributes:
        labels: the cluster of each client ``[N]``. Clusters are numbered from 0 in the order of their smallest client.
        threshold: a distance that gives these clusters. It is the requested threshold if there was one, otherwise the
            middle between the last merge that was made and the first one that was not.
        num_clusters: K.
        silhouette: the largest mean silhouette of all K, by which K was chosen; None if it was not, or for N below 3.
    """

    labels: NDArray[np.int64]
    threshold: float
    num_clusters: int
    silhouette: float | None = None


def cut_tree(
    distance_NN: NDArray[np.float64],
    linkage: Linkage,
    threshold: float | None = None,
    num_clusters: int | None = None,
    choose: Choose | None = None,
) -> TreeCut:
    """Builds the tree of a distance matrix and cuts it in one of three ways.

    Exactly one of `threshold`, `num_clusters` and `choose` is given.

    Args:
        distance_NN: see `linkage_tree`.
        linkage: see `linkage_tree`.
        threshold: lambda. No pair farther apart than this is joined.
        num_clusters: K, at most N.
        choose: how the data determine K: ``gap`` (`num_clusters_by_gap`), ``silhouette`` (the smallest K with the
            largest of the `mean_silhouettes`; N for N below 3), or ``silhouette_or_one``, the same but 1 if the
            largest is below 0.5 or N below 3.
    """
    assert sum(way is not None for way in (threshold, num_clusters, choose)) == 1
    tree = linkage_tree(distance_NN, linkage)
    heights, silhouette = tree[:, 2], None
    if threshold is not None:
        num_clusters = len(distance_NN) - int((heights <= threshold).sum())
    elif choose == "gap":
        num_clusters = num_clusters_by_gap(tree)
    elif choose is not None:
        scores = mean_silhouettes(tree, distance_NN)
        silhouette = max(scores.values(), default=None)
        num_clusters = max(scores, key=scores.__getitem__, default=len(distance_NN))
        if choose == "silhouette_or_one" and (silhouette is None or silhouette < REASONABLE):
            num_clusters = 1
    assert num_clusters is not None
    if threshold is None:
        padded = np.concatenate([[0.0], heights, heights[-1:]])
        num_merges = len(distance_NN) - num_clusters
        threshold = float(padded[num_merges : num_merges + 2].mean())
    return TreeCut(tree_labels(tree, num_clusters), threshold, num_clusters, silhouette)


def check_options(
    owner: str,
    linkage: Linkage,
    threshold: float | None,
    num_clusters: int | None,
    choose: Choose | None,
    euclidean: bool = True,
) -> None:
    """Checks the options of a clustering that cuts a tree, before there are any distances.

    Args:
        owner: the class of the clustering, for the messages.
        linkage: the linkage of the tree.
        threshold: a number >= 0, or None.
        num_clusters: a number >= 1, or None.
        choose: how the data determine K, or None.
        euclidean: whether the distances are l2, which ``ward`` needs.

    Raises:
        ValueError: for any other value, or unless exactly one of `threshold`, `num_clusters` and `choose` is given.
    """
    if linkage == "ward" and not euclidean:
        raise ValueError(f"{owner}: linkage=ward joins Euclidean vectors only; use metric=l2 or another linkage.")
    if sum(way is not None for way in (threshold, num_clusters, choose)) != 1:
        raise ValueError(
            f"{owner}: got threshold={threshold}, num_clusters={num_clusters}, choose={choose}; exactly one "
            "must be given. Set the other two to null."
        )
    if threshold is not None and not threshold >= 0:
        raise ValueError(f"{owner}: got threshold={threshold}; it must be a number >= 0.")
    if num_clusters is not None and num_clusters < 1:
        raise ValueError(f"{owner}: got num_clusters={num_clusters}; it must be at least 1.")
