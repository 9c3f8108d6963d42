"""Draws the accuracies in the tables of ``cifar10.py``, on own_split, for every kind of model and both partitions.

python benchmarks/cifar10_figure.py --out docs/results/cifar10.png
"""

import argparse
import csv
from pathlib import Path
from typing import TYPE_CHECKING

from lcfl.figures.base import KIND_COLOURS, new_panels, save

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RESULTS = Path(__file__).parents[1] / "docs" / "results"
TITLES = {"pathological": "four blocks of clients with equal classes", "dirichlet": "Dirichlet 0.1"}
# The first kind that a method has is the one that its paper reports. Values: marker, offset below the method's line.
KINDS = {"personal": ("o", 0.0), "cluster": ("s", 0.0), "global": ("^", 0.0), "after_local": ("x", 0.3)}
BASELINE = "majority class"

Table = dict[str, dict[str, tuple[float, float]]]  # by method and kind of model: mean and deviation over seeds


def table_of(path: Path) -> Table:
    """Reads the accuracies on own_split from a table of ``lcfl compare``, in percent."""
    table: Table = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            if row["protocol"] == "own_split":
                kinds = table.setdefault(row["label"], {})
                kinds[row["model"]] = 100 * float(row["acc"]), 100 * float(row["acc_std"])
    return table


def draw(tables: dict[str, Table]) -> "Figure":
    """Draws a panel per partition, with the methods that all tables have.

    They are sorted by their reported accuracy in the first one, the best on top.
    """
    first = next(iter(tables.values()))
    common = set.intersection(*map(set, tables.values())) - {BASELINE}
    methods = sorted(common, key=lambda method: _reported(first[method]))
    figure, panels = new_panels(11, 0.3 * len(methods) + 1.2, [TITLES[name] for name in tables])
    for (title, axes), table in zip(panels.items(), tables.values(), strict=True):
        axes.axvline(table[BASELINE][""][0], linestyle=":", color="grey", label="always the most frequent class")
        for kind, (marker, below) in KINDS.items():
            having = [(place - below, table[method]) for place, method in enumerate(methods) if kind in table[method]]
            points = [(place, *accuracies[kind]) for place, accuracies in having]
            places, means, deviations = zip(*points, strict=True)
            axes.errorbar(
                means, places, xerr=deviations, fmt=marker, color=KIND_COLOURS[kind], markersize=6, label=kind
            )
        axes.set_yticks(range(len(methods)), methods)
        axes.set_xlabel("test accuracy on own_split in %")
        axes.grid(axis="x", alpha=0.3)
        axes.set_title(title)
    axes.legend(loc="lower left", fontsize="small")
    return figure


def _reported(accuracies: dict[str, tuple[float, float]]) -> float:
    return next(accuracies[kind][0] for kind in KINDS if kind in accuracies)


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("cifar10.png"))
    options = parser.parse_args(args)
    save(draw({name: table_of(RESULTS / f"cifar10-{name}.csv") for name in TITLES}), options.out)


if __name__ == "__main__":
    main()
