"""Many runs as one: methods x grid x seeds, each an ordinary ``lcfl fit`` in a process of its own.

A grid is tried with the first seed; per method the point with the best validation accuracy is run with all seeds.
"""

import hashlib
import json
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise, product
from math import inf
from pathlib import Path
from typing import Any

import yaml

from lcfl.cli.shipped_configs import find
from lcfl.core.files import write_json
from lcfl.runs.comparison import FinishedRun

__all__ = ["Grid", "Sweep", "Trial", "given_to", "parse_grid", "points_of"]

STOPPED = (signal.SIGTERM, 128 + signal.SIGTERM)  # before lcfl minds signals, and after

Point = tuple[tuple[str, str], ...]  # (option, value) pairs


@dataclass(frozen=True)
class Grid:
    """The values to try for one option, for one method or (None) for all."""

    option: str
    values: tuple[str, ...]
    method: str | None = None


def parse_grid(text: str) -> Grid:
    """``[method:]option=value,value``; values are read as YAML.

    A value may be a mapping: ``model={cluster_weight: 0, global_weight: 0},{cluster_weight: 1, global_weight: 1}``
    tries two options together, which two grids would cross.

    Raises:
        ValueError: for a text of another form.
    """
    option, sign, values = text.partition("=")
    method, colon, rest = option.partition(":")
    try:
        parsed = yaml.safe_load(f"[{values}]")
    except yaml.YAMLError:
        parsed = []
    if not sign or not option or not parsed:
        raise ValueError(f"sweep: got --grid {text}; it has the form option=value,value or method:option=value,value.")
    words = tuple(value if isinstance(value, str) else json.dumps(value) for value in parsed)
    return Grid(rest, words, method) if colon else Grid(option, words)


def points_of(method: str, grids: Sequence[Grid]) -> list[Point]:
    """Every combination of the grid's values that concern a method; one empty point if there is nothing to choose."""
    own = [grid for grid in grids if grid.method in (None, method) and len(grid.values) > 1]
    return list(product(*([(grid.option, value) for value in grid.values] for grid in own)))


def given_to(method: str, grids: Sequence[Grid]) -> list[str]:
    """The words of a method's grids that leave nothing to choose: options of its own, not points."""
    own = [grid for grid in grids if grid.method in (None, method) and len(grid.values) == 1]
    return [f"--{grid.option}={grid.values[0]}" for grid in own]


@dataclass(frozen=True)
class Trial:
    """One run: a method at a point of its grid, with a seed; `rounds` where tuning is shorter."""

    method: str
    point: Point
    seed: int
    rounds: int | None = None

    @property
    def name(self) -> str:
        """Its ``trainer.name``."""
        parts = [Path(self.method).stem, *(_short(option, value) for option, value in self.point)]
        parts += [] if self.rounds is None else [f"rounds={self.rounds}"]
        return "-".join([*parts, f"seed{self.seed}"]).replace("/", "_")


def _say(text: str) -> None:
    print(f"{text}\n", end="", flush=True)  # in one piece: several threads say what they do


@dataclass(frozen=True)
class Sweep:
    """Runs trials and knows which are done.

    Args:
        root: folder of all runs; a trial lies in ``<root>/<trial>/version_0``, its output in ``<root>/<trial>.log``.
        layers: ``-c`` files of every run, below the method's.
        options: further words of every run, above the method's.
        own: further words of one method's runs, above all others.
        say: is told what happens.
        program: what a run's words are given to.
    """

    root: Path
    layers: Sequence[str]
    options: Sequence[str]
    own: Mapping[str, Sequence[str]] = field(default_factory=dict)
    say: Callable[[str], None] = _say
    program: Sequence[str] = (sys.executable, "-m", "lcfl", "fit")

    def command(self, trial: Trial) -> list[str]:
        """The words behind ``lcfl fit`` that make a trial."""
        words = [word for layer in (*self.layers, str(find("methods", trial.method))) for word in ("-c", layer)]
        words += [*self.options, *self.own.get(trial.method, ())]
        words += [f"--{option}={value}" for option, value in trial.point]
        words += [] if trial.rounds is None else [f"--trainer.rounds={trial.rounds}"]
        words += [f"--seed_everything={trial.seed}", f"--trainer.default_root_dir={self.root}"]
        return [*words, f"--trainer.name={trial.name}"]

    def run(self, trials: Sequence[Trial], jobs: int = 1) -> list[FinishedRun | None]:
        """Runs what is not done, resumes what was begun; None for a trial that failed.

        Ctrl-C asks every run to stop after its round with a checkpoint, waits for that, and starts no more.

        Raises:
            ValueError: if a trial of this name was made by another command, or one keeps nothing.
        """
        commands = [self.command(trial) for trial in trials]
        children: set[subprocess.Popen[bytes]] = set()
        new: list[Path] = []
        try:
            for trial, words in zip(trials, commands, strict=True):
                new += self._claim(trial, words)
            with ThreadPoolExecutor(jobs) as pool:
                futures = [
                    pool.submit(self._finish, trial, words, children)
                    for trial, words in zip(trials, commands, strict=True)
                ]
                try:
                    return [future.result() for future in futures]
                except BaseException:
                    for future in futures:
                        future.cancel()
                    for child in list(children):
                        child.terminate()
                    raise
        except BaseException:
            for note in new:
                if not (note.parent / "version_0").is_dir():  # nothing is there that it would tell about
                    note.unlink()
            raise

    def tune(
        self, method: str, points: Sequence[Point], seed: int, rounds: int | None, jobs: int = 1, finalists: int = 1
    ) -> Point:
        """The point with the best validation accuracy of the kind of model that the method's paper reports first.

        Args:
            method: whose points they are.
            points: to choose from; a single one needs no trial.
            seed: of every trial.
            rounds: of the trials, where they are shorter than a run.
            jobs: trials at the same time.
            finalists: so many of the best go all the way after shorter trials, and these runs decide.

        Raises:
            ValueError: if no trial has a validation accuracy.
        """
        if len(points) == 1:
            return points[0]
        if finalists >= len(points):
            rounds = None  # all would go all the way after trials that decide nothing
        scores = self._scores(method, [Trial(method, point, seed, rounds) for point in points], jobs)
        if rounds is not None and finalists > 1:
            best = sorted(scores, key=lambda point: -scores[point])[:finalists]
            scores = self._scores(method, [Trial(method, point, seed) for point in best], jobs)
        chosen = max(scores, key=lambda point: scores[point])
        words = " ".join(f"{option}={value}" for option, value in chosen)
        self.say(f"{method}: {words} is the best of {len(points)} on validation data, {100 * scores[chosen]:.2f} %")
        return chosen

    def _scores(self, method: str, trials: Sequence[Trial], jobs: int) -> dict[Point, float]:
        """The validation accuracies of trials that have one, by point."""
        runs = self.run(trials, jobs)
        scores = {trial.point: validation_accuracy(run) for trial, run in zip(trials, runs, strict=True) if run}
        scores = {point: score for point, score in scores.items() if score > -inf}
        if not scores:
            raise ValueError(f"sweep: no trial of {method} has a validation accuracy; see the logs in {self.root}.")
        return scores

    def _finish(
        self, trial: Trial, words: Sequence[str], children: "set[subprocess.Popen[bytes]]"
    ) -> FinishedRun | None:
        folder = self.root / trial.name / "version_0"
        summary = folder / "summary.json"
        if not summary.is_file():
            resumes = next((folder / "checkpoints").glob("round-*.ckpt"), None) is not None
            more = ["--ckpt_path=last"] if resumes else []
            self.say(f"{trial.name}: {'resumed' if resumes else 'started'}")
            if not resumes:  # begun, but killed before its first checkpoint: what is there is of no use
                shutil.rmtree(folder, ignore_errors=True)
            with (self.root / f"{trial.name}.log").open("a") as log:
                begin = log.tell()
                log.write(f"lcfl fit {shlex.join([*words, *more])}\n")
                log.flush()
                fit = [*self.program, *words, *more]
                # A session of its own: a terminal's Ctrl-C is for the sweep, which hands it on once.
                child = subprocess.Popen(fit, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
                children.add(child)
                status = child.wait()
                children.discard(child)
            if status:
                is_stopped = abs(status) in STOPPED
                ending = "stopped" if is_stopped else f"failed with status {status}"
                reason = "" if is_stopped else _last_error(self.root / f"{trial.name}.log", begin)
                self.say(f"{trial.name}: {ending}; see {self.root / trial.name}.log{reason}")
                return None
            if not summary.is_file():
                raise ValueError(
                    f"sweep: {trial.name} ended well and left no {summary}; see {self.root / trial.name}.log. Options "
                    "that keep nothing, such as trainer.fast_dev_run, are for lcfl fit: leave them out here."
                )
        run = FinishedRun(folder, json.loads(summary.read_text()))
        self.say(f"{trial.name}: done, validation {100 * validation_accuracy(run):.2f} %")
        return run

    def _claim(self, trial: Trial, words: Sequence[str]) -> list[Path]:
        """Notes a trial's command and gives the note if it is new; refuses a trial that another command has made.

        A file is known by its name and content: wherever it lies by now, a trial made from it can be resumed.
        """
        files = [word for flag, word in pairwise(words) if flag == "-c" and Path(word).is_file()]
        now = _by_name(words, {file: _digest(Path(file)) for file in files})
        note = self.root / trial.name / "trial.json"
        if not note.is_file():
            write_json(note, now, indent=2)
            return [note]
        was: dict[str, Any] = json.loads(note.read_text())
        if isinstance(was["files"], dict):  # as notes once were: of paths
            was = _by_name(was["command"], was["files"])
        if was == now:
            return []
        changed = set(was["command"]) ^ set(now["command"])
        changed |= {name for name, _ in set(map(tuple, was["files"])) ^ set(map(tuple, now["files"]))}
        differs = ", ".join(sorted(changed)) or "the order of the words"
        raise ValueError(
            f"sweep: {self.root / trial.name} was made by another command; {differs} differs. Name another "
            "folder with --out, or remove this one."
        )


def validation_accuracy(run: FinishedRun) -> float:
    """Of the first kind of model that the method's paper reports; -inf without validation data or where it is NaN."""
    names = [name for name in run.metrics if name.startswith("val/own_split/") and name.endswith("/acc")]
    value = run.metrics[names[0]] if names else -inf
    return value if value == value else -inf


def _last_error(log: Path, begin: int) -> str:
    """The last error of ``lcfl`` in a run's output from byte `begin` on, on a line of its own; empty without one."""
    output = log.read_bytes()[begin:].decode(errors="replace")
    errors = [line for line in output.splitlines() if line.startswith("lcfl: error: ")]
    return f"\n  {errors[-1]}" if errors else ""


def _short(option: str, value: str) -> str:
    """``lr=0.1`` of an option and its value; of a mapping its items, as YAML within braces reads them."""
    parsed = yaml.safe_load(value) if value.startswith("{") else None
    if not isinstance(parsed, dict):
        return f"{option.rpartition('.')[2]}={value}"
    items = {str(key): item if isinstance(item, str) else json.dumps(item) for key, item in parsed.items()}
    return "-".join(_short(key, item) for key, item in items.items())


def _by_name(words: Sequence[str], digests: Mapping[str, str]) -> dict[str, Any]:
    """What a trial's note holds: its words with its files by name, and the files' names and digests in order."""
    known = [Path(word).name if word in digests else word for word in words]
    return {"command": known, "files": [[Path(file).name, digest] for file, digest in digests.items()]}


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
