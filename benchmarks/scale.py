"""Measures the cost of a round as the population grows, for LCFed and FedAvg with LeNet-5 and 1,000 clients a round.

    python benchmarks/scale.py --json scale.json
    python benchmarks/scale.py --methods lcfed --populations 10000 --hosts 2

The data are random grey images of 28 x 28 pixels, 20 for each client. A client makes one SGD step with 16 images per
round. The network is LeNet-5 with 44,426 parameters, on one rank. The run starts as if all clients had already taken
part: every client of LCFed has a personal model in the store (`trainer.client_store: mapped`). For 100,000 clients,
these are 17.8 GB. The disk needs twice as much, because the checkpoint has them, too. Every entry is a separate
process. With --hosts the clients are owned by several hosts, which are namespaces of this machine
(`tests/helpers/hosts.py`) and share its cores and its disk; each has one rank.

For each method and population, the script prints

- the seconds until the first round, and the seconds per round (median);
- the processor seconds of local work, clustering, aggregation and the rest, which do not depend on other load;
- the processor seconds of the first aggregation, which computes the sums of all stored models from scratch;
- the memory of the process on each host, and the memory of its mapped files, after the last round;
- the megabytes that the first host sends and receives in a round, if there are several;
- the seconds and the written bytes of the first checkpoint, which has all clients, and of the later ones (median),
  which have those of one round;
- the seconds from the start of a resumed run until its first round.
"""

import argparse
import csv
import functools
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lcfl import Callback, FederatedModule, Federation, Method
from lcfl.core.clients import ClientState, ClientStore
from lcfl.core.state import FederationState
from lcfl.data.datamodule import FederatedDataModule
from lcfl.data.datasets import Tensors
from lcfl.data.partition import ClientShares, Partition, Pool
from lcfl.methods.aggregation import ClusterMean, GlobalMean
from lcfl.methods.clustering import LowRankCosine
from lcfl.methods.clustering.similarity import project_all
from lcfl.methods.exchange import CentreAndEmbedding, FullModel
from lcfl.methods.local import LocalTraining
from lcfl.models import LeNet5
from lcfl.runs import checkpoint, checkpoint_lookup
from lcfl.server.server import Server

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.helpers.hosts import Hosts, why_not

METHODS = ("fedavg", "lcfed")
NUM_CLUSTERS, CLASSES, PER_CLIENT, BATCH, DISTINCT = 10, 10, 20, 16, 97


class Consecutive(Partition):
    """Gives client i the images 20 i to 20 i + 19 of the pool. After its end, the pool starts again."""

    def split(self, pool: Pool, num_clients: int, generator: np.random.Generator) -> ClientShares:
        """Computes the indices. Draws no random numbers."""
        whole = len(pool) // PER_CLIENT
        starts = np.arange(num_clients) % whole * PER_CLIENT
        return ClientShares(list(starts[:, None] + np.arange(PER_CLIENT)), overlapping=num_clients > whole)


class EverybodyTookPart(Callback):
    """Gives all clients personal models before the first round, as if they had been trained."""

    shapes_result = True

    def on_round_start(self, server: Server, state: FederationState) -> None:
        """Stores models near the initial one for all clients, and projects them."""
        if state.round > 0:
            return
        draw = torch.Generator().manual_seed(0)
        noise = 0.01 * torch.randn(DISTINCT, state.initial.numel(), generator=draw)
        for begin in range(0, state.num_clients, DISTINCT):
            clients = range(begin, min(begin + DISTINCT, state.num_clients))
            models = [state.initial + (1 + i / state.num_clients) * noise[i - begin] for i in clients]
            keeps = server.method.exchange.keeps_model
            state.clients.update(
                {i: ClientState(model if keeps else None, BATCH) for i, model in zip(clients, models, strict=True)}
            )
        state.participated[:] = True
        if state.projection is not None:
            state.codes = project_all(state.stored_models(range(state.num_clients)), state.projection)


class Measured(Callback):
    """Writes a checkpoint after every round, and records its cost, the times of the round, and the memory."""

    def __init__(self) -> None:
        self.checkpoints: list[dict[str, float]] = []
        self.memory: list[list[dict[str, float]]] = []
        self.crossed: list[tuple[float, float]] = []
        self.cpu: list[dict[str, float]] = []
        self.started = 0.0
        self._mark = 0.0

    def on_fit_start(self) -> None:
        """Records the time at which the first round starts."""
        self.started = time.perf_counter()

    def on_round_start(self) -> None:
        """Starts the measurement of a round."""
        self._mark = time.process_time()
        self._network = network_mb()
        self.cpu.append({})

    def on_clients_sampled(self) -> None:
        """Records the time of sampling as part of the rest."""
        self._spent("rest")

    def on_uploads(self) -> None:
        """Records the time of the local updates."""
        self._spent("local")

    def on_round_end(self) -> None:
        """Records the time of the clusterings."""
        self._spent("cluster")

    def on_aggregated(self) -> None:
        """Records the time of the aggregation."""
        self._spent("aggregate")

    def _spent(self, what: str) -> None:
        begin, self._mark = self._mark, time.process_time()
        self.cpu[-1][what] = self.cpu[-1].get(what, 0.0) + self._mark - begin

    def on_round_logged(self, server: Server, state: FederationState) -> None:
        """Records the rest of the round, the memory and a checkpoint, except in warm-up rounds."""
        if state.round <= 0:
            return
        self._spent("rest")
        sent, received = (now - before for now, before in zip(network_mb(), self._network, strict=True))
        self.crossed.append((sent, received))
        self.memory.append(state.clients.at_owners(memory_mb, range(state.num_clients)))
        server.remembered.collect(server.state)
        begin = time.perf_counter()
        path = checkpoint.write(server.run_dir / "checkpoints", state, server.identity)
        seconds = time.perf_counter() - begin
        written = sum(file.stat().st_size for file in path.iterdir() if file.stat().st_nlink == 1)
        self.checkpoints.append({"seconds": seconds, "megabytes": written / 1e6})


def memory_mb(store: ClientStore, clients: list[int]) -> dict[str, float]:
    """Returns the memory of this process, and that of its mapped files, which the system can free when needed."""
    status = Path("/proc/self/status").read_text().splitlines()
    sizes = {line.split(":")[0]: float(line.split()[1]) / 1e3 for line in status if line.startswith("Rss")}
    return {"own": sizes["RssAnon"], "mapped": sizes["RssFile"] + sizes["RssShmem"]}


def network_mb() -> tuple[float, float]:
    """Returns what this host has sent and received over its cable so far, if it has one."""
    lines = [line.split() for line in Path("/proc/net/dev").read_text().splitlines()]
    counters = next((line for line in lines if line[0] == "eth0:"), ["0"] * 10)
    return int(counters[9]) / 1e6, int(counters[1]) / 1e6


def parts(method: str, num_clients: int, num_images: int) -> tuple[FederatedModule, FederatedDataModule, Method]:
    """Returns module, data and method."""
    draw = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (num_images, 1, 28, 28), generator=draw, dtype=torch.uint8)
    labels = torch.arange(num_images) * CLASSES // num_images
    data = FederatedDataModule(
        Tensors((images, labels)), Consecutive(), num_clients, batch_size=BATCH, val_fraction=0.0, test_fraction=0.2
    )
    network = functools.partial(LeNet5, in_channels=1, image_size=28)
    module = FederatedModule(network, functools.partial(torch.optim.SGD, lr=0.01))
    if method == "fedavg":
        return module, data, Method(LocalTraining(steps=1), FullModel(), GlobalMean())
    clustering = LowRankCosine(num_clusters=min(NUM_CLUSTERS, num_clients), offline_clients=100)
    return module, data, Method(LocalTraining(steps=1), CentreAndEmbedding(), ClusterMean(), [clustering])


def one(options: argparse.Namespace) -> dict[str, Any] | None:
    """Measures one method on one population, in this process; returns None if it is not that of the server."""
    method, num_clients, root = options.one[0], int(options.one[1]), options.one[2]
    settings: dict[str, Any] = {
        "clients_per_round": min(options.clients, num_clients), "evaluate_every": 0, "final_models": [],
        "evaluate_clients": min(options.clients, num_clients), "client_store": "mapped",
        "devices": 1 if options.hosts == 1 else "auto", "accelerator": "cpu", "logger": False,
        "enable_checkpointing": False, "enable_progress_bar": False, "default_root_dir": root,
    }  # fmt: skip
    measured, begin = Measured(), time.perf_counter()
    made = parts(method, num_clients, options.images)
    run = Federation(options.rounds, callbacks=[EverybodyTookPart(), measured], **settings).fit(*made)
    is_server = bool(measured.memory)
    start_s = measured.started - begin
    with (run.path / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if int(row["round"]) >= 0]
    if is_server:
        for path in sorted((run.path / "checkpoints").iterdir())[:-1]:
            checkpoint_lookup.remove(path)
    resumed, begin = Measured(), time.perf_counter()
    callbacks = [EverybodyTookPart(), resumed]
    Federation(options.rounds + 1, callbacks=callbacks, **settings).fit(*made, ckpt_path=run.path)
    if not is_server:
        return None

    def median(name: str) -> float:
        return statistics.median(float(row[name] or 0) for row in rows[1:])

    cpu = {name: statistics.median(each[name] for each in measured.cpu[1:]) for name in measured.cpu[0]}
    later = measured.checkpoints[1:]
    return {
        "method": method,
        "num_clients": num_clients,
        "start_s": start_s,
        "round_s": median("time/round_s"),
        **{f"{name}_cpu_s": cpu[name] for name in ("local", "cluster", "aggregate", "rest")},
        "first_aggregate_cpu_s": measured.cpu[0]["aggregate"],
        "moved_untrained": median("cluster/moved_untrained") if "cluster/moved_untrained" in rows[0] else 0.0,
        **{f"{name}_mb": [host[name] for host in measured.memory[-1]] for name in ("own", "mapped")},
        "crossed_mb": [statistics.median(each) for each in zip(*measured.crossed[1:], strict=True)],
        "full_checkpoint_s": measured.checkpoints[0]["seconds"],
        "full_checkpoint_mb": measured.checkpoints[0]["megabytes"],
        "next_checkpoint_s": statistics.median(each["seconds"] for each in later),
        "next_checkpoint_mb": statistics.median(each["megabytes"] for each in later),
        "resume_s": resumed.started - begin,
    }


def measure(options: argparse.Namespace, *words: str) -> dict[str, Any]:
    """Measures one entry in a new process, or in one on each host, and returns what the server prints."""
    script = [__file__, *sys.argv[1:], "--one", *words]
    if options.hosts == 1:
        output = subprocess.run([sys.executable, *script], check=True, stdout=subprocess.PIPE, text=True).stdout
    else:
        torchrun = ["-m", "torch.distributed.run", f"--nnodes={options.hosts}", "--nproc_per_node=1"]
        torchrun += ["--master_addr=first", "--master_port=29500"]
        with Hosts(options.hosts) as hosts:
            agents = [
                hosts.start(name, sys.executable, *torchrun, f"--node_rank={place}", *script)
                for place, name in enumerate(hosts.names)
            ]
            output, *_ = [agent.communicate()[0] for agent in agents]
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    return result


def shown(value: Any) -> str:
    """Formats a number with four digits, and several with slashes between them."""
    if isinstance(value, list):
        return "/".join(map(shown, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main() -> None:
    """Measures every method on every population, prints a table and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--populations", type=int, nargs="+", default=[1000, 10_000, 100_000])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--clients", type=int, default=1000, help="clients per round")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--images", type=int, default=120_000, help="images that all clients share")
    parser.add_argument("--folder", help="folder on the disk to use (default: the temporary folder of the system)")
    parser.add_argument("--json", type=Path, help="file for the entries")
    parser.add_argument("--hosts", type=int, default=1, help="hosts that own the clients")
    parser.add_argument("--one", nargs=3, metavar=("METHOD", "CLIENTS", "ROOT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.one:
        if (entry := one(options)) is not None:
            print(json.dumps(entry))
        return
    if options.hosts > 1 and (reason := why_not()):
        parser.error(reason)
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}")
    entries = []
    for method in options.methods:
        for num_clients in options.populations:
            with tempfile.TemporaryDirectory(dir=options.folder) as root:
                entries.append(measure(options, method, str(num_clients), root))
            print("  ".join(f"{name} {shown(value)}" for name, value in entries[-1].items()), flush=True)
    if options.json:
        options.json.write_text(json.dumps(entries, indent=2) + "\n")


if __name__ == "__main__":
    main()
