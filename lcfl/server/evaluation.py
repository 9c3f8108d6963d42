"""Server side of an evaluation: which model is measured on which client's data.

Legend: P + Q length of a model's flat vector.
"""

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lcfl.core import rng
from lcfl.core.state import FederationState
from lcfl.data.datamodule import FederatedDataModule
from lcfl.data.population import Population
from lcfl.data.protocols import PLAIN
from lcfl.distributed.ranks import Transport
from lcfl.distributed.worker import EvaluationTask, Failure, TrainingResult, TrainingTask, measure
from lcfl.methods.exchange import ModelKind
from lcfl.methods.local.training import LocalUpdate
from lcfl.methods.method import Method
from lcfl.models.module import FederatedModule
from lcfl.server.metrics import Evaluation

__all__ = ["Evaluator", "evaluated_metrics", "local_sets", "raise_failures"]

TASKS_AT_A_TIME = 256  # limits how many models travel between ranks at once

OwnModel = tuple[int, Tensor, Tensor | None]  # a client, a model, and its buffers if they are not part of the model


@dataclass(frozen=True)
class Evaluator:
    """Measures kinds of models on the clients' local data sets, on all ranks.

    Clients that share a model share its forward pass. Each sample is scored once per model and view of the sample.

    Args:
        transport: hands the forward passes to the ranks.
        method: the method, which determines the model of each kind for a client.
        population: the population whose data are used.
        protocols: the test protocols, i.e. the local test sets to use.
        module: the module, which knows the layout of the models and its metrics.
        chosen: returns the clients to measure, in ascending order, from the mask ``[N]`` of the clients that belong to
            the federation; None to measure all of these clients.
    """

    transport: Transport
    method: Method
    population: Population
    protocols: Sequence[str]
    module: FederatedModule
    chosen: Callable[[Tensor], list[int]] | None = None

    def __call__(
        self, state: FederationState, kinds: Iterable[ModelKind], stages: Iterable[str] = ("val", "test")
    ) -> Evaluation:
        """Returns every metric of every kind of model on every stage and protocol, per client.

        Newcomers and clients that have left are not measured. A client without samples in a set has no value for it. A
        set in which no client has samples is left out.
        """
        sets = local_sets(self.population, self.protocols, stages)
        evaluation = Evaluation.of(self.module)
        chosen = self.chosen(state.active) if self.chosen else torch.nonzero(state.active).flatten().tolist()
        clients = [i for i in chosen if any(len(client_sets[i]) for client_sets in sets.values())]
        for kind in kinds:
            metrics = self._measured(self._models(state, kind, clients), sets)
            for name in sets:
                measured = [i for i in clients if (i, name) in metrics]
                num_samples = [len(sets[name][i]) for i in measured]
                evaluation.add(f"{name}/{kind}", measured, [metrics[i, name] for i in measured], num_samples)
        _warn_of_broken_models(evaluation, self.population)
        return evaluation

    def _models(self, state: FederationState, kind: ModelKind, clients: list[int]) -> Iterator[OwnModel]:
        """Yields each client, its model of this kind, and the buffers if they are not part of the model."""
        exchange = self.method.exchange
        local_update = exchange.evaluation_update(kind, self.method.local_update)
        if local_update is None:
            for client in clients:
                yield client, self._known_model(state, kind, client), state.clients[client].buffers
            return
        centres = list(state.centres)
        for client, result in self._local_runs(state, clients, local_update):
            model, own = result.output.model, result.state.buffers
            if kind == "cluster":  # clients of one cluster then share its memory, so it is measured only once
                model = centres[int(result.output.extras["cluster"])]
            yield client, model, state.clients[client].buffers if own is None else own

    def _known_model(self, state: FederationState, kind: ModelKind, client: int) -> Tensor:
        """Returns the model of this kind as the server knows it."""
        if kind == "global":
            return state.global_model
        if kind == "cluster":
            return state.centre_of(client)
        return self.method.exchange.personal(state, client, self.module.layout)

    def _local_runs(
        self, state: FederationState, clients: list[int], local_update: LocalUpdate
    ) -> Iterator[tuple[int, TrainingResult]]:
        """Yields the results of local runs on copies of the clients, from what the server would send them now."""
        exchange = self.method.exchange
        for start in range(0, len(clients), TASKS_AT_A_TIME):
            part = clients[start : start + TASKS_AT_A_TIME]
            tasks = [
                TrainingTask(
                    i, state.round, state.clients[i], exchange.down(state, i, self.module.layout), local_update
                )
                for i in part
            ]
            results: list[TrainingResult] = self.transport.map(tasks, [len(self.population.train[i]) for i in part])
            raise_failures(results)
            yield from zip(part, results, strict=True)

    def _measured(
        self, models: Iterator[OwnModel], sets: dict[str, list[NDArray[np.int64]]]
    ) -> dict[tuple[int, str], dict[str, float]]:
        """Returns metrics by client and set. Models, and buffers, that share memory count as the same.

        At most `TASKS_AT_A_TIME` different models are held at once. A shared model is measured again if more than that
        many other models come between its clients.
        """
        metrics: dict[tuple[int, str], dict[str, float]] = {}
        sharing: dict[tuple[int, int], tuple[Tensor, Tensor | None, list[int]]] = {}
        for client, model, buffers in models:
            memory = model.data_ptr(), 0 if buffers is None else buffers.data_ptr()
            if memory not in sharing and len(sharing) == TASKS_AT_A_TIME:
                metrics |= self._measure(list(sharing.values()), sets)
                sharing = {}
            sharing.setdefault(memory, (model, buffers, []))[2].append(client)
        return metrics | self._measure(list(sharing.values()), sets)

    def _measure(
        self, groups: Sequence[tuple[Tensor, Tensor | None, list[int]]], sets: dict[str, list[NDArray[np.int64]]]
    ) -> dict[tuple[int, str], dict[str, float]]:
        """Returns the same metrics for these models, each with its buffers and its clients."""
        owners = [[(i, name) for i in members for name in sets if len(sets[name][i])] for *_, members in groups]
        tasks = [
            EvaluationTask(
                model,
                tuple(sets[name][i] for i, name in owned),
                tuple(members),
                tuple(None if name.rpartition("/")[2] in PLAIN else i for i, name in owned),
                buffers,
            )
            for (model, buffers, members), owned in zip(groups, owners, strict=True)
        ]
        results = self.transport.map(tasks, [sum(map(len, task.sets)) for task in tasks])
        raise_failures(results)
        return {
            key: value
            for owned, values in zip(owners, results, strict=True)
            for key, value in zip(owned, values, strict=True)
        }


def local_sets(
    population: Population, protocols: Sequence[str], stages: Iterable[str]
) -> dict[str, list[NDArray[np.int64]]]:
    """Returns the indices per client by ``<stage>/<protocol>``.

    Validation data are always part of the client's own data.
    """
    sets: dict[str, list[NDArray[np.int64]]] = {}
    for stage in stages:
        if stage == "val":
            sets["val/own_split"] = population.val
        else:
            sets |= {f"{stage}/{protocol}": population.test[protocol] for protocol in protocols}
    return sets


def evaluated_metrics(
    module: FederatedModule, data: FederatedDataModule, kinds: Sequence[ModelKind]
) -> dict[str, bool]:
    """Returns the names of the metrics that an evaluation of these kinds of model logs, sorted.

    With each name it returns whether larger values are better. A deviation over clients is better if it is smaller.
    """
    module = copy.deepcopy(module).cpu().eval()  # an engine has moved the module to its device
    inputs, targets = data.dataset.spec.blank(2)  # some metrics need two samples
    with torch.no_grad(), rng.isolated(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about blank samples
        metrics = measure(module, [(module(inputs), targets)])
    evaluation = Evaluation.of(module)
    for name, client_sets in local_sets(data.population, data.protocols, ("val", "test")).items():
        for kind in kinds if any(map(len, client_sets)) else ():
            evaluation.add(f"{name}/{kind}", [0], [metrics], [1])
    better = {
        summary: metric.larger_is_better and not summary.endswith("_std")
        for name, metric in evaluation.by_name.items()
        for summary in replace(evaluation, by_name={name: metric}).summary()
    }
    return dict(sorted(better.items()))


def _warn_of_broken_models(evaluation: Evaluation, population: Population) -> None:
    """Warns about clients whose loss is NaN or infinite.

    Their models have diverged, and so has every mean over these models.
    """
    for name, metric in evaluation.by_name.items():
        broken = metric.clients[~np.isfinite(metric.values)]
        if name.endswith("/loss") and len(broken):
            who = population.listed(broken)
            warnings.warn(
                f"{name} is not finite for {len(broken)} of {len(metric.clients)} clients ({who}): "
                "these models have diverged. A smaller learning rate may help.",
                stacklevel=4,
            )


def raise_failures(results: Sequence[object]) -> None:
    """Raises the first failure among the results, with the details from its rank as a note."""
    for result in results:
        if isinstance(result, Failure):
            error = result.kind(result.message)
            if result.details:
                error.add_note(result.details)
            raise error
