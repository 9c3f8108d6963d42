"""The data and the reported metric of each client, drawn by pure functions from arrays to a matplotlib `Figure`.

Legend: N clients, C classes.
"""

from collections.abc import Mapping, Sequence
from math import inf, isnan
from typing import TYPE_CHECKING, Any

import numpy as np

from lcfl.core.metric_names import ACCURACY, Reported
from lcfl.figures.base import (
    COLOURS,
    KIND_COLOURS,
    KIND_STYLES,
    Array,
    height_of,
    integer_ticks,
    label_clients,
    mark_groups,
    new_figure,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["client_sizes", "label_counts", "sorted_values"]


def label_counts(
    count_NC: Array,
    groups_N: Array | None = None,
    clients_N: Array | None = None,
    title: str = "Samples of each client",
    names_N: Sequence[str] | None = None,
) -> "Figure":
    """Draws how many samples of each class every client holds, and how many in total.

    Clients are ordered by number. If the true groups are known, clients are ordered by group first, with a line between
    groups. A class that a client does not hold is white.

    Args:
        count_NC: the number of samples of each class ``[N, C]``.
        groups_N: the true group of each client ``[N]``.
        clients_N: the clients' numbers ``[N]`` if they are not 0 to N - 1.
        title: the title of the picture.
        names_N: the clients' names ``[N]``, if they have names.

    Raises:
        ValueError: if there is no client or no class.
    """
    count_NC = np.asarray(count_NC)
    if count_NC.ndim != 2 or 0 in count_NC.shape:
        raise ValueError(
            f"figures: got label counts {count_NC.shape}; the shape must be [N, C], with at least one client and class."
        )
    num_clients, num_classes = count_NC.shape
    clients_N = np.arange(num_clients) if clients_N is None else np.asarray(clients_N)
    order_N = np.lexsort([clients_N] if groups_N is None else [clients_N, np.asarray(groups_N)])
    count_NC = count_NC[order_N]

    figure, axes = new_figure(8.0, height_of(num_clients))
    height_N1 = np.arange(num_clients + 1) - 0.5
    image = axes.pcolorfast(
        np.arange(num_classes + 1) - 0.5, height_N1, np.ma.masked_equal(count_NC, 0), cmap="viridis_r", vmin=0
    )
    label_clients(axes, clients_N, order_N, "number" if groups_N is None else "true group", names_N)
    axes.set_ylim(num_clients - 0.5, -0.5)
    axes.set_xlabel("class")
    integer_ticks(axes, "x")
    axes.set_title(title)
    sizes = axes.inset_axes((1.02, 0, 0.2, 1), sharey=axes)
    sizes.stairs(count_NC.sum(axis=1), height_N1, orientation="horizontal", fill=True, color=COLOURS[0])
    sizes.set_xlabel("total")
    sizes.tick_params(labelleft=False, left=False)
    sizes.locator_params(axis="x", nbins=2)
    if groups_N is not None:
        mark_groups(sizes, np.asarray(groups_N)[order_N])
        for start in np.flatnonzero(np.diff(np.asarray(groups_N)[order_N])) + 0.5:
            axes.axhline(start, color="black", lw=1.5)
    figure.colorbar(image, ax=[axes], label="samples", location="right", pad=0.02)
    return figure


def client_sizes(
    size_N: Array,
    clients_N: Array | None = None,
    title: str = "Samples of each client",
    names_N: Sequence[str] | None = None,
) -> "Figure":
    """Draws how many samples every client holds.

    Args:
        size_N: the number of samples ``[N]``.
        clients_N: the clients' numbers ``[N]`` if they are not 0 to N - 1.
        title: the title of the picture.
        names_N: the clients' names ``[N]``, if they have names.

    Raises:
        ValueError: if there is no client.
    """
    size_N = np.asarray(size_N)
    if size_N.ndim != 1 or not len(size_N):
        raise ValueError(f"figures: got sizes {size_N.shape}; the shape must be [N], with at least one client.")
    clients_N = np.arange(len(size_N)) if clients_N is None else np.asarray(clients_N)
    figure, axes = new_figure(8.0, height_of(len(size_N)))
    axes.stairs(size_N, np.arange(len(size_N) + 1) - 0.5, orientation="horizontal", fill=True, color=COLOURS[0])
    label_clients(axes, clients_N, np.arange(len(size_N)), "number" if names_N is None else "name", names_N)
    axes.set_ylim(len(size_N) - 0.5, -0.5)
    axes.set_xlabel("samples")
    axes.set_title(title)
    return figure


def sorted_values(values: Mapping[str, Array], name: str, reported: Reported = ACCURACY) -> "Figure":
    """Draws a metric of the clients from the worst to the best client, with a line for each kind of model.

    Args:
        values: the metric of the clients by kind of model; the kinds may differ in length.
        name: what it was measured on, which is the title.
        reported: the metric; the accuracy if not given.

    Raises:
        ValueError: if there is nothing to draw.
    """
    values = {kind: each for kind, each in values.items() if len(each)}
    if not values:
        raise ValueError(f"figures: there are no values of {name}.")
    figure, axes = new_figure(6.4, 4.0)
    for kind, each in values.items():
        worst_first = sorted(
            np.asarray(each).tolist(), key=lambda value: -inf if isnan(value) else reported.score(value)
        )
        value_N = reported.scaled(1) * np.array(worst_first)
        edges_N1 = np.linspace(0, 100, len(value_N) + 1)
        line: dict[str, Any] = {"ls": KIND_STYLES.get(kind, "-"), "color": KIND_COLOURS.get(kind, "black"), "lw": 1.5}
        axes.stairs(value_N, edges_N1, baseline=None, label=kind.replace("_", " "), **line)
    axes.set_xlim(0, 100)
    axes.set_xlabel("clients, from worst to best (%)")
    axes.set_ylabel(reported.axis)
    axes.grid(alpha=0.3)
    axes.legend()
    axes.set_title(name)
    return figure
