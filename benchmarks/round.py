"""Measures seconds per FedAvg round for lcfl's engines, a plain PyTorch loop and other packages, in turns in one run.

    python benchmarks/round.py --root data --json round.json
    python benchmarks/round.py --peers --peers-python pfl=envs/pfl/bin/python --peers-python flower=...
    python benchmarks/round.py --network cnn

Fashion-MNIST, 100 clients with 160 images each (client-wise Dirichlet 0.1), 25 clients a round, batch 32, one local
epoch = 5 SGD steps, learning rate 0.01, LeNet-5 with 61,706 parameters, no evaluation. With --network cnn, it is
CIFAR-10 and 4,778,954 parameters. All entries read the same partition, initial weights, sampled clients and order of
samples from files, so their models must agree. The script fails if the accuracy of an entry differs from that of the
first one by more than 0.005, or its loss by more than 0.002. Every entry is a separate process, which runs all the time
and waits until it is its turn.
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

from lcfl.core.cores import usable_cores
from lcfl.engines import EngineName

ENGINES = get_args(EngineName)
TOLERANCE = {
    "accuracy": 0.005,
    "loss": 0.002,
}  # the order of float32 sums differs, and many images are near a decision boundary early on


def ours(engines: Sequence[str], devices: Sequence[int]) -> list[Entry]:
    """Returns an entry for every engine and every number of ranks."""
    return [
        Entry(engine, number, ["peers.ours", "--engine", engine, "--devices", str(number)], is_ours=True)
        for engine in engines
        for number in devices
    ]


def loops(network: str) -> list[Entry]:
    """Returns the plain loop with torch's default threads, with one thread, and with a one-thread worker per core."""
    module, cores = "peers.reference_loop", usable_cores()
    entries = [Entry("reference-loop", 1, [module]), Entry("reference-loop, 1 thread", 1, [module, "--threads", "1"])]
    if cores > 1:
        entries.append(Entry("reference-loop", cores, [module, "--workers", str(cores)]))
    if network == "cnn":
        entries.append(
            Entry("reference-loop, channels_last", cores, [module, "--workers", str(cores), "--channels_last"])
        )
    return entries


def peers(pythons: dict[str, str], threads: int | None) -> list[Entry]:
    """Returns the peers that are installed, and prints a line for each of the others."""
    entries = []
    for name in PEERS:
        try:
            entries.append(Entry.of_peer(name, pythons.get(name), threads))
        except Unable as reason:
            print(f"{name} is left out: {reason}", file=sys.stderr)
    return entries


@contextlib.contextmanager
def started(entries: Sequence[Entry], task: Task) -> Iterator[list[Runner]]:
    """Starts the processes of the entries one by one. An entry that cannot run is left out unless it is lcfl."""
    with contextlib.ExitStack() as stack:
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # the contexts end the processes
        stack.callback(signal.signal, signal.SIGTERM, before)
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
    """Returns the measurements of an entry. `best_s` are the seconds per round of the fastest entry of lcfl."""
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
    """Parses the options of this script and of busy.py."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default="data", help="folder of torchvision's files; random: no files, random images")
    parser.add_argument("--network", choices=("lenet", "cnn"), default="lenet")
    parser.add_argument("--engines", nargs="+", default=ENGINES, help="engines of lcfl (default: all)")
    parser.add_argument("--devices", nargs="+", type=int, default=sorted({1, usable_cores()}), help="ranks of lcfl")
    parser.add_argument("--peers", action="store_true", help="also measure the packages " + ", ".join(PEERS))
    parser.add_argument(
        "--peers-python", action="append", default=[], metavar="NAME=PYTHON", help="interpreter of a peer's environment"
    )
    parser.add_argument("--peers-threads", type=int, help="OMP_NUM_THREADS of the peers (default: that of torch)")
    parser.add_argument("--only", nargs="+", help="measure only these engines")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=5, help="rounds per turn")
    parser.add_argument("--num_clients", type=int, default=100)
    parser.add_argument("--clients_per_round", type=int, default=25)
    parser.add_argument("--num_samples", type=int, default=160, help="samples per client")
    parser.add_argument("--json", type=Path, help="file for the rows")
    options = parser.parse_args(args)
    options.pythons = dict(each.split("=", 1) for each in options.peers_python)
    if unknown := set(options.pythons) - set(PEERS):
        parser.error(f"--peers-python: got {', '.join(sorted(unknown))}; allowed are {', '.join(PEERS)}.")
    return options


def entries_of(options: argparse.Namespace) -> list[Entry]:
    """Returns the entries to measure, those of lcfl first."""
    entries = ours(options.engines, options.devices) + loops(options.network)
    entries += peers(options.pythons, options.peers_threads) if options.peers or options.pythons else []
    return [entry for entry in entries if not options.only or entry.engine in options.only]


def plan_of(options: argparse.Namespace, num_rounds: int) -> Plan:
    """Returns the work for a number of rounds."""
    root = None if options.root == "random" else str(Path(options.root).resolve())
    return Plan(options.network, root, num_rounds, options.num_clients, options.clients_per_round, options.num_samples)


def main(args: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Measures, prints a table, writes JSON and returns the rows."""
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
            sys.exit(
                f"{what} of {rows[0]['engine']}: {rows[0][what]:.4f}; these differ by more than {tolerance}: {names}"
            )
    return rows


if __name__ == "__main__":
    main()
