"""How long it takes from the command to the first round, beside the import that LightningCLI needs; and memory.

    python benchmarks/start.py --json start.json
    python benchmarks/start.py --cold

The quickstart's first round is over when ``metrics.csv`` has its row; the process is then measured and ended. The three
take turns. With --cold every process starts without byte-code, as after an installation that did not compile it.
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
WAITING = "import sys, {}; print(flush=True); sys.stdin.read()"  # until its memory has been measured
PATIENCE_S = 300.0


def environment(cold: Path | None) -> dict[str, str]:
    """What every process gets: it finds this checkout, and no byte-code if `cold`, an empty folder, is given."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    found = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return found | {"PYTHONPYCACHEPREFIX": str(cold)} if cold else found


def help_page(environ: dict[str, str]) -> tuple[float, float]:
    """Seconds of ``lcfl --help``; its memory is not measured."""
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-m", "lcfl", "--help"], check=True, capture_output=True, env=environ)
    return time.perf_counter() - begin, float("nan")


def bare_import(module: str, environ: dict[str, str]) -> tuple[float, float]:
    """Seconds until a process has imported a module and nothing else, and its memory."""
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
    """Seconds until ``lcfl fit`` has written the row of round 0, and the memory of all its processes then."""
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
                    sys.exit(f"lcfl fit {' '.join(arguments)} did not come to its first round.")
                time.sleep(0.005)
            return time.perf_counter() - begin, memory_mb(process.pid)
        finally:
            for each in reversed(tree(process.pid)):
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    os.kill(each, signal.SIGKILL)
            process.wait()


def main(args: Sequence[str] | None = None) -> dict[str, dict[str, float]]:
    """Measures, prints a table and writes JSON; per start the median and the least of its seconds, and its memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--cold", action="store_true", help="without byte-code")
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "quickstart.yaml")
    parser.add_argument("--json", type=Path, help="write the numbers there")
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
            if turn or options.cold:  # the first turn warms the byte-code and the files
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
