"""Who went from which cluster to which: a pure function from arrays to a matplotlib `Figure`.

Legend: N clients, K clusters, T rounds, S of them shown.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lcfl.figures.base import Array, cluster_colours, new_figure
from lcfl.figures.clusters import cluster_colorbar, history

if TYPE_CHECKING:  # half a second to import, and only a run that draws needs it
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["assignment_flow"]

MOST_COLUMNS = 8
GAP = 0.03  # between the blocks of a column, of the number of clients
WIDTH = 0.06  # of a block; columns are 1 apart


def assignment_flow(assignment_TN: Array, rounds_T: Array) -> "Figure":
    """How clients move between clusters: a column of blocks per round, bands between one round and the next.

    Up to eight rounds, spread evenly and with the first and the last, are shown. A block is a cluster, as high as it
    has members; a band is as high as the number of clients that went from one cluster to the other, and has
    the colour of the cluster that they left. Clusters without members have no block.

    Args:
        assignment_TN: the cluster of each client after each round ``[T, N]``, numbers from 0.
        rounds_T: the rounds ``[T]``, ascending.

    Raises:
        ValueError: if there is no round or no client, or if the shapes do not fit together.
    """
    assignment_TN, rounds_T = history(assignment_TN, rounds_T)
    chosen_S = np.unique(np.linspace(0, len(rounds_T) - 1, MOST_COLUMNS).round().astype(int))
    assignment_SN = assignment_TN[chosen_S]
    colours, edges_K1 = cluster_colours(assignment_TN)
    colour_K = colours(range(len(edges_K1) - 1))
    bottom_SK = np.stack([_bottoms(assignment_N, len(colour_K)) for assignment_N in assignment_SN])

    figure, axes = new_figure(8.0, 4.5)
    for column, assignment_N in enumerate(assignment_SN):
        for cluster, size in zip(*np.unique(assignment_N, return_counts=True), strict=True):
            axes.bar(column, size, WIDTH, bottom_SK[column, cluster], color=colour_K[cluster])
    for column in range(len(chosen_S) - 1):
        _draw_bands(axes, column, assignment_SN[column : column + 2], bottom_SK[column : column + 2], colour_K)
    axes.set_xticks(range(len(chosen_S)), [f"{number}" for number in rounds_T[chosen_S]])
    axes.set_xlabel("round")
    axes.set_xlim(-2 * WIDTH, len(chosen_S) - 1 + 2 * WIDTH)
    axes.set_yticks([])
    axes.set_ylabel(f"{assignment_TN.shape[1]} clients")
    for side in ("top", "right", "bottom", "left"):
        axes.spines[side].set_visible(False)
    cluster_colorbar(figure, axes, colours, edges_K1)
    axes.set_title("Clients on their way between clusters")
    return figure


def _bottoms(assignment_N: NDArray[Any], num_clusters: int) -> NDArray[np.float64]:
    """The lower border of each cluster's block ``[K]``: cluster 0 at the bottom, gaps between blocks that exist."""
    size_K = np.bincount(assignment_N, minlength=num_clusters)
    gap_K = np.where(size_K > 0, GAP * len(assignment_N), 0)
    return np.concatenate([[0.0], np.cumsum(size_K + gap_K)[:-1]])


def _draw_bands(
    axes: "Axes",
    column: int,
    assignment_2N: NDArray[Any],
    bottom_2K: NDArray[np.float64],
    colour_K: NDArray[Any],
) -> None:
    """The bands from one column to the next, stacked inside their blocks in the order of clusters."""
    way = (1 - np.cos(np.linspace(0, np.pi, 30))) / 2
    across = column + WIDTH / 2 + np.linspace(0, 1 - WIDTH, 30)
    left_K, right_K = bottom_2K.copy()
    pairs, sizes = np.unique(assignment_2N, axis=1, return_counts=True)  # in the order of (from, to)
    for (source, target), size in zip(pairs.T, sizes, strict=True):
        lower = left_K[source] + (right_K[target] - left_K[source]) * way
        axes.fill_between(across, lower, lower + size, color=colour_K[source], alpha=0.45, lw=0)
        left_K[source] += size
        right_K[target] += size
