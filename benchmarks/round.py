"""Seconds per FedAvg round: lcfl's engines, a plain PyTorch loop and other packages, in turns in one run.

    python benchmarks/round.py --root data --json round.json
    python benchmarks/round.py --peers --peers-python pfl=envs/pfl/bin/python --peers-python flower=...
    python benchmarks/round.py --network cnn

Fashion-MNIST, 100 clients with 160 images each (client-wise Dirichlet 0.1), 25 clients a round, batch 32, one local
epoch = 5 SGD steps, learning rate 0.01, LeNet-5 with 61,706 parameters, no evaluation; with --network cnn CIFAR-10 and
4,778,954 parameters. All entries read the same partition, initial weights, draws of clients and orders of samples from
files, so their models must agree: an entry whose accuracy is further than 0.005 from the first one's, or whose loss is
further than 0.002, makes the script fail. Every entry is a process of its own that is there all the time and waits
until it is its turn.
"""

import argparse
import contextlib
import json
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

from contest import PEERS, WARM_UP, Entry, Plan, Runner, Task, Unable, machine

from lcfl.distributed.launch import usable_cores
from lcfl.engines import EngineName

ENGINES = [name for name in get_args(EngineName) if name != "fused"]  # compiles for seconds and is for GPUs
TOLERANCE = {"accuracy": 0.005, "loss": 0.002}  # float32 sums in another order; images lie near a border early on


def ours(engines: Sequence[str], devices: Sequence[int]) -> list[Entry]:
    """Every engine on every number of ranks."""
    return [
        Entry(engine, number, ["peers.ours", "--engine", engine, "--devices", str(number)], is_ours=True)
        for engine in engines
        for number in devices
    ]


def loops(network: str) -> list[Entry]:
    """The plain loop: with torch's default threads, with one, and in as many one-thread workers as there are cores."""
    module, cores = "peers.reference_loop", usable_cores()
    found = [Entry("reference-loop", 1, [module]), Entry("reference-loop, 1 thread", 1, [module, "--threads", "1"])]
    if cores > 1:
        found.append(Entry("reference-loop", cores, [module, "--workers", str(cores)]))
    if network == "cnn":
        found.append(
            Entry("reference-loop, channels_last", cores, [module, "--workers", str(cores), "--channels_last"])
        )
    return found


def peers(pythons: dict[str, str], threads: int | None) -> list[Entry]:
    """Those that are installed; of the others a line says so."""
    found = []
    for name in PEERS:
        try:
            found.append(Entry.of_peer(name, pythons.get(name), threads))
        except Unable as reason:
            print(f"{name} is left out: {reason}", file=sys.stderr)
    return found


@contextlib.contextmanager
def started(entries: Sequence[Entry], task: Task) -> Iterator[list[Runner]]:
    """The entries' processes, one after the other; one that cannot run is left out unless it is ours."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the contexts end what was started
    with contextlib.ExitStack() as stack:
        runners = []
        for entry in entries:
            try:
                runners.append(stack.enter_context(Runner(entry, task)))
            except Unable as reason:
                if entry.is_ours:
                    raise
                print(f"left out: {reason}", file=sys.stderr)
        yield runners


def row_of(runner: Runner, best_s: float) -> dict[str, Any]:
    """What is known of an entry, beside `best_s`, the seconds per round of our fastest."""
    accuracy, loss = runner.reached()
    return {
        "engine": runner.entry.engine,
        "devices": runner.entry.devices,
        "seconds_per_round": runner.median_s,
        "fastest_round": min(map(min, runner.seconds)),
        "over_ours": runner.median_s / best_s,
        "cpu_seconds_per_round": sum(runner.cpu_s) / sum(map(len, runner.seconds)),
        "start_up_s": runner.start_up_s,
        "memory_mb": runner.memory_mb,
        "beyond_imports_mb": runner.memory_mb - runner.imports_mb,
        "accuracy": accuracy,
        "loss": loss,
        "rounds": sum(map(len, runner.seconds)),
        "versions": runner.versions,
    }


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Prints the rows as a Markdown table."""
    names = {
        "seconds_per_round": "s/round, median", "fastest_round": "min", "over_ours": "x ours",
        "cpu_seconds_per_round": "cpu s/round", "start_up_s": "start-up s", "memory_mb": "memory MB",
        "beyond_imports_mb": "beyond imports", "accuracy": "accuracy", "loss": "loss",
    }  # fmt: skip
    digits = {"over_ours": 2, "start_up_s": 1, "memory_mb": 0, "beyond_imports_mb": 0, "accuracy": 4, "loss": 4}
    print("| engine | devices | " + " | ".join(names.values()) + " | version |")
    print("|---|---|" + "---|" * (len(names) + 1))
    for row in rows:
        cells = [f"{row[name]:.{digits.get(name, 3)}f}" for name in names]
        package, number = next(iter(row["versions"].items()))
        print(f"| {row['engine']} | {row['devices']} | " + " | ".join(cells) + f" | {package} {number} |")


def parse(args: Sequence[str] | None, description: str | None = __doc__) -> argparse.Namespace:
    """The options that say what is measured, here and in busy.py."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default="data", help="where torchvision's files lie; random: no files, random images")
    parser.add_argument("--network", choices=("lenet", "cnn"), default="lenet")
    parser.add_argument("--engines", nargs="+", default=ENGINES, help="of lcfl; all but fused by default")
    parser.add_argument("--devices", nargs="+", type=int, default=sorted({1, usable_cores()}), help="ranks of lcfl")
    parser.add_argument("--peers", action="store_true", help="also the packages " + ", ".join(PEERS))
    parser.add_argument(
        "--peers-python", action="append", default=[], metavar="NAME=PYTHON", help="a peer's own environment"
    )
    parser.add_argument("--peers-threads", type=int, help="OMP_NUM_THREADS of the peers; torch's default if not given")
    parser.add_argument("--only", nargs="+", help="engines that are measured, of all these")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=5, help="of a turn")
    parser.add_argument("--num_clients", type=int, default=100)
    parser.add_argument("--clients_per_round", type=int, default=25)
    parser.add_argument("--num_samples", type=int, default=160, help="of a client")
    parser.add_argument("--json", type=Path, help="write the rows there")
    options = parser.parse_args(args)
    options.pythons = dict(each.split("=", 1) for each in options.peers_python)
    if unknown := set(options.pythons) - set(PEERS):
        parser.error(f"--peers-python: got {', '.join(sorted(unknown))}; allowed are {', '.join(PEERS)}.")
    return options


def entries_of(options: argparse.Namespace) -> list[Entry]:
    """All that is to be measured, ours first."""
    found = ours(options.engines, options.devices) + loops(options.network)
    found += peers(options.pythons, options.peers_threads) if options.peers or options.pythons else []
    return [entry for entry in found if not options.only or entry.engine in options.only]


def plan_of(options: argparse.Namespace, num_rounds: int) -> Plan:
    """The work in so many rounds."""
    root = None if options.root == "random" else str(Path(options.root).resolve())
    return Plan(options.network, root, num_rounds, options.num_clients, options.clients_per_round, options.num_samples)


def main(args: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Measures, prints a table and writes JSON; the rows."""
    options = parse(args)
    with tempfile.TemporaryDirectory() as folder:
        task = Task(plan_of(options, WARM_UP + options.turns * options.rounds), Path(folder))
        with started(entries_of(options), task) as runners:
            for _ in range(options.turns):
                for runner in runners:
                    runner.turn(options.rounds)
            best = min((runner.median_s for runner in runners if runner.entry.is_ours), default=float("nan"))
            rows = [row_of(runner, best) for runner in runners]
    print(f"{machine()}, seed {task.plan.seed}, {options.turns} turns of {options.rounds} rounds")
    show(rows)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")
    for what, tolerance in TOLERANCE.items():
        far = [row for row in rows if abs(row[what] - rows[0][what]) > tolerance]
        if far:
            names = ", ".join(f"{row['engine']} x {row['devices']}: {row[what]:.4f}" for row in far)
            sys.exit(f"{what} of {rows[0]['engine']}: {rows[0][what]:.4f}; further away than {tolerance}: {names}")
    return rows


if __name__ == "__main__":
    main()
