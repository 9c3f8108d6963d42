"""Measures rounds of FedAvg as a simulation, on a fleet of nodes, and with a plain Flower app on the same nodes.

    OMP_NUM_THREADS=1 python benchmarks/fleet.py --csv fleet.csv

Ten SuperNodes of Flower on this machine, with TLS and keys, take the apps one after the other: the one that `lcfl fleet
app` writes, and one with Flower's own FedAvg and plain torch (peers/flower_nodes). All clients take part in each round,
with 5 steps on 32 random images like CIFAR-10. Nothing is evaluated. Shown are medians of all rounds but the first:
seconds, bytes of the arrays, and all bytes between SuperLink and SuperNodes, which pass a relay that counts them.
"""

import argparse
import csv
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from contest import machine

from lcfl.cli.federated_cli import instantiate_data

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))
from tests.helpers.flower import Federation  # noqa: E402

NETWORKS = {"lenet": "LeNet5", "cnn": "CNN"}
DATA = """
data:
  dataset:
    class_path: RandomLike
    init_args:
      dataset: {{class_path: CIFAR10, init_args: {{root: none, download: false}}}}
      num_samples: {num_samples}
  partition: {{class_path: IID}}
  num_clients: {num_nodes}
  batch_size: 32
  test_fraction: 0.1
  val_fraction: 0.1
"""
PER_CLIENT = 200  # images, of which 162 are for training


class Meter:
    """Passes connections on to a port of this machine, and counts their bytes in both directions."""

    def __init__(self, port: int) -> None:
        self.num_bytes, self._lock, self._to = 0, threading.Lock(), port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            ends = self._listener.accept()[0], socket.create_connection(("127.0.0.1", self._to))
            for source, sink in (ends, ends[::-1]):
                sink.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=self._carry, args=(source, sink), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        buffer = memoryview(bytearray(2**18))
        with suppress(OSError):
            while count := source.recv_into(buffer):
                sink.sendall(buffer[:count])
                with self._lock:
                    self.num_bytes += count
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)


def rows_of(table: Path) -> list[dict[str, float]]:
    """Returns the rounds in a table; none if there is no table yet."""
    lines = table.read_text().splitlines() if table.exists() else []
    return [{name: float(value or 0) for name, value in row.items()} for row in csv.DictReader(lines)]


def on_nodes(federation: Federation, meter: Meter, app: Path, table: Path, **config: object) -> list[int]:
    """Runs an app to its end, and returns the bytes that have passed the meter after each of its rounds."""
    process, marks = federation.run(app, **config), []

    def ended() -> bool:
        marks.extend([meter.num_bytes] * (len(rows_of(table)) - len(marks)))
        return process.poll() is not None

    federation.wait(ended, "the run", seconds=3600)
    return marks


def summary(way: str, table: Path, num_rounds: int, marks: Sequence[int] = ()) -> dict[str, Any]:
    """Returns the medians of a run."""
    rows = rows_of(table)
    sizes = {row[f"comm/{direction}_bytes"] for row in rows for direction in ("down", "up")}
    if len(rows) != num_rounds or len(sizes) != 1:
        raise RuntimeError(f"{way}: rounds or clients are missing: {rows}")
    seconds = [row["time/round_s"] for row in rows[1:]]
    named = {"way": way, "seconds": median(seconds), "fastest": min(seconds), "slowest": max(seconds)}
    sent = median(after - before for before, after in pairwise(marks)) if marks else 0
    return named | {"array_bytes": 2 * sizes.pop(), "sent_bytes": sent}


def measured(name: str, federation: Federation, meter: Meter, folder: Path, rounds: int) -> list[dict[str, Any]]:
    """Returns a row per way to train a network."""
    app, run, shares, plain = folder / name, f"{name}/version_0/metrics.csv", folder / "shares", folder / f"{name}.csv"
    words = ["-c", folder / "data.yaml", "-c", HERE.parent / "configs/methods/fedavg.yaml", f"--trainer.name={name}"]
    words += [f"--model.network={NETWORKS[name]}", f"--trainer.rounds={rounds}", "--trainer.clients_per_round=1.0"]
    words += [f"--trainer.{word}" for word in ("evaluate_every=0", "final_models=[]", "enable_progress_bar=false")]
    for command in (["fleet", "app", app], ["fit", f"--trainer.default_root_dir={folder}/simulation"]):
        subprocess.run([sys.executable, "-m", "lcfl", *command, *words], check=True, stdout=subprocess.DEVNULL)
    data = instantiate_data(app / "config.yaml")
    data.setup()
    shares.mkdir(exist_ok=True)
    for client, indices in enumerate(data.population.train):
        torch.save(data.samples.batch(indices, torch.device("cpu")), shares / f"{client}.pt")
    told = {"network": name, "rounds": rounds, "num-nodes": data.num_clients, "shares": shares, "metrics": plain}
    plain_marks = on_nodes(federation, meter, HERE / "peers/flower_nodes", plain, **told)
    fleet_marks = on_nodes(federation, meter, app, folder / "runs" / run, root=folder / "runs", **{"min-answers": 1.0})
    return [
        summary("simulation", folder / "simulation" / run, rounds),
        summary("fleet", folder / "runs" / run, rounds, fleet_marks),
        summary("plain Flower app", plain, rounds, plain_marks),
    ]


def end_all(folder: Path) -> None:
    """Kills what is left of the federation in a folder: Flower starts some programs in sessions of their own."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"\0FLWR_HOME={folder}/".encode() in b"\0" + (process / "environ").read_bytes():
                os.kill(int(process.name), signal.SIGKILL)


def main(args: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Prints the table and returns its rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--num_nodes", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--csv", type=Path, required=True)
    options = parser.parse_args(args)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        folder, num_nodes, data = Path(temporary), options.num_nodes, Path(temporary) / "data.yaml"
        data.write_text(DATA.format(num_samples=PER_CLIENT * num_nodes, num_nodes=num_nodes))
        try:
            with Federation(folder / "federation") as federation:
                federation.superlink(database=False)  # Flower's default
                meter = Meter(federation.port)
                federation.port = meter.port  # where nodes find the SuperLink
                for i in range(num_nodes):
                    federation.node(f"node{i}", data=data, state=folder / f"state{i}", client=i)
                for name in options.networks:
                    ways = measured(name, federation, meter, folder, options.rounds)
                    rows += [{"network": name} | way for way in ways]
        finally:
            end_all(folder)
    print(f"{num_nodes} nodes, {options.rounds} rounds; {machine()}")
    print("| network | way | seconds per round | fastest to slowest | MB of arrays per round | MB sent per round |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['network']} | {row['way']} | {row['seconds']:.2f} | {row['fastest']:.2f} to {row['slowest']:.2f} "
            f"| {row['array_bytes'] / 1e6:.2f} | {row['sent_bytes'] / 1e6:.2f} |"
        )
    with options.csv.open("w", newline="") as file:
        csv.writer(file).writerows([rows[0].keys(), *(row.values() for row in rows)])
    return rows


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that all processes end also then
    main()
