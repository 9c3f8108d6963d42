"""The hosts of a run. Each keeps the states of its own clients, and its ranks train and measure these clients.

The server asks the first rank of each host, and that rank hands the work to the ranks of its host. What crosses the
network for a client is what it is sent and what it sends, and not what it keeps.

Legend: P + Q length of a model's flat vector.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from lcfl.core.clients import ClientState, ClientStore
from lcfl.core.model_sums import ModelSums, Move
from lcfl.distributed.client_output import ClientError
from lcfl.distributed.connections import NetworkConnection
from lcfl.distributed.launch import LostRankError
from lcfl.distributed.rank_transport import TASKS_AT_A_TIME, RankTransport
from lcfl.distributed.ranks import Farewell, Ranks
from lcfl.distributed.tasks import EvaluationTask, Failure, Measured, TrainingResult, TrainingTask, raise_failures
from lcfl.distributed.worker import Worker, details_of
from lcfl.models.module import FederatedModule

__all__ = ["Host", "HostTransport", "Hosts", "StateElsewhere"]


@dataclass(frozen=True)
class StateElsewhere(ClientState):
    """Stands for a state that a host keeps. In a result, it is the state after the run.

    Attributes:
        owner: the number of the host.
        length: in a result, how many numbers its memory has; None without one.
    """

    owner: int = 0
    length: int | None = None

    @property
    def memory_length(self) -> int | None:
        """How many numbers the memory of the state has, as far as the server is told."""
        return self.length


class Host:
    """What one host of several does for the server. The server calls these methods through `Hosts`.

    Args:
        ranks: the ranks of this host, the first of which is this one.
        worker: the worker of this rank.
    """

    def __init__(self, ranks: Ranks, worker: Worker) -> None:
        self.ranks = ranks
        self._transport = RankTransport(ranks, worker)
        self._exchange, self._layout = worker.method.exchange, worker.module.layout
        self._clients = ClientStore(ClientState())
        self._trained: dict[int, ClientState] = {}  # states after the last runs, of which the server has to use some

    def serve(self) -> Any:
        """Does what the server asks for until the server is done, and returns the server's `result`."""
        assert self.ranks.group is not None, "there are several hosts"
        server = NetworkConnection(0, self.ranks.group)
        while not isinstance(message := server.receive(), Farewell):
            if isinstance(message, _Relay):
                before, after = (NetworkConnection(rank, self.ranks.group) for rank in (message.before, message.after))
                item = before.receive()
                after.send(
                    item if isinstance(item, Failure) else self._answer(message.method, item, *message.arguments)
                )
            else:
                method, arguments = message
                server.send((self._answer(method, *arguments), self.ranks.stop_signal))
        return message.result

    def open(self, blank: ClientState, folder: Path | None) -> None:
        """Begins to keep clients; see `ClientStore`."""
        self._clients = ClientStore(blank, folder)

    def map(self, tasks: Sequence[Any], costs: Sequence[float]) -> list[Any]:
        """Carries out tasks that need no state from here."""
        return self.ranks.map(tasks, costs)

    def train(self, tasks: Sequence[TrainingTask]) -> list[TrainingResult]:
        """Trains clients. The new states of those whose states are kept here stay here."""
        self._trained = {}
        results = self._transport.train([self._with_state(task) for task in tasks])
        return [self._without_state(*pair) for pair in zip(tasks, results, strict=True)]

    def evaluate(self, tasks: Sequence[EvaluationTask]) -> list[Measured]:
        """Measures models of clients whose states are kept here."""
        return self._transport.evaluate(map(self._with_state, tasks))

    def update(self, states: Mapping[int, ClientState]) -> None:
        """Stores states, and those that runs have left here."""
        here = {i: self._trained.pop(i) for i, state in states.items() if isinstance(state, StateElsewhere)}
        self._clients.update({**states, **here})

    def forget(self, clients: Sequence[int]) -> None:
        """Forgets the states of clients."""
        for client in clients:
            self._clients.forget(client)

    def call(self, function: Callable[[ClientStore, list[int]], Any], clients: list[int]) -> Any:
        """See `ClientStore.at_owners`."""
        return function(self._clients, clients)

    def move(self, sums: ModelSums, moves: Sequence[Move]) -> ModelSums:
        """Returns the sums after these moves of models that are kept here."""
        self._clients.move_models(sums, moves)
        return sums

    def _with_state(self, task: Any) -> Any:
        return replace(task, state=self._clients[task.client]) if isinstance(task.state, StateElsewhere) else task

    def _without_state(self, task: TrainingTask, result: TrainingResult) -> TrainingResult:
        """Returns the result without what stays here."""
        if not isinstance(task.state, StateElsewhere):
            return result
        assert result.state is not None, "ranks return states"
        exchange = task.exchange or self._exchange
        payload = exchange.decode(result.uplink.payload, task.downlink, self._layout)
        self._trained[task.client] = exchange.as_received(result.state, payload)
        model = torch.empty(0) if task.local_update is None else result.output.model  # others may want it
        output = replace(result.output, model=model, extras={}, memory=None)
        return replace(result, state=replace(task.state, length=result.state.memory_length), output=output)

    def _answer(self, method: str, *arguments: Any) -> Any:
        """Calls a method and returns its result, or the error as a `Failure`."""
        try:
            return getattr(self, method)(*arguments)
        except ClientError as error:
            return Failure(str(error), "\n".join(getattr(error, "__notes__", [])), type(error))
        except LostRankError:
            raise
        except Exception as error:
            return Failure(f"{type(self).__name__}.{method}: {type(error).__name__}: {error}", details_of(error))


class Hosts:
    """All hosts of a run, as the server sees them. The methods of `Host` are called on several at once.

    Args:
        host: the host of the server, which has number 0.

    Attributes:
        result: what `Host.serve` returns on the other hosts; the server sets it before it leaves.
    """

    def __init__(self, host: Host) -> None:
        group, hosts = host.ranks.group, host.ranks.hosts
        assert group is not None, "there are several hosts"
        self.result: Any = None
        self.sizes = [len(ranks) for ranks in hosts]
        self._host = host
        self._links = {number: NetworkConnection(ranks[0], group) for number, ranks in enumerate(hosts) if number}
        self._owed: set[int] = set()  # hosts that have not answered yet
        self._signal = 0

    def ask(self, method: str, arguments: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """Calls a method of several hosts at the same time.

        Args:
            method: the name of the method.
            arguments: its arguments, by host.

        Returns:
            Its results by host, in ascending order.
        """
        others = sorted(arguments.keys() - {0})
        for number in others:
            self._links[number].send((method, arguments[number]))
            self._owed.add(number)
        answers: dict[int, Any] = {}
        failed: Exception | None = None
        try:
            if 0 in arguments:
                answers[0] = getattr(self._host, method)(*arguments[0])
        except LostRankError:
            raise
        except Exception as error:  # of any kind, to be raised when the others have answered
            failed = error
        for number in others:
            answers[number], signal = self._links[number].receive()
            self._owed.remove(number)
            self._signal = self._signal or signal
        if failed is not None:
            raise failed
        raise_failures(list(answers.values()))
        return answers

    def relay(self, item: Any, method: str, arguments: Mapping[int, tuple[Any, ...]]) -> Any:
        """Hands an item from host to host, in ascending order. Each replaces it by what its method makes of it.

        The item crosses the network of a host once in each direction.
        """
        if 0 in arguments:
            item = getattr(self._host, method)(item, *arguments[0])
        chain = sorted(arguments.keys() - {0})
        if not chain:
            return item
        ranks = [0, *(self._links[number].peer for number in chain), 0]
        for place, number in enumerate(chain):
            self._owed.add(number)
            self._links[number].send(_Relay(method, arguments[number], ranks[place], ranks[place + 2]))
        self._links[chain[0]].send(item)
        item = self._links[chain[-1]].receive()
        self._owed.difference_update(chain)
        raise_failures([item])
        return item

    def map(self, tasks: Sequence[Any], costs: Sequence[float]) -> list[Any]:
        """Carries out tasks that need no state, on all ranks of all hosts, and returns the results in their order."""
        return self.spread("map", self.place(costs, [None] * len(tasks)), tasks, costs)

    def spread(self, method: str, places: Sequence[int], *columns: Sequence[Any]) -> list[Any]:
        """Calls a method of each host with the entries of the columns that are placed there.

        Returns the results, one for each entry, in the order of the entries.
        """
        positions: dict[int, list[int]] = {}
        for position, number in enumerate(places):
            positions.setdefault(number, []).append(position)
        answers = self.ask(
            method, {number: tuple([column[i] for i in own] for column in columns) for number, own in positions.items()}
        )
        results: list[Any] = [None] * len(places)
        for number, own in positions.items():
            for position, answer in zip(own, answers[number], strict=True):
                results[position] = answer
        return results

    def place(self, costs: Sequence[float], fixed: Sequence[int | None]) -> list[int]:
        """Assigns tasks to hosts so that the largest load of a rank is small.

        Args:
            costs: the cost of each task, in any unit.
            fixed: the host of each task that only one host can carry out; otherwise None.
        """
        loads, places = [0.0] * len(self.sizes), list(fixed)
        for number, cost in zip(fixed, costs, strict=True):
            if number is not None:
                loads[number] += cost / self.sizes[number]
        for position in sorted(range(len(costs)), key=lambda position: -costs[position]):
            if places[position] is None:
                after = [load + costs[position] / size for load, size in zip(loads, self.sizes, strict=True)]
                places[position] = number = after.index(min(after))
                loads[number] = after[number]
        return [number for number in places if number is not None]

    @property
    def stop_signal(self) -> int:
        """The number of the signal that requests a stop after this round, received on any rank; 0 for none."""
        return self._host.ranks.stop_signal or self._signal

    def __enter__(self) -> "Hosts":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends the other hosts, as `Ranks` ends the other ranks."""
        for number, link in self._links.items():
            if number not in self._owed:
                with suppress(LostRankError):
                    link.send(Farewell(self.result))


class HostTransport:
    """Hands the work of clients to all hosts. It is used on rank 0; the first ranks of the other hosts `Host.serve`.

    A task whose state a host keeps goes to that host. Any host carries out the others.

    Args:
        hosts: all hosts.
        worker: the worker of this rank.
    """

    def __init__(self, hosts: Hosts, worker: Worker) -> None:
        self._hosts, self._worker = hosts, worker
        self._anywhere = RankTransport(hosts, worker)
        self._blank = ClientState(buffers=worker.module.initial_buffers(worker.seed))

    @property
    def stop_signal(self) -> int:
        """The number of the signal that requests a stop after this round; 0 if there was none."""
        return self._hosts.stop_signal

    @property
    def module(self) -> FederatedModule:
        """The module in which this rank trains clients."""
        return self._worker.module

    def train(self, tasks: Sequence[TrainingTask]) -> list[TrainingResult]:
        """See `lcfl.distributed.transport.Transport.train`. No client is ever lost."""
        costs = [self._worker.cost_of(task) for task in tasks]
        return self._hosts.spread("train", self._hosts.place(costs, [_owner(task) for task in tasks]), tasks)

    def evaluate(self, tasks: Iterable[EvaluationTask]) -> list[Measured]:
        """See `lcfl.distributed.transport.Transport.evaluate`.

        Models that clients share are measured on any host, and the others where they are kept, some at a time.
        """
        owners: list[int | None] = []  # and not the tasks, which hold a downlink each
        waiting: list[EvaluationTask] = []
        kept: list[Measured] = []

        def measure_kept() -> None:
            places = [owner for task in waiting if (owner := _owner(task)) is not None]
            kept.extend(self._hosts.spread("evaluate", places, waiting))
            waiting.clear()

        def shared() -> Iterator[EvaluationTask]:
            for task in map(self._as_shared, tasks):
                owners.append(_owner(task))
                if owners[-1] is None:
                    yield task
                    continue
                waiting.append(task)
                if len(waiting) == TASKS_AT_A_TIME:
                    measure_kept()
            measure_kept()

        answers, own = iter(self._anywhere.evaluate(shared())), iter(kept)
        return [next(answers if owner is None else own) for owner in owners]

    def trivial_baseline(self, clients: Sequence[int]) -> list[dict[str, float]]:
        """See `lcfl.distributed.transport.Transport.trivial_baseline`."""
        return self._anywhere.trivial_baseline(clients)

    def score_on_proxy(self, models: Sequence[Tensor], buffers: Tensor | None) -> list[Mapping[str, float]]:
        """See `lcfl.distributed.transport.Transport.score_on_proxy`."""
        return self._anywhere.score_on_proxy(models, buffers)

    def _as_shared(self, task: EvaluationTask) -> EvaluationTask:
        """Returns the task with the blank state if the model is in the downlink."""
        is_whole = "model" in task.downlink.payload and not self._worker.module.keeps_buffers
        return replace(task, state=self._blank) if is_whole and task.local_update is None else task


@dataclass(frozen=True)
class _Relay:
    """Asks a host to receive an item from one rank, and to send what a method makes of it to another."""

    method: str
    arguments: tuple[Any, ...]
    before: int
    after: int


def _owner(task: TrainingTask | EvaluationTask) -> int | None:
    return task.state.owner if isinstance(task.state, StateElsewhere) else None
