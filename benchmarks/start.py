"""Measures the time from the command to the first round, and memory, in comparison with the import of LightningCLI.

    python benchmarks/start.py --json start.json
    python benchmarks/start.py --cold

The first round of the quickstart has ended when ``metrics.csv`` has its row. The memory of the process is then
measured, and the process is ended. The measurements take turns. With --cold, every process starts without byte-code, as
after an installation that did not compile it.
"""

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from contest import machine
from processes import memory_mb, tree

ROOT = Path(__file__).parent.parent
IMPORT = "lightning.pytorch.cli"
WAITING = "import sys, {}; print(flush=True); sys.stdin.read()"  # waits until its memory has been measured
PATIENCE_S = 300.0


def environment(cold: Path | None) -> dict[str, str]:
    """Returns the environment of a process, which finds this checkout.

    Args:
        cold: an empty folder for byte-code, so that the process finds none; None for the usual byte-code.
    """
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return environ | {"PYTHONPYCACHEPREFIX": str(cold)} if cold else environ


def help_page(environ: dict[str, str]) -> tuple[float, float]:
    """Returns the seconds of ``lcfl --help``, and nan, because its memory is not measured."""
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-m", "lcfl", "--help"], check=True, capture_output=True, env=environ)
    return time.perf_counter() - begin, float("nan")


def bare_import(module: str, environ: dict[str, str]) -> tuple[float, float]:
    """Returns the seconds until a process has imported only one module, and its memory."""
    begin = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-c", WAITING.format(module)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdout.readline()
        seconds = time.perf_counter() - begin
        megabytes = memory_mb(process.pid)
        process.stdin.close()
    return seconds, megabytes


def first_round(arguments: Sequence[str], environ: dict[str, str]) -> tuple[float, float]:
    """Returns the seconds until ``lcfl fit`` has written the row of round 0, and the memory of its processes then."""
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-m", "lcfl", "fit", *arguments, "--trainer.name", "start"],
            env=environ, cwd=folder, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            table = Path(folder) / "logs" / "start" / "version_0" / "metrics.csv"
            while not (table.is_file() and "\n0," in table.read_text()):
                if process.poll() is not None or time.perf_counter() - begin > PATIENCE_S:
                    sys.exit(f"lcfl fit {' '.join(arguments)} did not complete its first round.")
                time.sleep(0.005)
            return time.perf_counter() - begin, memory_mb(process.pid)
        finally:
            for each in reversed(tree(process.pid)):
                with contextlib.suppress(ProcessLookupError):  # the process has just ended
                    os.kill(each, signal.SIGKILL)
            process.wait()


def main(args: Sequence[str] | None = None) -> dict[str, dict[str, float]]:
    """Measures, prints a table and writes JSON. Returns seconds (median and least) and memory of each measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--cold", action="store_true", help="without byte-code")
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "quickstart.yaml")
    parser.add_argument("--json", type=Path, help="file for the numbers")
    options = parser.parse_args(args)
    fit = ["-c", str(options.config.resolve())]
    starts: dict[str, Callable[[dict[str, str]], tuple[float, float]]] = {
        "lcfl --help": help_page,
        "import torch": lambda environ: bare_import("torch", environ),
        f"import {IMPORT}": lambda environ: bare_import(IMPORT, environ),
        "first round": lambda environ: first_round(fit, environ),
        "first round, 1 rank": lambda environ: first_round([*fit, "--trainer.devices", "1"], environ),
    }
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in starts}
    for turn in range(options.turns + (not options.cold)):
        for name, start in starts.items():
            with tempfile.TemporaryDirectory() as folder:
                measured = start(environment(Path(folder) if options.cold else None))
            if turn or options.cold:  # the first turn is for warming up byte-code and files
                taken[name].append(measured)
    base = taken[f"import {IMPORT}"]
    rows = {}
    print(f"{machine()}, {'cold' if options.cold else 'warm'} byte-code, {options.turns} turns")
    print(f"| start | s, median | min | x import {IMPORT} | memory MB | beyond it |\n|---|---|---|---|---|---|")
    for name, each in taken.items():
        seconds, megabytes = zip(*each, strict=True)
        rows[name] = {
            "seconds": statistics.median(seconds),
            "fastest": min(seconds),
            "over_import": statistics.median(own[0] / other[0] for own, other in zip(each, base, strict=True)),
            "memory_mb": statistics.median(megabytes),
            "beyond_import_mb": statistics.median(own[1] - other[1] for own, other in zip(each, base, strict=True)),
        }
        cells = [f"{value:.{2 if value < 50 else 0}f}" for value in rows[name].values()]
        print(f"| {name} | {' | '.join(cells)} |")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")
    return rows


if __name__ == "__main__":
    main()
