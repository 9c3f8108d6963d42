"""Server side of a federation: Algorithm 1 of the papers, round after round.

Legend: N clients, K clusters, P + Q length of a model's flat vector.
"""

import itertools
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.fabric import Fabric
from lightning.fabric.loggers.logger import Logger

from lcfl.core import rng
from lcfl.core.callback import Callback
from lcfl.core.messages import Downlink, Uplink, uploads_unchanged
from lcfl.core.state import FederationState
from lcfl.data.datamodule import FederatedDataModule
from lcfl.distributed.tasks import TrainingTask
from lcfl.distributed.transport import Transport
from lcfl.methods.clustering.base import Clustering, ExtraRound
from lcfl.methods.exchange import Exchange
from lcfl.methods.exchange.transforms import PrivacyGuarantee
from lcfl.methods.method import Method
from lcfl.models.layout import Layout
from lcfl.models.module import FederatedModule
from lcfl.runs.metrics_table import MetricsTable
from lcfl.server.client_table import write_client_table
from lcfl.server.evaluation import Evaluator
from lcfl.server.metrics import cluster_metrics, fault_metrics, training_metrics
from lcfl.server.model_check import ModelCheck
from lcfl.server.reception import Received, Reception
from lcfl.server.remembered import Remembered
from lcfl.server.round_row import RoundRow
from lcfl.server.run_log import RunLog
from lcfl.server.schedule import Schedule
from lcfl.server.usable_updates import UsableUpdates

__all__ = ["Server"]

MOST_EXTRA_ROUNDS = 10_000  # before one training round; more than any clustering needs


class Server:
    """Rank 0 of a federation, which callbacks see as `server`.

    Args:
        fabric: launched Fabric whose callbacks are called and whose loggers are written to.
        transport: hands local work and evaluation to the ranks.
        module: network and loss.
        data: the data module after its setup.
        method: the four parts.
        schedule: the number of rounds, and how often something happens.
        state: the initial state, or the state of a checkpoint.
        seed: seed of the run.
        identity: the settings that must be equal when a checkpoint is resumed.
        run_dir: directory for the files of the run.
        callbacks: the callbacks of `fabric`: the clusterings, then the others, in the order in which hooks reach them.
        loggers: the loggers that receive the row of every training round.
        max_update_norm: the largest norm of an update that is not refused; None for no limit.
    """

    def __init__(
        self,
        fabric: Fabric,
        transport: Transport,
        module: FederatedModule,
        data: FederatedDataModule,
        method: Method,
        schedule: Schedule,
        state: FederationState,
        seed: int,
        identity: dict[str, Any],
        run_dir: Path,
        callbacks: Sequence[Callback] = (),
        loggers: Sequence[Logger] = (),
        max_update_norm: float | None = None,
    ) -> None:
        self.fabric, self.transport, self.module, self.data, self.method = fabric, transport, module, data, method
        self.schedule, self.state, self.seed, self.identity, self.run_dir = schedule, state, seed, identity, run_dir
        self.callbacks, self.loggers = callbacks, loggers
        self.receive = Reception(method, module.layout, data.population, max_update_norm)
        self.evaluator = Evaluator(transport, method, data, module, schedule, seed)
        self.row, self.table = RoundRow(), MetricsTable(run_dir / "metrics.csv")
        self.run_log = RunLog(self.row, self.table, loggers, state)
        self.usable_updates = UsableUpdates(self.table, run_dir, max_update_norm)
        self.remembered = Remembered(callbacks, method, module.layout, transport.module)
        self._check_models = ModelCheck()

    @property
    def layout(self) -> Layout:
        """How models are laid out in flat vectors."""
        return self.module.layout

    @property
    def stop_signal(self) -> int:
        """The number of the signal that requested a stop; 0 if there was none."""
        return self.transport.stop_signal

    @property
    def is_done(self) -> bool:
        """Whether the last round of the run is complete."""
        return self.state.round >= self.schedule.rounds or self.state.should_stop

    @property
    def is_interrupted(self) -> bool:
        """Whether a signal ends the run before its last round. Such a run has no final metrics."""
        return bool(self.stop_signal) and not self.is_done

    def initial_model(self, number: int) -> torch.Tensor:
        """Returns the initial model ``[P + Q]`` with this number, drawn from a separate random stream.

        Number 0 is the initial model of all clients.
        """
        return self.module.initial_model(self.seed, number)[: len(self.state.initial)]

    def log(self, name: str, value: float) -> None:
        """Adds a metric to the row of the current round, or to the final metrics during the last evaluation.

        Raises:
            ValueError: for a name that lcfl logs itself, and from ``on_round_logged`` and ``on_fit_end``, when the row
                has already been written.
        """
        self.row.log(name, value)

    def call(self, hook: str, number: int = 0, **arguments: Any) -> None:
        """Calls a hook on the clusterings, then on the callbacks. Checks the clusters if it may have changed them.

        The `number` tells apart several calls in a round.
        """
        uploads = arguments.get("uploads", ())
        shaping = [type(each).__name__ for each in self.callbacks if each.shapes_result and hasattr(each, hook)]
        by = ", ".join(shaping) or f"a callback in {hook}"
        # The user's may draw from global generators. A resumed run draws in on_fit_start what the whole run drew.
        address = 0 if hook == "on_fit_start" else self.state.round, number
        draws = rng.seeded(self.seed, hook, *address) if shaping else nullcontext()
        with draws, uploads_unchanged(uploads, f"{by} or a callback in {hook}" if shaping else by):
            self.fabric.call(hook, server=self, state=self.state, **arguments)
        if shaping or hook == "on_aggregated":
            self._check_models(self.state, by)
            self.state.check_assignment(by)

    def fit(self) -> dict[str, float]:
        """Runs the remaining rounds; returns the final metrics, or none if a signal stopped the run.

        Raises:
            ValueError: if no update of the whole run, or of its last rounds, could be used.
        """
        self.call("on_fit_start")
        self.remembered.begin()
        warmup_rounds = self.method.warmup_rounds(self.data.num_initial_clients)
        while self.state.round < 0 and not self.stop_signal:
            self.warmup_round(warmup_rounds[self.state.round])
        while not self.is_done and not self.stop_signal:
            self.round()
            if not self.is_done and not self.stop_signal and not self._rate_decays:
                self.usable_updates.check_last_rounds()
        if not self.is_interrupted:
            self._check_learned()
        metrics = {} if self.is_interrupted else self.final_metrics()
        with self.row.written():
            self.call("on_fit_end", metrics=metrics)
        return metrics

    @property
    def _rate_decays(self) -> bool:
        """Whether the local update lowers the learning rate, with which clients may train again."""
        return getattr(self.method.local_update, "lr_decay", 1.0) < 1

    def _check_learned(self) -> None:
        """Raises an error if updates arrived, but no client has completed a training round with one.

        A dry run is not checked, because its samples are random, and neither is a run whose clients may have left.
        """
        is_dry = self.schedule.most_clients is not None
        if not (self.state.participated.any() or self.state.round <= 0 or self.data.leavers or is_dry):
            self.usable_updates.check_whole_run()

    def warmup_round(self, extra: ExtraRound) -> None:
        """Runs a round before training, which has its own number and row."""
        begin = time.perf_counter()
        active = torch.nonzero(self.state.active).flatten().tolist()
        self.run_extra_round(replace(extra, clients=[active[place] for place in extra.clients]))
        self.state.round += 1
        self.finish_row(self.state.round - 1, begin)

    def extra_rounds(self, clustering: Clustering, sampled: Sequence[int]) -> Iterator[ExtraRound]:
        """Yields the extra rounds that a clustering requests before this training round.

        Raises:
            RuntimeError: if it requests more than any clustering needs, because the run would never go on.
        """
        for number in range(MOST_EXTRA_ROUNDS):
            with rng.seeded(self.seed, "extra_round", self.state.round, number):
                extra = clustering.extra_round(self.state, sampled)
            if extra is None:
                return
            extra.check(f"{type(clustering).__name__}.extra_round", self.state.num_clients)
            yield extra
        raise RuntimeError(
            f"{type(clustering).__name__}.extra_round: requested {MOST_EXTRA_ROUNDS} rounds before round "
            f"{self.state.round}; it must return None when it needs no more."
        )

    def run_extra_round(self, extra: ExtraRound, number: int = 0) -> None:
        """Runs a warm-up or extra round with the clients that it names.

        The clients keep nothing of what they learn. The `number` counts the extra rounds before one training round; it
        is 0 for a warm-up round.
        """
        state = self.state
        clients = [i for i in sorted(extra.clients) if state.active[i]][: self.schedule.most_clients]
        exchange = extra.exchange or (self.method.exchange if extra.sends_own else None)
        with self.row.timed("send"):
            initial = Downlink({"model": state.initial})
            down = self._sent(exchange, clients, number) if exchange else dict.fromkeys(clients, initial)
            tasks = [
                TrainingTask(
                    client=i,
                    round=state.round,
                    state=state.clients.for_task(i),
                    downlink=down[i],
                    local_update=extra.local_update,
                    exchange=extra.exchange,
                    extra=number,
                )
                for i in clients
            ]
        uploads = [result.uplink for result in self.train(tasks).results.values()]
        with self.row.timed("cluster"):
            self.call("on_extra_round_end", number, uploads=uploads)

    def round(self) -> None:
        """Runs one round: sample, send, train, receive, cluster, aggregate, evaluate, log."""
        state, begin, exchange = self.state, time.perf_counter(), self.method.exchange
        with self.row.timed("send"):
            leaving = [i for i, number in self.data.leavers.items() if number <= state.round and state.active[i]]
            state.leave(leaving)
            before = state.assignment.clone()
            self.call("on_round_start")
            sampled = self.schedule.sample(self.seed, state.round, state.active, exchange.full_participation)
            self.call("on_clients_sampled", sampled=sampled)
        numbers = itertools.count(1)
        for clustering in self.method.clustering:
            for extra in self.extra_rounds(clustering, sampled):
                self.run_extra_round(extra, next(numbers))

        with self.row.timed("send"):
            down = self._sent(exchange, sampled)
            tasks = [TrainingTask(i, state.round, state.clients.for_task(i), down[i]) for i in sampled]
        received = self.train(tasks, self.schedule.sample_dropouts(self.seed, state.round, sampled))
        self.usable_updates.count(received)
        results = received.results
        with self.row.timed("receive"):
            state.clients.update({i: result.state for i, result in results.items() if result.state is not None})
            state.participated[list(results)] = True
            uploads = [result.uplink for result in results.values()]
            self.call("on_uploads", uploads=uploads)

        with self.row.timed("cluster"):
            self.call("on_round_end", uploads=uploads)
        with self.row.timed("aggregate"):
            if uploads:
                self.aggregate(uploads)
        with self.row.timed("cluster"):  # tuning of the number of clusters
            self.call("on_aggregated", uploads=uploads)
            if self.method.is_clustered:
                self.row.update(cluster_metrics(before, state, list(results), self.data.population.groups))
            if faulty := self.data.population.faulty:
                self.row.update(fault_metrics(state, list(faulty)))
        if self.schedule.client_dropout:
            self.row.add("train/dropped_clients", 0)

        state.round += 1
        if self.schedule.evaluate_every and state.round % self.schedule.evaluate_every == 0:
            self.log_evaluation()
        self.finish_row(state.round - 1, begin)

    def aggregate(self, uploads: Sequence[Uplink]) -> None:
        """Sets the new models from the uploads of the round, as the exchange lets the aggregation read them."""
        state, name = self.state, type(self.method.aggregation).__name__
        read = self.method.exchange.before_aggregation(uploads, self.layout, self.seed, state.round)
        with rng.seeded(self.seed, "aggregation", state.round), uploads_unchanged(read, name):
            returned: object = self.method.aggregation(state, read, self.layout)
        if returned is not None and returned is not state:
            raise ValueError(
                f"{name}: got a {type(returned).__name__} back; an aggregation returns nothing. It sets the models of "
                "the next round in the state: state.global_model and, with clusters, state.centres."
            )
        self._check_models(state, name)

    def _sent(self, exchange: Exchange, clients: Sequence[int], number: int = 0) -> dict[int, Downlink]:
        """Returns what each client is sent in a training round, or in its `number`-th extra round.

        Raises:
            ValueError: if the exchange, which may be the user's own, returns anything else.
        """
        with rng.seeded(self.seed, "send", self.state.round, number):
            down = {i: exchange.down(self.state, i, self.layout) for i in clients}
        for sent in down.values():
            if not isinstance(sent, Downlink):
                raise ValueError(
                    f"{type(exchange).__name__}.down: got {type(sent).__name__}; it must return a "
                    "lcfl.core.messages.Downlink."
                )
            if unnamed := [name for name in sent.payload if name not in exchange.sends]:
                raise ValueError(
                    f"{type(exchange).__name__}.down: sends {unnamed[0]!r}, which its sends does not name "
                    f"({', '.join(exchange.sends) or 'nothing'})."
                )
        return down

    def train(self, tasks: Sequence[TrainingTask], dropped: Collection[int] = ()) -> Received:
        """Runs the local work of several clients; returns what has been received.

        Bytes sent to the clients in `dropped` are counted too, but these clients do nothing and stay as they were.
        """
        down_bytes = sum(task.downlink.num_bytes for task in tasks)
        tasks = [task for task in tasks if task.client not in dropped]
        with self.row.timed("local"):
            answers = self.transport.train(tasks)
        extra = tasks[0].extra if tasks else 0
        with self.row.timed("receive"), rng.seeded(self.seed, "receive", self.state.round, extra):
            received = self.receive(self.state, tasks, answers)
        self.state.total_bytes += down_bytes + received.up_bytes
        if not any(task.extra for task in tasks):  # the row of a training round has that round's loss alone
            self.row.update(training_metrics([result.output for result in received.results.values()]))
        self.row.add("train/failed_clients", received.num_failed)
        if self.receive.max_update_norm is not None:
            self.row.add("train/refused_clients", received.num_refused)
        if num_lost := len(dropped) + received.num_lost:
            self.row.add("train/dropped_clients", num_lost)
        self.row.add("comm/down_bytes", down_bytes)
        self.row.add("comm/up_bytes", received.up_bytes)
        self.row.update({"comm/total_bytes": float(self.state.total_bytes)})
        return received

    def log_evaluation(self) -> None:
        """Evaluates the kinds of model that the schedule names and logs every summary."""
        with self.row.timed("eval"):
            evaluation = self.evaluator.of_round(self.state)
        with self.row.timed("callbacks"):
            self.call("on_evaluated", evaluation=evaluation)
        self.row.update(evaluation.summary())

    def final_metrics(self) -> dict[str, float]:
        """Returns the summaries of the last evaluation, the trivial baseline, and how stable the clusters were."""
        evaluation = self.evaluator.final(self.state)
        population, clustered = self.data.population, self.method.is_clustered
        write_client_table(self.run_dir / "clients.csv", evaluation, population, self.state, clustered)
        self.call("on_evaluated", evaluation=evaluation)
        stable = self.table.column("cluster/stability")
        mean_stability = {"cluster/stability": float(np.mean(stable))} if stable else {}
        logged = self.row.take()  # includes what callbacks logged in on_evaluated
        return evaluation.summary() | self.evaluator.trivial_baseline(self.state) | mean_stability | logged

    def proxy_score(self, models: Sequence[torch.Tensor]) -> list[float]:
        """Returns the reported metric of models ``[P + Q]`` on the proxy set D_test, such as the accuracy.

        A metric v >= 0 whose smaller values are better counts as 1 / (1 + v), which is a share as an accuracy is. No
        client transform changes the samples.

        Raises:
            ValueError: if there is no proxy set.
        """
        proxy, reported = self.data.population.proxy, self.module.reported
        if not len(proxy):
            raise ValueError("data.proxy: got 0, so there is no proxy set; set it to a number of samples.")
        buffers = self.state.clients.blank.buffers  # of no client, in case each client has its own
        values = [measured[reported.name] for measured in self.transport.score_on_proxy(models, buffers)]
        return values if reported.larger_is_better else [1 / (1 + max(value, 0.0)) for value in values]

    @property
    def has_proxy(self) -> bool:
        """Whether there is a proxy set."""
        return len(self.data.population.proxy) > 0

    def privacy_guarantee(self) -> PrivacyGuarantee | None:
        """Returns how much the rounds so far reveal about one client's data at most.

        Returns None if nothing bounds it.
        """
        if not self.method.exchange.noises:
            return None
        remaining, full = self.data.remaining_clients, self.method.exchange.full_participation
        num_uploads = self.schedule.most_uploads(self.seed, remaining, self.state.round, full)
        return self.method.privacy_guarantee(num_uploads, self.data.num_initial_clients)

    def finish_row(self, number: int, begin: float) -> None:
        """Writes the row of round `number`, which began at `begin`, and notifies the callbacks."""
        with self.run_log.finished_row(number, begin) as row:
            self.call("on_round_logged", row=row)
