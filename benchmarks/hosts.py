"""Measures the seconds of a round, and the bytes that cross the network in it, on one host and on two.

    python benchmarks/hosts.py
    python benchmarks/hosts.py --networks cnn --delay 0.05 --rate 1e9 --csv hosts.csv

FedAvg trains LeNet-5 with 61,706 parameters, or a CNN with 4.8 million, on random images with 25 clients of 20 images
per round. There are always two ranks: both on one host, or one on each of two. The hosts are namespaces of this machine
(`tests/helpers/hosts.py`), so they share its cores and need root, or a user who may make namespaces. Their cable is as
fast as the memory, or it has a delay and a rate; then a process of this machine carries every packet.
"""

import argparse
import csv
import functools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from peers.ours import NETWORKS

from lcfl import Callback, FederatedModule, Federation, Method
from lcfl.data.datamodule import FederatedDataModule
from lcfl.data.datasets import Tensors
from lcfl.data.partition import IID
from lcfl.methods.aggregation import GlobalMean
from lcfl.methods.exchange import FullModel
from lcfl.methods.local import LocalTraining

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.helpers.hosts import Hosts, why_not

SHAPES = {"lenet": (1, 28, 28), "cnn": (3, 32, 32)}
NUM_CLIENTS, PER_CLIENT = 50, 20


class Crossed(Callback):
    """Records the bytes that the host of rank 0 has sent and received until the end of every round."""

    def __init__(self) -> None:
        self.bytes: list[tuple[int, int]] = []

    def on_round_logged(self) -> None:
        """Reads the counters of the host's network."""
        lines = [line.split() for line in Path("/proc/net/dev").read_text().splitlines()]
        (counters,) = (line for line in lines if line[0] == "eth0:")
        self.bytes.append((int(counters[9]), int(counters[1])))


def rank(network: str, rounds: int, clients: int) -> None:
    """Is one rank. Rank 0 prints the medians of the rounds after the first."""
    draw = torch.Generator().manual_seed(0)
    number = NUM_CLIENTS * PER_CLIENT
    images = torch.randint(0, 256, (number, *SHAPES[network]), generator=draw, dtype=torch.uint8)
    data = FederatedDataModule(
        Tensors((images, torch.arange(number) % 10)), IID(), NUM_CLIENTS, val_fraction=0.0, test_fraction=0.2
    )
    module = FederatedModule(NETWORKS[network], functools.partial(torch.optim.SGD, lr=0.01))
    crossed = Crossed()
    with tempfile.TemporaryDirectory() as root:
        run = Federation(
            rounds, clients, evaluate_every=0, final_models=[], accelerator="cpu", logger=False, callbacks=[crossed],
            enable_checkpointing=False, enable_progress_bar=False, default_root_dir=root,
        ).fit(module, data, Method(LocalTraining(epochs=1), FullModel(), GlobalMean()))  # fmt: skip
        if crossed.bytes:
            with (run.path / "metrics.csv").open() as file:
                seconds = [float(row["time/round_s"]) for row in csv.DictReader(file)][1:]
            steps = [
                [after - before for before, after in zip(*pair, strict=True)]
                for pair in zip(crossed.bytes, crossed.bytes[1:], strict=False)
            ]
            sent, received = (statistics.median(each) / 1e6 for each in zip(*steps, strict=True))
            print(json.dumps({"round_s": statistics.median(seconds), "sent_mb": sent, "received_mb": received}))


def measured(options: argparse.Namespace, network: str, number: int, **cable: float) -> dict[str, float]:
    """Runs two ranks on one or two hosts, and returns what rank 0 prints."""
    torchrun = ["-m", "torch.distributed.run", f"--nnodes={number}", f"--nproc_per_node={2 // number}"]
    torchrun += ["--master_addr=first", "--master_port=29500"]
    script = [__file__, "--rank", network, "--rounds", options.rounds, "--clients", options.clients]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    with Hosts(number, **cable) as hosts, tempfile.TemporaryFile("w+") as errors:
        agents = [
            hosts.start(name, sys.executable, *torchrun, f"--node_rank={place}", *script, env=environ, stderr=errors)
            for place, name in enumerate(hosts.names)
        ]
        output, *_ = [agent.communicate()[0] for agent in agents]
        if any(agent.returncode for agent in agents):
            errors.seek(0)
            raise subprocess.SubprocessError(errors.read())
    result: dict[str, float] = json.loads(output.splitlines()[-1])
    return result


def main(args: Sequence[str] | None = None) -> list[dict[str, object]]:
    """Measures every network with every cable and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--clients", type=int, default=25, help="clients per round")
    parser.add_argument("--delay", type=float, default=0.01, help="seconds that the slow cable takes, one way")
    parser.add_argument("--rate", type=float, default=1e8, help="bits per second of the slow cable, one way")
    parser.add_argument("--csv", type=Path, help="file for the rows")
    parser.add_argument("--rank", choices=list(SHAPES), help=argparse.SUPPRESS)
    options = parser.parse_args(args)
    if options.rank:
        rank(options.rank, options.rounds, options.clients)
        return []
    if reason := why_not():
        parser.error(reason)
    slow = {"delay": options.delay, "rate": options.rate}
    cables: dict[str, tuple[int, dict[str, float]]] = {
        "1 host": (1, {}),
        "2 hosts": (2, {}),
        f"2 hosts, {1000 * options.delay:g} ms, {options.rate / 1e6:g} Mbit/s": (2, slow),
    }
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}")
    print("| network | hosts | s/round | MB sent | MB received |\n|---|---|---|---|---|")
    rows: list[dict[str, object]] = []
    for network in options.networks:
        for name, (number, cable) in cables.items():
            row = measured(options, network, number, **cable)
            rows.append({"network": network, "hosts": name, **row})
            print("|", " | ".join([network, name, *(f"{value:.3g}" for value in row.values())]), "|", flush=True)
    if options.csv:
        with options.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    return rows


if __name__ == "__main__":
    main()
