"""What a client starts from and minimises.

Legend: P parameters and Q buffer entries in a model's flat vector, B batch size.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lcfl.clients import ClientState
from lcfl.local.order import batch_positions, pass_length
from lcfl.messages import Downlink
from lcfl.module import FederatedModule
from lcfl.networks.split import Layout

__all__ = ["Descent", "Engine", "Gradient", "LocalData", "LocalTraining", "LocalUpdate", "Trained"]

Positions = NDArray[np.int64]


class Descent(NamedTuple):
    """What an engine gives back: the trained model ``[P + Q]``, and means over the steps of loss and logged values."""

    model: Tensor
    loss: float
    logged: Mapping[str, float]


class Gradient(NamedTuple):
    """The slope of the module's loss on one batch, where the model lies that it was asked for.

    Attributes:
        vector: ``[P]``.
        buffers: of the network after the forward pass, ``[Q]``.
        loss: a number, as a tensor so that nobody has to wait for it.
        logged: the means of what the step logged, by name.
    """

    vector: Tensor
    buffers: Tensor
    loss: Tensor
    logged: Mapping[str, Tensor]

    def step_from(self, model: Tensor, rate: float) -> Tensor:
        """``w - rate g`` for a model w ``[P + Q]``, with the buffers as the forward pass left them."""
        return torch.cat([model[: len(self.vector)] - rate * self.vector, self.buffers])


class Engine(Protocol):
    """What carries out a local run on this rank; a method does not know which one it is.

    Two ways to compute: `descend` is a whole run of the module's optimizer; `gradient` and `hessian_product` are the
    numbers themselves, for methods whose step is another one.

    Attributes:
        module: loss, optimizer and the weights of the pulls; a method reads its settings.
        layout: how models lie in flat vectors.
        device: where a method that computes with vectors should put them.
        max_steps: cuts every local run after so many steps; None for no cut. `descend` sees to it by itself.
    """

    module: FederatedModule
    layout: Layout
    device: torch.device
    max_steps: int | None

    def descend(
        self,
        start: Tensor,
        batches: Iterable[Positions],
        centre: Tensor | None = None,
        embedding: Tensor | None = None,
    ) -> Descent:
        """One optimizer step per batch from the model `start`.

        Args:
            start: ``[P + Q]``.
            batches: indices into the pool of examples, one array per step.
            centre: Omega ``[P + Q]`` of the cluster pull, or None.
            embedding: Phi ``[P_phi]`` of the global pull, or None.
        """
        ...

    def gradient(
        self,
        model: Tensor,
        batch: Positions,
        number: int = 0,
        centre: Tensor | None = None,
        embedding: Tensor | None = None,
    ) -> Gradient:
        """The gradient of the module's training step at `model`, in training mode; no optimizer takes part.

        Args:
            model: ``[P + Q]``.
            batch: indices into the pool of examples.
            number: of the step within the local run.
            centre: Omega ``[P + Q]`` of the cluster pull, or None.
            embedding: Phi ``[P_phi]`` of the global pull, or None.
        """
        ...

    def hessian_product(self, model: Tensor, batch: Positions, direction: Tensor, number: int = 0) -> Gradient:
        """``H(w; batch) v``, exactly, by differentiating the gradient along v = `direction` ``[P]``; without pulls.

        Its `vector` is the product; the rest is as `gradient` gives it.
        """
        ...


@dataclass(frozen=True)
class LocalData:
    """A client's training samples and the address of its batch order.

    Attributes:
        indices: of its training samples in the pool, ``[n_i]``.
        batch_size: B.
        seed: the run's seed.
        client: its number.
        drop_last: whether a pass leaves out its last batch where that is shorter than B.
    """

    indices: Positions
    batch_size: int
    seed: int
    client: int
    drop_last: bool = False

    @property
    def pass_length(self) -> int:
        """How many samples one pass draws."""
        return pass_length(len(self.indices), self.batch_size, self.drop_last)


@dataclass(frozen=True)
class Trained:
    """The outcome of a local run.

    Attributes:
        model: trained, ``[P + Q]``.
        consumed: samples drawn by this client so far.
        loss: the mean over the steps.
        logged: further means over the steps, by name.
        extras: what the run found beside the model and an exchange may send, by name: tensors on the CPU.
    """

    model: Tensor
    consumed: int
    loss: float
    logged: Mapping[str, float] = field(default_factory=dict)
    extras: Mapping[str, Tensor] = field(default_factory=dict)


class LocalUpdate(ABC):
    """``(ClientState, Downlink) -> trained model``: one client's part of a round."""

    @abstractmethod
    def __call__(self, state: ClientState, downlink: Downlink, data: LocalData, engine: Engine) -> Trained:
        """Runs the client's local work; must depend on its arguments alone."""

    @abstractmethod
    def work(self, num_samples: int, batch_size: int) -> int:
        """How many samples one run of a client computes whose passes draw `num_samples` each: for balancing ranks."""


@dataclass(frozen=True)
class LocalTraining(LocalUpdate):
    """Gradient descent on the module's loss: LocalUpdate of LCFed's Algorithm 1, and plain local SGD.

    A downlink that holds a ``model`` is where the run starts (FedAvg). Otherwise `start` decides
    (reading A34): ``own`` is the paper's line 1, w <- w_i; ``centre`` starts from Omega_{R_i};
    ``embedding`` from (Phi, h_i), the global embedding with the own decision. A ``centre`` and an
    ``embedding`` in the downlink are what the module's two regularisers pull towards.

    Args:
        steps: mini-batches per participation, from an order that goes on at the next one (the reading
            of the papers' "5 local iterations"); give either this or `epochs`.
        epochs: full passes over the client's samples per participation (each without its short last batch
            under ``data.drop_last``).
        start: where a run starts that is not given a model.

    Raises:
        ValueError: unless exactly one of `steps` and `epochs` is a number >= 1, or for another `start`.
    """

    steps: int | None = None
    epochs: int | None = None
    start: Literal["own", "centre", "embedding"] = "own"

    def __post_init__(self) -> None:
        given = [number for number in (self.steps, self.epochs) if number is not None]
        if len(given) != 1 or given[0] < 1:
            raise ValueError(
                f"method.local_update: got steps={self.steps}, epochs={self.epochs}; exactly one of them must be a "
                "number >= 1, e.g. steps=5 and epochs=null."
            )
        if self.start not in ("own", "centre", "embedding"):
            raise ValueError(f"method.local_update: got start={self.start!r}; allowed are own, centre and embedding.")

    def __call__(self, state: ClientState, downlink: Downlink, data: LocalData, engine: Engine) -> Trained:
        """w <- start; then per batch w <- w - eta grad(L_sup + L_cluster + L_global)(w)."""
        start = self._start(state, downlink, engine.layout)
        consumed, batches = self._batches(state.consumed, data)
        centre, embedding = downlink.payload.get("centre"), downlink.payload.get("embedding")
        model, loss, logged = engine.descend(start, [data.indices[batch] for batch in batches], centre, embedding)
        return Trained(model, consumed, loss, logged)

    def _start(self, state: ClientState, downlink: Downlink, layout: Layout) -> Tensor:
        payload = downlink.payload
        if "model" in payload:
            return payload["model"]
        if self.start == "centre":
            return payload["centre"]
        assert state.model is not None, "an exchange without a model in the downlink keeps one at the client"
        if self.start == "embedding":
            return torch.cat([payload["embedding"], state.model[layout.num_embedding :]])
        return state.model

    def _batches(self, consumed: int, data: LocalData) -> tuple[int, list[Positions]]:
        """Samples consumed after the run, and the run's batches as positions."""
        length = data.pass_length
        if self.epochs is not None:
            consumed = -(-consumed // length) * length  # passes begin whole
            num_batches = self.epochs * -(-length // data.batch_size)
        else:
            assert self.steps is not None
            num_batches = self.steps
        endless = batch_positions(len(data.indices), data.batch_size, consumed, data.seed, data.client, data.drop_last)
        batches = list(islice(endless, num_batches))
        return consumed + sum(map(len, batches)), batches

    def work(self, num_samples: int, batch_size: int) -> int:
        """``epochs * num_samples``, or ``steps * min(B, num_samples)``."""
        if self.epochs is not None:
            return self.epochs * num_samples
        assert self.steps is not None
        return self.steps * min(batch_size, num_samples)
