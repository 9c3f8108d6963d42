"""The clusters and the similarity of clients, drawn by pure functions from arrays to a matplotlib `Figure`.

Legend: N clients, K clusters, T rounds. Cluster k has the same colour in every picture with at most twelve clusters.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lcfl.figures.base import (
    Array,
    block_labels,
    blocks_of,
    cluster_colours,
    height_of,
    integer_ticks,
    label_clients,
    mark_groups,
    new_figure,
)

if TYPE_CHECKING:  # importing it takes half a second, and only a run that draws needs it
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

__all__ = [
    "assignment_heatmap",
    "cluster_colorbar",
    "cluster_sizes",
    "distance_matrix",
    "history",
    "similarity_matrix",
]


def assignment_heatmap(
    assignment_TN: Array,
    rounds_T: Array,
    groups_N: Array | None = None,
    clients_N: Array | None = None,
    names_N: Sequence[str] | None = None,
) -> "Figure":
    """Draws the cluster of every client over the rounds.

    Clients are sorted by their final cluster, then by number. If the true groups are known, clients are sorted by group
    first, with a line between groups, so that a perfect clustering shows one colour per block.

    Args:
        assignment_TN: the cluster of each client after each round ``[T, N]``, numbered from 0; a number below 0 means
            no cluster and is white in the picture.
        rounds_T: the rounds ``[T]``, in ascending order.
        groups_N: the true group of each client ``[N]``.
        clients_N: the clients' numbers ``[N]`` if they are not 0 to N - 1.
        names_N: the clients' names ``[N]``, if they have names.

    Raises:
        ValueError: if there is no round or no client, or if the shapes do not fit together.
    """
    assignment_TN, rounds_T = history(assignment_TN, rounds_T)
    num_clients = assignment_TN.shape[1]
    clients_N = np.arange(num_clients) if clients_N is None else np.asarray(clients_N)
    keys = [clients_N, assignment_TN[-1]]
    if groups_N is not None:
        keys.append(np.asarray(groups_N))
    order_N = np.lexsort(keys)

    figure, axes = new_figure(8.0, height_of(num_clients))
    colours, edges_K1 = cluster_colours(assignment_TN)
    shown_NT = np.ma.masked_less(assignment_TN[:, order_N].T, 0)
    image = axes.pcolorfast(  # no interpolation, because the colours of clusters must not blend
        _edges(rounds_T), np.arange(num_clients + 1) - 0.5, shown_NT, cmap=colours
    )
    image.set_clim(edges_K1[0], edges_K1[-1])
    _label_rounds(axes, rounds_T)
    label_clients(axes, clients_N, order_N, "true group" if groups_N is not None else "final cluster", names_N)
    axes.invert_yaxis()
    if groups_N is not None:
        mark_groups(axes, np.asarray(groups_N)[order_N])
    cluster_colorbar(figure, axes, colours, edges_K1)
    axes.set_title("Cluster of each client")
    return figure


def cluster_sizes(assignment_TN: Array, rounds_T: Array, of_clients: int | None = None) -> "Figure":
    """Draws how many clients each cluster has after each round, stacked with cluster 0 at the bottom.

    Args:
        assignment_TN: the cluster of each client after each round ``[T, N]``, numbered from 0; -1 for none yet.
        rounds_T: the rounds ``[T]``, in ascending order.
        of_clients: how many clients there are in total if the N clients are only a part.

    Raises:
        ValueError: if there is no round or no client, or if the shapes do not fit together.
    """
    assignment_TN, rounds_T = history(assignment_TN, rounds_T)
    num_clients = assignment_TN.shape[1]
    colours, edges_K1 = cluster_colours(assignment_TN)
    size_KT = np.stack([(assignment_TN == cluster).sum(axis=1) for cluster in range(len(edges_K1) - 1)])

    figure, axes = new_figure(8.0, 4.0)
    # Each round is a step. The last column closes the last step, which makes even a single round visible.
    axes.stackplot(
        _edges(rounds_T), np.hstack([size_KT, size_KT[:, -1:]]), step="post", colors=colours(range(len(size_KT))), lw=0
    )
    axes.margins(0)
    _label_rounds(axes, rounds_T)
    part = of_clients is not None and of_clients > num_clients
    axes.set_ylabel(f"clients ({num_clients} of {of_clients})" if part else "clients")
    integer_ticks(axes, "y")
    cluster_colorbar(figure, axes, colours, edges_K1)
    axes.set_title("Members of each cluster")
    return figure


def similarity_matrix(similarity_NN: Array, cluster_N: Array, title: str = "Similarity of low-rank models") -> "Figure":
    """Draws the pairwise cosines of clients, ordered by cluster, with a border around each cluster.

    The colours run from the lowest cosine to 1 if no cosine is negative, else from -1 to 1.

    Args:
        similarity_NN: the cosine of each pair of clients ``[N, N]``.
        cluster_N: the cluster of each client ``[N]``; clients of one cluster keep their order.
        title: the title of the picture.

    Raises:
        ValueError: if there is no client, or if the shapes do not fit together.
    """
    similarity_NN = np.asarray(similarity_NN)
    lowest = float(similarity_NN.min(initial=1.0))
    colours = {"cmap": "cividis" if lowest >= 0 else "RdBu_r", "vmin": lowest if 0 <= lowest < 1 else -1, "vmax": 1}
    return _ordered(similarity_NN, np.asarray(cluster_N), colours, "cosine", title)


def distance_matrix(distance_NN: Array, cluster_N: Array, title: str = "Distance of clients") -> "Figure":
    """Draws the pairwise distances of clients, ordered by cluster, with a border around each cluster.

    Short distances are light. The picture corresponds to FedClust's Fig. 1.

    Args:
        distance_NN: the distance of each pair of clients ``[N, N]``.
        cluster_N: the cluster of each client ``[N]``; clients of one cluster keep their order.
        title: the title of the picture.

    Raises:
        ValueError: if there is no client, or if the shapes do not fit together.
    """
    return _ordered(np.asarray(distance_NN), np.asarray(cluster_N), {"cmap": "cividis_r", "vmin": 0}, "distance", title)


def _ordered(
    matrix_NN: NDArray[Any], cluster_N: NDArray[Any], colours: dict[str, Any], label: str, title: str
) -> "Figure":
    """Draws a matrix of clients in the order of their clusters."""
    num_clients = len(cluster_N)
    if num_clients == 0 or matrix_NN.shape != (num_clients, num_clients):
        what = "similarities" if label == "cosine" else "distances"
        raise ValueError(
            f"figures: got {what} {matrix_NN.shape} and clusters {cluster_N.shape}; the shapes must be [N, N] and [N], "
            "with at least one client."
        )
    order_N = np.argsort(cluster_N, kind="stable")
    figure, axes = new_figure(6.4, 5.4)
    image = axes.imshow(matrix_NN[np.ix_(order_N, order_N)], interpolation="nearest", **colours)
    figure.colorbar(image, label=label)
    blocks = blocks_of(cluster_N[order_N])
    _draw_borders(axes, blocks)
    centres, names = block_labels(blocks)
    axes.set_xticks(centres, names, fontsize=8)
    axes.set_yticks(centres, names, fontsize=8)
    axes.set_xlabel(f"cluster ({num_clients} clients)")
    axes.set_ylabel("cluster")
    axes.set_title(title)
    return figure


def history(assignment_TN: Array, rounds_T: Array) -> tuple[NDArray[Any], NDArray[Any]]:
    """Returns both as arrays ``[T, N]`` and ``[T]``, and checks that there is at least one round and one client."""
    assignment_TN, rounds_T = np.asarray(assignment_TN), np.asarray(rounds_T)
    if assignment_TN.ndim != 2 or 0 in assignment_TN.shape or rounds_T.shape != assignment_TN.shape[:1]:
        raise ValueError(
            f"figures: got assignments {assignment_TN.shape} and rounds {rounds_T.shape}; the shapes must be [T, N] "
            "and [T], with at least one round and one client."
        )
    return assignment_TN, rounds_T


def cluster_colorbar(figure: "Figure", axes: "Axes", colours: "Colormap", edges_K1: NDArray[Any]) -> None:
    """Draws a bar with the colours of the clusters, and integer ticks that do not crowd each other."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import BoundaryNorm

    num_clusters = len(edges_K1) - 1
    mappable = ScalarMappable(BoundaryNorm(edges_K1, num_clusters), colours)
    ticks = np.arange(0, num_clusters, max(1, -(-num_clusters // 16)))
    figure.colorbar(mappable, ax=axes, label="cluster", ticks=ticks).minorticks_off()


def _edges(rounds_T: NDArray[Any]) -> NDArray[Any]:
    """Returns the borders ``[T + 1]`` of columns that begin half a round before their round."""
    return np.append(rounds_T - 0.5, rounds_T[-1] + 0.5)


def _draw_borders(axes: "Axes", blocks: list[tuple[int, float, float]]) -> None:
    """Draws a square around each block of a matrix in black on white, so that it is visible on any colour."""
    from matplotlib.patches import Rectangle

    for _, start, end in blocks:
        for colour, width in (("white", 2.4), ("black", 1.0)):
            axes.add_patch(Rectangle((start, start), end - start, end - start, fill=False, color=colour, lw=width))


def _label_rounds(axes: "Axes", rounds_T: NDArray[Any]) -> None:
    axes.set_xlabel("round")
    axes.set_xlim(rounds_T[0] - 0.5, rounds_T[-1] + 0.5)
    integer_ticks(axes, "x")
