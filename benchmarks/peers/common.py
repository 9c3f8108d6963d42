"""The code that all entries of the contest share: the task, and the gate at which each waits for its turn.

An adapter runs in the environment of its package, where lcfl may not be installed. This file therefore needs only
torch. Legend: R rounds, N clients, n of them in a round, S samples of a client.
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
    """Returns LeNet-5 for grey images of 28 x 28 pixels, with 61,706 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


def cnn() -> nn.Module:
    """Returns a CNN for colour images of 32 x 32 pixels.

    It has two convolutions, three fully connected layers and 4,778,954 parameters.
    """
    return nn.Sequential(
        nn.Conv2d(3, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4096, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(),
        nn.Linear(512, 10),
    )  # fmt: skip


networks: dict[str, Callable[[], nn.Module]] = {"lenet": lenet5, "cnn": cnn}


class Task:
    """The work: the clients of each round, the samples of each client in their order, and the initial weights.

    Args:
        path: the file of the task; None for that of the contest.

    Attributes:
        num_rounds: R.
        num_clients: N.
        batch_size: the samples per step.
        lr: the learning rate of plain SGD.
        sampled: the clients of each round ``[R][n]``, in ascending order.
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
        """Returns the task of the contest, which is read once per process, for packages that start processes."""
        return Task()

    def network(self) -> nn.Module:
        """Returns a new network with the initial weights."""
        network = networks[self._network]()
        with torch.no_grad():
            for parameter, value in zip(network.parameters(), self._parameters, strict=True):
                parameter.copy_(value)
        return network

    def samples(self, number: int, client: int) -> tuple[Tensor, Tensor]:
        """Returns inputs ``[S, ...]`` and targets ``[S]`` of a client in round `number`, in the order of that round."""
        order = self._order[number][self.sampled[number].index(client)]
        return self._inputs[order], self._targets[order]

    def batches(self, number: int, client: int) -> list[tuple[Tensor, Tensor]]:
        """Returns the same samples as a list of batches, the cheapest replacement of a data loader."""
        inputs, targets = self.samples(number, client)
        return list(zip(inputs.split(self.batch_size), targets.split(self.batch_size), strict=True))


class Gate:
    """The gate at which an entry waits for its turn and reports the seconds of its rounds.

    An entry creates the gate after its imports, before it loads data. It then calls `ready` once, and `end_round` after
    every round.

    Args:
        packages: the distributions whose versions are reported.
    """

    def __init__(self, *packages: str) -> None:
        self._driver = Connection(int(os.environ["CONTEST_PIPE"]))
        self._left, self._begin = 0, 0.0
        self._seconds: list[float] = []
        self._driver.send({name: version(name) for name in (*packages, "torch")})
        self._driver.recv()  # waits until the memory of the imports has been measured

    def ready(self) -> None:
        """Reports that the first round can begin, and waits for the entry's turn."""
        self._driver.send(None)
        self._wait()

    def end_round(self, parameters: Callable[[], Sequence[Tensor]]) -> None:
        """Records the end of a round. At the end of a turn, saves the global model and waits for the next turn.

        Args:
            parameters: a function that returns the parameters of the global model, in the order of the network.
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
