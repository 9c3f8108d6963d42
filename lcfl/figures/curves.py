"""Methods over rounds and over bytes: pure functions from numbers to a matplotlib `Figure`."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING

import numpy as np

from lcfl.figures.base import COLOURS, LINE_STYLES, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["accuracy_curves"]

LEGEND_LETTERS = 100  # that fit into a line under the picture
MARKERS = ("", "o", "s", "^", "D")  # tell methods apart when the colours begin again
NUM_MARKS = 10  # on a line

Curve = Sequence[tuple[float, float]]


def accuracy_curves(
    curves: Mapping[str, Mapping[str, Sequence[Curve]]], x_label: str, title: str, baseline: float | None = None
) -> "Figure":
    """The accuracy of each method, the mean over its seeds, in a band from the worst to the best seed.

    A method has its colour, a kind of model its style of line.

    Args:
        curves: for each kind of model and method one curve per seed, each a list of (x, accuracy from 0 to 1). Methods
            with an empty curve are left out.
        x_label: what x is.
        title: of the picture.
        baseline: an accuracy to draw as a dotted line: that of the majority class.

    Raises:
        ValueError: if there is nothing to draw.
    """
    drawn = {
        (method, kind): seeds
        for kind, of_kind in curves.items()
        for method, seeds in of_kind.items()
        if seeds and all(seeds)
    }
    if not drawn:
        raise ValueError("figures: there is no curve to draw.")
    methods = list(dict.fromkeys(method for method, _ in drawn))
    styles = dict(zip(dict.fromkeys(kind for _, kind in drawn), cycle(LINE_STYLES), strict=False))
    num_columns = max(1, LEGEND_LETTERS // (max(len(", ".join(key)) for key in drawn) + 6))
    figure, axes = new_figure(8.0, 4.0 + 0.2 * -(-(len(drawn) + 1) // num_columns))
    for (method, kind), seeds in drawn.items():
        length = min(map(len, seeds))
        stacked = np.stack([np.asarray(seed)[:length] for seed in seeds])  # [seeds, length, 2]
        x, acc = stacked[..., 0].mean(axis=0), 100 * stacked[..., 1]
        again, number = divmod(methods.index(method), len(COLOURS))
        colour, marker, every = COLOURS[number], MARKERS[again % len(MARKERS)], -(-length // NUM_MARKS)
        (line,) = axes.plot(x, acc.mean(axis=0), styles[kind], color=colour, lw=1.5, label=f"{method}, {kind}")
        line.set(marker=marker, markevery=every, markersize=4)
        if len(seeds) > 1:
            axes.fill_between(x, acc.min(axis=0), acc.max(axis=0), color=colour, alpha=0.2, lw=0)
    if baseline is not None:
        axes.axhline(100 * baseline, color="black", ls=":", lw=1, label="majority class")
    axes.set_xlabel(x_label)
    axes.set_ylabel("accuracy (%), mean over clients")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=num_columns, fontsize="small")
    return figure
