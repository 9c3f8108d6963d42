"""The way from the server to its clients, and back. Ranks and fleets of machines are two ways of one interface."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from lcfl.distributed.tasks import EvaluationTask, Lost, Measured, TrainingResult, TrainingTask
from lcfl.models.module import FederatedModule

__all__ = ["Transport"]


class Transport(Protocol):
    """Hands tasks to clients and returns what they answer, in the order of the tasks.

    The round loop and the evaluation use these members only. A client whose answer does not arrive is `Lost` and left
    out of the round or of the evaluation. An exception that ends the run is raised.
    """

    @property
    def stop_signal(self) -> int:
        """The number of the signal that requests a stop after this round; 0 if there was none."""

    @property
    def module(self) -> FederatedModule | None:
        """The module in which this process trains clients; None if they all train elsewhere."""

    def train(self, tasks: Sequence[TrainingTask]) -> Sequence[TrainingResult | Lost]:
        """Has clients train.

        Clients may keep their private states to themselves. Their results then have no `state`, and a client goes on
        from the state after its last result that the server used (`lcfl.core.callback.Callback.on_uploads`).
        """

    def evaluate(self, tasks: Iterable[EvaluationTask]) -> Sequence[Measured | Lost]:
        """Has clients measure models on their own sets of samples."""

    def trivial_baseline(self, clients: Sequence[int]) -> Sequence[Mapping[str, float] | Lost]:
        """Has clients measure, by protocol, what a model that always predicts the same reaches."""

    def score_on_proxy(self, models: Sequence[Tensor], buffers: Tensor | None) -> Sequence[Mapping[str, float]]:
        """Returns the metrics of models ``[P + Q]`` on the server's proxy set, by name.

        Args:
            models: the models.
            buffers: the buffers ``[Q]`` of all these models if they are not part of them.
        """
