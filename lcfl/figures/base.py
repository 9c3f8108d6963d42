"""Common parts of all pictures: colours, axes, labels that do not crowd each other, and files that are complete.

Legend: N clients, K clusters. All colours are distinguishable with the common kinds of colour blindness.
"""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lcfl.core.files import replacing

if TYPE_CHECKING:  # importing it takes half a second, and only a run that draws needs it
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

__all__ = [
    "COLOURS",
    "KIND_COLOURS",
    "KIND_STYLES",
    "Array",
    "block_labels",
    "blocks_of",
    "cluster_colours",
    "height_of",
    "integer_ticks",
    "label_clients",
    "mark_groups",
    "new_figure",
    "new_panels",
    "save",
    "shown",
]

Array = NDArray[Any] | Tensor

# Krzywinski's twelve colours for colour blindness, ordered so that the first few differ most.
COLOURS = (
    *("#008DF9", "#FF6E3A", "#009F81", "#FFC33B", "#8400CD", "#FF5AAF"),
    *("#A40122", "#00C2F9", "#FFB2FD", "#00FCCF", "#E20134", "#9F0162"),
)
NO_CLUSTER = "#D0D0D0"
# The colour and the line style of a kind of model are the same in every picture.
KIND_COLOURS = {"personal": COLOURS[0], "cluster": COLOURS[1], "global": COLOURS[2], "after_local": COLOURS[4]}
KIND_STYLES = {"personal": "-", "cluster": "--", "global": "-.", "after_local": ":"}
MOST_CLIENTS = 256  # in a picture, because more rows are indistinguishable
MOST_LABELS = 40  # client numbers that fit next to an axis
LONGEST_NAME = 20  # letters of a client's name next to an axis
SMALLEST_LABELLED = 0.03  # a block of clients with a smaller share of its axis gets no label


def new_figure(width: float, height: float) -> "tuple[Figure, Axes]":
    """Returns an empty figure of this size in inches, whose parts make room for each other, and its axes."""
    figure, panels = new_panels(width, height, [""])
    return figure, panels[""]


def new_panels(width: float, height: float, names: Sequence[str]) -> "tuple[Figure, dict[str, Axes]]":
    """Returns a figure as `new_figure` does, but with panels by name, side by side on one vertical scale."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=100, layout="constrained")
    panels = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
    return figure, dict(zip(names, panels, strict=True))


def height_of(num_clients: int) -> float:
    """Returns the height in inches of a picture with a row for each client."""
    return min(8.0, max(3.0, 1.2 + 0.16 * num_clients))


def shown(num_clients: int, most: int = MOST_CLIENTS) -> NDArray[np.int64]:
    """Returns the indices of the clients in a picture: all, or `most` (256 or fewer) spread evenly."""
    return np.linspace(0, num_clients - 1, min(num_clients, most, MOST_CLIENTS)).round().astype(np.int64)


def save(figure: "Figure", path: Path) -> None:
    """Writes a complete file or none at all, in the format that its name ends with, and makes its folder."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        text.set_parse_math(False)  # names of runs and clients may have a $
    with replacing(path) as temporary:
        figure.savefig(temporary, format=path.suffix.removeprefix("."))


def cluster_colours(assignment_TN: NDArray[Any]) -> "tuple[Colormap, NDArray[Any]]":
    """Returns a colour for each cluster number, grey for those below 0, and the K + 1 borders between the numbers."""
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    num_clusters = max(int(assignment_TN.max()) + 1, 1)
    if num_clusters <= len(COLOURS):
        colours = ListedColormap(COLOURS[:num_clusters])
    else:
        colours = ListedColormap(colormaps["viridis"](np.linspace(0, 1, num_clusters)))
    return colours.with_extremes(under=NO_CLUSTER), np.arange(num_clusters + 1) - 0.5


def blocks_of(sorted_N: NDArray[Any]) -> list[tuple[int, float, float]]:
    """Returns the runs of equal values: the value, and the borders before and after it in units of positions."""
    borders = [0, *(np.flatnonzero(np.diff(sorted_N)) + 1).tolist(), len(sorted_N)]
    return [(int(sorted_N[start]), start - 0.5, end - 0.5) for start, end in pairwise(borders)]


def block_labels(blocks: list[tuple[int, float, float]]) -> tuple[list[float], list[str]]:
    """Returns the centres and names of the blocks that are large enough for a label."""
    smallest = SMALLEST_LABELLED * (blocks[-1][2] - blocks[0][1])
    large = [((start + end) / 2, f"{name}") for name, start, end in blocks if end - start >= smallest]
    return [centre for centre, _ in large], [name for _, name in large]


def integer_ticks(axes: "Axes", which: str) -> None:
    """Restricts ticks to whole numbers along the axis `which`, ``x`` or ``y``."""
    from matplotlib.ticker import MaxNLocator

    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=1))


def label_clients(
    axes: "Axes", clients_N: NDArray[Any], order_N: NDArray[Any], sorted_by: str, names_N: Sequence[str] | None = None
) -> None:
    """Labels positions with the clients' names or numbers, or only every n-th position if there are many clients.

    Args:
        axes: the axes.
        clients_N: the clients' numbers ``[N]``.
        order_N: the clients in the order of their positions, as places in `clients_N` ``[N]``.
        sorted_by: what the order follows, in words.
        names_N: the clients' names ``[N]``, if they have names.
    """
    step = -(-len(clients_N) // MOST_LABELS)
    positions = np.arange(0, len(clients_N), step)
    labels = clients_N if names_N is None else [_short(name) for name in names_N]
    axes.set_yticks(positions, [f"{labels[place]}" for place in order_N[positions]], fontsize=7)
    axes.set_ylabel(f"client, by {sorted_by}")


def _short(name: str) -> str:
    """Returns a name that leaves room for the picture; its end often tells it from others, so both ends stay."""
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME // 2]}…{name[-LONGEST_NAME // 2 :]}"


def mark_groups(axes: "Axes", groups_N: NDArray[Any]) -> None:
    """Draws lines between the true groups, and writes the number of each group next to it on the right."""
    blocks = blocks_of(groups_N)
    for _, start, _ in blocks[1:]:
        axes.axhline(start, color="black", lw=1.5)
    centres, names = block_labels(blocks)
    right_axis = axes.secondary_yaxis("right")
    right_axis.set_yticks(centres, [f"group {name}" for name in names], fontsize=8)
    right_axis.tick_params(length=0)
