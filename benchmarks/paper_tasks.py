"""A cell of a paper's table under a reading: the words that run it, and the rows that its runs give."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import nan
from pathlib import Path

import numpy as np
from paper_items import FILES, Cell, Item
from paper_measures import MEASURES, OVER_ROUNDS, best_accuracy, kinds_of
from paper_readings import words_of
from paper_rows import Key, Point, Row

from lcfl.cli.sweep import validation_of
from lcfl.cli.trials import Trial, parse_grid, points_of
from lcfl.runs.finished import FinishedRun, find_runs

HOME = Path(__file__).parents[1]
ROOT, OUT = "data", Path("logs/papers")  # the default folders of data and of runs
PLACES = ("--seeds=", "--out=", "--data.dataset.init_args.root=")  # words that do not change what a run computes


@dataclass(frozen=True)
class Task:
    """A cell under a reading, with the words that run it."""

    item: Item
    cell: Cell
    reading: str
    seeds: tuple[str, ...]
    root: str
    out: Path
    rounds: int | None = None

    @property
    def key(self) -> Key:
        """As `Row.key`."""
        return self.cell.column, self.cell.method, self.cell.point, self.name

    @property
    def name(self) -> str:
        """The reading, and the number of rounds if it is not the paper's, such as ``lenet@100``."""
        return self.reading if self.rounds is None else f"{self.reading}@{self.rounds}"

    @property
    def label(self) -> str:
        """What the task is, in words."""
        return f"{self.cell.column}, {self.cell.row}, {self.name}"

    @property
    def folder(self) -> Path:
        """The folder of its runs, which cells that need the same runs share."""
        name = self.cell.row.replace(" ", "-") if self.cell.words else self.cell.method
        return self.out / self.cell.config / self.name / name

    @property
    def words(self) -> list[str]:
        """The arguments of ``lcfl``."""
        words = ["sweep", "-c", f"configs/papers/{self.cell.config}.yaml", f"--methods={self.cell.method}"]
        words += [*self.item.words, *self.cell.words, *(words_of(self.cell, self.reading) or ())]
        words += [] if self.rounds is None else [f"--trainer.rounds={self.rounds}"]
        words += [f"--data.dataset.init_args.root={self.root}"] if self.cell.dataset in FILES else []
        words += ["--trainer.devices=1", "--trainer.enable_progress_bar=false", f"--seeds={','.join(self.seeds)}"]
        return [*words, f"--out={self.folder}"]

    @property
    def command(self) -> str:
        """The command for others to repeat, with the default folders in place of those on this machine."""
        return shlex.join(["lcfl", *replace(self, root=ROOT, out=OUT).words])

    @property
    def points(self) -> list[tuple[tuple[str, str], ...]]:
        """The points of its grids, as a sweep has them: one empty point without grids."""
        grids = [parse_grid(word.removeprefix("--grid=")) for word in self.words if word.startswith("--grid=")]
        return points_of(self.cell.method, grids)

    @property
    def num_runs(self) -> int:
        """The number of runs, with the trials."""
        return len(self.seeds) + len(self.points) - 1

    @property
    def is_of_letters(self) -> bool:
        """Whether it has EMNIST's letters in place of the 62 classes."""
        return "letters" in self.reading.split("+")

    @property
    def missing(self) -> str | None:
        """The files of the data set, below the folder of data, that are not there; None if nothing is missing."""
        pattern = FILES.get(self.cell.dataset, "*")
        if self.is_of_letters:
            pattern = pattern.replace("byclass", "letters")
        return None if any((HOME / self.root).glob(pattern)) else pattern

    def is_in(self, rows: Sequence[Row]) -> bool:
        """Returns whether rows have the cell, by the same command and with all seeds."""
        return any(
            row.key == self.key
            and _without_places(shlex.split(row.command)[1:]) == _without_places(self.words)
            and set(self.seeds) <= set(row.seeds.split())
            for row in rows
        )

    def runs(self) -> tuple[list[FinishedRun], str]:
        """Returns the finished runs of the point that the sweep chose, by seed, and that point in words."""
        known = {run.name: run for run in find_runs([HOME / self.folder])}
        chosen = self.points[0]
        if len(self.points) > 1:
            names = {point: Trial(self.cell.method, point, int(self.seeds[0])).name for point in self.points}
            first = {point: known[name] for point, name in names.items() if name in known}  # a trial may have failed
            scores = {point: found.score for point, run in first.items() if (found := validation_of(run)) is not None}
            chosen = max(scores, key=lambda point: scores[point])
        trials = [Trial(self.cell.method, chosen, int(seed)) for seed in self.seeds]
        return [known[trial.name] for trial in trials], " ".join(f"{option}={value}" for option, value in chosen)

    def rows(self) -> list[Row]:
        """Returns the rows of the finished cell."""
        (runs, options), cell, rows = self.runs(), self.cell, []
        seconds = _mean([sum(row["time/round_s"] for row in run.history) for run in runs])
        measured = [(metric, *kind) for metric in self.item.metrics for kind in kinds_of(runs[0], metric)]
        for metric, protocol, model in measured:
            values = [MEASURES[metric](run, protocol, model, cell) for run in runs]
            best = [best_accuracy(run, protocol, model, cell) for run in runs] if metric == "test_accuracy" else [nan]
            printed, printed_std = cell.printed.get(metric, (nan, nan))
            if self.is_of_letters:  # the paper prints another number
                printed = printed_std = nan
            rows.append(
                Row(
                    column=cell.column,
                    method=cell.method,
                    point=cell.point,
                    metric=metric,
                    reading=self.name,
                    protocol=protocol,
                    model=model,
                    seeds=" ".join(self.seeds),
                    mean=_mean(values),
                    std=_deviation(values),
                    best=_mean(best),
                    best_std=_deviation(best),
                    printed=printed,
                    printed_std=printed_std,
                    difference=_mean(values) - printed,
                    options=options,
                    rounds=runs[0].summary["rounds"],
                    seconds=seconds,
                    command=self.command,
                )
            )
        return rows

    def curves(self) -> list[Point]:
        """Returns what the finished cell measured during its runs."""
        points = []
        for run in self.runs()[0]:
            for metric in self.item.metrics:
                for protocol, model in kinds_of(run, metric):
                    name, scale = f"test/{protocol}/{model}/acc", 100
                    if metric in OVER_ROUNDS:
                        name, scale = OVER_ROUNDS[metric], 1
                    for number, _, value in run.curve(name):
                        points.append(Point(*self.key, metric, protocol, model, run.seed, number, scale * value))
        return points


def _without_places(words: Sequence[str]) -> list[str]:
    return [word for word in words if not word.startswith(PLACES)]


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))


def _deviation(values: Sequence[float]) -> float:
    return float(np.std(values, ddof=1)) if len(values) > 1 else nan
