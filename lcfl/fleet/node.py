"""A node: the machine of one client. It answers the server's messages, and what is private stays in its folder.

Legend: P + Q length of a model's flat vector.
"""

import hashlib
import json
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import lightning
import torch
from lightning.fabric import Fabric

import lcfl
from lcfl.core.clients import ClientState
from lcfl.core.messages import Downlink
from lcfl.core.schema import Array, Number, check_form
from lcfl.core.validation import abbreviated, shortened
from lcfl.data.datamodule import FederatedDataModule
from lcfl.distributed.tasks import TrainingResult, TrainingTask, measured_model, raise_failures
from lcfl.distributed.trivial_baseline import trivial_baselines
from lcfl.distributed.worker import ScoringTask, Worker
from lcfl.engines import choose_engine
from lcfl.federation.settings import Precision, Settings
from lcfl.federation.trial import check_batches, check_network, check_targets
from lcfl.fleet.data import described_spec, spec_digest
from lcfl.fleet.messages import Message
from lcfl.fleet.parcel import MessageError
from lcfl.fleet.parts import Parts, evaluation_parts, training_parts
from lcfl.fleet.states import NodeStates, Owner, state_name
from lcfl.methods.exchange import ModelKind
from lcfl.methods.method import Method
from lcfl.models.module import FederatedModule
from lcfl.runs.identity import describe, describe_module

__all__ = ["ANSWERS", "Node", "NodeSettings", "identity_of"]

RUN = re.compile(r"[0-9a-f]{32}")
# The fields of a request. `spec` is the digest of what the node's samples looked like when it joined, and `num_samples`
# how many it trained on. `after` names the state that the client goes on from, and `needed` is the first round whose
# state the server may still go back to.
ADDRESS: dict[str, Any] = {"run": str, "nonce": str, "identity": str, "spec": str, "num_samples": Number(int, 0)}
ADDRESS |= {"client": Number(int, 0), "num_clients": Number(int, 1)}
CLIENT = ADDRESS | {"round": int, "after": (str, None), "needed": (Number(int, 0), None)}
WORK = {"local_update": (dict, None), "exchange": (dict, None)}
REQUESTS = {
    "join": {"nonce": str, "lcfl": str, "sets": [str], "refused": (str, None)},
    "train": CLIENT | WORK | {"extra": Number(int, 0)},
    "evaluate": CLIENT | {"kinds": [WORK | {"kind": str, "sets": [str]}]},
    "trivial": ADDRESS,
}
METRICS = {str: {str: float}}
# The fields of an answer in addition to the nonce.
ANSWERS = {
    "join": {
        "lcfl": str,
        "identity": str,
        "name": str,
        "client": (Number(int, 0), None),
        "spec": dict,
        "sizes": {str: Number(int, 0, 2**31)},
        "fingerprint": str,
    },
    "train": {
        "loss": (float, None),
        "logged": {str: float},
        "num_steps": Number(int, 0),
        "num_samples": Number(int, 1),
        "diverged": bool,
    },
    "evaluate": {"metrics": [METRICS]},
    "trivial": {"metrics": {str: float}},
    "refused": {"reason": str},
}


@dataclass(frozen=True)
class NodeSettings:
    """What a node decides itself.

    Args:
        folder: where the private states of its client are kept.
        name: what the server calls the client; None for what its data call it, or else for its `place` or the name of
            the machine.
        place: which client of the node's data it is; None if there is only one.
        number: the number that it asks for in the federation; None for any.
        begins_anew: whether its client goes on as if it had never taken part if a state that it needs is lost.
    """

    folder: Path
    name: str | None = None
    place: int | None = None
    number: int | None = None
    begins_anew: bool = False


class Node:
    """Answers messages. Every message is answered from what is on the disk, so the node may be restarted at any time.

    Args:
        module: network, loss and optimizer.
        method: the method.
        data: the node's own data section.
        trainer: the settings of the run, of which a node uses device, precision, engine and seed.
        own: what the node decides itself.

    Raises:
        ValueError: if network and data do not fit together; says what to change.
    """

    def __init__(
        self, module: FederatedModule, method: Method, data: FederatedDataModule, trainer: Settings, own: NodeSettings
    ) -> None:
        self.module, self.method, self.seed, self.own = module, method, trainer.seed, own
        self.identity = identity_of(module, method, trainer.seed)
        try:
            check_network(module, data)
        except ValueError as error:
            raise ValueError(f"{error} The network is that of the run, so a node changes its data instead.") from error
        self.engine = choose_engine(trainer.engine, module, data, trainer.device_type, trainer.precision)
        precision = cast(Precision, trainer.precision)
        self._fabric = Fabric(accelerator=trainer.device_type, devices=1, precision=precision)
        if data.faults:
            raise ValueError("data.faults: only simulations have them; set faults: [] in the data section of the node.")
        data.prepare_data()
        data.setup()
        if own.place is None and data.num_clients > 1:
            named = data.population.names
            who = "" if named is None else f" ({abbreviated(named)})"
            raise ValueError(
                f"client: the data section has {data.num_clients} clients{who}, but a node is one client: give its "
                "number as client, or a data section with one client. Without a partition, all samples are its own."
            )
        self._own_place = own.place or 0
        if not 0 <= self._own_place < data.num_clients:
            raise ValueError(f"client: got {own.place}, but the data section has {data.num_clients}; the first is 0.")
        self._whole, self.place, self._initial = data, (0, 1), self._first_state()
        self._worker = self._placed()
        check_batches(module, self.data, method.local_update)
        check_targets(module, self.data)

    @property
    def name(self) -> str:
        """What the server calls the client."""
        names = self._whole.population.names
        if names is not None:
            return self.own.name or names[self._own_place]
        return self.own.name or (socket.gethostname() if self.own.place is None else f"client {self.own.place}")

    @property
    def data(self) -> FederatedDataModule:
        """The data of the node's client. All other clients of the federation have no samples here."""
        return self._worker.data

    def _placed(self) -> Worker:
        """Returns a worker for the client under its number in the federation."""
        data = self._whole.alone(self._own_place, *self.place)
        return Worker(self._fabric, self.module, data, self.method, self.seed, self.engine)

    def _first_state(self) -> ClientState:
        """Returns the state of a client that has never taken part."""
        initial = self.module.initial_model(self.seed)[: self.module.layout.size]
        kept = initial if self.method.exchange.keeps_model else None
        return ClientState(model=kept, buffers=self.module.initial_buffers(self.seed))

    def answer(self, message: Message) -> Message:
        """Returns the answer to a message, or in words why there is none."""
        nonce = message.fields.get("nonce")
        try:
            if message.kind not in REQUESTS:
                raise MessageError(f"a message of the unknown kind {message.kind!r:.40}.")
            check_form("", dict(message.fields), REQUESTS[message.kind], {})
            answer = self._answers[message.kind](self, message)
        except Exception as error:  # also of the user's own network: the server must hear of it
            words = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            answer = Message("refused", {"reason": shortened(words)})
        return Message(answer.kind, {"nonce": nonce, **answer.fields}, answer.arrays)

    def join(self, message: Message) -> Message:
        """Says what the server must know of the client: its name, the form of its samples and how many they are."""
        wanted, own = message.fields["sets"], self.data.population.sets(self.data.protocols)
        if missing := [name for name in wanted if name not in own]:
            raise MessageError(
                f"the federation tests on {', '.join(missing)}, but the data section of this node has only "
                f"{', '.join(own)}: set data.protocols."
            )
        place = self.place[0]
        sizes = {"train": len(self.data.population.train[place])} | {name: len(own[name][place]) for name in wanted}
        return Message(
            "join",
            {
                "lcfl": lcfl.__version__,
                "identity": self.identity,
                "name": self.name,
                "client": self.own.number,
                "spec": self._spec,
                "sizes": sizes,
                "fingerprint": self.data.samples.fingerprint(),
            },
        )

    @property
    def _spec(self) -> dict[str, Any]:
        return described_spec(self.data.dataset, self.data.samples)

    def train(self, message: Message) -> Message:
        """Trains as the server asks and keeps the new private state."""
        told = message.fields
        parts = training_parts(self.method, told["num_clients"], told)
        task, states = self._task(message, parts), self._states(message)
        result = self._run(task)
        assert result.state is not None, "a worker returns the state"
        if task.round >= 0 and not task.extra:
            states.keep(state_name(task.round, told["nonce"]), result.state)
        if told["needed"] is not None:
            states.forget_before(told["needed"])
        output = result.output
        return Message(
            "train",
            {
                "loss": None if output.loss is None else float(output.loss),
                "logged": {name: float(value) for name, value in output.logged.items()},
                "num_steps": output.num_steps,
                "num_samples": result.uplink.num_samples,
                "diverged": result.diverged,
            },
            result.uplink.payload,
        )

    def evaluate(self, message: Message) -> Message:
        """Measures models of several kinds on the client's own sets of samples."""
        metrics = []
        for number, wanted in enumerate(message.fields["kinds"]):
            first = f"{number}/"
            arrays = {name.removeprefix(first): each for name, each in message.arrays.items() if name.startswith(first)}
            parts = evaluation_parts(self.method, wanted["kind"], wanted)
            task = self._task(Message(message.kind, {**message.fields, **wanted}, arrays), parts)
            metrics.append(self._measured(task, wanted["kind"], wanted["sets"], self._states(message)))
        return Message("evaluate", {"metrics": metrics})

    def _measured(
        self, task: TrainingTask, kind: ModelKind, names: list[str], states: NodeStates
    ) -> dict[str, dict[str, float]]:
        """Returns the metrics of the client's model of one kind, by set. The model is kept for its owner.

        Only newcomers are measured with another exchange: before they train, and after it.
        """
        result = None if task.local_update is None else self._run(task)
        model, buffers = measured_model(task, kind, self.method.exchange, self.module.layout, result)
        if task.exchange is None or result is not None:
            network = self.module.network_of(model, buffers, self.module.initial_frozen(self.seed))
            owner = Owner(self.identity, self._own_place)
            states.keep_model("newcomer" if task.exchange else kind, network.state_dict(), owner, self._spec)
        sets = {"train": self.data.population.train} | self.data.population.sets(self.data.protocols)
        if unknown := [name for name in names if name not in sets]:
            raise MessageError(f"this node has no samples of {', '.join(unknown)}.")
        owned = [(task.client, name, sets[name][task.client]) for name in names]
        measured = self._worker.run(ScoringTask.of(model, buffers, owned))
        raise_failures([measured])
        return dict(zip(names, cast(list[dict[str, float]], measured), strict=True))

    def trivial(self, message: Message) -> Message:
        """Measures a model that always predicts the same."""
        self._checked(message.fields)
        (values,) = trivial_baselines(self.module, self.data, [message.fields["client"]], self.seed)
        return Message("trivial", {"metrics": values})

    _answers: Mapping[str, Callable[["Node", Message], Message]] = {
        "join": join,
        "train": train,
        "evaluate": evaluate,
        "trivial": trivial,
    }

    def _task(self, message: Message, parts: Parts) -> TrainingTask:
        """Returns what a message asks for, with the client's state."""
        told = message.fields
        self._checked(told)
        for name, array in message.arrays.items():
            # Every downlink of lcfl consists of vectors and matrices of parameters.
            check_form(name, array, Array((None,) * array.dim()), {})
        state, downlink = self._states(message)[told["after"]], Downlink(message.arrays)
        return TrainingTask(told["client"], told["round"], state, downlink, *parts, told.get("extra", 0))

    def _checked(self, told: Mapping[str, Any]) -> None:
        """Refuses a message for another network, method or form of data, and takes its number of this client."""
        if told["identity"] != self.identity:
            raise MessageError(
                "the message is for another network, method, seed or version of lcfl than this node has: install the "
                "app of the run anew."
            )
        if told["spec"] != spec_digest(self._spec):
            raise MessageError(
                "the samples of this node look different from before, in shape, type, classes, columns or "
                "normalisation: set its data section back."
            )
        if (size := len(self.data.population.train[self.place[0]])) != told["num_samples"]:
            raise MessageError(
                f"this node has {size} training samples, and had {told['num_samples']} when it joined: set its data "
                "back, or start the server again with ckpt-path='last', which takes the new number."
            )
        if told["client"] >= told["num_clients"]:
            raise MessageError(f"client {told['client']} of {told['num_clients']}.")
        if (place := (told["client"], told["num_clients"])) != self.place:
            self.place = place
            self._worker = self._placed()

    def _states(self, message: Message) -> NodeStates:
        run, client = message.fields["run"], message.fields["client"]
        if not RUN.fullmatch(run):
            raise MessageError(f"{run!r:.40} is no run.")
        return NodeStates(self.own.folder / run / f"client-{client}", self._initial, self.own.begins_anew)

    def _run(self, task: TrainingTask) -> TrainingResult:
        result = self._worker.run(task)
        raise_failures([result])
        assert isinstance(result, TrainingResult)
        return result


def identity_of(module: FederatedModule, method: Method, seed: int) -> str:
    """Returns a text that is equal on server and node if they have the same network, method, seed and versions.

    It also sets what is frozen in the network, as in initial model 0.
    """
    if (frozen := module.initial_frozen(seed)) is not None and module.frozen_layout is not None:
        module.frozen_layout.unpack(frozen, module.network)
    content = {
        "lcfl": lcfl.__version__,
        "torch": torch.__version__.partition("+")[0],
        "lightning": lightning.__version__,
        "seed": seed,
        "model": {key: each for key, each in describe_module(module).items() if key != "numbers_kept"},
        "init_from": module.initial_fingerprint,
        "frozen": module.frozen_fingerprint,
        "method": method,
    }
    return hashlib.sha256(json.dumps(describe(content), sort_keys=True).encode()).hexdigest()
