"""Local updates, which define what a client starts from and minimises.

Legend: P parameters and Q buffer entries in a model's flat vector, B batch size.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import inf
from typing import ClassVar, Literal

import torch
from torch import Tensor

from lcfl.core import rng
from lcfl.core.clients import ClientState
from lcfl.core.messages import Downlink
from lcfl.core.validation import CheckedFields
from lcfl.methods.local.batch_order import batch_positions, samples_per_epoch
from lcfl.methods.local.engine import Engine, Gradient, Indices, OptimizerResult
from lcfl.models.layout import Layout, Part
from lcfl.models.module import FederatedModule
from lcfl.models.pulls import Pulls

__all__ = [
    "OptimizerResult",
    "Engine",
    "Gradient",
    "LocalData",
    "LocalTraining",
    "LocalUpdate",
    "Indices",
    "LocalOutput",
    "check_amount",
    "draw_batches",
    "mean_logged",
    "mean_loss",
    "starting_model",
]

LEAST_FACTOR = 1e-30  # of a learning rate: with less, a long run would reach 0 in float32
MOST_STEPS = 10**6  # of a client in one round; with more, a round would not end


@dataclass(frozen=True)
class LocalData:
    """A client's training samples, and what addresses its batch order and its other random draws.

    Attributes:
        indices: the indices of its training samples in the pool, ``[n_i]``.
        batch_size: B.
        seed: the run's seed.
        client: the number of the client.
        drop_last: whether a pass leaves out its last batch if that is shorter than B.
        round: t, negative in a warm-up round. The batch order does not depend on it.
    """

    indices: Indices
    batch_size: int
    seed: int
    client: int
    drop_last: bool = False
    round: int = 0

    @property
    def samples_per_epoch(self) -> int:
        """The number of samples that one pass draws."""
        return samples_per_epoch(len(self.indices), self.batch_size, self.drop_last)


@dataclass(frozen=True)
class LocalOutput:
    """The outcome of a local run.

    Attributes:
        model: the trained model, ``[P + Q]``.
        consumed: the number of samples that this client has drawn so far.
        loss: the mean loss over the steps; None for a run that computes no loss.
        logged: further means over the steps, by name.
        num_steps: the number of steps that the run took.
        extras: further results of the run that an exchange may send, by name, as tensors on the CPU.
        memory: what the client gets back as `ClientState.memory` when it takes part again: a vector in float32 on the
            CPU, of the same length for all clients. It is part of every checkpoint. None keeps what it had.
    """

    model: Tensor
    consumed: int
    loss: float | None
    logged: Mapping[str, float] = field(default_factory=dict)
    num_steps: int = 0
    extras: Mapping[str, Tensor] = field(default_factory=dict)
    memory: Tensor | None = None

    @property
    def for_server(self) -> Tensor:
        """The model ``[P + Q]`` that the run has trained for the server, which may be another than the client's own."""
        return self.extras.get("model", self.model)


class LocalUpdate(CheckedFields, ABC):
    """One client's part of a round: ``(ClientState, Downlink) -> trained model``.

    Class attributes:
        reads: the names that it needs in the downlink.
        provides: the names in the `LocalOutput.extras` of its runs.
        adds: the names that it adds to the downlink for runs of its own, such as a ``centre`` to be pulled to, or the
            ``model`` that it has chosen to start from.
        uses_own_model: whether it needs the model that the client keeps, whatever is sent.
        has_pulls: whether its runs are pulled to the centre and the embedding in the downlink.
    """

    reads: ClassVar[tuple[str, ...]] = ()
    provides: ClassVar[tuple[str, ...]] = ()
    adds: ClassVar[tuple[str, ...]] = ()
    uses_own_model: ClassVar[bool] = False
    has_pulls: ClassVar[bool] = True

    @property
    def adaptation(self) -> "LocalUpdate | None":
        """The local update that makes a personal model from what the server sends; None if the method has none."""
        return None

    def check(self, module: FederatedModule) -> None:
        """Checks that it can train a module; called before any data is loaded.

        Raises:
            ValueError: for a module that it cannot train.
        """

    @abstractmethod
    def __call__(self, state: ClientState, downlink: Downlink, data: LocalData, engine: Engine) -> LocalOutput:
        """Runs the client's local work. The result must depend only on the arguments."""

    def sizes_drawn(self, num_samples: int) -> tuple[int, ...]:
        """Returns from how many of a client's samples batches are drawn; several numbers if parts of it differ."""
        return (num_samples,)

    @abstractmethod
    def cost(self, num_samples: int, batch_size: int) -> int:
        """Returns how many samples one run of a client computes, which is used to balance ranks.

        Args:
            num_samples: the number of samples that each pass of the client draws.
            batch_size: B.
        """


@dataclass(frozen=True)
class LocalTraining(LocalUpdate):
    """Minimises the module's loss by gradient descent: LocalUpdate of LCFed's Algorithm 1, and plain local SGD.

    If the downlink holds a ``model``, the run starts from it (FedAvg). Otherwise `start` decides (reading A34).
    ``own`` is the paper's line 1, w <- w_i. ``centre`` starts from Omega_{R_i}. ``embedding`` starts from (Phi, h_i),
    the global embedding with the client's own decision head. The module's two regularisers pull towards the ``centre``
    and the ``embedding`` in the downlink.

    Args:
        steps: the number of mini-batches per participation, from an order that continues at the next participation (the
            reading of the papers' "5 local iterations"). Give either this or `epochs`.
        epochs: the number of full passes over the client's samples per participation (each without its short last batch
            under ``data.drop_last``).
        start: where a run starts if the downlink holds no model.
        stragglers: the probability that a client does only part of the work, which is a number of epochs (or steps)
            drawn uniformly from 1 to one less than all. Its upload counts as any other (FedProx section 5).
        lr_decay: the learning rate of training round t is eta * lr_decay^t. In warm-up rounds it is eta.
        fill_batch: whether to run at least ceil(B / n_i) epochs, so that a client with few samples also draws B
            samples: T_i = max(ceil(B / n_i), epochs) (AS-CFL section 3.2.3 and Algorithm 1, lines 7 and 8; reading A9).

    Raises:
        ValueError: unless exactly one of `steps` and `epochs` is a number >= 1, for an unknown `start`, for
            `stragglers` outside [0, 1] or above 0 with fewer than two steps or epochs, for an `lr_decay` outside
            (0, 1], or for `fill_batch` without `epochs`.
    """

    steps: int | None = None
    epochs: int | None = None
    start: Literal["own", "centre", "embedding"] = "own"
    stragglers: float = 0.0
    lr_decay: float = 1.0
    fill_batch: bool = False

    def __post_init__(self) -> None:
        amount = check_amount(self.steps, self.epochs)
        if not 0 <= self.stragglers <= 1 or (self.stragglers > 0 and amount < 2):
            raise ValueError(
                f"method.local_update: got stragglers={self.stragglers} with steps={self.steps}, epochs={self.epochs}; "
                "allowed are shares from 0 to 1, and a share above 0 needs at least 2 steps or epochs. Set stragglers "
                "to 0, or raise steps or epochs."
            )
        if not 0 < self.lr_decay <= 1:
            raise ValueError(
                f"method.local_update: got lr_decay={self.lr_decay}; it must lie in (0, 1]. Set 1 for none."
            )
        if self.fill_batch and self.epochs is None:
            raise ValueError(
                "method.local_update: fill_batch=true raises the number of epochs, but steps is given; set epochs, or "
                "fill_batch=false."
            )

    def __call__(self, state: ClientState, downlink: Downlink, data: LocalData, engine: Engine) -> LocalOutput:
        """Sets w <- start, then takes per batch the step w <- w - eta grad(L_sup + L_cluster + L_global)(w)."""
        start = starting_model(self.start, state, downlink, engine.layout)
        consumed, batches = draw_batches(state.consumed, data, *self._steps_and_epochs(data))
        batches = batches[: engine.max_steps]
        correction = self.correction(state, downlink, engine.layout)
        pulls = Pulls(downlink.payload.get("centre"), downlink.payload.get("embedding"), correction)
        model, loss, logged = engine.run_optimizer(start, batches, pulls, self.rate_scale(data), self.trained)
        return LocalOutput(model, consumed, loss, logged, len(batches))

    @property
    def trained(self) -> Part:
        """The part of the model that is trained; the rest stays as it is."""
        return "all"

    def correction(self, state: ClientState, downlink: Downlink, layout: Layout) -> Tensor | None:
        """Returns the vector ``[P]`` that is added to every gradient; None for none."""
        return None

    def lr_factor(self, data: LocalData) -> float:
        """Returns eta_t / eta, the factor of the learning rate in round t = ``data.round``, which `lr_decay` sets.

        Override it for another schedule, with factors above 0. Warm-up rounds have negative numbers.
        """
        return max(self.lr_decay ** max(data.round, 0), LEAST_FACTOR)

    def rate_scale(self, data: LocalData) -> float:
        """Returns `lr_factor`, which may be the user's own.

        Raises:
            ValueError: if it is not a finite number above 0.
        """
        factor = self.lr_factor(data)
        if not 0 < factor < inf:
            raise ValueError(
                f"{type(self).__name__}.lr_factor: got {factor} in round {data.round}; it must be a finite number "
                "above 0."
            )
        return factor

    def _steps_and_epochs(self, data: LocalData) -> tuple[int | None, int | None]:
        """Returns the steps and epochs of this round, which are fewer if the client is a straggler."""
        steps, epochs = self.steps, self.epochs and self._num_epochs(data.samples_per_epoch, data.batch_size)
        if not self.stragglers:
            return steps, epochs
        draw = rng.generator(data.seed, "straggler", data.round, data.client)
        if draw.random() >= self.stragglers:
            return steps, epochs
        fewer = int(draw.integers(1, check_amount(steps, epochs)))
        return steps and fewer, epochs and fewer

    def _num_epochs(self, num_samples: int, batch_size: int) -> int:
        """Returns T_i."""
        assert self.epochs is not None
        return max(-(-batch_size // num_samples), self.epochs) if self.fill_batch else self.epochs

    def cost(self, num_samples: int, batch_size: int) -> int:
        """Returns ``T_i * num_samples``, or ``steps * min(B, num_samples)``."""
        if self.epochs is not None:
            return self._num_epochs(num_samples, batch_size) * num_samples
        assert self.steps is not None
        return self.steps * min(batch_size, num_samples)


def check_amount(steps: int | None, epochs: int | None, of: str = "") -> int:
    """Returns `steps` or `epochs`, whichever is set.

    Args:
        steps: a number of steps, or None.
        epochs: a number of epochs, or None.
        of: what the names of the two options begin with.

    Raises:
        ValueError: unless exactly one of the two is a number from 1 to `MOST_STEPS`.
    """
    amounts = [number for number in (steps, epochs) if number is not None]
    if len(amounts) != 1 or amounts[0] < 1:
        raise ValueError(
            f"method.local_update: got {of}steps={steps}, {of}epochs={epochs}; exactly one must be a number >= 1. Set "
            f"for example {of}steps=5 and {of}epochs=null."
        )
    if amounts[0] > MOST_STEPS:
        raise ValueError(
            f"method.local_update: got {of}steps={steps}, {of}epochs={epochs}; a client does at most {MOST_STEPS} "
            "steps or epochs in a round. Lower the number, or raise trainer.rounds."
        )
    return amounts[0]


def starting_model(start: str, state: ClientState, downlink: Downlink, layout: Layout) -> Tensor:
    """Returns the model in the downlink, or otherwise the model that `start` selects, see `LocalTraining`."""
    payload = downlink.payload
    if "model" in payload:
        return payload["model"]
    if start == "centre":
        return payload["centre"]
    assert state.model is not None, "an exchange without a model in the downlink keeps one at the client"
    if start == "embedding":
        return torch.cat([payload["embedding"], state.model[layout.num_embedding :]])
    return state.model


def mean_loss(losses: Sequence[Tensor]) -> float:
    """Returns the mean of the losses of a run's steps."""
    return float(torch.stack(list(losses)).float().mean())


def mean_logged(steps: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
    """Returns the mean of each value that steps of a run have logged, over the steps that logged it."""
    values: dict[str, list[Tensor]] = {}
    for step in steps:
        for name, value in step.items():
            values.setdefault(name, []).append(value)
    return {name: float(torch.stack(each).mean()) for name, each in values.items()}


def draw_batches(
    consumed: int, data: LocalData, steps: int | None = None, epochs: int | None = None
) -> tuple[int, list[Indices]]:
    """Returns the number of samples consumed after a run, and the batches of the run as indices into the pool.

    Args:
        consumed: the number of samples consumed before the run.
        data: the client's training samples.
        steps: the number of batches, if `epochs` is None.
        epochs: the number of full passes, or None.
    """
    length = data.samples_per_epoch
    if epochs is not None:
        consumed = -(-consumed // length) * length  # epochs start with a whole pass
        num_batches = epochs * -(-length // data.batch_size)
    else:
        assert steps is not None
        num_batches = steps
    endless = batch_positions(len(data.indices), data.batch_size, consumed, data.seed, data.client, data.drop_last)
    batches = [data.indices[batch] for batch in islice(endless, num_batches)]
    return consumed + sum(map(len, batches)), batches
