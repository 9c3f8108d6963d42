"""First assignments of clients to clusters: balanced at random, or by the directions of low-rank models.

Legend: N clients, n clients with a model, K clusters, D components.
"""

import functools
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from lcfl.core import rng

if TYPE_CHECKING:
    from threadpoolctl import ThreadpoolController

__all__ = ["balanced_labels", "first_is_repeated", "kmeans", "spherical_kmeans"]


def balanced_labels(num_clients: int, num_clusters: int, seed: int) -> Tensor:
    """Draws a random assignment ``[N]`` with cluster sizes that differ by at most one."""
    order = rng.generator(seed, "first assignment").permutation(num_clients)
    return torch.as_tensor(order % num_clusters)


def first_is_repeated(centre_KP: Tensor) -> bool:
    """Returns whether another of these models ``[K, P + Q]`` equals the first, so that they are no choice."""
    return bool((centre_KP[0] == centre_KP[1:]).all(dim=1).any())


def spherical_kmeans(code_nD: Tensor, num_clusters: int, seed: int, *stream: int) -> Tensor:
    """Clusters codes by direction, with k-means (k-means++ seeding) on the unit sphere.

    Args:
        code_nD: low-rank models ``[n, D]``.
        num_clusters: K; fewer if there are fewer distinct directions.
        seed: the seed of the run.
        stream: further numbers that select the random stream, e.g. the round.

    Returns:
        The cluster of each code ``[n]``.
    """
    return kmeans(normalize(code_nD.double(), dim=1), num_clusters, seed, *stream)


def kmeans(point_nD: Tensor, num_clusters: int, seed: int, *stream: int, max_iter: int = 300) -> Tensor:
    """Clusters points with k-means: k-means++ seeding, the best of ten runs.

    Args:
        point_nD: the points ``[n, D]``.
        num_clusters: K; fewer if there are fewer distinct points.
        seed: the seed of the run.
        stream: further numbers that select the random stream, e.g. the round.
        max_iter: the largest number of iterations of a run.

    Returns:
        The cluster of each point ``[n]``.
    """
    from sklearn.cluster import KMeans  # imported here because only some methods need it

    if point_nD.shape[1] == 0:
        return torch.zeros(len(point_nD), dtype=torch.int64)
    points = point_nD.double().numpy()
    num_distinct = len(np.unique(points, axis=0))
    state = np.random.RandomState(rng.stream_seed(seed, "kmeans", *stream) % 2**32)
    # One thread gives the same bits on any number of cores, and it is faster for points this short.
    with _thread_pools().limit(limits=1):
        fitted = KMeans(min(num_clusters, num_distinct), n_init=10, max_iter=max_iter, random_state=state).fit(points)
    _, label_n = np.unique(fitted.labels_, return_inverse=True)  # among nearly equal points a number may be unused
    return torch.as_tensor(label_n, dtype=torch.int64)


@functools.cache
def _thread_pools() -> "ThreadpoolController":
    """Returns the thread pools of scikit-learn and its dependencies.

    The result is cached, because finding the pools takes as long as a small k-means.
    """
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()
