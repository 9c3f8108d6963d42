"""What all entries of the contest share: the task, and the gate at which each waits for its turn.

An adapter runs in its package's own environment, where lcfl need not be installed: this file needs torch and nothing
else. Legend: R rounds, N clients, n of them in a round, S samples of a client.
"""

import functools
import os
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from multiprocessing.connection import Connection

import torch
from torch import Tensor, nn

__all__ = ["Gate", "Task", "networks"]


def lenet5() -> nn.Module:
    """LeNet-5 for grey images of 28 pixels, 61,706 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


def cnn() -> nn.Module:
    """Two convolutions and three fully connected layers for colour images of 32 pixels, 4,778,954 parameters."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4096, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(),
        nn.Linear(512, 10),
    )  # fmt: skip


networks: dict[str, Callable[[], nn.Module]] = {"lenet": lenet5, "cnn": cnn}


class Task:
    """The work: who is drawn in which round, on which samples in which order, from which initial weights.

    Args:
        path: of the file; the contest's if not given.

    Attributes:
        num_rounds: R.
        num_clients: N.
        batch_size: samples of a step.
        lr: learning rate of plain SGD.
        sampled: clients of each round ``[R][n]``, ascending.
    """

    def __init__(self, path: str | None = None) -> None:
        content = torch.load(path or os.environ["CONTEST_TASK"], weights_only=True)
        self.sampled: list[list[int]] = content["sampled"].tolist()
        self.num_rounds, self.num_clients = len(self.sampled), content["num_clients"]
        self.batch_size, self.lr = content["batch_size"], content["lr"]
        self._network, self._parameters = content["network"], content["parameters"]
        self._inputs, self._targets, self._order = content["inputs"], content["targets"], content["order"]

    @staticmethod
    @functools.cache
    def here() -> "Task":
        """The contest's, read once in a process: for packages that start processes of their own."""
        return Task()

    def network(self) -> nn.Module:
        """A new network with the initial weights."""
        made = networks[self._network]()
        with torch.no_grad():
            for parameter, value in zip(made.parameters(), self._parameters, strict=True):
                parameter.copy_(value)
        return made

    def samples(self, number: int, client: int) -> tuple[Tensor, Tensor]:
        """Inputs ``[S, ...]`` and targets ``[S]`` of a client in round `number`, in the order of that round's pass."""
        order = self._order[number][self.sampled[number].index(client)]
        return self._inputs[order], self._targets[order]

    def batches(self, number: int, client: int) -> list[tuple[Tensor, Tensor]]:
        """The same, cut into steps: the leanest thing that can stand for a loader."""
        inputs, targets = self.samples(number, client)
        return list(zip(inputs.split(self.batch_size), targets.split(self.batch_size), strict=True))


class Gate:
    """Where an entry waits for its turn and says how long its rounds took.

    The order of calls: the gate is made when everything is imported and nothing is loaded; then `ready`; then
    `end_round` after every round.

    Args:
        packages: the distributions whose versions are told.
    """

    def __init__(self, *packages: str) -> None:
        self._driver = Connection(int(os.environ["CONTEST_PIPE"]))
        self._left, self._begin = 0, 0.0
        self._seconds: list[float] = []
        self._driver.send({name: version(name) for name in (*packages, "torch")})
        self._driver.recv()  # the memory that imports take has been measured

    def ready(self) -> None:
        """The first round may begin: waits until it is this entry's turn."""
        self._driver.send(None)
        self._wait()

    def end_round(self, parameters: Callable[[], Sequence[Tensor]]) -> None:
        """A round is over; at the end of a turn hands in the global model and waits for the next turn.

        Args:
            parameters: makes the global model's parameters, in the order in which the network registers them.
        """
        self._seconds.append(time.perf_counter() - self._begin)
        self._left -= 1
        if self._left == 0:
            torch.save([each.detach().clone() for each in parameters()], os.environ["CONTEST_MODEL"])
            self._driver.send(self._seconds)
            self._wait()
        self._begin = time.perf_counter()

    def _wait(self) -> None:
        self._left, self._seconds = self._driver.recv(), []
        self._begin = time.perf_counter()
