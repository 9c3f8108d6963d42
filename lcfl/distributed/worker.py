"""The work of a rank: it trains clients and evaluates models. The result of a task depends on its arguments alone.

Legend: P + Q length of a model's flat vector.
"""

import copy
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from lightning.fabric import Fabric
from numpy.typing import NDArray
from torch import Tensor
from torchmetrics import MetricCollection

from lcfl.core import rng
from lcfl.core.clients import VECTORS, ClientState
from lcfl.core.messages import Downlink, Uplink, unchanged
from lcfl.core.validation import abbreviated, shortened
from lcfl.data.datamodule import FederatedDataModule
from lcfl.data.samples import Samples
from lcfl.data.spec import SampleSpec
from lcfl.distributed.client_deadline import ClientDeadline, ClientTookTooLong
from lcfl.distributed.client_output import (
    ClientOutputError,
    ClientTimeoutError,
    check_output,
    check_payload,
    check_returned,
)
from lcfl.distributed.faulty_client import as_sent
from lcfl.distributed.tasks import Failure, TrainingResult, TrainingTask
from lcfl.engines import ChosenEngine, SequentialEngine, make_engine
from lcfl.methods.local.batch_order import samples_per_epoch
from lcfl.methods.local.training import LocalData, LocalOutput
from lcfl.methods.method import Method
from lcfl.models.metrics import accuracy, counted_targets, weight_in_loss
from lcfl.models.module import FederatedModule

__all__ = ["ScoringTask", "Worker", "blank_output", "details_of", "measure", "most_outputs"]

OUTPUT_BYTES = 2**28  # of the outputs that an evaluation holds at once; a token may have a score for every word
RECEIVED = "the downlink in place, which other clients get, too"
KEPT = "the client's state in place, which it has in an evaluation, too"
RETURNED = "the local update's output in place, which the client may keep"
LONGEST_IN_TRACEBACK = 200  # bytes of a message; the whole message stands before the traceback


@dataclass(frozen=True)
class ScoringTask:
    """One model and the sets of samples that it is scored on. Samples that clients see alike are scored once.

    Attributes:
        model: ``[P + Q]``.
        sets: the indices of the samples in each set.
        clients: the clients whose model it is; empty for a model that the server evaluates on its proxy set.
        seen: for each set the client and the protocol, which decide how its samples are seen; empty if they are seen
            unchanged.
        buffers: the buffers ``[Q]`` of the model if they are not part of it.
    """

    model: Tensor
    sets: tuple[NDArray[np.int64], ...]
    clients: tuple[int, ...]
    seen: tuple[tuple[int, str], ...] = ()
    buffers: Tensor | None = None

    @classmethod
    def of(
        cls, model: Tensor, buffers: Tensor | None, owned: Sequence[tuple[int, str, NDArray[np.int64]]]
    ) -> "ScoringTask":
        """Returns the task to score a model on sets of clients: for each the client, its name and its samples."""
        return cls(
            model,
            tuple(indices for *_, indices in owned),
            tuple(dict.fromkeys(client for client, *_ in owned)),
            tuple((client, name.rpartition("/")[2]) for client, name, _ in owned),
            buffers,
        )

    def named(self, called: Callable[[int], str]) -> str:
        """Returns what the task is, in words; `called` gives what a client is called."""
        if not self.clients:
            return "evaluation on the proxy set"
        plural = "s" * (len(self.clients) > 1)
        return f"evaluation of the model of client{plural} {abbreviated(map(called, self.clients), 3)}"


Task = TrainingTask | ScoringTask
Outcome = TrainingResult | list[dict[str, float]] | Failure


class Worker:
    """Carries out the tasks of this rank with its engine.

    Args:
        fabric: device and precision of this rank.
        module: network, loss and optimizer.
        data: a federated data module that has been set up.
        method: the method, whose local update and exchange are used here.
        seed: the run's seed.
        engine: the engine that trains.
        max_steps: cuts every local run after so many steps.
        deadline: limits the seconds that a client's work may take; none if not given.
    """

    def __init__(
        self,
        fabric: Fabric,
        module: FederatedModule,
        data: FederatedDataModule,
        method: Method,
        seed: int,
        engine: ChosenEngine = ChosenEngine("sequential"),  # noqa: B008 - it cannot change
        max_steps: int | None = None,
        deadline: ClientDeadline | None = None,
    ) -> None:
        # Spawned ranks would otherwise share, and train, the same memory. On another device all of it is copied.
        module = module.replica() if fabric.device.type == "cpu" else copy.deepcopy(module)
        self.fabric = fabric
        self.module = module
        self.data = data
        self.method = method
        self.seed = seed
        self.deadline = deadline or ClientDeadline()
        self.engine = make_engine(engine, fabric, module, data, max_steps)
        self._frozen = module.frozen_fingerprint
        spec = data.dataset.spec
        numbers = spec.num_classes or blank_output(module, spec).numel()
        self._most_outputs = most_outputs(self.engine.most_clients * numbers)

    def run_all(self, tasks: Sequence[Task]) -> list[Outcome]:
        """Carries out tasks one by one or at once, depending on the engine, and returns the outcomes in the same order.

        An exception becomes a `Failure` of its task with the place of the exception. The other tasks continue. If a
        client's work takes too long, all tasks fail.
        """
        try:
            with self.deadline.interruptible():
                return self.engine.run_all([partial(self._run, task) for task in tasks])
        except ClientTookTooLong as error:
            return [Failure(str(error), kind=ClientTimeoutError)] * len(tasks)

    def run(self, task: Task) -> Outcome:
        """Carries out one task and returns its outcome; see `run_all`."""
        (outcome,) = self.run_all([task])
        return outcome

    def _run(self, task: Task, engine: SequentialEngine) -> Outcome:
        num_clients = len(task.sets) if isinstance(task, ScoringTask) else 1
        name = task.named(self.data.population.called)
        try:
            with self.deadline.limit(name, num_clients):
                return self.train(task, engine) if isinstance(task, TrainingTask) else self.score(task, engine)
        except ClientOutputError as error:
            return Failure(f"{name}, rank {self.fabric.global_rank}: {error}", kind=ClientOutputError)
        except Exception as error:
            said = f"{name}, rank {self.fabric.global_rank}: {type(error).__name__}: {shortened(str(error))}"
            if isinstance(error, ValueError) and _is_check_of_lcfl(error):
                return Failure(said, kind=ClientOutputError)
            return Failure(said, details_of(error))

    def train(self, task: TrainingTask, engine: SequentialEngine | None = None) -> TrainingResult:
        """Carries out one client's part of a round. All its random draws are addressed by (seed, round, client).

        Args:
            task: the task.
            engine: the engine that computes; the worker's engine if not given.
        """
        engine = engine or self.engine
        local_update = task.local_update or self.method.local_update
        indices = self.data.population.train[task.client]
        data = LocalData(indices, self.data.batch_size, self.seed, task.client, self.data.drop_last, task.round)
        engine.samples, engine.buffers = self.data.trained_on(task.client, task.round), task.state.buffers
        exchange = task.exchange or self.method.exchange
        with engine.seeded(self.seed, "local", task.round, task.client):
            with _unchanged(task, type(exchange).__name__):
                downlink = exchange.at_client(task.downlink, task.state, engine.layout)
            check_returned(f"{type(exchange).__name__}.at_client", downlink, Downlink)
            with _unchanged(task, type(local_update).__name__, downlink):
                output: LocalOutput = local_update(task.state, downlink, data, engine)
            if self._frozen is not None:
                self._check_frozen()
            check_output(
                type(local_update).__name__, output, engine.layout.size, may_be_empty=task.local_update is not None
            )
            address = task.round, task.client, *([task.extra] if task.extra else [])
            rng.seed_all(self.seed, "send", *address)  # what the user's exchange draws depends on no engine
            model = output.model if exchange.keeps_model else None
            own = engine.buffers if engine.module.keeps_buffers else None
            memory = task.state.memory if output.memory is None else output.memory
            state = ClientState(model, output.consumed, own, memory=memory)
            is_faulty = task.client in self.data.population.faulty
            sent, state = self._corrupted(output, state, downlink, task) if is_faulty else (output, state)
            with _unchanged(task, type(exchange).__name__, output=output):
                draw = rng.generator(self.seed, "upload", *address)
                payload = exchange.encode(sent, task.downlink, engine.layout, draw)
            check_payload(type(exchange).__name__, payload)
        uplink = Uplink(task.client, payload, len(indices))
        result = TrainingResult.of(uplink, output, state, bool(exchange.noises))
        return replace(result, state=task.state) if result.is_noisy and result.diverged else result

    def _check_frozen(self) -> None:
        """Refuses, after the first client, a network that changes what is frozen, such as a teacher that follows it."""
        if self.module.frozen_fingerprint != self._frozen:
            raise ValueError(
                f"model.network: {type(self.module.network).__name__} changes its frozen part as it trains. All "
                "clients of a rank share that part, and no model holds it. Register what the network updates itself as "
                "a buffer (register_buffer), or train it."
            )
        self._frozen = None

    def _corrupted(
        self, output: LocalOutput, state: ClientState, downlink: Downlink, task: TrainingTask
    ) -> tuple[LocalOutput, ClientState]:
        """Returns what a faulty client sends, and its state, which remembers what the server received instead."""
        layout, exchange, population = self.module.layout, task.exchange or self.method.exchange, self.data.population
        faults = population.faults_of(task.client, task.round)
        draw = rng.generator(self.seed, "fault", task.round, task.client, task.extra)
        sent = as_sent(faults, output, downlink, task.state.previous, layout.num_parameters, draw)
        differs = sent is not output and exchange.keeps_model and exchange.uploads_whole
        is_late = any(fault.answers_late for fault in population.faulty[task.client])
        previous = output.for_server[: layout.num_parameters] if is_late else None
        return sent, replace(state, received=sent.for_server if differs else None, previous=previous)

    def cost_of(self, task: TrainingTask) -> int:
        """Returns how many samples a task processes."""
        local_update = task.local_update or self.method.local_update
        num_samples, batch_size = len(self.data.population.train[task.client]), self.data.batch_size
        return local_update.cost(samples_per_epoch(num_samples, batch_size, self.data.drop_last), batch_size)

    @torch.no_grad()
    def score(self, task: ScoringTask, engine: SequentialEngine | None = None) -> list[dict[str, float]]:
        """Returns the loss and the module's metrics of a model on each set.

        Args:
            task: the task, without empty sets.
            engine: the engine that computes; the worker's engine if not given.
        """
        engine = engine or self.engine
        engine.buffers = task.buffers
        sets: dict[Samples, dict[int, NDArray[np.int64]]] = {}
        keys: list[tuple[Samples, int]] = []
        for indices, how in zip(task.sets, task.seen or [None] * len(task.sets), strict=True):
            seen = self.data.samples if how is None else self.data.seen_by(*how)
            sets.setdefault(seen, {})[id(indices)] = indices  # a set that clients share is scored once
            keys.append((seen, id(indices)))
        results: dict[tuple[Samples, int], dict[str, float]] = {}
        for seen, distinct in sets.items():
            union = np.unique(np.concatenate(list(distinct.values())))
            if len(union) > self._most_outputs:
                for key, indices in distinct.items():
                    pieces = self._scored(task.model, seen, indices, engine)
                    results[seen, key] = measure(engine.module, pieces, engine.module.metrics.clone())
                continue
            with engine.seeded(self.seed, "evaluate"):
                scores, targets = engine.scores(task.model, seen, union)
            for key, indices in distinct.items():
                rows = torch.from_numpy(np.searchsorted(union, indices))
                results[seen, key] = measure_once(engine.module, scores[rows], targets[rows])
        return [results[key] for key in keys]

    def _scored(
        self, model: Tensor, seen: Samples, indices: NDArray[np.int64], engine: SequentialEngine
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields outputs and targets of so many samples at a time that the outputs fit into `OUTPUT_BYTES`."""
        for start in range(0, len(indices), self._most_outputs):
            with engine.seeded(self.seed, "evaluate", start):
                batch = engine.scores(model, seen, indices[start : start + self._most_outputs])
            yield batch


def _unchanged(
    task: TrainingTask, by: str, downlink: Downlink | None = None, output: LocalOutput | None = None
) -> AbstractContextManager[None]:
    """Refuses a part of a method that changes in place what a client has received, what it keeps or what it returns."""
    held: dict[str, list[Mapping[str, Tensor]]] = {
        RECEIVED: [task.downlink.payload, *([] if downlink is None else [downlink.payload])],
        KEPT: [{name: each for name in VECTORS if (each := getattr(task.state, name)) is not None}],
        RETURNED: [] if output is None else [{"model": output.model}, _tensors(output.extras)],
    }
    return unchanged(held, ClientOutputError, by)


def _tensors(extras: Mapping[str, object]) -> dict[str, Tensor]:
    """Returns those of the user's extras that are tensors; the others are refused if the exchange sends them."""
    return {name: each for name, each in extras.items() if isinstance(each, Tensor)}


def _is_check_of_lcfl(error: Exception) -> bool:
    """Returns whether lcfl itself raised an exception, so that its message says everything.

    One that lcfl raised from another exception needs the place of that one, which may lie in the user's code.
    """
    if error.__cause__ is not None:
        return False
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and str(trace.tb_frame.f_globals.get("__name__")).startswith("lcfl.")


def details_of(error: Exception) -> str:
    """Returns the traceback of an exception, with long messages shortened."""
    text = "".join(traceback.format_exception(error))
    for each in (error, error.__cause__, error.__context__):
        text = text.replace(str(each), shortened(str(each), LONGEST_IN_TRACEBACK))
    return text


def most_outputs(numbers: int) -> int:
    """Returns how many outputs of so many numbers fit into `OUTPUT_BYTES`, at least one."""
    return max(1, OUTPUT_BYTES // (4 * max(1, numbers)))


@torch.no_grad()
def blank_output(module: FederatedModule, spec: SampleSpec) -> Tensor:
    """Returns the output ``[1, ...]`` of the network in evaluation mode for one blank sample, on the CPU."""
    with rng.isolated():
        output: Tensor = copy.deepcopy(module).cpu().eval()(spec.blank(1)[0])
    return output


def measure_once(module: FederatedModule, outputs: Tensor, targets: Tensor) -> dict[str, float]:
    """Returns the same as `measure` for a single batch, in less time if accuracy is the only metric."""
    if not module.has_accuracy_alone or outputs.dim() != targets.dim() + 1:
        return measure(module, [(outputs, targets)])
    if not counted_targets(module.loss, targets).numel():
        return {}
    has_loss = weight_in_loss(module.loss, targets) > 0
    loss = {"loss": float(module.loss(outputs, targets))} if has_loss else {}
    return loss | {"acc": accuracy(outputs, targets, module.loss)}


def measure(
    module: FederatedModule, batches: Iterable[tuple[Tensor, Tensor]], metrics: MetricCollection | None = None
) -> dict[str, float]:
    """Returns the loss and every metric of the module, by name; nothing if the loss ignores all targets.

    If the classes of all targets have a weight of 0, only the loss is missing.

    Args:
        module: the loss and the metrics. One that needs more than a single sample is left out for a single sample.
        batches: outputs ``[n, ...]`` and targets ``[n, ...]``, in one piece or in several.
        metrics: a copy of the module's metrics, needed if other models are measured between the pieces.
    """
    metrics = module.metrics if metrics is None else metrics
    metrics.reset()
    losses: list[float] = []
    weights: list[float] = []
    number = counted = 0
    for outputs, targets in batches:
        metrics.update(module.measured(outputs), targets)
        losses.append(float(module.loss(outputs, targets)))
        weights.append(weight_in_loss(module.loss, targets))
        number += len(targets)
        counted += counted_targets(module.loss, targets).numel()
    if not counted:
        return {}
    loss = {}
    if sum(weights):
        loss["loss"] = losses[0] if len(losses) == 1 else _weighted_mean(losses, weights)
    try:
        values: Mapping[str, Tensor] = metrics.compute()
    except Exception:
        values = dict(_computable(metrics, number))
    return {**loss, **{name: float(value) for name, value in values.items()}}


def _weighted_mean(values: Sequence[float], weights: Sequence[float]) -> float:
    """Returns the mean of the values that have a weight; the others may be nan."""
    return sum(value * weight for value, weight in zip(values, weights, strict=True) if weight) / sum(weights)


def _computable(metrics: MetricCollection, number: int) -> Iterator[tuple[str, Tensor]]:
    """Yields the metrics of a number of samples, of which one lacks some; R2, for example, needs two.

    Raises:
        ValueError: if another metric fails; names it.
    """
    for name, metric in metrics.items():
        try:
            yield str(name), metric.compute()
        except Exception as error:
            if number > 1 or not isinstance(error, ValueError):
                kind = type(metric).__name__
                raise ValueError(
                    f"model.metrics.{name}: {kind} fails on {number} samples ({type(error).__name__}: {error})"
                ) from error
