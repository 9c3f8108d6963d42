"""What the server asks of clients, and what it gets back. Tasks name everything that a result depends on.

Legend: P + Q length of a model's flat vector.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite

from torch import Tensor

from lcfl.core.clients import ClientState
from lcfl.core.messages import Downlink, Uplink, all_finite
from lcfl.distributed.client_output import ClientError
from lcfl.methods.exchange import Exchange, ModelKind
from lcfl.methods.local.training import LocalOutput, LocalUpdate
from lcfl.models.layout import Layout

__all__ = [
    "EvaluationTask",
    "Failure",
    "Lost",
    "Measured",
    "TrainingResult",
    "TrainingTask",
    "measured_model",
    "raise_failures",
]

Measured = Mapping[str, Mapping[str, float]]  # metrics by name, by set of samples: ``<stage>/<protocol>``


@dataclass(frozen=True)
class TrainingTask:
    """One client's part of a round.

    Attributes:
        client: the number of the client.
        round: the number of the round; negative in a warm-up round.
        state: the client's private part, as far as the server holds it.
        downlink: what the server sends.
        local_update: the local update; None for that of the method.
        exchange: the exchange, which defines the upload; None for that of the method.
        extra: 1, 2, ... in the extra rounds before a training round, which have noise of their own; otherwise 0.
    """

    client: int
    round: int
    state: ClientState
    downlink: Downlink
    local_update: LocalUpdate | None = None
    exchange: Exchange | None = None
    extra: int = 0

    def named(self, called: Callable[[int], str]) -> str:
        """Returns what the task is, in words; `called` gives what a client is called."""
        return f"client {called(self.client)}, round {self.round}"


@dataclass(frozen=True)
class TrainingResult:
    """The result of a `TrainingTask`.

    Attributes:
        uplink: what the client sends.
        output: the mean loss of the steps, the values that they logged and, unless it stays with the client, the
            trained model.
        state: the client's new private part; None if it stays with the client.
        diverged: whether loss, model or what the client keeps have NaN or infinity.
        is_noisy: whether the upload has noise. It then does not show whether the run diverged.
    """

    uplink: Uplink
    output: LocalOutput
    state: ClientState | None
    diverged: bool
    is_noisy: bool = False

    @classmethod
    def of(cls, uplink: Uplink, output: LocalOutput, state: ClientState, is_noisy: bool = False) -> "TrainingResult":
        """Returns the result of a local run, after a look for NaN and infinity."""
        tensors = [each for each in (output.model, state.buffers, state.memory) if each is not None]
        diverged = (output.loss is not None and not isfinite(output.loss)) or not all(map(all_finite, tensors))
        return cls(uplink, output, state, diverged, is_noisy)

    def buffers_after(self, before: ClientState) -> Tensor | None:
        """Returns the client's buffers ``[Q]`` after the run; those of its state `before` if the run returns none."""
        own = None if self.state is None else self.state.buffers
        return before.buffers if own is None else own

    def is_finite(self) -> bool:
        """Returns whether the server can use the result: the upload is finite and, without noise, the rest as well."""
        return all(map(all_finite, self.uplink.payload.values())) and (self.is_noisy or not self.diverged)


@dataclass(frozen=True)
class EvaluationTask:
    """One client's part of an evaluation: its model of one kind, measured on its own sets of samples.

    Attributes:
        client: the number of the client.
        round: the number of the next round.
        state: the client's private part, as far as the server holds it.
        kind: the kind of model.
        downlink: what the client needs to make that model.
        local_update: the local update with which it makes the model; None if the model is in the downlink or its own.
        sets: the names of the sets, ``<stage>/<protocol>`` or ``train``, none of which is empty.
        exchange: the exchange of that local update; None for that of the method.
    """

    client: int
    round: int
    state: ClientState
    kind: ModelKind
    downlink: Downlink
    local_update: LocalUpdate | None
    sets: tuple[str, ...]
    exchange: Exchange | None = None


@dataclass(frozen=True)
class Failure:
    """An exception on a rank, as text. It is raised once, on the server.

    Attributes:
        message: names the task and the exception.
        details: the traceback; empty if the message says everything.
        kind: what the server raises.
    """

    message: str
    details: str = ""
    kind: type[ClientError] = ClientError


@dataclass(frozen=True)
class Lost:
    """Stands for the result of a client that did not answer, or whose answer was refused.

    Attributes:
        reason: why, in words.
    """

    reason: str


def measured_model(
    task: TrainingTask | EvaluationTask,
    kind: ModelKind,
    exchange: Exchange,
    layout: Layout,
    result: TrainingResult | None,
) -> tuple[Tensor, Tensor | None]:
    """Returns the model ``[P + Q]`` that an evaluation measures, and the buffers ``[Q]`` if they are no part of it.

    Args:
        task: what the client has got and keeps.
        kind: the kind of model.
        exchange: that of the method.
        layout: the layout of models.
        result: the result of the local update with which the client makes the model; None without one.
    """
    exchange = task.exchange or exchange
    if result is None:
        return exchange.model_at_client(kind, task.downlink, task.state, layout), task.state.buffers
    return exchange.model_of_run(kind, task.downlink, result.output), result.buffers_after(task.state)


def raise_failures(results: Sequence[object]) -> None:
    """Raises the first failure among the results, with the details from its rank as a note."""
    for result in results:
        if isinstance(result, Failure):
            error = result.kind(result.message)
            if result.details:
                error.add_note(result.details)
            raise error
