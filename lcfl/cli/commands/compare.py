"""``lcfl compare RUN...``: compares finished runs in one table, as text, CSV and Markdown, and as curves."""

import argparse
import csv
import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import fields
from math import isnan, nan
from pathlib import Path
from typing import TYPE_CHECKING

from lcfl.core.metric_names import BACKDOOR, MODEL_KINDS, Reported
from lcfl.core.output import lossy_output
from lcfl.runs import comparison
from lcfl.runs.comparison import Entry, Row
from lcfl.runs.finished import find_runs, trivial_value

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["by_model", "costs", "main", "markdown", "parser"]

Lines = list[list[str]]

Curve = list[tuple[int, float, float]]  # rounds, bytes and value
Curves = dict[str, dict[str, dict[int, Curve]]]  # the curves of a setting, by model, label and seed

CURVE_COLUMNS = ("setting", "protocol", "label", "seed", "model", "rounds", "bytes")
AXES = (("rounds", "round", 1.0), ("bytes", "MB sent and received", 1e6))  # of the pictures: name, label and unit
PEAK = "rounds to 90 % of peak"
PIPED_WIDTH = 160  # characters per line in a file or a pipe


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command's options."""
    options = argparse.ArgumentParser(
        prog="lcfl compare", description="Compares finished runs in one table.", allow_abbrev=False
    )
    options.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="run directories, or folders with run directories"
    )
    options.add_argument(
        "--target", type=float, help="show the first round that is this good, 0.6 for six in ten (default: 0.9 x best)"
    )
    options.add_argument("--mix", action="store_true", help="allow runs with different data or protocols, in sections")
    options.add_argument("--wide", action="store_true", help="only the metric: a line per method, a column per model")
    options.add_argument("--out", type=Path, help="folder for comparison.csv, comparison.md, curves.csv, pictures")
    options.add_argument(
        "--format", choices=("png", "svg", "pdf"), default="png", help="format of the pictures (default: png)"
    )
    return options


def main(args: Sequence[str]) -> None:
    """Prints the table of the runs at the given paths. With ``--out``, writes the table and pictures to files.

    Raises:
        FileNotFoundError: if there is no run at one of the paths.
        ValueError: if no run is finished, or if the runs cannot be compared and ``--mix`` is not given.
    """
    options = parser().parse_args(args)
    entries = comparison.entries_of(find_runs(options.runs))
    if not entries:
        raise ValueError("compare: none of these runs is finished and has a test of its reported metric.")
    reported = comparison.reported_by(entries)
    if not options.mix:
        comparison.check_same_setting(entries)
    if options.target is not None and reported.is_accuracy and not 0 < options.target <= 1:
        raise ValueError(
            f"compare: got --target {options.target}; an accuracy is above 0 and at most 1, such as 0.6 for 60 %."
        )
    rows, targets = comparison.rows_of(entries, options.target)
    from rich.console import Console

    width = None if sys.stdout.isatty() else PIPED_WIDTH
    console = Console(file=lossy_output(), width=width, markup=False, emoji=False)  # names may have brackets
    many = len({row.setting for row in rows}) > 1
    for (setting, protocol), target in targets.items():
        lines = [row for row in rows if (row.setting, row.protocol) == (setting, protocol)]
        if options.wide:
            console.print(_table(_title(reported, setting, protocol, many), by_model(lines, reported)))
            continue
        console.print(_table(_caption(reported, setting, protocol, target, many), _values(lines, reported, target)))
        console.print(_table("cost of a run", costs(lines)))
    if options.out is not None:
        _write(options.out, rows, targets, entries, reported, options.format)
        print(f"written to {options.out}")


def _title(reported: Reported, setting: int, protocol: str, many: bool) -> str:
    what = f"{'backdoor' if protocol == BACKDOOR else 'test'} {_column(reported, protocol)}{reported.unit}"
    return ", ".join([what, *[f"setting {setting}"] * many, *[protocol] * (protocol != BACKDOOR)])


def _column(reported: Reported, protocol: str) -> str:
    """Returns what the reported metric is called in a table: an accuracy under a backdoor is the attack's success."""
    return "success" if protocol == BACKDOOR and reported.is_accuracy else reported.title


def _caption(reported: Reported, setting: int, protocol: str, target: float, many: bool) -> str:
    if isnan(target):
        return _title(reported, setting, protocol, many)
    percent = " %" if reported.is_accuracy else ""
    return f"{_title(reported, setting, protocol, many)}; rounds and MB to reach {reported.text(target)}{percent}"


def by_model(rows: Sequence[Row], reported: Reported) -> Lines:
    """Returns header and cells, with a line for each method and a column for each kind of model.

    The trivial baseline is a separate line.
    """
    kinds = [kind for kind in MODEL_KINDS if any(row.model == kind for row in rows)]
    cells: dict[str, dict[str, str]] = {}
    for row in rows:
        cells.setdefault(row.label, {})[row.model or kinds[0]] = _value(row, reported)
    lines = [["method", *kinds], *([label, *(of.get(kind, "") for kind in kinds)] for label, of in cells.items())]
    return _with_options(lines, rows)


def _with_options(lines: Lines, rows: Sequence[Row]) -> Lines:
    """Adds a column with the options that the labels leave out, if there are any."""
    options = {row.label: row.options for row in rows}
    if not any(options.values()):
        return lines
    return [[*lines[0], "options"], *([*cells, options[cells[0]]] for cells in lines[1:])]


def _value(row: Row, reported: Reported) -> str:
    return reported.text(row.value) + ("" if isnan(row.value_std) else f" ± {reported.text(row.value_std)}")


def _added(row: Row, name: str) -> str:
    value, deviation = (row.added.get(f"{name}{end}", nan) for end in ("", "_std"))
    return _number(value, 4) + ("" if isnan(deviation) else f" ± {deviation:.4f}")


def _values(rows: Sequence[Row], reported: Reported, target: float) -> Lines:
    """Returns header and cells, with a line for each kind of model. The first line of a method has its name."""
    has_target = not isnan(target)
    added = list(dict.fromkeys(name for row in rows for name in row.added if not name.endswith("_std")))
    lines = [["method", "model", _column(reported, rows[0].protocol), "worst 10 %"]]
    lines[0] += [*["rounds", "MB"] * has_target, *added]
    previous = ""
    for row in rows:
        cells = [row.label if row.label != previous else "", row.model, _value(row, reported)]
        cells.append(reported.text(row.worst10))
        cells += [_number(row.rounds_to_target), _megabytes(row.bytes_to_target)] * has_target
        cells += [_added(row, name) for name in added]
        lines.append(cells)
        previous = row.label
    return lines


def costs(rows: Sequence[Row]) -> Lines:
    """Returns header and cells, with a line for each method. The last column is about its first kind of model."""
    lines = [["method", "seeds", "clusters", "ARI", "stability", "MB", "minutes", PEAK]]
    firsts: dict[str, Row] = {}
    for row in rows:
        if row.seeds:
            firsts.setdefault(row.label, row)
    for row in firsts.values():
        numbers = [_number(row.clusters, 1), _number(row.rand_index, 2), _number(row.stability, 2)]
        numbers += [_megabytes(row.total_bytes), _minutes(row.seconds), _number(row.rounds_to_peak90)]
        lines.append([row.label, str(row.seeds), *numbers])
    return _with_options(lines, rows)


def _number(value: float, digits: int = 0) -> str:
    return "" if isnan(value) else f"{value:.{digits}f}"


def _megabytes(size: float) -> str:
    return _number(size / 1e6, 0 if size >= 1e7 else 2)


def _minutes(seconds: float) -> str:
    return _number(seconds / 60, 1 if seconds >= 60 else 2)


def _table(title: str, lines: Lines) -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for header in lines[0]:
        is_text, wraps = header in ("method", "model", "options"), header in ("method", PEAK, "options")
        table.add_column(header, justify="left" if is_text else "right", no_wrap=not wraps, overflow="fold")
    for cells in lines[1:]:
        table.add_row(*cells)
    return table


def markdown(lines: Lines) -> list[str]:
    """Returns header and cells as the lines of a Markdown table."""
    escaped = [[cell.replace("|", r"\|") for cell in cells] for cells in lines]
    return ["| " + " | ".join(cells) + " |" for cells in (escaped[0], ["---"] * len(lines[0]), *escaped[1:])]


def _write(
    folder: Path,
    rows: Sequence[Row],
    targets: dict[tuple[int, str], float],
    entries: Sequence[Entry],
    reported: Reported,
    picture_format: str,
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    plain = [field.name for field in fields(Row) if field.name != "added"]
    added = list(dict.fromkeys(name for row in rows for name in row.added))
    table = [[getattr(row, name) for name in plain] + [row.added.get(name, nan) for name in added] for row in rows]
    columns = [name.replace("value", reported.name) for name in plain]
    _write_csv(folder / "comparison.csv", [*columns, *added], table)
    many = len({row.setting for row in rows}) > 1
    text = []
    for (setting, protocol), target in targets.items():
        lines = [row for row in rows if (row.setting, row.protocol) == (setting, protocol)]
        text += [_title(reported, setting, protocol, many), "", *markdown(by_model(lines, reported)), ""]
        text += [_caption(reported, setting, protocol, target, many), "", *markdown(_values(lines, reported, target))]
        text += ["", "cost of a run", "", *markdown(costs(lines)), ""]
    (folder / "comparison.md").write_text("\n".join(text), "utf-8")
    points: list[tuple[object, ...]] = []
    for setting, protocol in targets:
        members = [entry for entry in entries if entry.setting == setting]
        curves = _curves(members, protocol, reported)
        points += [
            (setting, protocol, label, seed, kind, *point)
            for kind, methods in curves.items()
            for label, seeds in methods.items()
            for seed, curve in seeds.items()
            for point in curve
        ]
        baseline = trivial_value(members[0].runs, protocol)
        name = f"{protocol}_{setting}" if many else protocol
        title = f"Test {reported.title}, {protocol}"
        if protocol == BACKDOOR:
            title = f"Backdoor {_column(reported, protocol)}"
        _draw(folder, f"{name}.{picture_format}", curves, title, baseline, reported)
    _write_csv(folder / "curves.csv", [*CURVE_COLUMNS, reported.name], points)


def _draw(folder: Path, name: str, curves: Curves, title: str, baseline: float, reported: Reported) -> None:
    """Draws the metric over rounds and over bytes. Draws nothing if nothing was evaluated during the runs."""
    from lcfl import figures

    if not any(curve for methods in curves.values() for seeds in methods.values() for curve in seeds.values()):
        return
    for axis, (over, x_label, scale) in enumerate(AXES):
        drawn = {
            kind: {
                label: [[(point[axis] / scale, point[2]) for point in curve] for curve in in_common(seeds.values())]
                for label, seeds in methods.items()
            }
            for kind, methods in curves.items()
        }
        picture = figures.metric_curves(drawn, x_label, title, None if isnan(baseline) else baseline, reported)
        figures.save(picture, folder / f"{reported.title}_over_{over}_{name}")


def in_common(curves: Collection[Curve]) -> list[Curve]:
    """Returns the points of the rounds that all curves have, because a picture shows their mean."""
    rounds = set.intersection(*({point[0] for point in curve} for curve in curves))
    return [[point for point in curve if point[0] in rounds] for curve in curves]


def _curves(entries: Sequence[Entry], protocol: str, reported: Reported) -> Curves:
    """Returns the values of the reported metric during the runs of one setting."""
    kinds = {kind for entry in entries for of, kind in entry.test_sets if of == protocol}
    return {
        kind: {
            entry.label: {run.seed: run.curve(f"test/{protocol}/{kind}/{reported.name}") for run in entry.runs}
            for entry in entries
        }
        for kind in MODEL_KINDS
        if kind in kinds
    }


def _write_csv(path: Path, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(rows)
