"""``lcfl sweep``: methods x grid x seeds, tuned on validation data with the same budget, compared at the end."""

import argparse
import warnings
from collections.abc import Sequence
from pathlib import Path

from lcfl.cli.commands import compare
from lcfl.cli.shipped_configs import find
from lcfl.cli.sweep import Sweep, Trial, given_to, parse_grid, points_of

__all__ = ["main", "parser"]


def parser() -> argparse.ArgumentParser:
    """The command's own options; all others are those of ``lcfl fit``."""
    made = argparse.ArgumentParser(
        prog="lcfl sweep",
        description="Runs methods with several seeds and compares them. Every option of lcfl fit may be added; "
        "finished runs are not run again and interrupted ones are resumed: give the same command again.",
        allow_abbrev=False,
    )
    made.add_argument(
        "-c", "--config", action="append", default=[], metavar="FILE", help="as for fit, below the method"
    )
    made.add_argument("--methods", required=True, help="names of lcfl's methods or files, separated by commas")
    made.add_argument("--seeds", default="0", help="separated by commas; the first one is used for tuning")
    made.add_argument(
        "--grid",
        action="append",
        default=[],
        metavar="[METHOD:]OPTION=VALUE,...",
        help="values to try for an option, for every method or for one; may be given several times; a single value is "
        "an option of that method's runs",
    )
    made.add_argument("--tuning_rounds", type=int, help="rounds of the trials of a grid; those of a run if not given")
    made.add_argument(
        "--finalists",
        type=int,
        default=1,
        help="so many of the best trials of fewer rounds go all the way, which decides",
    )
    made.add_argument(
        "--jobs", type=int, default=1, help="runs at the same time; with 2 or more give --trainer.devices"
    )
    made.add_argument("--out", type=Path, default=Path("logs/sweep"), help="folder of all runs (logs/sweep)")
    made.add_argument("--target", type=compare.accuracy, help="as for lcfl compare")
    return made


def main(args: Sequence[str]) -> None:
    """Tunes, runs and compares.

    Raises:
        ValueError: for options of another form, a method that is named in a grid only, trials made by another
            command, or if a run failed; the others are finished all the same.
        FileNotFoundError: for a method that is neither a file nor one of lcfl's.
    """
    options, others = parser().parse_known_args(args)
    methods = [word for word in options.methods.split(",") if word]
    try:
        seeds = [int(word) for word in options.seeds.split(",")]
    except ValueError:
        raise ValueError(f"sweep: got --seeds {options.seeds}; whole numbers separated by commas are needed.") from None
    for option in ("jobs", "finalists"):
        if getattr(options, option) < 1:
            raise ValueError(f"sweep: got --{option} {getattr(options, option)}; at least 1 is needed.")
    if options.finalists > 1 and options.tuning_rounds is None:
        warnings.warn(
            f"sweep: --finalists {options.finalists} has no effect, as every trial goes all the way; give "
            "--tuning_rounds to make the trials shorter.",
            stacklevel=2,
        )
    grids = [parse_grid(text) for text in options.grid]
    for method in methods:
        find("methods", method)
    unknown = [grid.method for grid in grids if grid.method is not None and grid.method not in methods]
    if unknown:
        raise ValueError(f"sweep: --grid names {', '.join(unknown)}, which --methods {options.methods} does not.")
    points = {method: points_of(method, grids) for method in methods}
    if len({len(each) for each in points.values()}) > 1:
        budget = ", ".join(f"{method} {len(each)}" for method, each in points.items())
        warnings.warn(f"sweep: the methods get different numbers of trials to tune: {budget}.", stacklevel=2)

    own = {method: given_to(method, grids) for method in methods}
    sweep = Sweep(options.out, options.config, others, own)
    chosen = {
        method: sweep.tune(method, points[method], seeds[0], options.tuning_rounds, options.jobs, options.finalists)
        for method in methods
    }
    trials = [Trial(method, chosen[method], seed) for method in methods for seed in seeds]
    runs = sweep.run(trials, options.jobs)
    paths = [str(run.path) for run in runs if run is not None]
    if paths:
        target = [] if options.target is None else [f"--target={options.target}"]
        compare.main([*paths, f"--out={options.out / 'comparison'}", *target])
    failed = [trial.name for trial, run in zip(trials, runs, strict=True) if run is None]
    if failed:
        raise ValueError(f"sweep: {len(failed)} of {len(trials)} runs failed: {', '.join(failed)}.")
