"""Reads finished runs from their directories."""

import csv
import json
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from math import nan
from pathlib import Path
from statistics import mean
from typing import Any, Self

from lcfl.core.earlier_versions import with_current_metrics, with_current_names
from lcfl.core.metric_names import TRIVIAL, Reported, definitions_of
from lcfl.core.validation import abbreviated
from lcfl.runs.directory import how_to_resume
from lcfl.runs.user_code import Code, changed_modules

__all__ = ["OPTION", "FinishedRun", "find_runs", "metrics_of", "trivial_value"]

OPTION = re.compile(r"-(?=[A-Za-z_][\w.]*=)")  # before each option in the name of a run of a sweep
SHORTER = re.compile(r"-rounds=\d+-seed\d+$")  # the name of a trial that is shorter than a run


def metrics_of(summary: Mapping[str, Any]) -> dict[str, float]:
    """Returns the final metrics in the content of a ``summary.json``, by name."""
    metrics = with_current_metrics(summary["metrics"])
    return {name: nan if value is None else value for name, value in metrics.items()}  # JSON has no NaN


@dataclass(frozen=True)
class FinishedRun:
    """A finished run, read from its directory.

    Attributes:
        path: the run directory.
        summary: the content of ``summary.json``.
    """

    path: Path
    summary: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> Self:
        """Reads the summary of a run.

        Raises:
            ValueError: if it is damaged, or is not that of a run of lcfl; names the file.
        """
        file = path / "summary.json"
        try:
            run = cls(path, json.loads(file.read_bytes()))
            _ = run.settings, run.seed, run.test_sets, run.summary["total_bytes"]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{file}: not the summary of a run of lcfl, or damaged ({_reason(error)}).") from None
        return run

    @property
    def name(self) -> str:
        """The option ``trainer.name``."""
        return self.path.resolve().parent.name

    @property
    def seed(self) -> int:
        """The option ``seed_everything``."""
        return int(self.summary["identity"]["seed"])

    @cached_property
    def metrics(self) -> dict[str, float]:
        """The final metrics by name."""
        return metrics_of(self.summary)

    @property
    def reported(self) -> Reported:
        """The metric that the run reports."""
        return Reported(**self.summary.get("reported", {}))  # missing in older summaries

    @property
    def reported_definition(self) -> Any:
        """What the reported metric is: the description of the loss or of a metric; None if the summary lacks it."""
        identity, name = self.summary["identity"], self.reported.name
        if name == "loss":
            return identity.get("model", {}).get("loss")
        return definitions_of(identity).get(name)

    def reports_otherwise(self, other: "FinishedRun") -> bool:
        """Returns whether another run reports something else under the same name, as far as both say what it is."""
        ours, theirs = self.reported_definition, other.reported_definition
        return self.reported == other.reported and None not in (ours, theirs) and ours != theirs

    @cached_property
    def settings(self) -> dict[str, Any]:
        """All settings but the seed, the number of evaluated clients, the protocols, metrics and the user's code."""
        identity = with_current_names(self.summary["identity"])
        identity.pop("seed")
        identity.pop("code", None)
        identity.pop("metrics", None)
        return {
            # Those that were planned: seeds that were stopped early belong together. Missing in older summaries.
            "rounds": self.summary.get("planned_rounds", self.summary["rounds"]),
            "evaluate_clients": self.summary.get("evaluate_clients") or "all",  # missing in older summaries
            "protocols": " ".join(self.protocols),
            **identity,
        }

    @property
    def local_work(self) -> str:
        """What a client does in a round, as in ``5 steps``; empty if the local update has no such option."""
        local_update = self.settings.get("method", {}).get("local_update", {})
        amounts = {unit: local_update.get(f"{unit}s") for unit in ("step", "epoch")}
        return " ".join(f"{number} {unit}{'s' * (number != 1)}" for unit, number in amounts.items() if number)

    @property
    def code(self) -> Code:
        """The user's code that the run imported; empty in older summaries."""
        code: Code = self.summary["identity"].get("code", {})
        return code

    @property
    def ended(self) -> int:
        """The time at which ``summary.json`` was written, in ns."""
        return (self.path / "summary.json").stat().st_mtime_ns

    @cached_property
    def test_sets(self) -> list[tuple[str, str]]:
        """The protocol and the kind of model of every test of the reported metric, without the trivial baseline."""
        names = [name.split("/") for name in self.metrics]
        found = [(name[1], name[2]) for name in names if name[0] == "test" and name[3:] == [self.reported.name]]
        return [pair for pair in found if pair[1] != TRIVIAL]

    @cached_property
    def protocols(self) -> list[str]:
        """The test protocols, sorted."""
        return sorted({protocol for protocol, _ in self.test_sets})

    @cached_property
    def history(self) -> list[dict[str, float]]:
        """The rows of ``metrics.csv`` that belong to training rounds."""
        path = self.path / "metrics.csv"
        try:
            with path.open(newline="", encoding="utf-8") as file:
                rows = [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]
            return [row for row in rows if row["round"] >= 0]
        except (ValueError, KeyError, TypeError, csv.Error) as error:
            raise ValueError(f"{path}: not the table of a run of lcfl, or damaged ({_reason(error)}).") from None

    def curve(self, metric: str) -> list[tuple[int, float, float]]:
        """Returns the course of a metric: completed rounds, bytes sent and received until then, and value.

        Rounds in which the metric was not measured are left out.
        """
        return [(int(row["round"]) + 1, row["comm/total_bytes"], row[metric]) for row in self.history if metric in row]


def find_runs(paths: Iterable[Path]) -> list[FinishedRun]:
    """Returns the finished runs at or below the paths, in the order of the paths.

    If several runs have the same settings and seed, the newest one counts, by the time of its ``summary.json``. The
    others are left out with a warning, and so are runs without ``summary.json`` or without a test of the reported
    metric, those whose files are damaged or not of lcfl, and the shorter trials of a sweep that has complete runs.

    Raises:
        FileNotFoundError: if there is no run at or below one of the paths.
    """
    runs: dict[str, FinishedRun] = {}
    for path in paths:
        folders = [path, *sorted(path.rglob("version_*"), key=_version)] if path.is_dir() else []
        run_folders = [folder for folder in folders if (folder / "metrics.csv").is_file()]
        if not run_folders:
            raise FileNotFoundError(f"{path}: there is no run in it, which is a directory with metrics.csv.")
        shorter = _shorter_trials(run_folders)
        if shorter:
            warnings.warn(
                f"{path}: {len(shorter)} shorter trials of a sweep are left out, such as {shorter[0]}. To see such "
                "a run, give its directory.",
                stacklevel=2,
            )
        for folder in (each for each in run_folders if each not in shorter):
            summary = folder / "summary.json"
            if not summary.is_file():
                warnings.warn(
                    f"{folder} is left out: it is not finished. Resume it {how_to_resume(folder)}.",
                    stacklevel=2,
                )
                continue
            try:
                run = FinishedRun.read(folder)
                missing = run.summary["rounds"] - len(run.history)
            except ValueError as error:
                warnings.warn(f"{folder} is left out: {error}", stacklevel=2)
                continue
            if missing:
                warnings.warn(
                    f"{folder / 'metrics.csv'} lacks {missing} rounds. So its curves, and what is measured in rounds "
                    "and minutes, are not complete.",
                    stacklevel=2,
                )
            if not run.test_sets:
                warnings.warn(
                    f"{folder} is left out: it has no test {run.reported.name}. Either no evaluated client had test "
                    "samples, or an earlier version wrote it; then run it again.",
                    stacklevel=2,
                )
                continue
            key = json.dumps([run.settings, run.seed], sort_keys=True)
            if key in runs and runs[key].reports_otherwise(run):  # `lcfl compare` refuses them
                key = json.dumps([run.settings, run.seed, run.reported_definition], sort_keys=True)
            known = runs.get(key, run)
            if known.path.resolve() != folder.resolve():
                older, run = sorted([known, run], key=lambda each: each.ended)
                warnings.warn(
                    f"{older.path} is left out: {run.path} has the same settings and seed and is newer.", stacklevel=2
                )
            runs[key] = run
    _warn_of_changed_code(list(runs.values()))
    return list(runs.values())


def _shorter_trials(folders: Sequence[Path]) -> list[Path]:
    """Returns the trials with fewer rounds (``--tuning_rounds``) of methods that have complete runs, too."""
    trials = [folder for folder in folders if (folder.parent / "trial.json").is_file()]
    shorter = [folder for folder in trials if _is_shorter(folder)]
    complete = {_of_method(each) for each in trials if each not in shorter and (each / "summary.json").is_file()}
    return [folder for folder in shorter if _of_method(folder) in complete]


def _is_shorter(trial: Path) -> bool:
    """Returns whether a trial has fewer rounds than a run. Its name says so, too, if no option ends in "rounds"."""
    with suppress(ValueError, KeyError, TypeError):  # a damaged note, or that of an earlier version
        return bool(json.loads((trial.parent / "trial.json").read_bytes())["is_shorter"])
    return SHORTER.search(trial.parent.name) is not None


def _of_method(trial: Path) -> tuple[Path, str]:
    name = re.sub(r"-seed\d+$", "", trial.parent.name)
    return trial.parent.parent, OPTION.split(name)[0]


def _warn_of_changed_code(runs: Sequence[FinishedRun]) -> None:
    """Warns about modules of the user that have changed between runs; the newest run has the current ones."""
    by_module: dict[str, list[FinishedRun]] = {}
    for run in sorted(runs, key=lambda each: each.ended):
        for name in run.code:
            by_module.setdefault(name, []).append(run)
    for name, users in by_module.items():
        if older := [str(run.path) for run in users if changed_modules({name: users[-1].code[name]}, run.code)]:
            warnings.warn(
                f"{name}: the code has changed between these runs. {abbreviated(older)} used another version than "
                f"{users[-1].path}.",
                stacklevel=3,
            )


def _reason(error: Exception) -> str:
    """Returns what an error says of the content of a file."""
    return f"it lacks {error}" if isinstance(error, KeyError) else str(error)


def trivial_value(runs: Sequence[FinishedRun], protocol: str) -> float:
    """Returns the reported metric of the trivial baseline, the mean over runs; nan if one has none."""
    return mean(run.metrics.get(f"test/{protocol}/{TRIVIAL}/{run.reported.name}", nan) for run in runs)


def _version(path: Path) -> tuple[str, int]:
    number = path.name.removeprefix("version_")
    return str(path.parent), int(number) if number.isdigit() else -1
