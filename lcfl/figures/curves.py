"""The reported metric over rounds and over bytes, drawn by pure functions from numbers to a matplotlib `Figure`."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lcfl.core.metric_names import ACCURACY, Reported
from lcfl.figures.base import COLOURS, KIND_STYLES, new_panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["metric_curves"]

LEGEND_LETTERS = 12.5  # letters that fit into an inch under the picture
MARKERS = ("", "o", "s", "^", "D")  # these distinguish methods when the colours start over
NUM_MARKS = 10  # markers on a line
MOST_LINES = 12  # lines in a panel that shows several kinds of model

Curve = Sequence[tuple[float, float]]


class _Place(NamedTuple):
    panel: str  # the title of the panel
    style: str
    label: str


def metric_curves(
    curves: Mapping[str, Mapping[str, Sequence[Curve]]],
    x_label: str,
    title: str,
    baseline: float | None = None,
    reported: Reported = ACCURACY,
) -> "Figure":
    """Draws a metric of each method as the mean over its seeds, in a band from the lowest to the highest seed.

    Each method has a colour. Each kind of model has a line style or, if there are many lines, a panel.

    Args:
        curves: one curve per seed for each kind of model and each method. A curve is a list of (x, metric). Methods
            with an empty curve are left out.
        x_label: what x is.
        title: the title of the picture.
        baseline: a value to draw as a dotted line, that of the trivial baseline.
        reported: the metric; the accuracy if not given.

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
    places = _places(list(drawn), title)
    titles = list(dict.fromkeys(place.panel for place in places.values()))
    width, height = (8.0, 4.0) if len(titles) == 1 else (5.0 * len(titles), 5.0)
    labels = {place.label for place in places.values()}
    num_columns = max(1, int(width * LEGEND_LETTERS) // (max(map(len, labels)) + 6))
    num_rows = -(-(len(labels) + 1) // num_columns)
    figure, panels = new_panels(width, height + 0.2 * num_rows, titles)
    for (method, kind), seeds in drawn.items():
        place = places[method, kind]
        _draw(panels[place.panel], [np.asarray(seed) for seed in seeds], place, methods.index(method), reported)
    for panel, axes in panels.items():
        if baseline is not None:
            axes.axhline(reported.scaled(baseline), color="black", ls=":", lw=1, label=reported.trivial)
        axes.set_title(panel)
        axes.set_xlabel(x_label)
        axes.grid(alpha=0.3)
    next(iter(panels.values())).set_ylabel(f"{reported.axis}, mean over clients")
    shown = {line.get_label(): line for axes in panels.values() for line in axes.lines}
    figure.legend(handles=list(shown.values()), loc="outside lower center", ncols=num_columns, fontsize="small")
    return figure


def _draw(axes: "Axes", seeds: Sequence[NDArray[np.float64]], place: _Place, number: int, reported: Reported) -> None:
    """Draws the curves ``[rounds, 2]`` of some seeds as their mean and a band, in the colour of method `number`."""
    length = min(map(len, seeds))
    stacked = np.stack([seed[:length] for seed in seeds])  # [seeds, length, 2]
    x, value = stacked[..., 0].mean(axis=0), reported.scaled(1) * stacked[..., 1]
    repeat, place_of_colour = divmod(number, len(COLOURS))
    colour, marker, every = COLOURS[place_of_colour], MARKERS[repeat % len(MARKERS)], -(-length // NUM_MARKS)
    (line,) = axes.plot(x, value.mean(axis=0), place.style, color=colour, lw=1.5, label=place.label)
    line.set(marker=marker, markevery=every, markersize=4)
    if len(seeds) > 1:
        axes.fill_between(x, value.min(axis=0), value.max(axis=0), color=colour, alpha=0.2, lw=0)


def _places(keys: Sequence[tuple[str, str]], title: str) -> dict[tuple[str, str], _Place]:
    """Returns the place of each line. Few lines share a panel, with a style per kind; else each kind has a panel."""
    kinds = list(dict.fromkeys(kind for _, kind in keys))
    if len(keys) > MOST_LINES and len(kinds) > 1:
        return {(method, kind): _Place(f"{title}, {kind}", "-", method) for method, kind in keys}
    return {(method, kind): _Place(title, KIND_STYLES.get(kind, "-"), f"{method}, {kind}") for method, kind in keys}
