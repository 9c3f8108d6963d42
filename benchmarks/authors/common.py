"""What all comparisons share: rows of the table, a network, rounds of lcfl, and the authors' code.

Legend: N clients, B samples in a batch, P parameters and Q buffers of the network.
"""

import importlib
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import numpy as np
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

from lcfl import methods as parts
from lcfl.core.clients import ClientState
from lcfl.core.messages import Downlink, Uplink
from lcfl.core.state import FederationState
from lcfl.data.partition.base import Indices
from lcfl.data.samples import TensorSamples
from lcfl.engines import SequentialEngine
from lcfl.methods.local.training import LocalData, LocalOutput, draw_batches
from lcfl.models.module import FederatedModule

FEATURES, CLASSES, BATCH, LR = 8, 4, 5, 0.1
UNEQUAL, EQUAL = (20, 15, 12), (12, 12, 12)  # numbers of samples; a pass of 12 ends with a batch of 2
SGD = partial(torch.optim.SGD, lr=LR)

# What the authors' code imports for work that is not done here.
VISION = [f"torchvision{name}" for name in ("", ".transforms", ".datasets", ".models")]

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Row:
    """What both have made of the same.

    `start` is what it was before, perhaps one model for all clients; None if it is a count of disagreements.
    """

    compared: str
    ours: Tensor
    theirs: Tensor
    start: Tensor | None = None
    reason: str = ""

    @property
    def difference(self) -> float:
        """The largest absolute difference."""
        assert self.ours.shape == self.theirs.shape, (self.compared, self.ours.shape, self.theirs.shape)
        return float((self.ours.double() - self.theirs.double()).abs().max())

    @property
    def relative(self) -> float | None:
        """The difference, divided by the largest change."""
        if self.start is None:
            return None
        return self.difference / float((self.theirs.double() - self.start.double()).abs().max())


Comparison = Callable[[Path], Iterator[Row]]


def with_each(*cases: tuple[Any, ...]) -> Callable[[Callable[..., Iterator[Row]]], Comparison]:
    """Makes a comparison of a function that takes the folder and the values of a case. It goes through all cases."""
    return lambda compare: lambda folder: (row for case in cases for row in compare(folder, *case))


class Network(nn.Module):
    """The network that both train. The authors' code looks for ``linear`` and ``bn`` in the names."""

    def __init__(self, normed: bool = False) -> None:
        super().__init__()
        self.features = nn.Linear(FEATURES, 6)
        self.bn = nn.BatchNorm1d(6) if normed else nn.Identity()
        self.linear = nn.Linear(6, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns the class scores of a batch."""
        return self.linear(torch.relu(self.bn(self.features(inputs))))


class Passes:
    """Gives a list of batches in each pass, in place of a loader."""

    def __init__(self, *passes: Sequence[Batch]) -> None:
        self._passes = iter(passes)

    def __iter__(self) -> Iterator[Batch]:
        return iter(next(self._passes))


class Rounds:
    """Rounds of a method of lcfl in which all clients take part, from random models.

    Args:
        local, exchange, aggregation: the parts of the method.
        sizes: the number of samples of each client, ``[N]``.
        network: makes the network.
        optimizer: makes the optimizer; plain SGD if not given.
        drop_last: see `LocalData`.
        batch_size: B.
        module: further options of the module.

    Attributes:
        outputs: what the clients have made in the last round, ``[N]``.
    """

    def __init__(
        self,
        local: parts.LocalUpdate,
        exchange: parts.Exchange,
        aggregation: parts.Aggregation,
        sizes: Sequence[int] = UNEQUAL,
        network: Callable[[], nn.Module] = Network,
        optimizer: Callable[..., Any] = SGD,
        drop_last: bool = False,
        batch_size: int = BATCH,
        **module: Any,
    ) -> None:
        draw, ends = torch.Generator().manual_seed(0), np.cumsum(sizes)
        self.inputs = torch.randn(ends[-1], FEATURES, generator=draw)
        self.targets = torch.randint(CLASSES, (int(ends[-1]),), generator=draw)
        self.shares = np.split(np.arange(ends[-1]), ends[:-1])
        self.method, self.clients, self.number = parts.Method(local, exchange, aggregation), range(len(sizes)), 0
        self.drop_last, self.batch_size, self.network = drop_last, batch_size, network
        self.module = FederatedModule(network, optimizer, cut="linear", **module)
        self.layout = self.module.layout
        samples = TensorSamples(self.inputs, self.targets, int(ends[-1]), CLASSES)
        self.engine = SequentialEngine(Fabric(accelerator="cpu", devices=1), self.module, samples)
        self.state = FederationState.create(self.random_model(1), len(sizes), exchange.keeps_model)
        self.outputs: list[LocalOutput] = []

    def random_model(self, seed: int) -> Tensor:
        """Returns a model with random parameters and the buffers of a new one, ``[P + Q]``."""
        model, end = self.module.initial_model(0).clone(), self.layout.num_parameters
        model[:end] = 0.5 * torch.randn(end, generator=torch.Generator().manual_seed(seed))
        return model

    def keep_random_models(self) -> None:
        """Gives every client that keeps a model a random one."""
        for client in self.clients:
            self.state.clients[client] = ClientState(self.random_model(10 + client))

    @property
    def global_model(self) -> Tensor:
        """The model of the server, ``[P + Q]``."""
        return self.state.global_model

    @property
    def kept_models(self) -> Tensor:
        """The models that the clients keep, ``[N, P + Q]``."""
        return torch.stack([self.state.clients[client].model for client in self.clients])

    @property
    def starts(self) -> Tensor:
        """The models that the clients make of what they are sent and what they keep, ``[N, P + Q]``."""
        return torch.stack([self.downlinks(client)[1].payload["model"] for client in self.clients])

    def data(self, client: int) -> LocalData:
        """Returns the client's samples in this round."""
        return LocalData(self.shares[client], self.batch_size, 0, client, self.drop_last, self.number)

    def samples(self, indices: Indices) -> Batch:
        """Returns samples as a batch."""
        return self.inputs[indices], self.targets[indices]

    def pairs(self, *batches: Indices) -> list[Batch]:
        """Returns the samples of batches, one by one."""
        return list(zip(*self.samples(np.concatenate(batches)), strict=True))

    def drawn(self, client: int, steps: int | None = None, epochs: int | None = None) -> list[Indices]:
        """Returns the batches that the client draws next, as indices."""
        return draw_batches(self.state.clients[client].consumed, self.data(client), steps, epochs)[1]

    def batches(self, client: int, steps: int | None = None, epochs: int | None = None) -> list[Batch]:
        """Returns the same batches."""
        return [self.samples(batch) for batch in self.drawn(client, steps, epochs)]

    def passes(self, client: int, steps: int | None = None, epochs: int | None = None) -> Passes:
        """Returns the same batches, pass by pass."""
        batches, each = self.batches(client, steps, epochs), -(-len(self.shares[client]) // self.batch_size)
        return Passes(*(batches[begin : begin + each] for begin in range(0, len(batches), each)))

    def load(self, model: Tensor) -> nn.Module:
        """Returns a network with this model, for the authors' code."""
        return self.layout.unpack(model, self.network())

    def vector(self, network: nn.Module | dict[str, Tensor] | Sequence[Tensor]) -> Tensor:
        """Returns the parameters and buffers of a network, of a dict of them, or of a list of parameters."""
        if isinstance(network, nn.Module):
            return self.layout.pack(network)
        values = network.values() if isinstance(network, dict) else network
        return torch.cat([value.detach().float().flatten() for value in values])

    def vectors(self, networks: Iterable[nn.Module | dict[str, Tensor] | Sequence[Tensor]]) -> Tensor:
        """Returns the same of one network for each client, ``[N, P + Q]``."""
        return torch.stack([self.vector(network) for network in networks])

    def downlinks(self, client: int) -> tuple[Downlink, Downlink]:
        """Returns what a client is sent, and what it makes of it before it trains."""
        sent = self.method.exchange.down(self.state, client, self.layout)
        return sent, self.method.exchange.at_client(sent, self.state.clients[client], self.layout)

    def trained(self, client: int) -> LocalOutput:
        """Returns what a client makes in this round."""
        own, downlink = self.state.clients[client], self.downlinks(client)[1]
        return self.method.local_update(own, downlink, self.data(client), self.engine)

    def round(self) -> Tensor:
        """Carries out a round as a server and its ranks do, and returns the clients' models, ``[N, P + Q]``."""
        exchange, uploads = self.method.exchange, []
        self.outputs = [self.trained(client) for client in self.clients]
        for client, output in enumerate(self.outputs):
            own, sent = self.state.clients[client], self.downlinks(client)[0]
            uploads.append(Uplink(client, exchange.up(output, sent, self.layout), len(self.shares[client]), sent))
            model = output.model if exchange.keeps_model else None
            memory = own.memory if output.memory is None else output.memory
            self.state.clients[client] = ClientState(model, output.consumed, memory=memory)
        received = [exchange.at_server(upload, self.state, self.layout) for upload in uploads]
        self.method.aggregation(self.state, received, self.layout)
        self.number += 1
        return torch.stack([output.model for output in self.outputs])


@contextmanager
def code_in(folder: Path, *names: str, unused: Sequence[str] = ()) -> Iterator[list[Any]]:
    """Gives modules of the authors' code, quietly and on the CPU, and forgets them at the end.

    Args:
        folder: the folder that must be on the path.
        names: the modules.
        unused: modules that they import and do not need here, in place of which there are stand-ins.
    """
    before = dict(sys.modules)
    with (
        redirect_stdout(StringIO()),
        warnings.catch_warnings(action="ignore"),
        patch.dict("os.environ"),
        patch.object(torch.cuda, "is_available", return_value=False),
        patch.object(np, "NINF", -np.inf, create=True),  # was in old versions of numpy
        patch.object(sys, "path", [str(folder), *sys.path]),
        patch.object(sys, "dont_write_bytecode", True),
    ):
        sys.modules.update({name: MagicMock() for name in unused})
        try:
            yield [importlib.import_module(name) for name in names]
        finally:
            for name in sorted(sys.modules.keys() - before.keys(), reverse=True):  # what is inside a package first
                module = sys.modules[name]
                places = [getattr(module, "__file__", None), *getattr(module, "__path__", ())]
                if name in unused or any(str(place).startswith(str(folder)) for place in places):
                    del sys.modules[name]
            sys.modules.update({name: before[name] for name in unused if name in before})
