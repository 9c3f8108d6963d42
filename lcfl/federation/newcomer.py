"""A client that joins a federation after its training.

Legend: P + Q length of a model's flat vector.
"""

from dataclasses import replace
from math import isfinite, nan

from torch import Tensor

from lcfl.core.messages import Downlink, Uplink
from lcfl.core.state import FederationState
from lcfl.distributed.tasks import EvaluationTask, Lost, Measured, TrainingResult, TrainingTask
from lcfl.distributed.transport import Transport
from lcfl.methods.exchange import Exchange, FullModel
from lcfl.methods.local.training import LocalTraining, LocalUpdate
from lcfl.models.layout import Layout

__all__ = ["Newcomer"]

WARMUP = -1  # the round of the founders' warm-up, which a newcomer repeats: `LocalTraining.lr_decay` has not begun


class Newcomer:
    """A client that joins: trains and measures on its own samples, and counts the bytes sent and received.

    Args:
        client: the number of the client.
        transport: the way to the client.
        state: the state of the federation.
        layout: the layout of the models.

    Attributes:
        has_centres: whether the client has been sent the models of all clusters.
    """

    def __init__(self, client: int, transport: Transport, state: FederationState, layout: Layout) -> None:
        self.client, self.layout = client, layout
        self.down_bytes = self.up_bytes = 0
        self.has_centres = False
        self._transport, self._round = transport, state.round
        self._own = state.clients[client]  # a blank state, because the client never took part

    def run(self, downlink: Downlink, exchange: Exchange, local_update: LocalUpdate | None = None) -> Uplink:
        """See `lcfl.methods.clustering.base.NewcomerInterface.run`.

        Raises:
            ValueError: if the local run diverges, or the client does not answer.
        """
        result = self._trained(WARMUP, downlink, exchange, local_update)
        self.down_bytes += downlink.num_bytes
        self.up_bytes += result.uplink.num_bytes
        return result.uplink

    def losses(self, model_KP: Tensor) -> list[float]:
        """See `lcfl.methods.clustering.base.NewcomerInterface.losses`."""
        self.down_bytes += Downlink({"models": model_KP}).num_bytes
        self.has_centres = True
        return [
            each["train"].get("loss", nan)
            for each in self._measured([self._task(model, ("train",)) for model in model_KP])
        ]

    def personalise(self, model: Tensor, epochs: int) -> tuple[Tensor, Tensor | None]:
        """Returns a model ``[P + Q]`` after `epochs` epochs of plain training, and the buffers of the client.

        The training has no pulls. The buffers ``[Q]`` are None if they are part of the model, or if there are none.

        Raises:
            ValueError: if the training diverges.
        """
        training = LocalTraining(epochs=epochs)
        result = self._trained(self._round, Downlink({"model": model}), FullModel(), training)
        return result.output.model, result.buffers_after(self._own)

    def measure(
        self, model: Tensor, sets: tuple[str, ...], epochs: int, personal: tuple[Tensor, Tensor | None] | None = None
    ) -> list[Measured]:
        """Returns the metrics of a model ``[P + Q]``, and of the same after `epochs` epochs of plain training.

        Args:
            model: the model.
            sets: the names of the newcomer's own sets.
            epochs: epochs of the training, which has no pulls.
            personal: what `personalise` has returned. Without it, the client trains now and keeps the trained model.

        Raises:
            ValueError: if the training diverges, or the client does not answer.
        """
        if not sets:
            return [{}, {}]
        if personal is None:
            trained = self._task(model, sets, LocalTraining(epochs=epochs))
        else:
            trained = replace(self._task(personal[0], sets), state=replace(self._own, buffers=personal[1]))
        before, after = self._measured([self._task(model, sets), trained])
        if not all(isfinite(metrics["loss"]) for metrics in after.values() if "loss" in metrics):  # some sets have none
            raise self._diverged()
        return [before, after]

    def _trained(
        self, number: int, downlink: Downlink, exchange: Exchange, local_update: LocalUpdate | None
    ) -> TrainingResult:
        task = TrainingTask(self.client, number, self._own, downlink, local_update, exchange)
        (result,) = self._transport.train([task])
        if isinstance(result, Lost):
            raise ValueError(f"newcomer {self.client}: {result.reason}.")
        if not result.is_finite():
            raise self._diverged()
        return result

    def _task(self, model: Tensor, sets: tuple[str, ...], local_update: LocalUpdate | None = None) -> EvaluationTask:
        downlink, exchange = Downlink({"model": model}), FullModel()
        return EvaluationTask(self.client, self._round, self._own, "global", downlink, local_update, sets, exchange)

    def _measured(self, tasks: list[EvaluationTask]) -> list[Measured]:
        answers: list[Measured] = []
        for answer in self._transport.evaluate(tasks):
            if isinstance(answer, Lost):
                raise ValueError(f"newcomer {self.client}: {answer.reason}.")
            answers.append(answer)
        return answers

    def _diverged(self) -> ValueError:
        return ValueError(f"newcomer {self.client}: its local run diverged. A smaller learning rate may help.")
