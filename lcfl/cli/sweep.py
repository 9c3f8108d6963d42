"""Runs methods x grid x seeds. Each run is an ordinary ``lcfl fit`` in a separate process.

A grid is tried with the first seed. For each method, the point with the best reported metric (the accuracy, unless
``model.report`` names another one) on validation data is run with all seeds.
"""

import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from math import isnan
from pathlib import Path
from typing import NamedTuple

from lcfl.cli.shipped_configs import find
from lcfl.cli.trial_log import last_error, warnings_in
from lcfl.cli.trial_notes import check_note, digest_of, note_of
from lcfl.cli.trials import Point, Trial
from lcfl.core.files import write_json
from lcfl.core.output import lossy_output
from lcfl.core.validation import abbreviated
from lcfl.runs.comparison import check_same_definition
from lcfl.runs.directory import RunDirectory
from lcfl.runs.finished import FinishedRun

__all__ = ["Sweep", "Validation", "validation_of"]

SAFE_PATH = [] if sys.path[0] == os.getcwd() else ["-P"]  # a run finds modules in the same order as this process
LONGEST_NAME = 240  # bytes; file systems allow 255, and its log has an ending
LOST = "a rank was lost"  # how `LostRankError` begins
STOPPED = (signal.SIGTERM, 128 + signal.SIGTERM)  # before lcfl handles signals, and after


def _print_line(text: str) -> None:
    print(f"{text}\n", end="", flush=True, file=lossy_output())  # one write, because several threads report here


@dataclass(frozen=True)
class Sweep:
    """Runs trials, and skips those that are finished.

    Args:
        root: the folder of all runs. A trial is in ``<root>/<trial>/version_0`` and its output in
            ``<root>/<trial>.log``.
        layers: the ``-c`` files of every run; the method's file overrides them.
        options: further arguments of every run; they override the method's file.
        own: further arguments for the runs of one method; they override all of the above.
        say: a function that gets every progress message.
        program: the command that gets the arguments of a run.

    Attributes:
        cut_off: the names of trials that a signal ended or that another process is running.
    """

    root: Path
    layers: Sequence[str]
    options: Sequence[str]
    own: Mapping[str, Sequence[str]] = field(default_factory=dict)
    say: Callable[[str], None] = _print_line
    program: Sequence[str] = (sys.executable, *SAFE_PATH, "-m", "lcfl", "fit")
    cut_off: set[str] = field(default_factory=set, init=False)
    _warned: set[tuple[str, str]] = field(default_factory=set, init=False)
    _unvalidated: set[str] = field(default_factory=set, init=False)  # trials without validation data that need them

    def command(self, trial: Trial) -> list[str]:
        """Returns the arguments of ``lcfl fit`` for a trial."""
        words = [word for layer in (*self.layers, str(find("methods", trial.method))) for word in ("-c", layer)]
        words += [*self.options, *self.own.get(trial.method, ())]
        words += [f"--{option}={value}" for option, value in trial.point]
        words += [] if trial.rounds is None else [f"--trainer.rounds={trial.rounds}"]
        words += [f"--seed_everything={trial.seed}", f"--trainer.default_root_dir={self.root}"]
        return [*words, f"--trainer.name={trial.name}"]

    def check(self, trials: Sequence[Trial]) -> None:
        """Checks the configurations of the trials that are not finished, so that no sweep ends with a wrong one.

        Raises:
            ValueError: if any of them would be refused; names each reason with its trials. Also if two have the same
                name, or if a name is too long for a folder.
        """
        names = [trial.name for trial in trials]
        if alike := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"sweep: {abbreviated(alike)} would be the folder of several runs; give other values.")
        if long := [name for name in names if len(name.encode()) > LONGEST_NAME]:
            raise ValueError(
                f"sweep: the name {long[0][:60]}... of a run has {len(long[0].encode())} bytes, too many for a folder. "
                "Move long values of --grid to files, and give the names of these."
            )
        waiting = [each for each in trials if not (self.root / each.name / "version_0" / "summary.json").is_file()]
        if not waiting:
            return
        from lcfl.cli.federated_cli import refusal  # imports torch, which a finished sweep does not need

        reasons: dict[str, list[str]] = {}
        for trial in waiting:
            if reason := refusal(self.command(trial)):
                reasons.setdefault(reason, []).append(trial.name)
        if reasons:
            number = sum(map(len, reasons.values()))
            lines = [f"\n  {abbreviated(names)}: {reason}" for reason, names in reasons.items()]
            raise ValueError(
                f"sweep: {number} of {len(trials)} configurations are refused, so nothing was started:{''.join(lines)}"
            )

    def run(self, trials: Sequence[Trial], jobs: int = 1, is_tuned: bool = False) -> list[FinishedRun | None]:
        """Runs the trials, and resumes those that were interrupted.

        Ctrl-C makes every run stop after its round with a checkpoint, waits for that, and starts no further run.

        Args:
            trials: the trials.
            jobs: the number of runs at the same time.
            is_tuned: whether the best of the trials is sought, for which all of them need validation data.

        Returns:
            The runs in the order of the trials; None for a trial that failed.

        Raises:
            ValueError: if a trial of this name was run by another command, if a trial saves nothing, or if it has no
                validation data but needs them.
        """
        commands = [self.command(trial) for trial in trials]
        children: set[subprocess.Popen[bytes]] = set()
        for trial, words in zip(trials, commands, strict=True):
            self._check_command(trial, words)
        with ThreadPoolExecutor(jobs) as pool:
            futures = [
                pool.submit(self._finish, trial, words, children, is_tuned)
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

    def tune(
        self, method: str, points: Sequence[Point], seed: int, rounds: int | None, jobs: int = 1, finalists: int = 1
    ) -> Point | None:
        """Returns the point with the best reported metric on validation data; None if every trial failed.

        It is that of the kind of model that the method's paper reports first.

        Args:
            method: the method.
            points: the points to choose from; a single one needs no trial.
            seed: the seed of every trial.
            rounds: the rounds of a trial, if trials are shorter than a run.
            jobs: the number of trials at the same time.
            finalists: after shorter trials, this number of the best points is run with all rounds, and these runs
                decide.

        Raises:
            ValueError: if no trial has the metric on validation data, or if one did not come to its end, so that the
                best point is not known.
        """
        if len(points) == 1:
            return points[0]
        if finalists >= len(points):
            rounds = None  # the shorter trials would not exclude any point
        scores = self._scores(method, [Trial(method, point, seed, rounds) for point in points], jobs)
        if not scores:
            return None
        failed = f" ({len(points) - len(scores)} of them without a result)" * (len(scores) < len(points))
        if rounds is not None and finalists > 1:
            best = sorted(scores, key=lambda point: -scores[point].rounded)[:finalists]
            scores = self._scores(method, [Trial(method, point, seed) for point in best], jobs)
            if not scores:
                return None
        chosen = max(scores, key=lambda point: scores[point].rounded)  # of equals, the first
        words = " ".join(f"{option}={value}" for option, value in chosen)
        self.say(
            f"{method}: {words} is the best of {len(points)} points{failed}, {scores[chosen].text} on validation data"
        )
        return chosen

    def _scores(self, method: str, trials: Sequence[Trial], jobs: int) -> "dict[Point, Validation]":
        """Runs trials and returns their results on validation data by point, of those trials that have one."""
        runs = self.run(trials, jobs, is_tuned=True)
        if cut_off := [trial.name for trial in trials if trial.name in self.cut_off]:
            raise ValueError(
                f"sweep: {abbreviated(cut_off)} did not come to an end, so the best point of {method} is not known; "
                "give the same command again."
            )
        check_same_definition(run for run in runs if run)
        found = {trial.point: validation_of(run) for trial, run in zip(trials, runs, strict=True) if run}
        scores = {point: each for point, each in found.items() if each is not None}
        if any(runs) and not scores:
            raise ValueError(
                f"sweep: no trial of {method} has the reported metric on validation data; see the logs in {self.root}."
            )
        return scores

    def _finish(
        self, trial: Trial, words: Sequence[str], children: "set[subprocess.Popen[bytes]]", is_tuned: bool
    ) -> FinishedRun | None:
        """Runs or resumes a trial that is not finished; returns its run, or None if it failed."""
        folder = self.root / trial.name / "version_0"
        summary = folder / "summary.json"
        self.cut_off.discard(trial.name)
        if is_tuned and self._unvalidated:  # the sweep is ending
            return None
        is_kept = summary.is_file()
        if not is_kept:
            if not self._fit(trial, words, folder, children):
                return None
            if not summary.is_file():
                raise ValueError(
                    f"sweep: {trial.name} succeeded but wrote no {summary}; see {self.root / trial.name}.log. Leave "
                    "out options that save nothing, such as trainer.fast_dev_run; use them with lcfl fit."
                )
        run = FinishedRun.read(folder)
        if is_kept:
            self._warn_of_changed_code(run)
        validation = validation_of(run)
        said = "no validation data, or its metric is NaN" if validation is None else f"validation {validation.text}"
        self.say(f"{trial.name}: done, {said}")
        if is_tuned and not any(name.startswith("val/") for name in run.metrics):  # nor has any other trial
            self._unvalidated.add(trial.name)
            raise ValueError(
                f"sweep: {trial.name} has no validation data, which decide between the values of --grid. Set "
                f"data.val_fraction, and give another folder with --out or remove {self.root}."
            )
        return run

    def _warn_of_changed_code(self, run: FinishedRun) -> None:
        """Says that a run is kept although the user's code has changed since."""
        files = {Path(each["file"]): each["sha256"] for each in run.code.values()}
        if changed := [file.name for file, digest in files.items() if file.is_file() and digest_of(file) != digest]:
            self.say(
                f"{run.name}: {', '.join(changed)} has changed since this run, which is kept. Remove "
                f"{run.path.parent}, or give another folder with --out, to run the new code."
            )

    def _fit(self, trial: Trial, words: Sequence[str], folder: Path, children: "set[subprocess.Popen[bytes]]") -> bool:
        """Runs or resumes a trial, unless another process does. Returns whether it succeeded."""
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = _locked(folder)
        if lock is None:
            self.say(f"{trial.name}: left alone, because another process is writing it")
            self.cut_off.add(trial.name)
            return False
        with closing(lock):
            if (folder / "summary.json").is_file():  # by now
                return True
            self._check_command(trial, words, lock)
            write_json(folder.parent / "trial.json", note_of(words, trial.rounds is not None), indent=2)
            return self._wait(trial, words, folder, children, lock)

    def _wait(
        self,
        trial: Trial,
        words: Sequence[str],
        folder: Path,
        children: "set[subprocess.Popen[bytes]]",
        lock: RunDirectory,
    ) -> bool:
        """Starts the run of a trial, or resumes it, and waits for its end. Returns whether it succeeded."""
        resumes = next((folder / "checkpoints").glob("round-*.ckpt"), None) is not None
        more = [f"--ckpt_path={folder}"] if resumes else []
        self.say(f"{trial.name}: {'resumed' if resumes else 'started'}")
        if not resumes:  # killed before its first checkpoint, so there is nothing to resume
            shutil.rmtree(folder, ignore_errors=True)
        path = self.root / f"{trial.name}.log"
        with path.open("a", encoding="utf-8") as log:
            begin = log.tell()
            log.write(f"lcfl fit {shlex.join([*words, *more])}\n")
            log.flush()
            fit = [*self.program, *words, *more]
            # In a separate session, because Ctrl-C in a terminal must reach only the sweep. It passes it on once.
            child = subprocess.Popen(
                fit, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, pass_fds=lock.descriptors
            )
            children.add(child)
            status = child.wait()
            children.discard(child)
        for warning in warnings_in(path, begin):
            if (trial.method, warning) not in self._warned:  # all runs of a method warn of the same
                self._warned.add((trial.method, warning))
                self.say(f"{trial.name}: {warning}")
        if status == 0:
            return True
        is_stopped = abs(status) in STOPPED
        ending = "stopped" if is_stopped else f"failed with status {status}"
        reason = "" if is_stopped else last_error(path, begin)
        if status < 0 or is_stopped or LOST in reason:  # such as a process that was killed for its memory
            self.cut_off.add(trial.name)
        self.say(f"{trial.name}: {ending}; see {path}{reason}")
        return False

    def _check_command(self, trial: Trial, words: Sequence[str], lock: RunDirectory | None = None) -> None:
        """Refuses a trial that another command has begun. A run that never began binds nobody.

        A file is identified by its name and its content. A trial can therefore be resumed even if its files have moved.

        Args:
            trial: the trial.
            words: its command.
            lock: the lock of the trial if this process holds it.
        """
        note, folder = self.root / trial.name / "trial.json", self.root / trial.name / "version_0"
        if not note.is_file():
            return
        if not folder.is_dir() and (lock is not None or _is_free(folder)):
            return
        check_note(note, note_of(words, trial.rounds is not None))


def _locked(folder: Path) -> RunDirectory | None:
    """Locks a trial, whose run is in `folder`; None if another sweep runs it, or any process writes its run.

    The run of a trial inherits the lock, because it outlives a sweep that is killed.
    """
    try:
        lock = RunDirectory(folder.parent)
    except ValueError:
        return None
    try:
        if folder.is_dir():
            RunDirectory(folder).close()
    except ValueError:  # lcfl fit
        lock.close()
        return None
    return lock


def _is_free(folder: Path) -> bool:
    """Returns whether nobody runs a trial."""
    lock = _locked(folder)
    if lock is not None:
        lock.close()
    return lock is not None


class Validation(NamedTuple):
    """The result of a run on validation data: a score that is larger for better runs, and the value as text."""

    score: float
    text: str

    @property
    def rounded(self) -> float:
        """The score to six digits, by which runs are compared: the last bits depend on the processor."""
        return float(f"{self.score:.6g}")


def validation_of(run: FinishedRun) -> Validation | None:
    """Returns the reported metric on validation data, of the kind of model that the method's paper reports first.

    Returns None without validation data, and if the metric is NaN.
    """
    reported = run.reported
    names = [name for name in run.metrics if name.startswith("val/own_split/") and name.endswith(f"/{reported.name}")]
    if not names or isnan(value := run.metrics[names[0]]):
        return None
    return Validation(reported.score(value), reported.text(value) + " %" * reported.is_accuracy)
