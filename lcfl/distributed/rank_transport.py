"""The transport of a simulated federation, whose clients are played by the ranks of this run.

Legend: P + Q length of a model's flat vector.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, islice
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lcfl.distributed.tasks import (
    EvaluationTask,
    Measured,
    TrainingResult,
    TrainingTask,
    measured_model,
    raise_failures,
)
from lcfl.distributed.trivial_baseline import trivial_baselines
from lcfl.distributed.worker import ScoringTask, Worker
from lcfl.models.module import FederatedModule

__all__ = ["TASKS_AT_A_TIME", "RankTransport"]

TASKS_AT_A_TIME = 256  # limits how many models travel between ranks at once

OwnModel = tuple[EvaluationTask, Tensor, Tensor | None]  # a task, its model, and buffers that are not part of the model


class Pool(Protocol):
    """All that carry out tasks: the `Ranks` of one host, or all `Hosts`."""

    @property
    def stop_signal(self) -> int:
        """The number of the signal that requests a stop after this round; 0 if there was none."""

    def map(self, tasks: Sequence[Any], costs: Sequence[float]) -> list[Any]:
        """Carries out tasks, given their costs, and returns the results in the tasks' order."""


class RankTransport:
    """Hands the work of clients to all ranks. It is used on rank 0; the other ranks `Ranks.serve`.

    A task is sent with everything that a rank needs for it, so any rank can play any client.

    Args:
        ranks: what carries out the tasks.
        worker: the worker of this rank, which knows the clients' data.
    """

    def __init__(self, ranks: Pool, worker: Worker) -> None:
        self._ranks, self._worker = ranks, worker
        self._data, self._exchange, self._layout = worker.data, worker.method.exchange, worker.module.layout
        population = worker.data.population
        self._sets = {"train": population.train} | population.sets(worker.data.protocols)

    @property
    def stop_signal(self) -> int:
        """The number of the signal that requests a stop after this round; 0 if there was none."""
        return self._ranks.stop_signal

    @property
    def module(self) -> FederatedModule:
        """The module in which this rank trains clients."""
        return self._worker.module

    def train(self, tasks: Sequence[TrainingTask]) -> list[TrainingResult]:
        """See `lcfl.distributed.transport.Transport.train`. No client is ever lost."""
        return self._map(tasks, [self._worker.cost_of(task) for task in tasks])

    def evaluate(self, tasks: Iterable[EvaluationTask]) -> list[Measured]:
        """See `lcfl.distributed.transport.Transport.evaluate`. One kind of model is measured after the other."""
        return [answer for _, part in groupby(tasks, lambda task: task.kind) for answer in self._evaluate(part)]

    def _evaluate(self, tasks: Iterable[EvaluationTask]) -> list[Measured]:
        """Evaluates models of one kind.

        Clients that share a model share its forward pass. Models, and buffers, that share memory count as the same.
        At most `TASKS_AT_A_TIME` different models are held at once. A shared model is measured again if more than that
        many other models come between its clients.
        """
        answers: list[dict[str, Mapping[str, float]]] = []
        sharing: dict[tuple[int, int], tuple[Tensor, Tensor | None, list[int]]] = {}
        owners: list[tuple[int, tuple[str, ...]]] = []  # and not the tasks, which hold a downlink each
        for place, (task, model, buffers) in enumerate(self._models(tasks)):
            memory = model.data_ptr(), 0 if buffers is None else buffers.data_ptr()
            if memory not in sharing and len(sharing) == TASKS_AT_A_TIME:
                self._score(sharing.values(), owners, answers)
                sharing = {}
            owners.append((task.client, task.sets))
            answers.append({})
            sharing.setdefault(memory, (model, buffers, []))[2].append(place)
        self._score(sharing.values(), owners, answers)
        return list(answers)

    def trivial_baseline(self, clients: Sequence[int]) -> list[dict[str, float]]:
        """See `lcfl.distributed.transport.Transport.trivial_baseline`."""
        return trivial_baselines(self._worker.module, self._data, clients, self._worker.seed)

    def score_on_proxy(self, models: Sequence[Tensor], buffers: Tensor | None) -> list[Mapping[str, float]]:
        """See `lcfl.distributed.transport.Transport.score_on_proxy`."""
        proxy = self._data.population.proxy
        results = self._map([ScoringTask(model, (proxy,), (), buffers=buffers) for model in models], [1] * len(models))
        return [measured for (measured,) in results]

    def _map(self, tasks: Sequence[TrainingTask | ScoringTask], costs: Sequence[float]) -> list[Any]:
        results = self._ranks.map(tasks, costs)
        raise_failures(results)
        return results

    def _models(self, tasks: Iterable[EvaluationTask]) -> Iterator[OwnModel]:
        """Yields each task, the model that it measures, and the buffers if they are not part of the model."""
        waiting = iter(tasks)
        while part := list(islice(waiting, TASKS_AT_A_TIME)):
            runs = [
                TrainingTask(task.client, task.round, task.state, task.downlink, task.local_update, task.exchange)
                for task in part
                if task.local_update is not None
            ]
            results = iter(self.train(runs) if runs else ())
            for task in part:
                result = None if task.local_update is None else next(results)
                yield task, *measured_model(task, task.kind, self._exchange, self._layout, result)

    def _score(
        self,
        groups: Iterable[tuple[Tensor, Tensor | None, list[int]]],
        owners: Sequence[tuple[int, tuple[str, ...]]],
        answers: Sequence[dict[str, Mapping[str, float]]],
    ) -> None:
        """Adds the metrics of these models, each with its buffers and the places of its owners, to the answers."""
        pairs = [[(place, name) for place in places for name in owners[place][1]] for *_, places in groups]
        tasks = [
            ScoringTask.of(model, buffers, [self._owned(owners[place][0], name) for place, name in own])
            for (model, buffers, _), own in zip(groups, pairs, strict=True)
        ]
        results = self._map(tasks, [sum(map(len, task.sets)) for task in tasks])
        for own, values in zip(pairs, results, strict=True):
            for (place, name), measured in zip(own, values, strict=True):
                answers[place][name] = measured

    def _owned(self, client: int, name: str) -> tuple[int, str, NDArray[np.int64]]:
        return client, name, self._sets[name][client]
