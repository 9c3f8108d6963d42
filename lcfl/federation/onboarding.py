"""Newcomers: clients that were kept out of a federation join it after its end; nothing of it is trained again."""

import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from lightning.fabric import Fabric
from numpy.typing import NDArray
from torch import Tensor

from lcfl.core.callback import with_state_keys
from lcfl.core.files import write_bytes, write_json
from lcfl.core.messages import Downlink, Uplink
from lcfl.core.state import FederationState
from lcfl.data.datamodule import FederatedDataModule
from lcfl.data.protocols import PLAIN
from lcfl.distributed.launch import one_thread
from lcfl.distributed.worker import EvaluationTask, TrainingResult, TrainingTask, Worker
from lcfl.engines import choose_engine
from lcfl.methods.exchange import Exchange, FullModel
from lcfl.methods.local.training import LocalTraining, LocalUpdate
from lcfl.methods.method import Method
from lcfl.models.layout import Layout
from lcfl.models.module import FederatedModule
from lcfl.runs import checkpoint
from lcfl.runs.identity import differences
from lcfl.server.evaluation import local_sets, raise_failures
from lcfl.server.metrics import Evaluation

__all__ = ["OnboardedClient", "Newcomer", "OnboardingResult", "onboard"]

NO_CLUSTERS = "none: the method has no clusters"
STAGES = ("before", "after")


@dataclass(frozen=True)
class OnboardedClient:
    """How one newcomer fared.

    Attributes:
        client: its number.
        group: its true group, None where that is not known.
        cluster: the one that it joined, None for a method without clusters.
        down_bytes: sent to it, the model that it was given included.
        up_bytes: sent by it.
    """

    client: int
    group: int | None
    cluster: int | None
    down_bytes: int
    up_bytes: int


@dataclass(frozen=True)
class OnboardingResult:
    """What `onboard` found.

    Attributes:
        checkpoint: of the federation that was joined.
        rule: how a cluster was found, in words.
        epochs: of personalisation.
        joined: the newcomers.
        evaluation: of each newcomer, ``<stage>/<protocol>/before/<metric>`` of the model that it was given and
            ``.../after/...`` of what became of that model in `epochs` epochs on the newcomer's training images.
    """

    checkpoint: Path
    rule: str
    epochs: int
    joined: list[OnboardedClient]
    evaluation: Evaluation

    def rows(self) -> list[dict[str, Any]]:
        """One row per newcomer: who it is, its cluster, its bytes and its metrics, None where it has no such data."""
        values = {
            name: dict(zip(metric.clients.tolist(), metric.values.tolist(), strict=True))
            for name, metric in self.evaluation.by_name.items()
        }
        return [
            vars(each) | {name: by_client.get(each.client) for name, by_client in values.items()}
            for each in self.joined
        ]

    def write(self, folder: Path) -> None:
        """``newcomers.json`` and ``newcomers.csv``."""
        rows = self.rows()
        content = {
            "checkpoint": self.checkpoint.name,
            "rule": self.rule,
            "epochs": self.epochs,
            "metrics": self.evaluation.summary(),
            "newcomers": rows,
        }
        write_json(folder / "newcomers.json", content, indent=2)
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, rows[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_bytes(folder / "newcomers.csv", text.getvalue().encode())


class Newcomer:
    """One client that joins: works and measures on its own images, and counts what crosses the wire.

    Args:
        client: its number.
        worker: carries the work out.
        state: of the federation.
        layout: of the models.
    """

    def __init__(self, client: int, worker: Worker, state: FederationState, layout: Layout) -> None:
        self.client, self.layout = client, layout
        self.down_bytes = self.up_bytes = 0
        self._worker, self._round = worker, state.round
        self._own = state.clients[client]  # blank

    def run(self, downlink: Downlink, exchange: Exchange, local_update: LocalUpdate | None = None) -> Uplink:
        """See `lcfl.methods.clustering.base.NewcomerView.run`.

        Raises:
            ValueError: if the local run diverges.
        """
        uplink = self._train(downlink, exchange, local_update).uplink
        self.down_bytes += downlink.num_bytes
        self.up_bytes += uplink.num_bytes
        return uplink

    def losses(self, model_KP: Tensor) -> list[float]:
        """See `lcfl.methods.clustering.base.NewcomerView.losses`."""
        self.down_bytes += Downlink({"models": model_KP}).num_bytes
        images = self._worker.data.population.train[self.client]
        return [self.measure(model, [images], [self.client])[0]["loss"] for model in model_KP]

    def personalise(self, model: Tensor, epochs: int) -> Tensor:
        """What becomes of a model ``[P + Q]`` in so many epochs of plain training, without pulls.

        From then on the client is measured with its own buffers where these are not part of a model.
        """
        result = self._train(Downlink({"model": model}), FullModel(), LocalTraining(epochs=epochs))
        if result.state.buffers is not None:
            self._own = result.state
        return result.output.model

    def measure(
        self, model: Tensor, sets: list[NDArray[np.int64]], owners: list[int | None] | list[int]
    ) -> list[dict[str, float]]:
        """The metrics of a model on sets of images as their owners see them, None: as they are."""
        task = EvaluationTask(model, tuple(sets), (self.client,), tuple(owners), self._own.buffers)
        values = self._worker.run(task)
        raise_failures([values])
        return cast(list[dict[str, float]], values)

    def _train(self, downlink: Downlink, exchange: Exchange, local_update: LocalUpdate | None) -> TrainingResult:
        task = TrainingTask(self.client, self._round, self._own, downlink, local_update, exchange)
        result = self._worker.run(task)
        raise_failures([result])
        assert isinstance(result, TrainingResult)
        if not result.is_finite():
            raise ValueError(f"newcomer {self.client}: its local run diverged. A smaller learning rate may help.")
        return result


@one_thread()
def onboard(
    path: Path,
    module: FederatedModule,
    data: FederatedDataModule,
    method: Method,
    epochs: int = 5,
    accelerator: Literal["auto", "cpu", "cuda"] = "auto",
) -> OnboardingResult:
    """Brings the newcomers of a run into its federation, one by one (FedClust Algorithm 2 and section 5.2).

    Each is placed into a cluster by the method's first clustering, is given the model that the server would send
    to a member that never took part, and trains it for some epochs on its own images, plainly and without pulls
    whatever the method. No newcomer changes anything for the federation or for the other newcomers.

    Args:
        path: a checkpoint.
        module: as in the run.
        data: as in the run.
        method: as in the run; a setting that matters after the last round only, e.g. of `Clustering.place_newcomer`,
            may differ.
        epochs: of personalisation.
        accelerator: ``auto`` is CUDA where there is some.

    Raises:
        ValueError: if the run kept no newcomers out, or it is one of other data.
    """
    if not data.newcomer_clients:
        raise ValueError("onboard: the run kept no newcomers out of its federation; train one with data.newcomers > 0.")
    if epochs < 1:
        raise ValueError(f"onboard: got epochs={epochs}; it must be at least 1.")
    saved = checkpoint.read(path)
    data.prepare_data()
    data.setup()
    _check(saved, data)
    state = saved.state
    for key, clustering in with_state_keys(method.clustering):
        clustering.load_state_dict(state.callbacks[key])
    if accelerator == "auto":  # as in `Federation`: Fabric's own choice may be another kind of device
        accelerator = "cuda" if torch.cuda.is_available() else "cpu"
    fabric = Fabric(accelerator=accelerator, devices=1, precision=saved.identity["precision"])
    engine = choose_engine("auto", module, data, fabric.device.type, saved.identity["precision"])
    worker = Worker(fabric, module, data, method, int(saved.identity["seed"]), engine)
    joined, evaluation, groups = [], _Measured(), data.population.groups
    for client in data.newcomer_clients:
        newcomer = Newcomer(client, worker, state, module.layout)
        cluster = method.clustering[0].place_newcomer(newcomer, state) if method.is_clustered else None
        state.assignment[client] = cluster or 0
        newcomer.down_bytes += method.exchange.down(state, client, module.layout).num_bytes
        given = method.exchange.personal(state, client, module.layout)
        evaluation.add("before", newcomer, given, data)
        evaluation.add("after", newcomer, newcomer.personalise(given, epochs), data)
        group = None if groups is None else int(groups[client])
        joined.append(OnboardedClient(client, group, cluster, newcomer.down_bytes, newcomer.up_bytes))
    rule = method.clustering[0].newcomer_rule if method.is_clustered else NO_CLUSTERS
    return OnboardingResult(path, rule, epochs, joined, evaluation.collected())


class _Measured:
    """Metrics of one client after the other, by ``<stage>/<protocol>/<before or after>``."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[list[int], list[Mapping[str, float]], list[int]]] = {}

    def add(self, stage: str, newcomer: Newcomer, model: Tensor, data: FederatedDataModule) -> None:
        """Measures a model on all of the newcomer's validation and test sets."""
        client = newcomer.client
        sets = local_sets(data.population, data.protocols, ("val", "test"))
        own = {name: indices[client] for name, indices in sets.items() if len(indices[client])}
        owners = [None if name.rpartition("/")[2] in PLAIN else client for name in own]
        for name, values in zip(own, newcomer.measure(model, list(own.values()), owners) if own else [], strict=True):
            clients, results, sizes = self._found.setdefault(f"{name}/{stage}", ([], [], []))
            clients.append(client)
            results.append(values)
            sizes.append(len(own[name]))

    def collected(self) -> Evaluation:
        """All of it, sorted by what was measured."""
        evaluation = Evaluation()
        for name in sorted(self._found, key=lambda name: name.rpartition("/")[0]):
            evaluation.add(name, *self._found[name])
        return evaluation


def _check(saved: checkpoint.LoadedCheckpoint, data: FederatedDataModule) -> None:
    """Refuses other data, and a federation that has not begun."""
    now = {"data": data.samples.fingerprint(), "partition": data.population.fingerprint}
    changed = differences({name: saved.identity.get(name) for name in now}, now)
    if changed:
        raise checkpoint.CheckpointError(f"{saved.path} is of other data:\n  " + "\n  ".join(changed))
    if saved.state.round < 0:
        raise checkpoint.CheckpointError(f"{saved.path}: its warm-up rounds are still due; there is nothing to join.")
    assert not torch.any(saved.state.active[list(data.newcomer_clients)])
