"""``lcfl sweep``: runs methods x grid x seeds, tunes each method on validation data, and compares the runs."""

import argparse
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

from lcfl.cli.commands import compare
from lcfl.cli.shipped_configs import find
from lcfl.cli.sweep import Sweep
from lcfl.cli.trials import Grid, Point, Trial, given_to, parse_grid, points_of

__all__ = ["main", "parser"]

# Options that every run gets from the sweep, and those to use instead.
TAKEN = {"--seed_everything": "--seeds", "--trainer.name": "--out", "--trainer.default_root_dir": "--out"}


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the options that ``lcfl fit`` does not have."""
    options = argparse.ArgumentParser(
        prog="lcfl sweep",
        description="Runs methods with several seeds and compares them. Every option of lcfl fit may be added. If the "
        "same command is given again, finished runs are kept and interrupted ones are resumed.",
        allow_abbrev=False,
    )
    options.add_argument(
        "-c",
        "--config",
        action="append",
        default=[],
        metavar="FILE",
        help="as for lcfl fit; the method's file overrides it",
    )
    options.add_argument("--methods", required=True, help="names of methods of lcfl, or files, separated by commas")
    options.add_argument(
        "--seeds", default="0", help="seeds, separated by commas (default 0); the first is used for tuning"
    )
    options.add_argument(
        "--grid",
        action="append",
        default=[],
        metavar="[METHOD:]OPTION=VALUE,...",
        help="values of an option to try, for every method or for one; may be given several times; a single value is "
        "an option of all runs of that method",
    )
    options.add_argument("--tuning_rounds", type=int, help="rounds of the trials of a grid (default: all rounds)")
    options.add_argument(
        "--finalists",
        type=int,
        default=1,
        help="how many of the best shorter trials are run with all rounds; these runs then decide (default: 1)",
    )
    options.add_argument(
        "--jobs",
        type=int,
        default=1,
        help="runs at the same time (default 1); for 2 or more, also give --trainer.devices",
    )
    options.add_argument(
        "--out", type=Path, default=Path("logs/sweep"), help="folder of all runs (default: logs/sweep)"
    )
    options.add_argument("--target", type=float, help="as for lcfl compare")
    return options


def main(args: Sequence[str]) -> None:
    """Tunes the methods, runs them and compares the runs.

    Raises:
        ValueError: if an option has another form, if only a grid names a method, if the trials were run by another
            command, or if a run failed. The other runs are finished all the same.
        FileNotFoundError: if a method is neither a file nor one of lcfl's.
    """
    options, others = parser().parse_known_args(args)
    methods = list(dict.fromkeys(word for word in options.methods.split(",") if word))
    seeds = _seeds(options.seeds)
    _check(options, others, methods, seeds)
    grids = _grids(options, methods)
    points = {method: points_of(method, grids) for method in methods}
    if len({len(each) for each in points.values()}) > 1:
        budget = ", ".join(f"{method} {len(each)}" for method, each in points.items())
        warnings.warn(f"sweep: the methods have different numbers of trials for tuning: {budget}.", stacklevel=2)

    own = {method: given_to(method, grids) for method in methods}
    sweep = Sweep(options.out, options.config, others, own)
    sweep.check(_first_trials(points, seeds[0], options.tuning_rounds))
    chosen = {
        method: sweep.tune(method, points[method], seeds[0], options.tuning_rounds, options.jobs, options.finalists)
        for method in methods
    }
    trials = [Trial(method, point, seed) for method, point in chosen.items() if point is not None for seed in seeds]
    runs = sweep.run(trials, options.jobs)
    paths = [str(run.path) for run in runs if run is not None]
    if paths:
        target = [] if options.target is None else [f"--target={options.target}"]
        compare.main([*paths, f"--out={options.out / 'comparison'}", *target])
    failed = [trial.name for trial, run in zip(trials, runs, strict=True) if run is None]
    failed += [f"every trial of {method}" for method, point in chosen.items() if point is None]
    if failed:
        wanted = len(methods) * len(seeds)
        number = f"{wanted - len(paths)} of {wanted}" if paths else f"all {wanted}"
        raise ValueError(f"sweep: {number} runs have no result: {', '.join(failed)}; see the logs in {options.out}.")


def _seeds(text: str) -> list[int]:
    try:
        return list(dict.fromkeys(int(word) for word in text.split(",")))
    except ValueError:
        raise ValueError(f"sweep: got --seeds {text}; allowed are whole numbers separated by commas.") from None


def _grids(options: argparse.Namespace, methods: Sequence[str]) -> list[Grid]:
    """Returns the grids, all of which are for methods of the sweep."""
    grids = [parse_grid(text) for text in options.grid]
    names = {*methods, *(Path(method).stem for method in methods)}
    unknown = [grid.method for grid in grids if grid.method is not None and grid.method not in names]
    if unknown:
        raise ValueError(
            f"sweep: --grid names {', '.join(unknown)}, which --methods {options.methods} does not contain. "
            "Write a method as in --methods."
        )
    return grids


def _first_trials(points: Mapping[str, Sequence[Point]], seed: int, tuning_rounds: int | None) -> list[Trial]:
    """Returns the trials that the sweep begins with: one of every point of every method."""
    return [
        Trial(method, point, seed, tuning_rounds if len(own) > 1 else None)
        for method, own in points.items()
        for point in own
    ]


def _check(options: argparse.Namespace, others: Sequence[str], methods: Sequence[str], seeds: Sequence[int]) -> None:
    """Refuses options with which no run could begin; warns of one without an effect."""
    for option, instead in TAKEN.items():
        if any(word.partition("=")[0] == option for word in others):
            raise ValueError(f"sweep: got {option}, which it gives every run itself; use {instead}.")
    if not methods:
        raise ValueError(f"sweep: got --methods {options.methods!r}; name at least one method.")
    stems = [Path(method).stem for method in methods]
    if twice := [method for method, stem in zip(methods, stems, strict=True) if stems.count(stem) > 1]:
        raise ValueError(
            f"sweep: {' and '.join(twice)} would have the same name in folders and tables; rename one of the files."
        )
    if min(seeds) < 0 or max(seeds) >= 2**32:
        raise ValueError(f"sweep: got --seeds {options.seeds}; a seed is from 0 to {2**32 - 1}.")
    for option in ("jobs", "finalists", "tuning_rounds"):
        if getattr(options, option) is not None and getattr(options, option) < 1:
            raise ValueError(f"sweep: got --{option} {getattr(options, option)}; at least 1 is needed.")
    if options.finalists > 1 and options.tuning_rounds is None:
        warnings.warn(
            f"sweep: --finalists {options.finalists} has no effect, because every trial has all rounds; give "
            "--tuning_rounds to make the trials shorter.",
            stacklevel=3,
        )
    is_accuracy = options.target is None or 0 < options.target <= 1
    files = [*options.config, *(str(find("methods", method)) for method in methods)]
    if not is_accuracy and not _names_another_metric([*files, *others]):
        raise ValueError(
            f"sweep: got --target {options.target}; an accuracy is above 0 and at most 1, such as 0.6 for 60 %. For "
            "another metric, set model.report."
        )


def _names_another_metric(words: Sequence[str]) -> bool:
    """Returns whether the runs may report another metric than the accuracy: a word, or a file among them, says so."""
    texts = [Path(word).read_text("utf-8", "replace") if os.path.isfile(word) else word for word in words]
    return any("report:" in text or "model.report" in text for text in texts)
