"""Puts the papers' tables beside what was measured, counts the cells that agree, and keeps both in docs/papers.md.

    python benchmarks/paper_page.py

For each item, reading, kind of model and test protocol, it compares all measured cells with the printed ones. The kind
of model is the one that the method reports first (personal, cluster or global), or that model after one more local
update. FedClust takes its baselines from PACFL, whose code tests some methods before that update and some after it.
This is a third group, ``as in PACFL``. A cell is reproduced if the two means differ by at most two standard deviations
of their difference. If only one seed has been run, that is the printed standard deviation.
"""

import re
from collections.abc import Sequence
from math import hypot, isnan
from pathlib import Path

import numpy as np
from paper_items import ITEMS
from paper_rows import Row, read

from lcfl.cli.commands.compare import markdown

PAGE = Path(__file__).parents[1] / "docs" / "papers.md"
RESULTS = PAGE.with_name("results") / "papers"
KINDS = ("personal", "cluster", "global")
ACCURACIES = ("test_accuracy", "newcomer_test_accuracy")
# The methods that PACFL's code tests after a local update.
UPDATED = ("local", "lg_fedavg", "per_fedavg", "ifca", "pacfl", "fedclust")
HEADER = (
    *("reading", "model", "test images", "cells", "within two deviations", "within two points"),
    *("mean difference", "mean distance"),
)

Group = tuple[str, str, str]  # reading, kind of model, protocol


def groups_of(name: str, rows: Sequence[Row]) -> dict[Group, list[Row]]:
    """Returns the rows of the columns of an item that have printed numbers, by what they measure."""
    printed = {row.column for row in rows if not isnan(row.printed)}
    kinds = {row.method: [kind for kind in KINDS if _has(rows, row.method, kind)] for row in rows}
    groups: dict[Group, list[Row]] = {}
    for row in rows:
        is_updated, is_reported = row.model in ("after_local", "after"), row.model in ("before", *kinds[row.method][:1])
        if row.column not in printed or not (is_updated or is_reported):
            continue
        found = ["reported" if row.model in KINDS else row.model]
        if name.startswith("fedclust") and is_updated == (row.method in UPDATED):
            found.append("as in PACFL")
        for kind in found:
            groups.setdefault((row.reading, kind, row.protocol), []).append(row)
    return groups


def _has(rows: Sequence[Row], method: str, kind: str) -> bool:
    return any((row.method, row.model) == (method, kind) for row in rows)


def is_reproduced(row: Row) -> bool:
    """Returns whether a measured mean is within two standard deviations of the printed one."""
    deviation = hypot(*(each for each in (row.std, row.printed_std) if not isnan(each)))
    return abs(row.difference) <= 2 * deviation


def counts(name: str, rows: Sequence[Row]) -> list[list[str]]:
    """Returns header and cells of the table of an item."""
    lines = [list(HEADER)]
    for (reading, kind, protocol), group in groups_of(name, rows).items():
        if not (members := [row for row in group if not isnan(row.printed)]):
            continue
        differences = np.array([row.difference for row in members])
        numbers = sum(map(is_reproduced, members)), int((np.abs(differences) <= 2).sum())
        lines.append(
            [
                *(reading, kind, protocol, str(len(members)), *map(str, numbers)),
                *(f"{differences.mean():+.2f}", f"{np.abs(differences).mean():.2f}"),
            ]
        )
    return lines


def values(name: str, rows: Sequence[Row], group: Group) -> list[list[str]]:
    """Returns header and cells of a table of methods and columns: measured, and printed in brackets.

    The largest measured and the largest printed number of a column are bold. Some cells have no printed number.
    """
    members = groups_of(name, rows)[group]
    columns, methods = (list(dict.fromkeys(getattr(row, key) for row in members)) for key in ("column", "method"))
    cells = {(row.method, row.column): row for row in members}
    best = {
        (column, key): max(value for row in members if row.column == column and not isnan(value := getattr(row, key)))
        for column in columns
        for key in ("mean", "printed")
    }

    def shown(row: Row | None) -> str:
        if row is None:
            return ""
        measured, printed = _number(row.mean, row.std), _number(row.printed, row.printed_std)
        measured, printed = (
            f"**{text}**" if getattr(row, key) == best[row.column, key] else text
            for key, text in (("mean", measured), ("printed", printed))
        )
        return measured if isnan(row.printed) else f"{measured} ({printed})"

    return [
        ["", *columns],
        *([method, *(shown(cells.get((method, column))) for column in columns)] for method in methods),
    ]


def _number(mean: float, deviation: float) -> str:
    return f"{mean:.2f}" if isnan(deviation) else f"{mean:.2f} ± {deviation:.2f}"


def with_values(page: str) -> str:
    """Returns the page with new tables, each below a comment such as ``<!-- values: lcfed-table1, ... -->``.

    The four words are the item, the reading, the kind of model and the test protocol.
    """

    def table(match: re.Match[str]) -> str:
        name, *group = match[2].split(", ")
        text = "\n".join(markdown(values(name, _rows_of(name), (group[0], group[1], group[2]))))
        return f"{match[1]}{text}\n"

    return re.sub(r"(<!-- values: (.*) -->\n)(?:\|.*\n)*", table, page)


def with_counts(page: str) -> str:
    """Returns the page with new tables, each below a comment such as ``<!-- cells: lcfed-table1 -->``.

    Items without rows have no table, and an item with rows must be on the page.
    """
    for name in ITEMS:
        rows = _rows_of(name)
        if not any(not isnan(row.printed) for row in rows):
            continue
        lines = counts(name, rows)
        text = "\n".join(markdown(lines))
        mark = f"<!-- cells: {name} -->\n"
        page, found = re.subn(rf"({mark})(?:\|.*\n)*", lambda match, text=text: f"{match[1]}{text}\n", page)
        assert found == 1, f"{PAGE} lacks {mark}"
    return page


def _rows_of(name: str) -> list[Row]:
    """Returns the accuracies that are measured of an item."""
    return [row for row in read(RESULTS / f"{name}.csv", Row) if row.metric in ACCURACIES]


def main() -> None:
    PAGE.write_text(with_values(with_counts(PAGE.read_text())))


if __name__ == "__main__":
    main()
