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
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from math import isnan, nan
from pathlib import Path

import numpy as np
import paper_pictures
from paper_items import ITEMS, Item
from paper_readings import AS_CONFIGURED, READINGS, words_of
from paper_rows import Point, Row, read, write
from paper_tasks import HOME, OUT, ROOT, Task

NEWCOMER_EPOCHS = 5  # of FedClust's Table 6


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
