"""The server's side of an evaluation: which model is measured on which client's data.

Legend: P + Q length of a model's flat vector.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lcfl.data.population import Population
from lcfl.exchange import ModelKind
from lcfl.method import Method
from lcfl.metrics import Evaluation
from lcfl.networks.split import Layout
from lcfl.ranks import Ranks
from lcfl.state import FederationState
from lcfl.worker import ClientError, EvaluationTask, Failure, LocalTask

__all__ = ["Evaluator", "raise_failures"]

TASKS_AT_A_TIME = 256  # bounds the models on their way between ranks


@dataclass(frozen=True)
class Evaluator:
    """Measures kinds of models on the clients' local data sets, on all ranks.

    Clients that share a model share its forward pass, and an image is scored once per model.

    Args:
        ranks: carry out the forward passes.
        method: says which model of a client is meant.
        population: whose data there are.
        protocols: the local test sets to use.
        layout: of the models.
    """

    ranks: Ranks
    method: Method
    population: Population
    protocols: Sequence[str]
    layout: Layout

    def __call__(
        self, state: FederationState, kinds: Iterable[ModelKind], stages: Iterable[str] = ("val", "test")
    ) -> Evaluation:
        """Every metric of every kind of model on every stage and protocol, per client.

        A client without samples in a set has no value there; a set that nobody has is left out.
        """
        sets = {f"{stage}/{protocol}": client_sets for stage in stages for protocol, client_sets in self._sets(stage)}
        evaluation = Evaluation()
        for kind in kinds:
            clients = [i for i in range(state.num_clients) if any(len(client_sets[i]) for client_sets in sets.values())]
            found = self._measure(self._models(state, kind, clients), clients, sets)
            for name in sets:
                measured = [i for i in clients if (i, name) in found]
                num_samples = [len(sets[name][i]) for i in measured]
                evaluation.add(f"{name}/{kind}", measured, [found[i, name] for i in measured], num_samples)
        return evaluation

    def _sets(self, stage: str) -> list[tuple[str, list[NDArray[np.int64]]]]:
        """Protocol and indices per client; validation data are always part of the client's own."""
        if stage == "val":
            return [("own_split", self.population.val)]
        return [(protocol, self.population.test[protocol]) for protocol in self.protocols]

    def _models(self, state: FederationState, kind: ModelKind, clients: list[int]) -> Iterator[tuple[int, Tensor]]:
        """Each client and its model of that kind."""
        if kind == "after_local":
            yield from self._after_local(state, clients)
            return
        for client in clients:
            if kind == "global":
                yield client, state.global_model
            elif kind == "cluster":
                yield client, state.centre_of(client)
            else:
                yield client, self.method.exchange.personal(state, client, self.layout)

    def _after_local(self, state: FederationState, clients: list[int]) -> Iterator[tuple[int, Tensor]]:
        """One ordinary local run of a copy of every client, from what the server would send it now."""
        for start in range(0, len(clients), TASKS_AT_A_TIME):
            part = clients[start : start + TASKS_AT_A_TIME]
            tasks = [
                LocalTask(i, state.round, state.clients[i], self.method.exchange.down(state, i, self.layout))
                for i in part
            ]
            results = self.ranks.map(tasks, [len(self.population.train[i]) for i in part])
            raise_failures(results)
            yield from ((client, result.model) for client, result in zip(part, results, strict=True))

    def _measure(
        self, models: Iterator[tuple[int, Tensor]], clients: list[int], sets: dict[str, list[NDArray[np.int64]]]
    ) -> dict[tuple[int, str], dict[str, float]]:
        """Metrics by client and set. Models that are the same memory are the same model."""
        sharing: dict[int, tuple[Tensor, list[int]]] = {}
        for client, model in models:
            sharing.setdefault(model.data_ptr(), (model, []))[1].append(client)
        groups = list(sharing.values())
        found: dict[tuple[int, str], dict[str, float]] = {}
        for start in range(0, len(groups), TASKS_AT_A_TIME):
            part = groups[start : start + TASKS_AT_A_TIME]
            owners = [[(i, name) for i in members for name in sets if len(sets[name][i])] for _, members in part]
            tasks = [
                EvaluationTask(model, tuple(sets[name][i] for i, name in owned))
                for (model, _), owned in zip(part, owners, strict=True)
            ]
            results = self.ranks.map(tasks, [sum(map(len, task.sets)) for task in tasks])
            raise_failures(results)
            for owned, values in zip(owners, results, strict=True):
                found.update(zip(owned, values, strict=True))
        return found


def raise_failures(results: Sequence[object]) -> None:
    """Raises the first failure among the results, with what happened on its rank as a note."""
    for result in results:
        if isinstance(result, Failure):
            error = ClientError(result.message)
            error.add_note(result.details)
            raise error
