"""Pictures of a federation: pure functions from arrays to a matplotlib `Figure`, without any global state.

Legend: N clients, K clusters, T rounds. Cluster k has the same colour in every picture with at most
twelve clusters; all colours can be told apart with the common kinds of colour blindness.
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:  # half a second to import, and only a run that draws needs it
    from matplotlib.axes import Axes
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure

__all__ = ["assignment_heatmap", "cluster_sizes", "similarity_matrix", "sorted_accuracies"]

Array = NDArray[Any] | Tensor

# Krzywinski's twelve colours for colour blindness, ordered so that the first few differ most.
COLOURS = (
    *("#008DF9", "#FF6E3A", "#009F81", "#FFC33B", "#8400CD", "#FF5AAF"),
    *("#A40122", "#00C2F9", "#FFB2FD", "#00FCCF", "#E20134", "#9F0162"),
)
LINE_STYLES = ("-", "--", "-.", ":")
MOST_LABELS = 40  # client numbers that fit beside an axis
SMALLEST_LABELLED = 0.03  # a block of clients that is a smaller share of its axis gets no label


def assignment_heatmap(
    assignment_TN: Array, rounds_T: Array, groups_N: Array | None = None, clients_N: Array | None = None
) -> "Figure":
    """The cluster of every client over the rounds.

    Clients are sorted by their final cluster, then by number; where the true groups are known, by
    group first, with a line between groups, so that a perfect clustering shows one colour per block.

    Args:
        assignment_TN: the cluster of each client after each round ``[T, N]``, numbers from 0.
        rounds_T: the rounds ``[T]``, ascending.
        groups_N: the true group of each client ``[N]``.
        clients_N: the clients' numbers ``[N]`` where they are not 0 to N - 1.

    Raises:
        ValueError: if there is no round or no client, or if the shapes do not fit together.
    """
    assignment_TN, rounds_T = _history(assignment_TN, rounds_T)
    num_clients = assignment_TN.shape[1]
    clients_N = np.arange(num_clients) if clients_N is None else np.asarray(clients_N)
    keys = [clients_N, assignment_TN[-1]]
    if groups_N is not None:
        keys.append(np.asarray(groups_N))
    order_N = np.lexsort(keys)

    figure, axes = _figure(8.0, min(8.0, max(3.0, 1.2 + 0.16 * num_clients)))
    colours, edges_K1 = _colours(assignment_TN)
    image = axes.pcolorfast(  # nearest neighbour: colours of clusters must not blend
        _edges(rounds_T), np.arange(num_clients + 1) - 0.5, assignment_TN[:, order_N].T, cmap=colours
    )
    image.set_clim(edges_K1[0], edges_K1[-1])
    _label_rounds(axes, rounds_T)
    _label_clients(axes, clients_N[order_N], "true group" if groups_N is not None else "final cluster")
    axes.invert_yaxis()
    if groups_N is not None:
        _mark_groups(axes, np.asarray(groups_N)[order_N])
    _colorbar(figure, axes, colours, edges_K1)
    axes.set_title("Cluster of each client")
    return figure


def cluster_sizes(assignment_TN: Array, rounds_T: Array, of_clients: int | None = None) -> "Figure":
    """How many clients each cluster has after each round, stacked: cluster 0 at the bottom.

    Args:
        assignment_TN: the cluster of each client after each round ``[T, N]``, numbers from 0.
        rounds_T: the rounds ``[T]``, ascending.
        of_clients: how many clients there are where the N given are only a part of them.

    Raises:
        ValueError: if there is no round or no client, or if the shapes do not fit together.
    """
    assignment_TN, rounds_T = _history(assignment_TN, rounds_T)
    num_clients = assignment_TN.shape[1]
    colours, edges_K1 = _colours(assignment_TN)
    size_KT = np.stack([(assignment_TN == cluster).sum(axis=1) for cluster in range(len(edges_K1) - 1)])

    figure, axes = _figure(8.0, 4.0)
    # A step per round: the last column closes the last step, which also makes a single round visible.
    axes.stackplot(
        _edges(rounds_T), np.hstack([size_KT, size_KT[:, -1:]]), step="post", colors=colours(range(len(size_KT))), lw=0
    )
    axes.margins(0)
    _label_rounds(axes, rounds_T)
    part = of_clients is not None and of_clients > num_clients
    axes.set_ylabel(f"clients ({num_clients} of {of_clients})" if part else "clients")
    _integer_ticks(axes, "y")
    _colorbar(figure, axes, colours, edges_K1)
    axes.set_title("Members of each cluster")
    return figure


def similarity_matrix(similarity_NN: Array, cluster_N: Array, title: str = "Similarity of low-rank models") -> "Figure":
    """Pairwise cosines of clients, ordered by cluster, with a border around each cluster.

    The colours run from the lowest cosine to 1 where none is negative, else from -1 to 1.

    Args:
        similarity_NN: the cosine of each pair of clients ``[N, N]``.
        cluster_N: the cluster of each client ``[N]``; clients of one cluster keep their order.
        title: of the picture.

    Raises:
        ValueError: if there is no client or the shapes do not fit together.
    """
    similarity_NN, cluster_N = np.asarray(similarity_NN), np.asarray(cluster_N)
    num_clients = len(cluster_N)
    if num_clients == 0 or similarity_NN.shape != (num_clients, num_clients):
        raise ValueError(f"figures: got similarities {similarity_NN.shape} and clusters {cluster_N.shape}.")
    order_N = np.argsort(cluster_N, kind="stable")
    lowest = float(similarity_NN.min())
    figure, axes = _figure(6.4, 5.4)
    image = axes.imshow(
        similarity_NN[np.ix_(order_N, order_N)],
        cmap="cividis" if lowest >= 0 else "RdBu_r",
        vmin=lowest if 0 <= lowest < 1 else -1,
        vmax=1,
        interpolation="nearest",
    )
    figure.colorbar(image, label="cosine")
    blocks = _blocks(cluster_N[order_N])
    _draw_borders(axes, blocks)
    centres, names = _labels(blocks)
    axes.set_xticks(centres, names, fontsize=8)
    axes.set_yticks(centres, names, fontsize=8)
    axes.set_xlabel(f"cluster ({num_clients} clients)")
    axes.set_ylabel("cluster")
    axes.set_title(title)
    return figure


def sorted_accuracies(values: Mapping[str, Array], name: str) -> "Figure":
    """The clients' accuracies from the worst to the best client, a line for each kind of model.

    Args:
        values: accuracies of the clients, 0 to 1, by kind of model; the kinds may differ in length.
        name: what they were measured on; the title.

    Raises:
        ValueError: if there is nothing to draw.
    """
    values = {kind: each for kind, each in values.items() if len(each)}
    if not values:
        raise ValueError(f"figures: there are no accuracies of {name}.")
    figure, axes = _figure(6.4, 4.0)
    for number, (kind, each) in enumerate(values.items()):
        accuracy_N = 100 * np.sort(np.asarray(each))
        edges_N1 = np.linspace(0, 100, len(accuracy_N) + 1)
        style, colour = LINE_STYLES[number % len(LINE_STYLES)], COLOURS[number % len(COLOURS)]
        axes.stairs(accuracy_N, edges_N1, baseline=None, ls=style, color=colour, lw=1.5, label=kind.replace("_", " "))
    axes.set_xlim(0, 100)
    axes.set_xlabel("clients, from worst to best (%)")
    axes.set_ylabel("accuracy (%)")
    axes.grid(alpha=0.3)
    axes.legend()
    axes.set_title(name)
    return figure


def _figure(width: float, height: float) -> "tuple[Figure, Axes]":
    """An empty figure of so many inches whose parts make room for each other."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=100, layout="constrained")
    return figure, figure.add_subplot()


def _history(assignment_TN: Array, rounds_T: Array) -> tuple[NDArray[Any], NDArray[Any]]:
    assignment_TN, rounds_T = np.asarray(assignment_TN), np.asarray(rounds_T)
    if assignment_TN.ndim != 2 or 0 in assignment_TN.shape or rounds_T.shape != assignment_TN.shape[:1]:
        raise ValueError(
            f"figures: got assignments {assignment_TN.shape} and rounds {rounds_T.shape}; needed are [T, N] and [T], "
            "with at least one round and one client."
        )
    return assignment_TN, rounds_T


def _colours(assignment_TN: NDArray[Any]) -> "tuple[ListedColormap, NDArray[Any]]":
    """A colour for each cluster number up to the highest, and the K + 1 borders between the numbers."""
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    num_clusters = int(assignment_TN.max()) + 1
    if num_clusters <= len(COLOURS):
        colours = ListedColormap(COLOURS[:num_clusters])
    else:
        colours = ListedColormap(colormaps["viridis"](np.linspace(0, 1, num_clusters)))
    return colours, np.arange(num_clusters + 1) - 0.5


def _colorbar(figure: "Figure", axes: "Axes", colours: "ListedColormap", edges_K1: NDArray[Any]) -> None:
    """The colours of the clusters, with integer ticks that do not crowd each other."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import BoundaryNorm

    num_clusters = len(edges_K1) - 1
    mappable = ScalarMappable(BoundaryNorm(edges_K1, num_clusters), colours)
    ticks = np.arange(0, num_clusters, max(1, -(-num_clusters // 16)))
    figure.colorbar(mappable, ax=axes, label="cluster", ticks=ticks).minorticks_off()


def _edges(rounds_T: NDArray[Any]) -> NDArray[Any]:
    """The borders ``[T + 1]`` of columns that begin half a round before their round."""
    return np.append(rounds_T - 0.5, rounds_T[-1] + 0.5)


def _blocks(sorted_N: NDArray[Any]) -> list[tuple[int, float, float]]:
    """Runs of equal values: the value and the borders before and after, in units of positions."""
    borders = [0, *(np.flatnonzero(np.diff(sorted_N)) + 1).tolist(), len(sorted_N)]
    return [(int(sorted_N[start]), start - 0.5, end - 0.5) for start, end in pairwise(borders)]


def _labels(blocks: list[tuple[int, float, float]]) -> tuple[list[float], list[str]]:
    """Centres and names of the blocks that are large enough for a label."""
    smallest = SMALLEST_LABELLED * (blocks[-1][2] - blocks[0][1])
    large = [((start + end) / 2, f"{name}") for name, start, end in blocks if end - start >= smallest]
    return [centre for centre, _ in large], [name for _, name in large]


def _draw_borders(axes: "Axes", blocks: list[tuple[int, float, float]]) -> None:
    """A square around each block of a matrix, black on white: one of the two shows on any colour."""
    from matplotlib.patches import Rectangle

    for _, start, end in blocks:
        for colour, width in (("white", 2.4), ("black", 1.0)):
            axes.add_patch(Rectangle((start, start), end - start, end - start, fill=False, color=colour, lw=width))


def _integer_ticks(axes: "Axes", which: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=1))


def _label_rounds(axes: "Axes", rounds_T: NDArray[Any]) -> None:
    axes.set_xlabel("round")
    axes.set_xlim(rounds_T[0] - 0.5, rounds_T[-1] + 0.5)
    _integer_ticks(axes, "x")


def _label_clients(axes: "Axes", clients_N: NDArray[Any], sorted_by: str) -> None:
    """The clients' numbers at their positions, all or every so many of them."""
    step = -(-len(clients_N) // MOST_LABELS)
    positions = np.arange(0, len(clients_N), step)
    axes.set_yticks(positions, [f"{client}" for client in clients_N[positions]], fontsize=7)
    axes.set_ylabel(f"client, by {sorted_by}")


def _mark_groups(axes: "Axes", groups_N: NDArray[Any]) -> None:
    """Lines between the true groups, and the number of each beside it on the right."""
    blocks = _blocks(groups_N)
    for _, start, _ in blocks[1:]:
        axes.axhline(start, color="black", lw=1.5)
    centres, names = _labels(blocks)
    beside = axes.secondary_yaxis("right")
    beside.set_yticks(centres, [f"group {name}" for name in names], fontsize=8)
    beside.tick_params(length=0)
