"""Keeps the tables and the picture of ``cifar10.py`` in docs/results.md.

    python benchmarks/cifar10_page.py --add logs/cifar10-dirichlet/comparison/comparison.csv --partition dirichlet
    python benchmarks/cifar10_page.py

The rows of a comparison go to docs/results/cifar10-PARTITION.csv, where they replace those of the same method. The
tables in docs/results.md and the picture are then made of these files. Without options, only tables and picture are
made.
"""

import argparse
import csv
import re
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cifar10 import GRIDS

from lcfl.cli.commands.compare import by_model, costs, markdown
from lcfl.core.metric_names import Reported
from lcfl.figures.base import KIND_COLOURS, new_panels, save
from lcfl.runs.comparison import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAGE = Path(__file__).parents[1] / "docs" / "results.md"
RESULTS = PAGE.with_suffix("")
TITLES = {"pathological": "four blocks of clients with equal classes", "dirichlet": "Dirichlet 0.1"}
PROTOCOLS = ("own_split", "label_view")
# The first kind that a method has is the one that its paper reports. Values: marker, offset below the method's line.
KINDS = {"personal": ("o", 0.0), "cluster": ("s", 0.0), "global": ("^", 0.0), "after_local": ("x", 0.3)}
BASELINE = "majority class"

Record = dict[str, str]  # a row of a comparison
Table = dict[str, dict[str, tuple[float, float]]]  # by method and kind of model: mean and deviation over seeds


def read(path: Path) -> list[Record]:
    """Returns the rows of a comparison."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def added(rows: Sequence[Record], new: Sequence[Record]) -> list[Record]:
    """Returns the rows with those of a newer comparison, by protocol and in the order of ``cifar10.GRIDS``."""
    methods = {row["label"] for row in new} - {BASELINE}
    kept = [row for row in rows if row["label"] not in methods]
    order = [*GRIDS, BASELINE]
    both = [*kept, *(row for row in new if row["label"] in methods)]
    return sorted(both, key=lambda row: (PROTOCOLS.index(row["protocol"]), order.index(row["label"])))


def write(path: Path, rows: Sequence[Record]) -> None:
    """Writes the rows of a comparison."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def with_tables(page: str, rows_of: dict[str, list[Record]]) -> str:
    """Returns the page with new tables, each below a comment such as ``<!-- table: dirichlet costs -->``."""
    for partition, records in rows_of.items():
        rows = [_row(record) for record in records]
        tables = {name: by_model([row for row in rows if row.protocol == name], Reported()) for name in PROTOCOLS}
        tables["costs"] = costs([row for row in rows if row.protocol == PROTOCOLS[0]])
        for name, lines in tables.items():
            text = "\n".join(markdown(lines))
            mark = f"<!-- table: {partition} {name} -->\n"
            page, found = re.subn(rf"({mark})(?:\|.*\n)*", lambda match, text=text: f"{match[1]}{text}\n", page)
            assert found == 1, mark
    return page


def _row(record: Record) -> Row:
    """Returns a row of a file as the row of the comparison that it was."""
    values = {name.replace("acc", "value"): value for name, value in record.items()}
    types: dict[str, Any] = {each.name: each.type for each in fields(Row)}
    return Row(**{name: types[name](value) for name, value in values.items()})


def table_of(rows: Sequence[Record]) -> Table:
    """Returns the accuracies on own_split, in percent."""
    table: Table = {}
    for row in rows:
        if row["protocol"] == PROTOCOLS[0]:
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
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize="small")
    return figure


def _reported(accuracies: dict[str, tuple[float, float]]) -> float:
    return next(accuracies[kind][0] for kind in KINDS if kind in accuracies)


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--add", type=Path, nargs="+", default=[], help="comparison.csv of finished sweeps")
    parser.add_argument("--partition", choices=TITLES, help="the partition of these sweeps")
    options = parser.parse_args(args)
    if options.add and options.partition is None:
        parser.error("--add needs --partition")
    paths = {name: RESULTS / f"cifar10-{name}.csv" for name in TITLES}
    for path in options.add:
        write(paths[options.partition], added(read(paths[options.partition]), read(path)))
    rows_of = {name: read(path) for name, path in paths.items()}
    PAGE.write_text(with_tables(PAGE.read_text(), rows_of))
    save(draw({name: table_of(rows) for name, rows in rows_of.items()}), RESULTS / "cifar10.png")


if __name__ == "__main__":
    main()
