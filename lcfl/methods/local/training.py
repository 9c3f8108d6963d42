"""What a client starts from and minimises.

Legend: P parameters and Q buffer entries in a model's flat vector, B batch size.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import ClassVar, Literal

import torch
from torch import Tensor

from lcfl.core import rng
from lcfl.core.clients import ClientState
from lcfl.core.messages import Downlink
from lcfl.core.validation import check_choices
from lcfl.methods.local.batch_order import batch_positions, pass_length
from lcfl.methods.local.engine import Engine, Gradient, Indices, OptimizerRun
from lcfl.models.layout import Layout
from lcfl.models.module import FederatedModule

__all__ = [
    "OptimizerRun",
    "Engine",
    "Gradient",
    "LocalData",
    "LocalTraining",
    "LocalUpdate",
    "Indices",
    "LocalOutput",
    "check_amount",
    "draw_batches",
    "starting_model",
]


@dataclass(frozen=True)
class LocalData:
    """A client's training samples and the addresses of its batch order and of other draws.

    Attributes:
        indices: of its training samples in the pool, ``[n_i]``.
        batch_size: B.
        seed: the run's seed.
        client: its number.
        drop_last: whether a pass leaves out its last batch where that is shorter than B.
        round: t, negative in an warm-up round; the batch order does not depend on it.
    """

    indices: Indices
    batch_size: int
    seed: int
    client: int
    drop_last: bool = False
    round: int = 0

    @property
    def pass_length(self) -> int:
        """How many samples one pass draws."""
        return pass_length(len(self.indices), self.batch_size, self.drop_last)


@dataclass(frozen=True)
class LocalOutput:
    """The outcome of a local run.

    Attributes:
        model: trained, ``[P + Q]``.
        consumed: samples drawn by this client so far.
        loss: the mean over the steps; None of a run that looks at no loss.
        logged: further means over the steps, by name.
        num_steps: how many steps it took.
        extras: what the run found beside the model and an exchange may send, by name: tensors on the CPU.
    """

    model: Tensor
    consumed: int
    loss: float | None
    logged: Mapping[str, float] = field(default_factory=dict)
    num_steps: int = 0
    extras: Mapping[str, Tensor] = field(default_factory=dict)


class LocalUpdate(ABC):
    """``(ClientState, Downlink) -> trained model``: one client's part of a round.

    Class attributes:
        reads: what it cannot do without in the downlink.
        provides: the names of the `LocalOutput.extras` that its runs give.
    """

    reads: ClassVar[tuple[str, ...]] = ()
    provides: ClassVar[tuple[str, ...]] = ()

    @property
    def adaptation(self) -> "LocalUpdate | None":
        """What makes a client's personal model of what the server sends it, where the method has such a step."""
        return None

    def check(self, module: FederatedModule) -> None:  # noqa: B027 - most can train any module
        """Raises a ValueError for a module that it cannot train; called before any data is loaded."""

    @abstractmethod
    def __call__(self, state: ClientState, downlink: Downlink, data: LocalData, engine: Engine) -> LocalOutput:
        """Runs the client's local work; must depend on its arguments alone."""

    @abstractmethod
    def cost(self, num_samples: int, batch_size: int) -> int:
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
        stragglers: with this probability a client manages only part of the work: a number of epochs (or steps)
            drawn uniformly from 1 to one less than all. What it sends counts as any other's (FedProx section 5).
        lr_decay: the learning rate of training round t is eta * lr_decay^t, and eta in warm-up rounds.
        fill_batch: make at least ceil(B / n_i) epochs, so that a client with few samples draws B of them,
            too: T_i = max(ceil(B / n_i), epochs) (AS-CFL section 3.2.3 and Algorithm 1, lines 7 and 8; reading A9).

    Raises:
        ValueError: unless exactly one of `steps` and `epochs` is a number >= 1, for another `start`, for
            `stragglers` outside [0, 1] or without at least two steps or epochs, for an `lr_decay` outside (0, 1], or
            for `fill_batch` without `epochs`.
    """

    steps: int | None = None
    epochs: int | None = None
    start: Literal["own", "centre", "embedding"] = "own"
    stragglers: float = 0.0
    lr_decay: float = 1.0
    fill_batch: bool = False

    def __post_init__(self) -> None:
        amount = check_amount(self.steps, self.epochs)
        check_choices("method.local_update", self)
        if not 0 <= self.stragglers <= 1 or (self.stragglers > 0 and amount < 2):
            raise ValueError(
                f"method.local_update: got stragglers={self.stragglers} with steps={self.steps}, epochs={self.epochs}; "
                "allowed are shares from 0 to 1, and those above 0 need at least 2 steps or epochs to leave some out."
            )
        if not 0 < self.lr_decay <= 1:
            raise ValueError(f"method.local_update: got lr_decay={self.lr_decay}; it must lie in (0, 1], 1 for none.")
        if self.fill_batch and self.epochs is None:
            raise ValueError(
                "method.local_update: fill_batch=true raises the number of epochs, but steps is given; set epochs, or "
                "fill_batch=false."
            )

    def __call__(self, state: ClientState, downlink: Downlink, data: LocalData, engine: Engine) -> LocalOutput:
        """w <- start; then per batch w <- w - eta grad(L_sup + L_cluster + L_global)(w)."""
        start = starting_model(self.start, state, downlink, engine.layout)
        consumed, batches = draw_batches(state.consumed, data, *self._steps_and_epochs(data))
        batches = batches[: engine.max_steps]
        centre, embedding = downlink.payload.get("centre"), downlink.payload.get("embedding")
        model, loss, logged = engine.run_optimizer(start, batches, centre, embedding, self._lr_factor(data))
        return LocalOutput(model, consumed, loss, logged, len(batches))

    def _lr_factor(self, data: LocalData) -> float:
        """eta_t / eta."""
        return self.lr_decay ** max(data.round, 0)

    def _steps_and_epochs(self, data: LocalData) -> tuple[int | None, int | None]:
        """All that there is to do, or what a straggler manages of it in this round."""
        steps, epochs = self.steps, self.epochs and self._num_epochs(data.pass_length, data.batch_size)
        if not self.stragglers:
            return steps, epochs
        draw = rng.generator(data.seed, "straggler", data.round, data.client)
        if draw.random() >= self.stragglers:
            return steps, epochs
        fewer = int(draw.integers(1, check_amount(steps, epochs)))
        return steps and fewer, epochs and fewer

    def _num_epochs(self, num_samples: int, batch_size: int) -> int:
        """T_i."""
        assert self.epochs is not None
        return max(-(-batch_size // num_samples), self.epochs) if self.fill_batch else self.epochs

    def cost(self, num_samples: int, batch_size: int) -> int:
        """``T_i * num_samples``, or ``steps * min(B, num_samples)``."""
        if self.epochs is not None:
            return self._num_epochs(num_samples, batch_size) * num_samples
        assert self.steps is not None
        return self.steps * min(batch_size, num_samples)


def check_amount(steps: int | None, epochs: int | None) -> int:
    """The one of the two that is given.

    Raises:
        ValueError: unless exactly one of them is a number >= 1.
    """
    given = [number for number in (steps, epochs) if number is not None]
    if len(given) != 1 or given[0] < 1:
        raise ValueError(
            f"method.local_update: got steps={steps}, epochs={epochs}; exactly one of them must be a "
            "number >= 1, e.g. steps=5 and epochs=null."
        )
    return given[0]


def starting_model(start: str, state: ClientState, downlink: Downlink, layout: Layout) -> Tensor:
    """The model in the downlink; else what `start` says, see `LocalTraining`."""
    payload = downlink.payload
    if "model" in payload:
        return payload["model"]
    if start == "centre":
        return payload["centre"]
    assert state.model is not None, "an exchange without a model in the downlink keeps one at the client"
    if start == "embedding":
        return torch.cat([payload["embedding"], state.model[layout.num_embedding :]])
    return state.model


def draw_batches(
    consumed: int, data: LocalData, steps: int | None = None, epochs: int | None = None
) -> tuple[int, list[Indices]]:
    """Samples consumed after a run of so many steps or full passes, and its batches as indices into the pool."""
    length = data.pass_length
    if epochs is not None:
        consumed = -(-consumed // length) * length  # passes begin whole
        num_batches = epochs * -(-length // data.batch_size)
    else:
        assert steps is not None
        num_batches = steps
    endless = batch_positions(len(data.indices), data.batch_size, consumed, data.seed, data.client, data.drop_last)
    batches = [data.indices[batch] for batch in islice(endless, num_batches)]
    return consumed + sum(map(len, batches)), batches
