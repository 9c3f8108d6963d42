"""The transport of a federation whose clients are machines of their own.

Legend: N clients, P + Q length of a model's flat vector.
"""

import math
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from pathlib import Path
from secrets import token_hex
from typing import Any, ClassVar

import torch
from torch import Tensor

from lcfl.core.callback import Callback
from lcfl.core.messages import Uplink, all_finite
from lcfl.core.metric_names import is_reserved
from lcfl.core.schema import Forms, check_form
from lcfl.core.state import FederationState
from lcfl.core.validation import abbreviated
from lcfl.distributed.stop_flag import StopFlag
from lcfl.distributed.tasks import EvaluationTask, Lost, Measured, TrainingResult, TrainingTask
from lcfl.distributed.worker import ScoringTask, Worker
from lcfl.fleet.data import spec_digest
from lcfl.fleet.members import Member, is_word, write_members
from lcfl.fleet.messages import Message
from lcfl.fleet.parcel import MessageError
from lcfl.fleet.parts import described_part
from lcfl.fleet.post import Check, Post
from lcfl.fleet.states import state_name
from lcfl.methods.local.training import LocalOutput
from lcfl.methods.method import Method
from lcfl.models.layout import Layout
from lcfl.runs.checkpoint import NAME
from lcfl.server.server import Server

__all__ = ["Fleet", "FleetRecord"]


class FleetRecord(Callback):
    """Remembers which state each client goes on from: the one after its last answer that the server used.

    It is part of every checkpoint, so a resumed run takes its clients back to where they were. Nodes keep the states
    that the server may go back to: those that a checkpoint needs. The file ``fleet.json`` says who the clients are.

    Args:
        run: identifies the run.
        members: the clients by number.
    """

    remembers: ClassVar[Forms] = {"after": {int: str}, "rounds": {int: int}}

    def __init__(self, run: str, members: Mapping[int, Member]) -> None:
        self.run, self.members = run, dict(members)
        self._after: dict[int, str] = {}
        self._rounds: dict[int, int] = {}
        self._saved: dict[str, dict[int, int]] = {}  # the rounds of the states that each checkpoint needs, by its name
        self._needs_all = False  # whether there are checkpoints of which this process does not know what they need
        self._asked: dict[int, str] = {}

    def asked(self, client: int, nonce: str) -> None:
        """Notes the latest request to a client."""
        self._asked[client] = nonce

    def of(self, client: int) -> dict[str, Any]:
        """Returns what a request tells a client of its states."""
        rounds = [saved.get(client) for saved in self._saved.values()]
        known = [number for number in rounds if number is not None]
        keeps_all = self._needs_all or not rounds or len(known) < len(rounds)
        return {"after": self._after.get(client), "needed": None if keeps_all else min(known)}

    def on_fit_start(self, server: Server) -> None:
        """Writes ``fleet.json``."""
        write_members(server.run_dir, self.run, self.members)

    def on_uploads(self, state: FederationState, uploads: Sequence[Uplink]) -> None:
        """Notes the clients whose answers are used in this round."""
        for upload in uploads:
            self._rounds[upload.client] = state.round
            self._after[upload.client] = state_name(state.round, self._asked[upload.client])

    def on_checkpoint(self, path: Path) -> None:
        """Notes which states the new checkpoint needs, and forgets those that have been removed."""
        left = {each.name for each in path.parent.iterdir() if NAME.fullmatch(each.name)}
        saved = self._saved | {path.name: dict(self._rounds)}
        self._saved = {name: rounds for name, rounds in saved.items() if name in left}
        self._needs_all = bool(left - self._saved.keys())


class Fleet:
    """Hands the work of clients to the nodes of a fleet, as a `lcfl.distributed.transport.Transport`.

    A client whose node does not answer in time, or whose answer is refused, is lost for the round; a warning says why.
    Rounds before training wait for all their clients.

    Args:
        post: sends requests and waits for answers.
        identity: see `lcfl.fleet.node.identity_of`.
        num_clients: N.
        method: the method.
        layout: the layout of models.
        record: knows the clients, and the states that they go on from.
        newcomers: the clients that no round waits for.
        metrics: the names of the metrics that clients measure.
        flag: this process's stop flag.
        proxy: a worker with the server's proxy set; None without one.
    """

    def __init__(
        self,
        post: Post,
        identity: str,
        num_clients: int,
        method: Method,
        layout: Layout,
        record: FleetRecord,
        newcomers: Collection[int],
        metrics: Collection[str],
        flag: StopFlag,
        proxy: Worker | None = None,
    ) -> None:
        self._post, self._identity, self._num_clients = post, identity, num_clients
        self._method, self._layout, self._record, self._flag, self._proxy = method, layout, record, flag, proxy
        self._newcomers, self._metrics = frozenset(newcomers), frozenset(metrics)

    @property
    def stop_signal(self) -> int:
        """The number of the signal that requests a stop after this round; 0 if there was none."""
        return self._flag.signal

    @property
    def module(self) -> None:
        """None, because all clients train on nodes."""

    def train(self, tasks: Sequence[TrainingTask]) -> list[TrainingResult | Lost]:
        """See `lcfl.distributed.transport.Transport.train`."""
        requests = {}
        for task in tasks:
            nonce = token_hex(8)
            self._record.asked(task.client, nonce)
            told = self._record.of(task.client) | {"round": task.round, "extra": task.extra, "nonce": nonce}
            told["local_update"] = described_part(task.local_update)
            told["exchange"] = described_part(task.exchange)
            requests[task.client] = self._request("train", task.client, told, task.downlink.payload)
        is_opening = any(task.round < 0 for task in tasks)
        by_client = {task.client: task for task in tasks}
        answers = self._ask(
            requests,
            lambda client, answer: self._check(by_client[client], answer),
            len(requests) if is_opening else None,
        )
        if tasks:
            self._warn(f"round {tasks[0].round}" if tasks[0].round >= 0 else "additional round", answers)
        return [self._result(task, answers[task.client]) for task in tasks]

    def evaluate(self, tasks: Iterable[EvaluationTask]) -> list[Measured | Lost]:
        """See `lcfl.distributed.transport.Transport.evaluate`."""
        tasks = list(tasks)
        by_client: dict[int, list[EvaluationTask]] = {}
        for task in tasks:
            by_client.setdefault(task.client, []).append(task)
        requests = {client: self._evaluation(client, own) for client, own in by_client.items()}
        answers = self._ask(requests, lambda client, answer: self._check_metrics(answer, by_client[client]))
        if tasks:
            self._warn(f"evaluation after {tasks[0].round} rounds", answers)
        places: dict[int, Iterator[Measured | Lost]] = {
            client: repeat(own) if isinstance(own, Lost) else iter(own.fields["metrics"])
            for client, own in answers.items()
        }
        return [next(places[task.client]) for task in tasks]

    def trivial_baseline(self, clients: Sequence[int]) -> list[Mapping[str, float] | Lost]:
        """See `lcfl.distributed.transport.Transport.trivial_baseline`."""
        requests = {client: self._request("trivial", client, {}, {}) for client in clients}
        answers = self._ask(requests, lambda client, answer: self._check_protocols(client, answer))
        return [each if isinstance(each, Lost) else each.fields["metrics"] for each in answers.values()]

    def score_on_proxy(self, models: Sequence[Tensor], buffers: Tensor | None) -> list[Mapping[str, float]]:
        """See `lcfl.distributed.transport.Transport.score_on_proxy`. The server scores these models itself."""
        assert self._proxy is not None, "there is a proxy set"
        indices = self._proxy.data.population.proxy
        return [self._proxy.score(ScoringTask(model, (indices,), (), buffers=buffers))[0] for model in models]

    def _evaluation(self, client: int, tasks: Sequence[EvaluationTask]) -> Message:
        """Returns one request for all kinds of model of a client."""
        kinds = [
            {
                "kind": task.kind,
                "local_update": described_part(task.local_update),
                "exchange": described_part(task.exchange),
                "sets": list(task.sets),
            }
            for task in tasks
        ]
        arrays = {
            f"{number}/{name}": tensor
            for number, task in enumerate(tasks)
            for name, tensor in task.downlink.payload.items()
        }
        told = self._record.of(client) | {"round": tasks[0].round, "kinds": kinds}
        return self._request("evaluate", client, told, arrays)

    def _request(self, kind: str, client: int, told: Mapping[str, Any], arrays: Mapping[str, Tensor]) -> Message:
        member = self._record.members.get(client)  # a request to nobody is not sent
        address = {
            "run": self._record.run,
            "identity": self._identity,
            "spec": "" if member is None else spec_digest(member.spec),
            "num_samples": 0 if member is None else member.sizes["train"],
            "client": client,
            "num_clients": self._num_clients,
        }
        return Message(kind, address | dict(told), arrays)

    def _ask(
        self, requests: Mapping[int, Message], check: Check = lambda client, answer: None, enough: int | None = None
    ) -> dict[int, Message | Lost]:
        """Returns the answers of clients, in the order of the requests. No newcomer is waited for without end."""
        if self._newcomers.issuperset(requests):
            enough = 0
        known = {client: self._record.members[client].node for client in requests if client in self._record.members}
        number = {node: client for client, node in known.items()}
        self._post.names = {node: self._record.members[client].name for client, node in known.items()}
        answers = self._post.ask(
            {node: requests[client] for client, node in known.items()},
            enough,
            lambda node, answer: check(number[node], answer),
        )
        nobody = Lost("no node has this number")
        return {client: answers[known[client]] if client in known else nobody for client in requests}

    def _check(self, task: TrainingTask, answer: Message) -> None:
        """Refuses an upload of another form than the exchange defines, with another weight or with reserved names."""
        told, exchange = answer.fields, task.exchange or self._method.exchange
        member, centres = self._record.members[task.client], task.downlink.payload.get("centres", ())
        sizes = {"K": len(centres), "D": math.prod(member.spec["shape"])}
        try:
            if told["num_samples"] != (size := member.sizes["train"]):
                raise MessageError(f"it has {told['num_samples']} training samples, but joined with {size}")
            if bad := [name for name in told["logged"] if is_reserved(name) or not is_word(name)]:
                raise MessageError(f"it logs {bad[0]!r:.40}, which is reserved")
            payload = exchange.decode(answer.arrays, task.downlink, self._layout)
            forms = exchange.upload_forms(self._layout)
            if payload.keys() != forms.keys():
                raise MessageError(f"it uploads {', '.join(payload) or 'nothing'} instead of {', '.join(forms)}")
            for name, form in forms.items():
                check_form(name, payload[name], form, sizes)
            if all(map(all_finite, answer.arrays.values())) and not all(map(all_finite, payload.values())):
                raise MessageError("it is not finite after it was decoded")
        except Exception as error:  # of any kind, from a decoder that meets an upload that it has not encoded
            raise MessageError(f"the upload was refused: {error}") from None

    def _check_metrics(self, answer: Message, tasks: Sequence[EvaluationTask]) -> None:
        """Refuses an answer with metrics of other sets than those of a client's tasks, or with other metrics."""
        metrics = answer.fields["metrics"]
        if [set(each) for each in metrics] != [set(task.sets) for task in tasks]:
            raise MessageError("the answer was refused: it has metrics of other sets")
        measured = [each for sets in metrics for each in sets.values() if each]  # a set may have none, see `measure`
        needed = self._metrics - {"loss"}  # which is not defined if all targets have a weight of 0
        if not all(needed <= each.keys() <= self._metrics for each in measured):
            raise MessageError(f"the answer was refused: it must have {', '.join(sorted(self._metrics))}")
        if not all(0 <= each.get("acc", 0) <= 1 or math.isnan(each["acc"]) for each in measured):
            raise MessageError("the answer was refused: an accuracy must lie from 0 to 1")

    def _check_protocols(self, client: int, answer: Message) -> None:
        """Refuses an answer that has another form than the client's tests."""
        tests = [name.removeprefix("test/") for name in self._record.members[client].sizes if name.startswith("test/")]
        if answer.fields["metrics"].keys() != set(tests):
            raise MessageError(f"the answer was refused: it must be about {', '.join(tests)}")

    def _result(self, task: TrainingTask, answer: Message | Lost) -> TrainingResult | Lost:
        """Returns the result in an answer."""
        if isinstance(answer, Lost):
            return answer
        told, exchange = answer.fields, task.exchange or self._method.exchange
        output = LocalOutput(torch.empty(0), 0, told["loss"], told["logged"], told["num_steps"])
        diverged = told["diverged"] or not math.isfinite(told["loss"] or 0.0)
        uplink = Uplink(task.client, answer.arrays, told["num_samples"])
        return TrainingResult(uplink, output, None, diverged, bool(exchange.noises))

    def _warn(self, what: str, results: Mapping[int, object]) -> None:
        """Warns of the clients that are lost, with the reasons."""
        lost = {client: each.reason for client, each in results.items() if isinstance(each, Lost)}
        if lost:
            names = {client: f" ({member.name})" for client, member in self._record.members.items()}
            said = abbreviated(f"{client}{names.get(client, '')}: {reason}" for client, reason in lost.items())
            warnings.warn(f"{what}: {len(lost)} of {len(results)} clients are left out: {said}.", stacklevel=3)
