"""Runs entries that do the same work in turns. Each has a process that waits at a gate until it is its turn.

Legend: R rounds, n clients of a round, S samples of a client.
"""

import importlib.util
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peers.common import networks
from peers.ours import NETWORKS, make_data
from processes import cpu_seconds, memory_mb, tree
from torch import Tensor

from lcfl import FederatedModule
from lcfl.core import rng
from lcfl.data.partition import ClientDirichlet
from lcfl.data.partition.base import Partition
from lcfl.methods.local.batch_order import batch_positions

__all__ = ["PEERS", "Entry", "Plan", "Runner", "Task", "Unable", "machine"]

HERE = Path(__file__).parent
PEERS = {"pfl": "pfl", "fedlab": "fedlab", "blazefl": "blazefl", "fluke": "fluke", "flower": "flwr"}
WARM_UP = 3  # rounds before the first turn, which include lazy imports, page faults and trials of an engine
PATIENCE_S = 600.0


class Unable(Exception):
    """Raised if an entry cannot be started or has ended. The message gives the reason."""


@dataclass(frozen=True)
class Plan:
    """The work, as values that fit into JSON: client-wise Dirichlet 0.1 with equal sizes, and plain SGD.

    Attributes:
        network: ``lenet`` on Fashion-MNIST, 61,706 parameters, or ``cnn`` on CIFAR-10, 4,778,954.
        root: the folder of torchvision's files; None for random images.
        num_rounds: R.
        num_samples: S.
    """

    network: str = "lenet"
    root: str | None = "data"
    num_rounds: int = 30
    num_clients: int = 100
    clients_per_round: int = 25
    num_samples: int = 160
    batch_size: int = 32
    lr: float = 0.01
    seed: int = 0


@dataclass(frozen=True)
class Entry:
    """A package or engine that does the work.

    Attributes:
        engine: the name.
        devices: the number of processes that compute.
        arguments: the module of ``peers`` and its options.
        python: the interpreter of its environment.
        is_ours: whether the entry is lcfl.
        threads: the threads of torch's operators; None for torch's default or the number that the entry itself sets.
    """

    engine: str
    devices: int
    arguments: Sequence[str]
    python: str = sys.executable
    is_ours: bool = False
    threads: int | None = None

    def __str__(self) -> str:
        return f"{self.engine} x {self.devices}"

    @classmethod
    def of_peer(cls, name: str, python: str | None, threads: int | None = None) -> "Entry":
        """Returns the entry of a peer, in a separate environment or in this one.

        Raises:
            Unable: if the peer is not installed in that environment.
        """
        if python is None and importlib.util.find_spec(PEERS[name]) is None:
            raise Unable(f"{PEERS[name]} is not installed here, and --peers-python {name}=... is not given")
        return cls(name, 1, [f"peers.{name}"], python or sys.executable, threads=threads)


class Task:
    """The files that every entry reads, and the test data for the models.

    Args:
        plan: the work.
        folder: the folder of the files.
    """

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan, self.folder = plan, folder
        data = self._data(ClientDirichlet(0.1, (plan.num_samples, plan.num_samples)))
        module = FederatedModule(NETWORKS[plan.network])
        network = module.layout.unpack(module.initial_model(plan.seed), module.make_network())
        torch.save(network.state_dict(), folder / "weights.pt")
        data.write(folder / "partition.json")
        files = {"weights": str(folder / "weights.pt"), "partition": str(folder / "partition.json")}
        (folder / "plan.json").write_text(json.dumps(asdict(plan) | files))
        self._write(data, list(network.parameters()))
        examples = data.dataset.load()  # the data module has only the samples that a client has
        self._test = examples.batch(np.arange(examples.num_train, len(examples)), torch.device("cpu"))

    def _data(self, partition: Partition) -> Any:
        data = make_data(asdict(self.plan), partition)
        data.setup()
        return data

    def _write(self, data: Any, parameters: list[Tensor]) -> None:
        """Writes ``task.pt``, with the training samples, the clients of each round, and the order of their samples."""
        plan, shares = self.plan, data.population.train
        held = np.concatenate(shares)
        inputs, targets = data.samples.batch(held, torch.device("cpu"))
        position_of = {int(index): position for position, index in enumerate(held)}
        consumed, steps = [0] * plan.num_clients, -(-plan.num_samples // plan.batch_size)
        sampled, order = [], []
        for number in range(plan.num_rounds):
            draw = rng.generator(plan.seed, "sample", number)
            clients = sorted(draw.choice(plan.num_clients, plan.clients_per_round, replace=False).tolist())
            for client in clients:
                batches = batch_positions(plan.num_samples, plan.batch_size, consumed[client], plan.seed, client)
                positions = np.concatenate([next(batches) for _ in range(steps)])
                order.append([position_of[int(index)] for index in shares[client][positions]])
                consumed[client] += plan.num_samples
            sampled.append(clients)
        content = {
            "network": plan.network, "num_clients": plan.num_clients, "batch_size": plan.batch_size, "lr": plan.lr,
            "sampled": torch.tensor(sampled), "inputs": inputs, "targets": targets,
            "order": torch.tensor(order).reshape(plan.num_rounds, plan.clients_per_round, -1),
            "parameters": [parameter.detach().clone() for parameter in parameters],
        }  # fmt: skip
        torch.save(content, self.folder / "task.pt")

    @torch.no_grad()
    def measure(self, parameters: Sequence[Tensor]) -> tuple[float, float]:
        """Returns accuracy and loss of a model on the official test samples."""
        network = networks[self.plan.network]().eval()
        for own, value in zip(network.parameters(), parameters, strict=True):
            own.copy_(value)
        inputs, targets = self._test
        scores = torch.cat([network(part) for part in inputs.split(500)])
        accuracy = (scores.argmax(dim=1) == targets).float().mean()
        return float(accuracy), float(torch.nn.functional.cross_entropy(scores, targets))


@dataclass(eq=False)
class Runner:
    """The process of an entry, and its measurements. As a context manager, it ends the process.

    Attributes:
        start_up_s: seconds from the command to the end of the first round.
        imports_mb: memory after the imports, before data are loaded.
        memory_mb: the largest memory between two turns.
        seconds: the seconds of each round of each turn.
        cpu_s: the seconds of all cores in each turn.
    """

    entry: Entry
    task: Task
    start_up_s: float = 0.0
    imports_mb: float = 0.0
    memory_mb: float = 0.0
    seconds: list[list[float]] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)

    def __enter__(self) -> "Runner":
        """Starts the process and makes it run the first rounds.

        Raises:
            Unable: if the process ends by itself or does not answer.
        """
        folder = Path(tempfile.mkdtemp(dir=self.task.folder))
        self._model, self._log = folder / "model.pt", folder / "log.txt"
        self._pipe, other_end = Pipe()
        paths = [str(HERE), os.environ.get("PYTHONPATH", "")]
        environ = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "CONTEST_PIPE": str(other_end.fileno()),
            "CONTEST_MODEL": str(self._model),
            "CONTEST_TASK": str(self.task.folder / "task.pt"),
            "CONTEST_PLAN": str(self.task.folder / "plan.json"),
        }
        if self.entry.threads:
            environ |= {name: str(self.entry.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        begin = time.perf_counter()
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [self.entry.python, "-m", *self.entry.arguments], cwd=folder, env=environ, stdin=subprocess.DEVNULL,
                stdout=log, stderr=log, pass_fds=[other_end.fileno()], start_new_session=True,
            )  # fmt: skip
        other_end.close()
        try:
            self.versions = self._receive()
            measuring = time.perf_counter()
            self.imports_mb = memory_mb(self._process.pid)
            begin += time.perf_counter() - measuring
            self._pipe.send(None)
            self._receive()
            self._pipe.send(1)
            self._receive()
            self.start_up_s = time.perf_counter() - begin
            if self.task.plan.num_rounds > 1:
                self._pipe.send(min(WARM_UP, self.task.plan.num_rounds) - 1)
                self._receive()
        except BaseException:
            self.__exit__()
            raise
        return self

    def turn(self, rounds: int) -> list[float]:
        """Runs the next rounds and returns the seconds of each of them."""
        before = cpu_seconds(self._process.pid)
        self._pipe.send(rounds)
        seconds: list[float] = self._receive()
        self.seconds.append(seconds)
        self.cpu_s.append(cpu_seconds(self._process.pid) - before)
        self.memory_mb = max(self.memory_mb, memory_mb(self._process.pid))
        return seconds

    @property
    def median_s(self) -> float:
        """The median of the seconds per round over all turns."""
        return statistics.median(each for turn in self.seconds for each in turn)

    def reached(self) -> tuple[float, float]:
        """Returns accuracy and loss of the global model after the last round that was run."""
        return self.task.measure(torch.load(self._model, weights_only=True))

    def __exit__(self, *_: object) -> None:
        """Ends the process and its descendants."""
        for process in reversed(tree(self._process.pid)):
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self._process.wait()

    def _receive(self) -> Any:
        deadline = time.perf_counter() + PATIENCE_S
        while not self._pipe.poll(0.5):
            if self._process.poll() is not None or time.perf_counter() > deadline:
                break
        else:
            try:
                return self._pipe.recv()
            except EOFError:
                pass
        lines = self._log.read_text().strip().splitlines() or ["it printed nothing"]
        raise Unable(f"{self.entry}: " + "\n    ".join(["it did not answer", *lines[-15:]]))


def machine() -> str:
    """Returns a description of this machine and its load."""
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    model = names[0].partition(":")[2].strip() if names else platform.machine()
    cores, load = len(names) or os.cpu_count(), os.getloadavg()[0]
    return f"{cores} cores ({model}), load {load:.1f}, Python {platform.python_version()}, torch {torch.__version__}"
