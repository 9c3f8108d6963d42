"""Draws the results of ``papers.py``: a dot for each measured number, beside the printed ones."""

from collections.abc import Callable, Sequence
from itertools import product
from math import inf, isnan, nan
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING

from paper_items import Item
from paper_readings import AS_CONFIGURED
from paper_rows import Point, Row

from lcfl.figures.base import COLOURS, KIND_COLOURS, KIND_STYLES, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

__all__ = ["draw"]

PANELS_IN_A_ROW = 3
LETTERS_PER_INCH = 12  # of a legend
STAGE_COLOURS = {"before": COLOURS[3], "after": COLOURS[6]}  # of newcomers
MARKERS = "os^vDP*X<>phd8"  # one for each reading
TITLES = {
    "test_accuracy": "test accuracy in %",
    "newcomer_test_accuracy": "test accuracy of newcomers in %",
    "rounds_to_target": "rounds to the target",
    "communication_mb": "megabits per client to the target",
    "all_communication_mb": "megabits per client to the target, with warm-up",
    "rounds_to_90pct_peak": "rounds to 90 % of the peak",
    "megabytes_to_90pct_peak": "MB to 90 % of the peak",
    "uplink_mb": "MB sent by all clients per round",
    "stability_jaccard": "stability of the clusters",
    "granularity": "G, mean over clusters",
    "granularity_variance": "G, variance over clusters",
    "clusters": "clusters",
}


def draw(item: Item, rows: Sequence[Row], points: Sequence[Point], path: Path) -> None:
    """Draws an item under the first of its test protocols."""
    protocol = next((row.protocol for row in rows if row.protocol), "")
    drawn = [row for row in rows if row.protocol in ("", protocol)]
    dotted = [point for point in points if point.protocol in ("", protocol)]
    figure = DRAWERS[item.picture](item, drawn, dotted)
    figure.suptitle(", ".join(filter(None, [item.title, protocol])))
    save(figure, path)


def table(item: Item, rows: Sequence[Row], points: Sequence[Point]) -> "Figure":
    """Draws a panel per column and metric with a line per measured method. Printed numbers are black bars.

    The global model of a method that reports another one is left out.
    """
    others = {row.key for row in rows if row.model in ("personal", "cluster")}
    rows = [row for row in rows if not (row.model == "global" and row.key in others)]
    measured = {_name(row) for row in rows}
    names = [name for name in dict.fromkeys(cell.row for cell in reversed(item.cells)) if name in measured]
    readings = list(dict.fromkeys(row.reading for row in rows))
    figure, panels = _panels(item, rows, (0.3 + 0.1 * len(readings)) * len(names) + 1.5)
    for (column, metric), axes in panels.items():
        for row in rows:
            if (row.column, row.metric) == (column, metric):
                place, number = names.index(_name(row)), readings.index(row.reading)
                printed, marker = _known(row.printed_std), MARKERS[number % len(MARKERS)]
                axes.errorbar(row.printed, place, xerr=printed, fmt="|", color="black", markersize=14)
                below = 0.8 * ((number + 0.5) / len(readings) - 0.5)  # all readings share eight tenths of a line
                axes.errorbar(row.mean, place - below, xerr=_known(row.std), fmt=marker, color=_colour(row))
        axes.set_yticks(range(len(names)), names)
        axes.grid(axis="x", alpha=0.3)
    handles = [_mark("printed", "|", "black")]
    handles += [_mark(kind, "s", colour) for kind, colour in _kinds(rows).items()]
    handles += [_mark(name, MARKERS[n % len(MARKERS)], "grey") for n, name in enumerate(readings)]
    _add_legend(figure, handles)
    return figure


def lines(item: Item, rows: Sequence[Row], points: Sequence[Point]) -> "Figure":
    """Draws a panel per column and metric, over the points, with a line per method, kind of model and reading.

    Stars are printed numbers.
    """
    figure, panels = _panels(item, rows, 4, is_shared=False)
    lines_of: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        lines_of.setdefault((row.column, row.metric, row.method, row.reading, row.model), []).append(row)
    methods = list(dict.fromkeys(cell.method for cell in item.cells))
    readings = list(dict.fromkeys(row.reading for row in rows))
    for (column, metric, method, reading, model), members in lines_of.items():
        members.sort(key=lambda row: _value_of(row.point))
        x, y = [_value_of(row.point) for row in members], [row.mean for row in members]
        label = " ".join(filter(None, [method, model, "" if reading == AS_CONFIGURED else reading]))
        colour, style = COLOURS[methods.index(method)], KIND_STYLES.get(model, "-")
        marker = MARKERS[readings.index(reading) % len(MARKERS)]
        panels[column, metric].plot(x, y, style, color=colour, marker=marker, markersize=4, label=label)
    for row in rows:
        if not isnan(row.printed):
            x, colour = _value_of(row.point), COLOURS[methods.index(row.method)]
            axes, label = panels[row.column, row.metric], f"{row.method} printed"
            axes.plot(x, row.printed, "*", color=colour, markersize=12, label=label)
    values = sorted({_value_of(row.point) for row in rows})
    for axes in panels.values():
        if 0 < 20 * values[0] <= values[-1]:  # such as numbers of clusters from 1 to 100
            axes.set_xscale("log")
            axes.set_xticks(values, [f"{value:g}" for value in values])
            axes.minorticks_off()
        axes.set_xlabel(item.cells[0].point.split()[-1].partition("=")[0])
        axes.grid(alpha=0.3)
    _legend(figure, panels)
    return figure


def surface(item: Item, rows: Sequence[Row], points: Sequence[Point]) -> "Figure":
    """Draws a map of the first kind of model over pairs of values, a panel per column."""
    from matplotlib.figure import Figure

    rows = [row for row in rows if row.model == rows[0].model]
    panels = list(dict.fromkeys((row.column, row.reading) for row in rows))
    figure = Figure(figsize=(4.5 * len(panels), 4), dpi=100, layout="constrained")
    for (column, reading), axes in zip(panels, figure.subplots(1, len(panels), squeeze=False)[0], strict=True):
        own = {_pair(row.point): row.mean for row in rows if (row.column, row.reading) == (column, reading)}
        across, up = (sorted({pair[place] for pair in own}) for place in (0, 1))
        values = [[own.get((x, y), nan) for x in across] for y in up]
        axes.imshow(values, origin="lower", cmap="viridis")
        middle = (min(own.values()) + max(own.values())) / 2
        for y, x in product(range(len(up)), range(len(across))):
            if isnan(values[y][x]):
                continue
            colour = "white" if values[y][x] < middle else "black"
            axes.text(x, y, f"{values[y][x]:.1f}", ha="center", va="center", color=colour)
        axes.set_xticks(range(len(across)), [f"{x:g}" for x in across])
        axes.set_yticks(range(len(up)), [f"{y:g}" for y in up])
        names = [word.partition("=")[0] for word in item.cells[0].point.split()]
        axes.set_xlabel(names[0])
        axes.set_ylabel(names[1])
        axes.set_title(f"{column}, {rows[0].model}" + ("" if reading == AS_CONFIGURED else f"\n{reading}"), fontsize=10)
    return figure


def curves(item: Item, rows: Sequence[Row], points: Sequence[Point]) -> "Figure":
    """Draws a panel per column and metric, over rounds, with a line for the mean over seeds of each cell."""
    figure, panels = _panels(item, rows, 4.5, is_shared=False)
    names = list(dict.fromkeys(cell.row for cell in item.cells))
    values: dict[tuple[str, ...], dict[int, list[float]]] = {}
    last = inf if item.shown_rounds is None else item.shown_rounds
    for point in (each for each in points if each.round <= last):
        key = (point.column, point.metric, _name(point), point.model, point.reading)
        values.setdefault(key, {}).setdefault(point.round, []).append(point.value)
    for (column, metric, name, model, reading), by_round in values.items():
        means = [mean(each) for each in by_round.values()]
        label = " ".join(filter(None, [name, model, "" if reading == AS_CONFIGURED else reading]))
        colour, style = COLOURS[names.index(name) % len(COLOURS)], KIND_STYLES.get(model, "-")
        panels[column, metric].plot(list(by_round), means, style, color=colour, label=label)
    for axes in panels.values():
        axes.set_xlabel("round")
        axes.grid(alpha=0.3)
    _legend(figure, panels)
    return figure


Drawer = Callable[[Item, Sequence[Row], Sequence[Point]], "Figure"]
DRAWERS: dict[str, Drawer] = {"table": table, "lines": lines, "surface": surface, "curves": curves}


def _panels(
    item: Item, rows: Sequence[Row], height: float, is_shared: bool = True
) -> "tuple[Figure, dict[tuple[str, str], Axes]]":
    """Returns a figure with a panel for each column and metric that has been measured."""
    from matplotlib.figure import Figure

    columns = [column for column in dict.fromkeys(cell.column for cell in item.cells) if _has(rows, column)]
    keys = list(product(columns, item.metrics))
    num_rows = -(-len(keys) // PANELS_IN_A_ROW)
    num_columns = -(-len(keys) // num_rows)
    figure = Figure(figsize=(4 * num_columns + 1, height * num_rows), dpi=100, layout="constrained")
    panels = figure.subplots(num_rows, num_columns, sharey=is_shared, squeeze=False).flatten()
    for unused in panels[len(keys) :]:
        unused.remove()
    panels = panels[: len(keys)]
    for (column, metric), axes in zip(keys, panels, strict=True):
        axes.set_title(column if len(columns) > 1 else "", fontsize="medium")
        (axes.set_xlabel if is_shared else axes.set_ylabel)(TITLES[metric])
    return figure, dict(zip(keys, panels, strict=True))


def _has(rows: Sequence[Row], column: str) -> bool:
    return any(row.column == column for row in rows)


def _name(row: Row | Point) -> str:
    """As `Cell.row`."""
    return " ".join(filter(None, [row.method, row.point]))


def _known(deviation: float) -> float | None:
    return None if isnan(deviation) else deviation


def _colour(row: Row) -> str:
    return (KIND_COLOURS | STAGE_COLOURS).get(row.model, "grey")


def _kinds(rows: Sequence[Row]) -> dict[str, str]:
    return {row.model: _colour(row) for row in rows if row.model}


def _value_of(point: str) -> float:
    """Returns the value of a point such as ``theta=0.8``."""
    return float(point.rpartition("=")[2])


def _pair(point: str) -> tuple[float, float]:
    """Returns the values of a point such as ``mu=0.1 lambda=1``."""
    first, second = (_value_of(word) for word in point.split())
    return first, second


def _mark(label: str, marker: str, colour: str) -> "Line2D":
    from matplotlib.lines import Line2D

    return Line2D([], [], linestyle="none", marker=marker, color=colour, label=label)


def _legend(figure: "Figure", panels: "dict[tuple[str, str], Axes]") -> None:
    shown = {line.get_label(): line for axes in panels.values() for line in axes.lines}
    _add_legend(figure, list(shown.values()))


def _add_legend(figure: "Figure", handles: "list[Line2D]") -> None:
    """Adds a legend below all panels, with as many columns as have room."""
    longest = max(len(str(handle.get_label())) for handle in handles)
    num_columns = max(1, int(figure.get_figwidth() * LETTERS_PER_INCH) // (longest + 6))
    figure.legend(handles=handles, loc="outside lower center", ncols=num_columns, fontsize="small")
