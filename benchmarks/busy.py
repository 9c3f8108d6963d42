"""Measures the cost of another busy process: seconds per round with and without a process that keeps a core busy.

    python benchmarks/busy.py --root data --json busy.json
    python benchmarks/busy.py --peers --peers-python pfl=envs/pfl/bin/python

The entries and options are those of round.py. The entries take turns in pairs, quiet and busy, so that any other load
of the machine affects both. torch's default threads wait for each other by spinning. If one of them loses its core, all
of them wait for the scheduler in every operator. On C cores, a process that loses one core can keep (C - 1) / C of its
speed. If the scheduler gives each of two processes half of the time of one core, it keeps (C - 1/2) / C.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from contest import WARM_UP, Runner, Task, machine
from round import entries_of, parse, plan_of, started

from lcfl.core.cores import usable_cores


@contextmanager
def busy_core() -> Iterator[None]:
    """Runs a process that keeps one core busy inside the block."""
    code = f"import os\nwhile os.getppid() == {os.getpid()}: pass"
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def row_of(runner: Runner, quiet: Sequence[float], busy: Sequence[float]) -> dict[str, Any]:
    """Returns the medians of the quiet and the busy rounds, and their ratio."""
    return {
        "engine": runner.entry.engine,
        "devices": runner.entry.devices,
        "seconds_per_round": statistics.median(quiet),
        "seconds_per_round_busy": statistics.median(busy),
        "longest_round_busy": max(busy),
        "busy_over_quiet": statistics.median(busy) / statistics.median(quiet),
        "accuracy": runner.reached()[0],
    }


def main(args: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Measures, prints a table, writes JSON and returns the rows."""
    options = parse(args, __doc__)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        task = Task(plan_of(options, WARM_UP + 2 * options.turns * options.rounds), Path(folder))
        with started(entries_of(options), task) as runners:
            seconds: dict[Runner, tuple[list[float], list[float]]] = {runner: ([], []) for runner in runners}
            for _ in range(options.turns):
                for runner, (quiet, busy) in seconds.items():
                    quiet += runner.turn(options.rounds)
                    with busy_core():
                        busy += runner.turn(options.rounds)
            rows = [row_of(runner, *both) for runner, both in seconds.items()]
    cores = usable_cores()
    print(f"{machine()}, seed {task.plan.seed}, {options.turns} pairs of turns of {options.rounds} rounds")
    print(f"one core less costs at most a factor of {cores / (cores - 1) if cores > 1 else float('inf'):.2f}")
    print("| engine | devices | s/round | with a busy process | longest | factor |\n|---|---|---|---|---|---|")
    for row in rows:
        cells = [f"{row[name]:.3f}" for name in ("seconds_per_round", "seconds_per_round_busy", "longest_round_busy")]
        print(f"| {row['engine']} | {row['devices']} | {' | '.join(cells)} | {row['busy_over_quiet']:.2f} |")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")
    return rows


if __name__ == "__main__":
    main()
