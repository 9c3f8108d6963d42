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
import fcntl
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import isnan, nan
from pathlib import Path

import numpy as np
import paper_pictures
from paper_items import FILES, ITEMS, Cell, Item
from paper_measures import MEASURES, OVER_ROUNDS, best_accuracy, kinds_of
from paper_readings import AS_CONFIGURED, READINGS, words_of
from paper_rows import Key, Point, Row, read, write

from lcfl.cli.sweep import Trial, parse_grid, points_of, validation_of
from lcfl.runs.finished import FinishedRun, find_runs

HOME = Path(__file__).parents[1]
NEWCOMER_EPOCHS = 5  # of FedClust's Table 6
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


class Results:
    """The rows of an item in its file, which is complete after every cell.

    Args:
        path: the file, ``<item>.csv``. Curves are in ``<item>-curves.csv``, and the picture in ``<item>.png``.
        item: the item.
    """

    def __init__(self, path: Path, item: Item) -> None:
        self.path, self.item = path, item
        self.curves = path.with_name(f"{path.stem}-curves.csv")
        self._lock = threading.Lock()  # several cells run at the same time

    def rows(self) -> list[Row]:
        """Returns the rows of all cells."""
        return read(self.path, Row)

    def put(self, task: Task) -> None:
        """Replaces the rows of a cell, whose runs are finished, and draws the picture again."""
        new, points = task.rows(), task.curves() if self.item.picture == "curves" else []
        places = {(cell.column, cell.method, cell.point): place for place, cell in enumerate(self.item.cells)}
        with self._lock:
            kept = [row for row in self.rows() if row.key != task.key and row.key[:3] in places]
            rows = sorted([*kept, *new], key=lambda row: (row.reading, places[row.key[:3]]))  # keeps models in order
            write(self.path, rows, Row)
            if points:
                points = [point for point in read(self.curves, Point) if point.key != task.key] + points
                write(self.curves, points, Point)
            paper_pictures.draw(self.item, rows, points, self.path.with_suffix(".png"))


class Runner:
    """Runs cells, several at the same time, and stores their rows.

    Args:
        results: where the rows go.
        jobs: the number of cells at the same time.
    """

    def __init__(self, results: Results, jobs: int) -> None:
        self.results, self.jobs = results, jobs
        self._threads = max((os.cpu_count() or 1) // jobs, 1)
        self._commands: set[subprocess.Popen[bytes]] = set()

    def __call__(self, tasks: Sequence[Task]) -> list[Task]:
        """Returns the tasks that failed. On Ctrl-C and SIGTERM, the runs stop after their round with a checkpoint."""
        # Also SIGINT, which a shell has the commands in its background ignore, and these would have theirs ignore it.
        before = {each: signal.signal(each, signal.default_int_handler) for each in (signal.SIGINT, signal.SIGTERM)}
        with ThreadPoolExecutor(self.jobs) as pool:
            futures = {pool.submit(self._tried, task): task for task in tasks}
            try:
                return [task for future, task in futures.items() if not future.result()]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                for command in list(self._commands):
                    command.send_signal(signal.SIGINT)
                raise
            finally:
                for each, handler in before.items():
                    signal.signal(each, handler)

    def _tried(self, task: Task) -> bool:
        """Runs a cell as `_run` does. An error is printed, because the other cells are still worth running."""
        try:
            return self._run(task)
        except Exception:
            _say(f"{task.label}: failed\n{traceback.format_exc()}")
            return False

    def _run(self, task: Task) -> bool:
        """Runs a cell; returns whether it succeeded."""
        _say(f"{task.label}: started")
        begin, log = time.monotonic(), HOME / task.folder / "sweep.log"
        succeeded = self._lcfl(task.words, log)
        if succeeded and "newcomer_test_accuracy" in task.item.metrics:
            paths = [run.path for run in task.runs()[0] if not (run.path / "newcomers.json").is_file()]
            words = [["onboard", f"--ckpt_path={path}", f"--epochs={NEWCOMER_EPOCHS}"] for path in paths]
            succeeded = all(self._lcfl(each, log) for each in words)
        if not succeeded:
            _say(f"{task.label}: failed or stopped, see {log}")
            return False
        self.results.put(task)
        for checkpoints in (HOME / task.folder).glob("*/version_*/checkpoints"):
            shutil.rmtree(checkpoints)  # of a large network, they would soon fill the disk
        _say(f"{task.label}: done in {(time.monotonic() - begin) / 60:.1f} min")
        return True

    def _lcfl(self, words: Sequence[str], log: Path) -> bool:
        """Runs a command in the repository and adds its output to a file. Returns whether it succeeded."""
        log.parent.mkdir(parents=True, exist_ok=True)
        environment = {"OMP_NUM_THREADS": str(self._threads)} | os.environ
        with log.open("a") as file:
            words = [sys.executable, "-m", "lcfl", *words]
            # In a session of its own, because Ctrl-C in a terminal must reach it only once, from here.
            command = subprocess.Popen(
                words, cwd=HOME, stdout=file, stderr=file, env=environment, start_new_session=True
            )
            self._commands.add(command)
            status = command.wait()
            self._commands.discard(command)
        return status == 0


def _say(line: str) -> None:
    """Prints a line at once, so that those of cells that run at the same time do not mix."""
    print(f"{line}\n", end="", flush=True)


def tasks_of(options: argparse.Namespace) -> list[Task]:
    """Returns the chosen cells under each of the chosen readings that applies to them.

    Raises:
        SystemExit: if an option names something that there is not.
    """
    item = ITEMS[options.item]
    columns, methods = {cell.column for cell in item.cells}, {cell.method for cell in item.cells}
    named = {name for reading in options.readings for name in reading.split("+")}
    for name, given, known in (
        ("columns", options.columns or (), columns),
        ("methods", options.methods or (), methods),
        ("readings", named, {AS_CONFIGURED, *READINGS}),
    ):
        if unknown := set(given) - known:
            sys.exit(f"--{name}: got {', '.join(sorted(unknown))}; allowed are {', '.join(sorted(known))}.")
    return [
        Task(item, cell, reading, tuple(options.seeds), options.root, options.out, options.rounds)
        for reading in options.readings
        for cell in item.cells
        if cell.column in (options.columns or columns) and cell.method in (options.methods or methods)
        if words_of(cell, reading) is not None
    ]


def seconds_of(task: Task, rows: Sequence[Row]) -> float:
    """Returns the expected seconds of a run; nan if nothing like it has been measured.

    They are those of the method under the reading in any column, or else the median over all methods.
    """
    like = [row for row in rows if row.reading == task.name]
    own = [row.seconds for row in like if row.method == task.cell.method]
    return float(np.median(own or [row.seconds for row in like] or [nan]))


def show(tasks: Sequence[Task], rows: Sequence[Row], jobs: int) -> None:
    """Prints what is done, what is left to do and how long that takes, and what cannot be run."""
    left = 0.0
    for task in tasks:
        if task.is_in(rows):
            state = "done"
        elif (missing := task.missing) is not None:
            state = f"there is no {task.root}/{missing}"
        else:
            minutes = task.num_runs * seconds_of(task, rows) / 60
            left += 0 if isnan(minutes) else minutes
            state = f"{task.num_runs} runs, " + ("unknown time" if isnan(minutes) else f"{minutes:.0f} min")
        print(f"{task.cell.column:<26}{task.cell.row:<36}{task.name:<28}{state}")
    print(f"left, as far as it is known: {left / jobs / 60:.1f} h with --jobs {jobs}")


def _listed(text: str) -> list[str]:
    return text.split(",")


def main(args: Sequence[str] | None = None) -> None:
    readings = "\n".join(f"  {name:<16}{reading.__doc__}" for name, reading in READINGS.items())
    parser = argparse.ArgumentParser(
        description=f"{__doc__}{readings}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("item", choices=ITEMS)
    parser.add_argument("--columns", type=_listed, help="such as cifar10-pathological-3 (default: all)")
    parser.add_argument("--methods", type=_listed, help="names, separated by commas (default: all)")
    parser.add_argument("--readings", type=_listed, default=[AS_CONFIGURED])
    parser.add_argument("--seeds", type=_listed, default=["0"])
    parser.add_argument("--rounds", type=int, help="rounds of every run (default: those of the paper)")
    parser.add_argument("--jobs", type=int, default=1, help="cells at the same time")
    parser.add_argument("--root", default=ROOT, help="folder with torchvision's files")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the runs")
    parser.add_argument("--results", type=Path, default=Path("docs/results/papers"), help="folder of tables, pictures")
    parser.add_argument("--list", action="store_true", help="only show what is done and what the rest would cost")
    options = parser.parse_args(args)
    tasks, results = tasks_of(options), Results(HOME / options.results / f"{options.item}.csv", ITEMS[options.item])
    if options.list:
        show(tasks, results.rows(), options.jobs)
        return
    due = [task for task in tasks if not task.is_in(results.rows())]
    ready = [task for task in due if task.missing is None]
    print(
        f"{len(tasks) - len(due)} cells are done, {len(due) - len(ready)} have no data, {len(ready)} are run",
        flush=True,
    )
    (HOME / options.out).mkdir(parents=True, exist_ok=True)
    with (HOME / options.out / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.exit(
                f"--out: another {Path(__file__).name} runs in {options.out}; wait for it, or give another folder."
            )
        try:
            failed = Runner(results, options.jobs)(ready)
        except KeyboardInterrupt:
            sys.exit("stopped; give the same command again to go on.")
    if failed:
        sys.exit(f"{len(failed)} of {len(ready)} cells failed or were stopped; give the same command again.")


if __name__ == "__main__":
    main()
