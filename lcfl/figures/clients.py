"""What each client holds and how well it is served: pure functions from arrays to a matplotlib `Figure`.

Legend: N clients, C classes.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from lcfl.figures.base import COLOURS, LINE_STYLES, Array, integer_ticks, label_clients, mark_groups, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["label_counts", "sorted_accuracies"]


def label_counts(
    count_NC: Array, groups_N: Array | None = None, clients_N: Array | None = None, title: str = "Images of each client"
) -> "Figure":
    """How many images of each class every client holds, and how many in all.

    Clients are in order of their numbers; where the true groups are known, by group first, with a line
    between groups. A class that a client does not hold is white.

    Args:
        count_NC: images of each class ``[N, C]``.
        groups_N: the true group of each client ``[N]``.
        clients_N: the clients' numbers ``[N]`` where they are not 0 to N - 1.
        title: of the picture.

    Raises:
        ValueError: if there is no client or no class.
    """
    count_NC = np.asarray(count_NC)
    if count_NC.ndim != 2 or 0 in count_NC.shape:
        raise ValueError(f"figures: got label counts {count_NC.shape}; needed are [N, C], at least one of each.")
    num_clients, num_classes = count_NC.shape
    clients_N = np.arange(num_clients) if clients_N is None else np.asarray(clients_N)
    order_N = np.lexsort([clients_N] if groups_N is None else [clients_N, np.asarray(groups_N)])
    count_NC = count_NC[order_N]

    figure, axes = new_figure(8.0, min(8.0, max(3.0, 1.2 + 0.16 * num_clients)))
    height_N1 = np.arange(num_clients + 1) - 0.5
    image = axes.pcolorfast(
        np.arange(num_classes + 1) - 0.5, height_N1, np.ma.masked_equal(count_NC, 0), cmap="viridis_r", vmin=0
    )
    label_clients(axes, clients_N[order_N], "number" if groups_N is None else "true group")
    axes.set_ylim(num_clients - 0.5, -0.5)
    axes.set_xlabel("class")
    integer_ticks(axes, "x")
    axes.set_title(title)
    sizes = axes.inset_axes((1.02, 0, 0.2, 1), sharey=axes)
    sizes.stairs(count_NC.sum(axis=1), height_N1, orientation="horizontal", fill=True, color=COLOURS[0])
    sizes.set_xlabel("in all")
    sizes.tick_params(labelleft=False, left=False)
    sizes.locator_params(axis="x", nbins=2)
    if groups_N is not None:
        mark_groups(sizes, np.asarray(groups_N)[order_N])
        for start in np.flatnonzero(np.diff(np.asarray(groups_N)[order_N])) + 0.5:
            axes.axhline(start, color="black", lw=1.5)
    figure.colorbar(image, ax=[axes], label="images", location="right", pad=0.02)
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
    figure, axes = new_figure(6.4, 4.0)
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
