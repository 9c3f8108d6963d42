"""Newcomers: clients that were kept out of a federation, or are new, join it after its end.

No model of the federation is trained again.
"""

import csv
import io
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from operator import index
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric import Fabric
from torch import Tensor

from lcfl.core.files import read_json, replacing, write_json, write_whole
from lcfl.core.schema import check_form
from lcfl.core.state import FederationState
from lcfl.core.validation import abbreviated
from lcfl.data.datamodule import FederatedDataModule
from lcfl.distributed.launch import gradients_on, one_thread
from lcfl.distributed.placement import device_type
from lcfl.distributed.rank_transport import RankTransport
from lcfl.distributed.ranks import Ranks
from lcfl.distributed.stop_flag import StopFlag
from lcfl.distributed.tasks import Measured
from lcfl.distributed.transport import Transport
from lcfl.distributed.worker import Worker
from lcfl.engines import choose_engine
from lcfl.federation.newcomer import Newcomer
from lcfl.federation.session import expected, run_of
from lcfl.federation.trial import check_batches, check_network, check_targets
from lcfl.methods.method import Method
from lcfl.models.module import FederatedModule
from lcfl.runs import checkpoint, checkpoint_lookup
from lcfl.runs.identity import differences
from lcfl.server.metrics import Evaluation

__all__ = ["OnboardedClient", "Onboarding", "OnboardingResult", "onboard"]

NO_CLUSTERS = "none: the method has no clusters"
STAGES = ("before", "after")


@dataclass(frozen=True)
class OnboardedClient:
    """How one newcomer fared.

    Attributes:
        client: the number of the client.
        group: its true group, or None if it is not known.
        cluster: the cluster that it joined, or None for a method without clusters.
        down_bytes: bytes sent to the client, including the model that it received.
        up_bytes: bytes sent by the client.
        name: its name, or None if clients have only numbers.
    """

    client: int
    group: int | None
    cluster: int | None
    down_bytes: int
    up_bytes: int
    name: str | None = None


@dataclass(frozen=True)
class OnboardingResult:
    """Result of `onboard`.

    Attributes:
        checkpoint: the checkpoint of the federation that the newcomers joined.
        rule: how a cluster was found, in words.
        epochs: epochs of personalisation.
        joined: the newcomers.
        evaluation: the metrics of each newcomer. ``<stage>/<protocol>/before/<metric>`` measures the model that it
            received, and ``.../after/...`` the same model after `epochs` epochs on the newcomer's training samples.
        weights: the state dict of the latter model of each newcomer, by client, if they were to be kept.
    """

    checkpoint: Path
    rule: str
    epochs: int
    joined: list[OnboardedClient]
    evaluation: Evaluation
    weights: Mapping[int, Mapping[str, Tensor]] = field(default_factory=dict)

    def rows(self) -> list[dict[str, Any]]:
        """Returns one row per newcomer: the client, its cluster, its bytes and its metrics.

        A metric is None if the client has no data for it.
        """
        values = {
            name: dict(zip(metric.clients.tolist(), metric.values.tolist(), strict=True))
            for name, metric in self.evaluation.by_name.items()
        }
        return [
            {key: value for key, value in vars(newcomer).items() if key != "name" or value is not None}
            | {name: by_client.get(newcomer.client) for name, by_client in values.items()}
            for newcomer in self.joined
        ]

    def content(self) -> dict[str, Any]:
        """Returns what ``newcomers.json`` holds."""
        return {
            "checkpoint": self.checkpoint.name,
            "rule": self.rule,
            "epochs": self.epochs,
            "metrics": _finite(self.evaluation.summary()),
            "newcomers": [_finite(row) for row in self.rows()],
        }

    def write(self, folder: Path) -> None:
        """Writes ``newcomers.json`` and ``newcomers.csv``, and a file ``client-<number>.pt`` with weights of each."""
        rows = self.rows()
        write_json(folder / "newcomers.json", self.content(), indent=2)
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, rows[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_whole(folder / "newcomers.csv", text.getvalue().encode())
        for client, weights in self.weights.items():
            with replacing(folder / f"client-{client}.pt") as temporary:
                torch.save(weights, temporary)


def _finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns values with None in place of numbers that JSON does not have."""
    return {name: None if isinstance(each, float) and not isfinite(each) else each for name, each in values.items()}


class Onboarding:
    """Adds newcomers to a federation, one by one.

    Args:
        transport: the way to the newcomers.
        module: network, loss and metrics.
        data: what is known of the clients.
        method: the method, whose first clustering places newcomers.
        state: the state of the federation; only the newcomers' clusters are entered there.
        epochs: epochs of personalisation.
        keep_weights: whether the server keeps the weights of the personalised models, which otherwise stay with the
            newcomers.
    """

    def __init__(
        self,
        transport: Transport,
        module: FederatedModule,
        data: FederatedDataModule,
        method: Method,
        state: FederationState,
        epochs: int,
        keep_weights: bool = False,
    ) -> None:
        self.transport, self.module, self.data, self.method = transport, module, data, method
        self.state, self.epochs, self.keep_weights = state, epochs, keep_weights
        self._joined: list[OnboardedClient] = []
        self._weights: dict[int, dict[str, Tensor]] = {}
        self._measured = _Measured(module)

    def add(self, client: int) -> OnboardedClient:
        """Places a newcomer, sends it its model, and has it measure and personalise it.

        Raises:
            ValueError: if its training diverges, or it does not answer.
        """
        state, method, layout, population = self.state, self.method, self.module.layout, self.data.population
        newcomer = Newcomer(client, self.transport, state, layout)
        cluster = self._placed(newcomer) if method.is_clustered else None
        if client >= state.num_clients:
            state = state.grown(client + 1)
        state.assignment[client] = cluster or 0
        sent = method.exchange.down(state, client, layout)
        if not (newcomer.has_centres and "centres" in sent.payload):
            newcomer.down_bytes += sent.num_bytes
        received = method.exchange.newcomer_model(state, client, layout)
        sets = population.sets(self.data.protocols)
        own = tuple(name for name, indices in sets.items() if len(indices[client]))
        personal = newcomer.personalise(received, self.epochs) if self.keep_weights else None
        if personal is not None:
            self._weights[client] = self.module.network_of(*personal, state.frozen).state_dict()
        for stage, metrics in zip(STAGES, newcomer.measure(received, own, self.epochs, personal), strict=True):
            self._measured.add(stage, client, metrics, {name: len(sets[name][client]) for name in own})
        group = None if population.groups is None else int(population.groups[client])
        name = None if population.names is None else population.names[client]
        joined = OnboardedClient(client, group, cluster, newcomer.down_bytes, newcomer.up_bytes, name)
        self._joined.append(joined)
        return joined

    def _placed(self, newcomer: Newcomer) -> int:
        """Returns the cluster of a newcomer, as the clustering, which may be the user's own, says.

        Raises:
            ValueError: if this is not the number of a cluster.
        """
        clustering, most = self.method.clustering[0], self.state.num_clusters - 1
        cluster = clustering.place_newcomer(newcomer, self.state)
        try:
            number = index(cluster)  # also of a tensor without dimensions
        except TypeError:
            number = -1
        if not 0 <= number <= most:
            raise ValueError(
                f"{type(clustering).__name__}.place_newcomer: got {cluster!r}; it must return the number of a cluster, "
                f"from 0 to {most}."
            )
        return number

    def result(self, path: Path) -> OnboardingResult:
        """Returns how all newcomers have fared.

        Args:
            path: the checkpoint, or the run, of the federation that they joined.
        """
        rule = self.method.clustering[0].newcomer_rule if self.method.is_clustered else NO_CLUSTERS
        evaluation = self._measured.collected()
        return OnboardingResult(path, rule, self.epochs, list(self._joined), evaluation, self._weights)


@gradients_on()
@one_thread()
def onboard(
    path: str | Path,
    module: FederatedModule,
    data: FederatedDataModule,
    method: Method,
    epochs: int = 5,
    accelerator: Literal["auto", "cpu", "cuda"] = "auto",
    of_the_run: bool = True,
    keep_weights: bool = False,
) -> OnboardingResult:
    """Adds newcomers to the federation of a run, one by one (FedClust Algorithm 2 and section 5.2).

    The method's first clustering places each newcomer into a cluster. The newcomer receives the model that the server
    would send to a member that never took part. It trains this model for some epochs on its own samples, plainly and
    without pulls, whatever the method. No newcomer changes anything for the federation or for the other newcomers.

    Args:
        path: a checkpoint, or a run directory, which stands for its newest checkpoint.
        module: as in the run.
        data: as in the run, or the data of new clients.
        method: as in the run; a setting that matters only after the last round, e.g. of `Clustering.place_newcomer`,
            may differ.
        epochs: epochs of personalisation.
        accelerator: ``auto`` uses CUDA if it is available.
        of_the_run: whether the data are those of the run, whose newcomers join. Otherwise all clients of the data do,
            with numbers after those of the run's clients.
        keep_weights: whether the result has the weights of the newcomers' personalised models.

    Raises:
        CheckpointError: if the run used other data, or if there is no federation yet.
        ValueError: if the run kept no newcomers out, or if the network of the run does not fit the data.
    """
    if of_the_run and not data.newcomer_clients:
        raise ValueError(
            "onboard: the run kept no newcomers out of its federation. Train a run with data.newcomers > 0, or give "
            "the data of new clients (--data FILE)."
        )
    if epochs < 1:
        raise ValueError(f"onboard: got epochs={epochs}; it must be at least 1.")
    path = Path(path)
    if (path / "checkpoints").is_dir():
        path = checkpoint_lookup.newest([path])
    data.prepare_data()
    with warnings.catch_warnings():
        if not of_the_run:  # the clients of the run train on these classes, too
            warnings.filterwarnings("ignore", message="data.dataset: only one client trains on")
        data.setup()
    if of_the_run:
        _check_data(path, data)
        sizes, newcomers = (data.num_clients, data.num_initial_clients), data.newcomer_clients
    else:
        sizes = _check_new_data(path, data, module)
        data = data.behind(sizes[0])
        newcomers = tuple(range(sizes[0], data.num_clients))
    saved = _restored(path, module, method, sizes)
    transport = _transport(saved, module, data, method, accelerator)
    onboarding = Onboarding(transport, module, data, method, saved.state, epochs, keep_weights)
    for client in newcomers:
        onboarding.add(client)
    return onboarding.result(path)


def _restored(
    path: Path, module: FederatedModule, method: Method, sizes: tuple[int, int]
) -> checkpoint.LoadedCheckpoint:
    """Reads a checkpoint, and gives the module its frozen part and the clusterings what they remember."""
    saved = checkpoint.read(path, expected=expected(module, method, *sizes))
    if saved.state.round < 0:
        raise checkpoint.CheckpointError(
            f"{path}: its warm-up rounds are not complete, so there is no federation to join."
        )
    run = {name: saved.identity.get(name) for name in ("precision", "seed")}
    check_form(f"{path}: identity", run, {"precision": str, "seed": int}, {})
    if saved.state.frozen is not None and module.frozen_layout is not None:
        module.frozen_layout.unpack(saved.state.frozen, module.network)
    saved.restore(method.clustering, method.aggregation.remembers)
    return saved


def _transport(
    saved: checkpoint.LoadedCheckpoint,
    module: FederatedModule,
    data: FederatedDataModule,
    method: Method,
    accelerator: str,
) -> RankTransport:
    """Returns the way to newcomers that this process plays, with the precision and the seed of the run."""
    precision, seed = saved.identity["precision"], saved.identity["seed"]
    fabric = Fabric(accelerator=device_type(accelerator), devices=1, precision=precision)
    engine = choose_engine("auto", module, data, fabric.device.type, precision)
    worker = Worker(fabric, module, data, method, seed, engine)
    return RankTransport(Ranks(fabric, worker.run_all, StopFlag()), worker)


class _Measured:
    """Collects the metrics of one client after another, by ``<stage>/<protocol>/<before or after>``."""

    def __init__(self, module: FederatedModule) -> None:
        self._module = module
        self._found: dict[str, tuple[list[int], list[Mapping[str, float]], list[int]]] = {}

    def add(self, stage: str, client: int, metrics: Measured, sizes: Mapping[str, int]) -> None:
        """Adds what a newcomer measured on each of its sets, given their sizes."""
        for name, size in sizes.items():
            clients, results, numbers = self._found.setdefault(f"{name}/{stage}", ([], [], []))
            clients.append(client)
            results.append(metrics[name])
            numbers.append(size)

    def collected(self) -> Evaluation:
        """Returns all metrics, sorted by what was measured."""
        evaluation = Evaluation.of(self._module)
        for name in sorted(self._found, key=lambda name: name.rpartition("/")[0]):
            evaluation.add(name, *self._found[name])
        return evaluation


def _check_new_data(path: Path, data: FederatedDataModule, module: FederatedModule) -> tuple[int, int]:
    """Refuses new clients whose data do not fit the run; returns the run's number of clients, also at its start."""
    run = read_json(run_of(path) / "partition.json")
    if "train" not in run:
        raise ValueError("onboard: the run is one of a fleet, whose newcomers join while it goes on (newcomer-epochs).")
    arguments = {
        "classes": "the data set's argument classes, or by ClassLabel with HuggingFace",
        "columns": "the reader's arguments features and target",
    }
    for what, argument in arguments.items():
        known, own = run.get(what), getattr(data.dataset, what)
        if known is not None and own is not None and list(own) != known:
            raise ValueError(
                f"onboard: the run has the {what} {abbreviated(known, 10)}, and the new clients have "
                f"{abbreviated(own, 10)}. Give them the same {what} in the same order, e.g. by {argument}."
            )
    known, own = run.get("normalisation"), data.samples.normalisation
    if known is not None and own is not None and known != own:
        raise ValueError(
            f"onboard: the inputs of the run are normalised by {known}, and those of the new clients by {own}. "
            "Give their data set or its reader the normalisation that the run has."
        )
    members = {name for client, name in enumerate(run.get("names") or ()) if client not in run["newcomers"]}
    if again := sorted(members.intersection(data.population.names or ())):
        warnings.warn(
            f"onboard: {abbreviated(again)} took part in the run. If these are the same clients, the run may have "
            "trained on their test samples. Otherwise give newcomers names of their own.",
            stacklevel=3,
        )
    check_network(module, data)
    check_batches(module, data)
    check_targets(module, data)
    return len(run["train"]), len(run["train"]) - len(run["newcomers"])


def _check_data(path: Path, data: FederatedDataModule) -> None:
    """Refuses a checkpoint of other data."""
    saved = checkpoint.identity_of(path)
    now = {"data": data.samples.fingerprint(), "partition": data.population.fingerprint}
    changed = differences({name: saved.get(name) for name in now}, now)
    if changed:
        raise checkpoint.CheckpointError(f"{path} was trained on other data:\n  " + "\n  ".join(changed))
