"""Server side of an evaluation: which model is measured on which client's data."""

import copy
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from lcfl.core import rng
from lcfl.core.state import FederationState
from lcfl.data.datamodule import FederatedDataModule
from lcfl.data.population import Population
from lcfl.distributed.tasks import EvaluationTask, Lost
from lcfl.distributed.transport import Transport
from lcfl.distributed.worker import measure
from lcfl.methods.exchange import ModelKind
from lcfl.methods.method import Method
from lcfl.models.metrics import ignore_index
from lcfl.models.module import FederatedModule
from lcfl.server.metrics import Evaluation, is_undefined, trivial_metrics
from lcfl.server.schedule import Schedule

__all__ = ["Evaluator", "evaluated_clients", "evaluated_metrics"]


@dataclass
class Evaluator:
    """Measures kinds of models on the clients' local data sets.

    Args:
        transport: has the clients measure.
        method: the method, which determines the model of each kind for a client.
        data: the clients, their local data sets, and the test protocols.
        module: the module, which knows the layout of the models and its metrics.
        schedule: which clients and which kinds of model an evaluation measures.
        seed: seed of the run.
    """

    transport: Transport
    method: Method
    data: FederatedDataModule
    module: FederatedModule
    schedule: Schedule
    seed: int
    _newest: tuple[int, Evaluation] | None = field(default=None, init=False)  # rounds before it, and the evaluation

    def __call__(
        self, state: FederationState, kinds: Iterable[ModelKind], stages: Iterable[str] = ("val", "test")
    ) -> Evaluation:
        """Returns every metric of every kind of model on every stage and protocol, per client.

        Newcomers, clients that have left and faulty clients are not measured. A client without samples in a set, or
        without an answer, has no value for it. A set in which no client has samples is left out.
        """
        sets = self.data.population.sets(self.data.protocols, stages)
        evaluation = Evaluation.of(self.module)
        own = {i: tuple(name for name in sets if len(sets[name][i])) for i in self._clients(state)}
        clients = [i for i, names in own.items() if names]
        kinds = list(kinds)
        tasks = (task for kind in kinds for task in self._tasks(state, kind, {i: own[i] for i in clients}))
        with rng.isolated():  # `_tasks` seeds the global generators
            answers = iter(self.transport.evaluate(tasks))
        undefined: dict[tuple[str, str], set[int]] = {}
        for kind in kinds:
            pairs = [(i, next(answers)) for i in clients]
            measured = {i: answer for i, answer in pairs if not isinstance(answer, Lost)}
            for name in sets:
                those = [i for i, answer in measured.items() if name in answer]
                metrics = [measured[i][name] for i in those]
                evaluation.add(f"{name}/{kind}", those, metrics, [len(sets[name][i]) for i in those])
                for metric in evaluation.directions:
                    missing = {i for i in those if is_undefined(metric, measured[i][name])}
                    undefined.setdefault((name, metric), set()).update(missing)
        self._warn_of_undefined_metrics(undefined)
        _warn_of_broken_models(evaluation, self.data.population)
        return evaluation

    def of_round(self, state: FederationState) -> Evaluation:
        """Measures the kinds of model that the schedule names for every evaluation."""
        evaluation = self(state, self.schedule.evaluated_kinds(self.method.exchange))
        self._newest = state.round, evaluation
        return evaluation

    def final(self, state: FederationState) -> Evaluation:
        """Measures the whole grid of stages, protocols and requested kinds of model, after the last round.

        What the evaluation of this round has measured is not measured again.
        """
        missing = self.schedule.evaluated_kinds(self.method.exchange, is_final=True)
        known = Evaluation.of(self.module)
        if self._newest is not None and self._newest[0] == state.round:
            known = self._newest[1]
            evaluated = self.schedule.evaluated_kinds(self.method.exchange)
            missing = [kind for kind in missing if kind not in evaluated]
        evaluation = known | self(state, missing)
        if not evaluation.by_name:
            warnings.warn(
                "nothing is measured: none of the evaluated clients has samples for it. See data.test_fraction, "
                "data.val_fraction and trainer.evaluate_clients.",
                stacklevel=4,
            )
        return evaluation

    def trivial_baseline(self, state: FederationState) -> dict[str, float]:
        """Returns the reported metric of clients that always predict the same: the mean over clients, by protocol."""
        answers = self.transport.trivial_baseline(self._clients(state))
        return trivial_metrics([each for each in answers if not isinstance(each, Lost)], self.module.reported)

    def _clients(self, state: FederationState) -> list[int]:
        return evaluated_clients(self.schedule, self.data, self.seed, state.active)

    def _warn_of_undefined_metrics(self, undefined: Mapping[tuple[str, str], set[int]]) -> None:
        """Warns once for each set and each group of clients without a value of some metrics, by (set, metric)."""
        metrics: dict[tuple[str, frozenset[int]], list[str]] = {}
        for (name, metric), each in undefined.items():
            if each:
                metrics.setdefault((name, frozenset(each)), []).append(metric)
        for (name, clients), those in metrics.items():
            who = self.data.population.listed(sorted(clients))
            warnings.warn(
                f"{' and '.join(those)}: not defined for samples of {len(clients)} clients ({who}) in {name}, which do "
                "not count in the means over clients.",
                stacklevel=4,
            )

    def _tasks(
        self, state: FederationState, kind: ModelKind, sets: Mapping[int, tuple[str, ...]]
    ) -> Iterator[EvaluationTask]:
        """Yields the task of each client, given the names of its sets."""
        exchange, layout = self.method.exchange, self.module.layout
        local_update = exchange.evaluation_update(kind, self.method.local_update)
        rng.seed_all(self.seed, f"evaluate {kind}", state.round)  # the user's exchange may draw what it sends
        for client, names in sets.items():
            if local_update is None:
                downlink = exchange.evaluation_down(state, client, kind, layout)
            else:  # a run on a copy of the client, from what the server would send it now
                downlink = exchange.down(state, client, layout)
            own = state.clients.for_task(client)
            yield EvaluationTask(client, state.round, own, kind, downlink, local_update, names)


def evaluated_clients(schedule: Schedule, data: FederatedDataModule, seed: int, active_N: Tensor) -> list[int]:
    """Returns the clients that an evaluation measures, in ascending order, none of which is faulty."""
    honest_N = active_N.clone()
    honest_N[list(data.population.faulty)] = False
    return schedule.sample_evaluated(seed, honest_N)


def evaluated_metrics(
    module: FederatedModule, data: FederatedDataModule, kinds: Sequence[ModelKind], clients: Sequence[int]
) -> dict[str, bool]:
    """Returns the names of the metrics that an evaluation of these kinds of model and clients logs, sorted.

    With each name it returns whether larger values are better. A deviation over clients is better if it is smaller.
    """
    module = copy.deepcopy(module).cpu().eval()  # an engine has moved the module to its device
    inputs, targets = data.dataset.spec.blank(2)  # some metrics need two samples
    targets = targets + (targets == ignore_index(module.loss))  # a set whose targets are all ignored has no metric
    with torch.no_grad(), rng.isolated(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about blank samples
        metrics = measure(module, [(module(inputs), targets)])
    evaluation = Evaluation.of(module)
    for name, client_sets in data.population.sets(data.protocols).items():
        for kind in kinds if any(len(client_sets[client]) for client in clients) else ():
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
                "these models have diverged, unless samples are not finite. A smaller learning rate may help.",
                stacklevel=4,
            )
