"""The movement of clients between clusters, drawn by a pure function from arrays to a matplotlib `Figure`.

Legend: N clients, K clusters, T rounds, S rounds that are shown, B = K + 1 blocks.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lcfl.figures.base import Array, cluster_colours, new_figure
from lcfl.figures.clusters import cluster_colorbar, history

if TYPE_CHECKING:  # importing it takes half a second, and only a run that draws needs it
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["assignment_flow"]

MOST_COLUMNS = 8
GAP = 0.03  # between the blocks of a column, relative to the number of clients
WIDTH = 0.06  # of a block; the distance between columns is 1


def assignment_flow(assignment_TN: Array, rounds_T: Array) -> "Figure":
    """Draws how clients move between clusters: a column of blocks per round, and bands from one round to the next.

    Up to eight rounds are shown. They are spread evenly and include the first and the last. A block stands for a
    cluster, and its height is the number of members. The height of a band is the number of clients that moved from one
    cluster to the other, and its colour is that of the cluster that they left. Clusters without members have no block.
    Clients without a cluster form a grey block at the bottom.

    Args:
        assignment_TN: the cluster of each client after each round ``[T, N]``, numbered from 0; -1 for none.
        rounds_T: the rounds ``[T]``, in ascending order.

    Raises:
        ValueError: if there is no round or no client, or if the shapes do not fit together.
    """
    assignment_TN, rounds_T = history(assignment_TN, rounds_T)
    chosen_S = np.unique(np.linspace(0, len(rounds_T) - 1, MOST_COLUMNS).round().astype(int))
    block_SN = assignment_TN[chosen_S].astype(np.int64) + 1  # block 0 holds the clients without a cluster
    colours, edges_K1 = cluster_colours(assignment_TN)
    colour_B = colours(range(-1, len(edges_K1) - 1))
    bottom_SB = np.stack([_bottoms(block_N, len(colour_B)) for block_N in block_SN])

    figure, axes = new_figure(8.0, 4.5)
    for column, block_N in enumerate(block_SN):
        for block, size in zip(*np.unique(block_N, return_counts=True), strict=True):
            axes.bar(column, size, WIDTH, bottom_SB[column, block], color=colour_B[block])
    for column in range(len(chosen_S) - 1):
        _draw_bands(axes, column, block_SN[column : column + 2], bottom_SB[column : column + 2], colour_B)
    axes.set_xticks(range(len(chosen_S)), [f"{number}" for number in rounds_T[chosen_S]])
    axes.set_xlabel("round")
    axes.set_xlim(-2 * WIDTH, len(chosen_S) - 1 + 2 * WIDTH)
    axes.set_yticks([])
    axes.set_ylabel(f"{assignment_TN.shape[1]} clients")
    for side in ("top", "right", "bottom", "left"):
        axes.spines[side].set_visible(False)
    cluster_colorbar(figure, axes, colours, edges_K1)
    axes.set_title("Movement of clients between clusters")
    return figure


def _bottoms(block_N: NDArray[np.int64], num_blocks: int) -> NDArray[np.float64]:
    """Returns the lower border of each block of a column ``[B]``: block 0 at the bottom, gaps after nonempty blocks."""
    size_B = np.bincount(block_N, minlength=num_blocks)
    gap_B = np.where(size_B > 0, GAP * len(block_N), 0)
    return np.concatenate([[0.0], np.cumsum(size_B + gap_B)[:-1]])


def _draw_bands(
    axes: "Axes",
    column: int,
    block_2N: NDArray[np.int64],
    bottom_2B: NDArray[np.float64],
    colour_B: NDArray[Any],
) -> None:
    """Draws the bands from one column to the next, stacked inside their blocks in the order of the blocks."""
    from matplotlib.collections import PolyCollection

    way = (1 - np.cos(np.linspace(0, np.pi, 30))) / 2
    across = column + WIDTH / 2 + np.linspace(0, 1 - WIDTH, 30)
    left_B, right_B = bottom_2B.copy()
    bands, sources = [], []
    pairs, sizes = np.unique(block_2N, axis=1, return_counts=True)  # sorted by (from, to)
    for (source, target), size in zip(pairs.T, sizes, strict=True):
        lower = left_B[source] + (right_B[target] - left_B[source]) * way
        bands.append(np.column_stack([np.concatenate([across, across[::-1]]), [*lower, *(lower + size)[::-1]]]))
        sources.append(source)
        left_B[source] += size
        right_B[target] += size
    # All bands in one object, because matplotlib takes a millisecond for each.
    axes.add_collection(PolyCollection(bands, facecolors=colour_B[sources], alpha=0.45, linewidths=0))
