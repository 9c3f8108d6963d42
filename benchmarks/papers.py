"""Runs the tables and figures of the four papers, and puts measured beside printed numbers.

    python benchmarks/papers.py lcfed-table1 --root data --jobs 2
    python benchmarks/papers.py lcfed-table1 --columns cifar10-pathological-3 --methods fedavg,lcfed --readings lenet
    python benchmarks/papers.py lcfed-table1 --list

Each cell is one ``lcfl sweep``. The rows of a finished cell go to ``docs/results/papers/<item>.csv`` at once, one for
each test protocol and kind of model, and the picture is drawn again. If the command is given again, finished cells are
skipped and interrupted runs are resumed. Paths that are not absolute begin in the folder of the repository.

``--readings`` takes names separated by commas. A ``+`` joins several to one, such as ``lenet+ring``. The reading
``as_configured`` is the configuration as it is in ``configs/papers``. The others are:

"""

import argparse
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from json import loads
from math import inf, isnan, nan
from pathlib import Path

import numpy as np
import paper_pictures
from paper_items import AS_CONFIGURED, FILES, ITEMS, READINGS, Cell, Item, file_missing, words_of
from paper_rows import Key, Point, Row, read, write

from lcfl.cli.sweep import parse_grid, points_of, validation_of
from lcfl.runs.comparison import Entry, entries_of, rounds_to_peak
from lcfl.runs.finished import FinishedRun, find_runs

HOME = Path(__file__).parents[1]
MEGABIT = 1e6 / 8  # bytes
NUM_CLIENTS = 100  # of FedClust
NEWCOMER_EPOCHS = 5  # as well


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
        return self.cell.column, self.cell.method, self.cell.point, self.reading

    @property
    def folder(self) -> Path:
        """The folder of its runs, which items that need the same runs share."""
        return self.out / self.cell.config / self.reading / self.cell.row.replace(" ", "-")

    @property
    def words(self) -> list[str]:
        """The arguments of ``lcfl sweep``."""
        words = ["-c", f"configs/papers/{self.cell.config}.yaml", f"--methods={self.cell.method}"]
        words += [*self.item.words, *self.cell.words, *(words_of(self.cell, self.reading) or ())]
        words += [] if self.rounds is None else [f"--trainer.rounds={self.rounds}"]
        words += [f"--data.dataset.init_args.root={self.root}"] if self.cell.dataset in FILES else []
        words += ["--trainer.devices=1", "--trainer.enable_progress_bar=false", f"--seeds={','.join(self.seeds)}"]
        return [*words, f"--out={self.folder}"]

    @property
    def num_runs(self) -> int:
        """The number of runs, with the trials of grids."""
        grids = [parse_grid(word.removeprefix("--grid=")) for word in self.words if word.startswith("--grid=")]
        num_points = len(points_of(self.cell.method, grids))
        return len(self.seeds) + (num_points - 1 if num_points > 1 else 0)


Measure = Callable[[FinishedRun, str, str, Cell], float]


def accuracy(run: FinishedRun, protocol: str, model: str, cell: Cell) -> float:
    """Returns the final accuracy in percent."""
    return 100 * run.metrics[f"test/{protocol}/{model}/acc"]


def best_accuracy(run: FinishedRun, protocol: str, model: str, cell: Cell) -> float:
    """Returns the accuracy in percent of the best evaluated round."""
    return max([accuracy(run, protocol, model, cell), *(100 * value for _, _, value in _curve(run, protocol, model))])


def rounds_to_target(run: FinishedRun, protocol: str, model: str, cell: Cell) -> float:
    """Returns the number of rounds after which an evaluation first reaches the target; nan if none does."""
    return next((number for number, _, value in _curve(run, protocol, model) if value >= (cell.target or 1)), nan)


def megabits_to_target(run: FinishedRun, protocol: str, model: str, cell: Cell) -> float:
    """Returns the megabits that a client has sent and received by then, on average over all clients."""
    reached = (size for _, size, value in _curve(run, protocol, model) if value >= (cell.target or 1))
    return next(reached, nan) / MEGABIT / NUM_CLIENTS


def rounds_to_peak90(run: FinishedRun, protocol: str, model: str, cell: Cell) -> float:
    """Returns the number of rounds until nine tenths of the peak."""
    return rounds_to_peak(_curve(run, protocol, model))


def newcomers(run: FinishedRun, protocol: str, model: str, cell: Cell) -> float:
    """Returns the accuracy in percent of the newcomers: ``before`` or ``after`` their own training."""
    metrics = loads((run.path / "newcomers.json").read_text())["metrics"]
    return 100 * metrics[f"test/{protocol}/{model}/acc"]


def stability(run: FinishedRun, protocol: str, model: str, cell: Cell) -> float:
    """Returns the mean Jaccard similarity of the clusters of consecutive rounds."""
    return run.metrics["cluster/stability"]


def granularity(run: FinishedRun, protocol: str, model: str, cell: Cell) -> float:
    """Returns the mean over clusters of FedAC's G at the end."""
    return float(np.mean(_granularities(run)))


def granularity_variance(run: FinishedRun, protocol: str, model: str, cell: Cell) -> float:
    """Returns the variance over clusters of FedAC's G at the end."""
    return float(np.var(_granularities(run)))


def clusters(run: FinishedRun, protocol: str, model: str, cell: Cell) -> float:
    """Returns the number of clusters at the end; nan for a method without clusters."""
    return run.history[-1].get("cluster/count", nan)


MEASURES: dict[str, Measure] = {
    "test_accuracy": accuracy,
    "newcomer_test_accuracy": newcomers,
    "rounds_to_target": rounds_to_target,
    "communication_mb": megabits_to_target,
    "rounds_to_90pct_peak": rounds_to_peak90,
    "stability_jaccard": stability,
    "granularity": granularity,
    "granularity_variance": granularity_variance,
    "clusters": clusters,
}
OF_MODELS = ("test_accuracy", "rounds_to_target", "communication_mb", "rounds_to_90pct_peak")
OF_CURVES = OF_MODELS[1:]  # need evaluations during the run
COLUMNS = {"granularity": "cluster/granularity", "clusters": "cluster/count"}  # of metrics.csv, for curves


def _curve(run: FinishedRun, protocol: str, model: str) -> list[tuple[int, float, float]]:
    return run.curve(f"test/{protocol}/{model}/acc")


def _granularities(run: FinishedRun) -> list[float]:
    """Returns the last known G of every cluster of the last round that has any."""
    names = [name for name in run.history[-1] if name.startswith("cluster/granularity_")]
    return [run.history[-1][name] for name in names] or [nan]


def finished(task: Task) -> Entry:
    """Returns the finished runs of a cell, without trials."""
    entries = entries_of(find_runs([HOME / task.folder]))
    return max(entries, key=lambda entry: (len(entry.runs), _validation(entry.runs[0])))  # a trial has one seed


def _validation(run: FinishedRun) -> float:
    validation = validation_of(run)
    return -inf if validation is None else validation.score


def kinds_of(entry: Entry, metric: str) -> list[tuple[str, str]]:
    """Returns the protocols and the kinds of model, or stages of newcomers, of which there is a metric."""
    if metric == "newcomer_test_accuracy":
        return [(protocol, stage) for protocol in entry.runs[0].protocols for stage in ("before", "after")]
    if metric not in OF_MODELS:
        return [("", "")]
    return [each for each in entry.test_sets if metric not in OF_CURVES or _curve(entry.runs[0], *each)]


def rows_of(task: Task, entry: Entry) -> list[Row]:
    """Returns the rows of a finished cell."""
    cell, runs, rows = task.cell, entry.runs, []
    measured = [(metric, *each) for metric in task.item.metrics for each in kinds_of(entry, metric)]
    for metric, protocol, model in measured:
        values = [MEASURES[metric](run, protocol, model, cell) for run in runs]
        best = [best_accuracy(run, protocol, model, cell) for run in runs] if metric == "test_accuracy" else [nan]
        printed, printed_std = cell.printed.get(metric, (nan, nan))
        seconds = [sum(row["time/round_s"] for row in run.history) for run in runs]
        rows.append(
            Row(
                column=cell.column,
                method=cell.method,
                point=cell.point,
                metric=metric,
                reading=task.reading,
                protocol=protocol,
                model=model,
                seeds=len(runs),
                mean=_mean(values),
                std=_deviation(values),
                best=_mean(best),
                best_std=_deviation(best),
                printed=printed,
                printed_std=printed_std,
                difference=_mean(values) - printed,
                options=entry.options,
                rounds=runs[0].summary["rounds"],
                seconds=_mean(seconds),
                command=shlex.join(["lcfl", "sweep", *task.words]),
            )
        )
    return rows


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))


def _deviation(values: Sequence[float]) -> float:
    return float(np.std(values, ddof=1)) if len(values) > 1 else nan


def points_of_curves(task: Task, entry: Entry) -> list[Point]:
    """Returns what a cell measured during its runs."""
    points = []
    for run, metric in product(entry.runs, task.item.metrics):
        for protocol, model in kinds_of(entry, metric):
            name = COLUMNS.get(metric, f"test/{protocol}/{model}/acc")
            scale = 1 if metric in COLUMNS else 100
            for number, _, value in run.curve(name):
                points.append(Point(*task.key, metric, protocol, model, run.seed, number, scale * value))
    return points


class Results:
    """The rows of an item in its file, which is complete after every cell.

    Args:
        path: the file, ``<item>.csv``. Curves are in ``<item>-curves.csv``.
        item: the item.
    """

    def __init__(self, path: Path, item: Item) -> None:
        self.path, self.item = path, item
        self.curves = path.with_name(f"{path.stem}-curves.csv")
        self._lock = threading.Lock()  # several cells run at the same time

    def rows(self) -> list[Row]:
        """Returns all rows."""
        return read(self.path, Row)

    def points(self) -> list[Point]:
        """Returns the points of all curves."""
        return read(self.curves, Point)

    def num_seeds(self, key: Key) -> int:
        """Returns of how many seeds a cell is known under a reading."""
        return max((row.seeds for row in self.rows() if row.key == key), default=0)

    def put(self, task: Task) -> None:
        """Replaces the rows of a cell, whose runs are finished, and draws the picture again."""
        entry = finished(task)
        with self._lock:
            rows = [row for row in self.rows() if row.key != task.key] + rows_of(task, entry)
            places = {(cell.column, cell.method, cell.point): place for place, cell in enumerate(self.item.cells)}
            rows.sort(key=lambda row: (row.reading, places[row.key[:3]]))  # stable, so models keep their order
            write(self.path, rows)
            points = []
            if self.item.picture == "curves":
                points = [each for each in self.points() if each.key != task.key] + points_of_curves(task, entry)
                write(self.curves, points)
            self.draw()

    def draw(self) -> None:
        """Draws the picture."""
        paper_pictures.draw(self.item, self.rows(), self.points(), self.path.with_suffix(".png"))


def run(task: Task, results: Results, threads: int) -> bool:
    """Runs a cell and stores its rows. Returns whether it succeeded."""
    label = f"{task.cell.column}, {task.cell.row}, {task.reading}"
    print(f"{label}: started", flush=True)
    begin, log = time.monotonic(), HOME / task.folder / "sweep.log"
    succeeded = lcfl(["sweep", *task.words], log, threads)
    if succeeded and "newcomer_test_accuracy" in task.item.metrics:
        words = [["onboard", f"--ckpt_path={run.path}", f"--epochs={NEWCOMER_EPOCHS}"] for run in finished(task).runs]
        succeeded = all(lcfl(each, log, threads) for each in words)
    if not succeeded:
        print(f"{label}: failed or stopped, see {log}", flush=True)
        return False
    results.put(task)
    print(f"{label}: done in {(time.monotonic() - begin) / 60:.1f} min", flush=True)
    return True


def lcfl(words: Sequence[str], log: Path, threads: int) -> bool:
    """Runs a command in the repository and adds its output to a file. Returns whether it succeeded."""
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {"OMP_NUM_THREADS": str(threads)} | os.environ
    with log.open("a") as file:
        command = [sys.executable, "-m", "lcfl", *words]
        return not subprocess.run(command, cwd=HOME, stdout=file, stderr=file, env=environment).returncode


def tasks_of(options: argparse.Namespace) -> list[Task]:
    """Returns the chosen cells under each of the chosen readings that applies to them.

    Raises:
        SystemExit: if an option names something that the item does not have.
    """
    item = ITEMS[options.item]
    given = {"columns": {cell.column for cell in item.cells}, "methods": {cell.method for cell in item.cells}}
    for name, known in given.items():
        unknown = set(getattr(options, name) or known) - known
        if unknown:
            sys.exit(f"--{name}: got {', '.join(sorted(unknown))}; {options.item} has {', '.join(sorted(known))}.")
    unknown = {name for reading in options.readings for name in reading.split("+")} - {AS_CONFIGURED, *READINGS}
    if unknown:
        sys.exit(f"--readings: got {', '.join(sorted(unknown))}; allowed are {', '.join([AS_CONFIGURED, *READINGS])}.")
    return [
        Task(item, cell, reading, tuple(options.seeds), options.root, options.out, options.rounds)
        for reading in options.readings
        for cell in item.cells
        if cell.column in (options.columns or given["columns"]) and cell.method in (options.methods or given["methods"])
        if words_of(cell, reading) is not None
    ]


def seconds_of(task: Task, rows: Sequence[Row]) -> float:
    """Returns the expected seconds of a run, nan if nothing like it has been measured.

    They are those of the method under the reading in any column, or else the median of all methods.
    """
    like = [row for row in rows if row.reading == task.reading]
    own = [row.seconds for row in like if row.method == task.cell.method]
    return float(np.median(own or [row.seconds for row in like] or [nan]))


def show(tasks: Sequence[Task], results: Results, jobs: int) -> None:
    """Prints what is done, what is left to do and how long that takes, and what cannot be run."""
    rows, left = results.rows(), 0.0
    for task in tasks:
        missing = file_missing(task.cell, task.reading, HOME / task.root)
        num_seeds = results.num_seeds(task.key)
        if num_seeds >= len(task.seeds):
            state = f"done with {num_seeds} seeds"
        elif missing is not None:
            state = f"there is no {task.root}/{missing}"
        else:
            minutes = task.num_runs * seconds_of(task, rows) / 60
            left += 0 if isnan(minutes) else minutes
            state = f"{task.num_runs} runs, " + ("unknown time" if isnan(minutes) else f"{minutes:.0f} min")
        print(f"{task.cell.column:<26}{task.cell.row:<36}{task.reading:<28}{state}")
    print(f"left, as far as it is known: {left / jobs / 60:.1f} h with --jobs {jobs}")


def _words(text: str) -> list[str]:
    return text.split(",")


def main(args: Sequence[str] | None = None) -> None:
    readings = "\n".join(f"  {name:<16}{(reading.__doc__ or '')}" for name, reading in READINGS.items())
    parser = argparse.ArgumentParser(
        description=f"{__doc__}{readings}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("item", choices=ITEMS)
    parser.add_argument("--columns", type=_words, help="such as cifar10-pathological-3 (default: all)")
    parser.add_argument("--methods", type=_words, help="names, separated by commas (default: all)")
    parser.add_argument("--readings", type=_words, default=[AS_CONFIGURED])
    parser.add_argument("--seeds", type=_words, default=["0"])
    parser.add_argument("--rounds", type=int, help="rounds of every run (default: those of the paper)")
    parser.add_argument("--jobs", type=int, default=1, help="cells at the same time")
    parser.add_argument("--root", default="data", help="folder with torchvision's files")
    parser.add_argument("--out", type=Path, default=Path("logs/papers"), help="folder of the runs")
    parser.add_argument(
        "--results", type=Path, default=Path("docs/results/papers"), help="folder of the tables and pictures"
    )
    parser.add_argument("--list", action="store_true", help="only show what is done and what the rest would cost")
    options = parser.parse_args(args)
    tasks = tasks_of(options)
    results = Results(HOME / options.results / f"{options.item}.csv", ITEMS[options.item])
    if options.list:
        show(tasks, results, options.jobs)
        return
    due = [task for task in tasks if results.num_seeds(task.key) < len(task.seeds)]
    ready = [task for task in due if file_missing(task.cell, task.reading, HOME / task.root) is None]
    print(
        f"{len(tasks) - len(due)} cells are done, {len(due) - len(ready)} have no data, {len(ready)} are run",
        flush=True,
    )
    threads = max((os.cpu_count() or 1) // options.jobs, 1)
    with ThreadPoolExecutor(options.jobs) as pool:
        succeeded = list(pool.map(lambda task: run(task, results, threads), ready))
    if not all(succeeded):
        sys.exit(f"{succeeded.count(False)} of {len(ready)} cells failed or were stopped; give the same command again.")


if __name__ == "__main__":
    main()
