"""Reception of the clients' answers: which of them the server can use, and how it reads them.

Legend: P + Q length of a model's flat vector.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lcfl.core.clients import ClientState
from lcfl.core.messages import Uplink
from lcfl.core.state import FederationState
from lcfl.data.population import Population
from lcfl.distributed.client_output import ClientOutputError, check_returned
from lcfl.distributed.tasks import Lost, TrainingResult, TrainingTask
from lcfl.methods.exchange import Exchange
from lcfl.methods.method import Method
from lcfl.models.layout import Layout

__all__ = ["Received", "Reception"]


@dataclass(frozen=True)
class Received:
    """The answers to some tasks.

    Attributes:
        results: the results that the server can use, by client.
        num_lost: the number of clients that did not answer.
        num_failed: the number of clients whose loss or model is not finite.
        num_refused: the number of clients whose updates are beyond the limit.
        up_bytes: the bytes of all uploads that arrived, also of those that are left out.
    """

    results: Mapping[int, TrainingResult]
    num_lost: int
    num_failed: int
    num_refused: int
    up_bytes: int


@dataclass(frozen=True)
class Reception:
    """Reads answers, and leaves out results with NaN or infinity and updates beyond a limit. It warns of each.

    Args:
        method: the method, whose exchange reads the uploads if a task names no other.
        layout: how models are laid out in flat vectors.
        population: knows what the clients are called.
        max_update_norm: the largest norm of an update that is not refused; None for no limit.
    """

    method: Method
    layout: Layout
    population: Population
    max_update_norm: float | None = None

    def __call__(
        self, state: FederationState, tasks: Sequence[TrainingTask], answers: Sequence[TrainingResult | Lost]
    ) -> Received:
        """Returns the results that the server can use as the server sees them, and counts the others."""
        pairs = [(task, answer) for task, answer in zip(tasks, answers, strict=True) if not isinstance(answer, Lost)]
        finite = [(task, result) for task, result in pairs if result.is_finite()]
        if len(finite) < len(pairs):
            failed = [task.client for task, result in pairs if not result.is_finite()]
            warnings.warn(
                f"round {state.round}: the loss or the upload of {len(failed)} of {len(pairs)} clients is not "
                f"finite ({self.population.listed(failed)}); they are left out of this round and keep their previous "
                "models. A smaller learning rate may help, unless their samples are not finite or the loss ignores all "
                "targets of a batch.",
                stacklevel=3,
            )
        decoded = [(task, self._decoded(task, result)) for task, result in finite]
        kept = self._within_limit(state, decoded)
        diverged = [task for task, result in kept if result.is_noisy and result.diverged]
        for task in diverged:
            warnings.warn(
                f"{task.named(self.population.called)}: the loss or the model is not finite. The upload is clipped and "
                "noisy as always, and the client keeps its previous model. A smaller learning rate may help.",
                stacklevel=3,
            )
        return Received(
            {task.client: self._read(state, task, result) for task, result in kept},
            len(tasks) - len(pairs),
            len(pairs) - len(finite) + len(diverged),
            len(decoded) - len(kept),
            sum(result.uplink.num_bytes for _, result in pairs),
        )

    def _exchange(self, task: TrainingTask) -> Exchange:
        return task.exchange or self.method.exchange

    def _decoded(self, task: TrainingTask, result: TrainingResult) -> TrainingResult:
        """Returns a result with the upload after its transforms, and with the downlink that it answers."""
        payload = self._exchange(task).decode(result.uplink.payload, task.downlink, self.layout)
        return replace(result, uplink=replace(result.uplink, payload=payload, answers=task.downlink))

    def _at_server(self, exchange: Exchange, uplink: Uplink, state: FederationState) -> Uplink:
        """Returns an uplink as the server reads it; the exchange may be the user's own."""
        read = exchange.at_server(uplink, state, self.layout)
        check_returned(f"{type(exchange).__name__}.at_server", read, Uplink)
        return read

    def _norm(self, state: FederationState, task: TrainingTask, result: TrainingResult) -> float:
        """Returns the norm of an update, as it was sent or, if this has no model, as the server reads it."""
        exchange, uplink = self._exchange(task), result.uplink
        if exchange.change_of(uplink.payload, task.downlink, self.layout) is None:
            uplink = self._at_server(exchange, uplink, state)
        return exchange.update_norm(uplink.payload, task.downlink, self.layout)

    def _within_limit(
        self, state: FederationState, decoded: list[tuple[TrainingTask, TrainingResult]]
    ) -> list[tuple[TrainingTask, TrainingResult]]:
        """Returns the results whose updates do not have a larger norm than the limit."""
        if self.max_update_norm is None:
            return decoded
        norms = [self._norm(state, task, result) for task, result in decoded]
        far = {
            task.client: norm
            for (task, _), norm in zip(decoded, norms, strict=True)
            if not norm <= self.max_update_norm
        }
        if far:
            warnings.warn(
                f"round {state.round}: {len(far)} updates have norms up to {max(far.values()):.3g}, beyond "
                f"trainer.max_update_norm={self.max_update_norm} ({self.population.listed(far)}); these clients are "
                "left out of this round.",
                stacklevel=4,
            )
        return [(task, result) for task, result in decoded if task.client not in far]

    def _read(self, state: FederationState, task: TrainingTask, result: TrainingResult) -> TrainingResult:
        """Returns a result with the upload and the client's state as the server sees them.

        Raises:
            ClientOutputError: if the upload lacks a name that the exchange, which may be the user's own, promises.
        """
        exchange, payload, own = self._exchange(task), result.uplink.payload, result.state
        if own is None:  # it stays at the client, and the server knows at most the model
            if exchange.keeps_model and exchange.uploads_whole and "model" in payload:
                own = ClientState(payload["model"])
        elif own.model is not None:  # otherwise a host keeps the state, or clients keep no model
            own = exchange.as_received(own, payload)
        uplink = self._at_server(exchange, result.uplink, state)
        if missing := [name for name in exchange.returns if name not in uplink.payload]:
            raise ClientOutputError(
                f"{task.named(self.population.called)}: {type(exchange).__name__} uploads "
                f"{', '.join(payload) or 'nothing'} without {missing[0]!r}, which its returns names."
            )
        return replace(result, state=own, uplink=uplink)
