"""Leads a fleet: waits for its clients to join, then trains with them as with simulated ones."""

import copy
import logging
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from lcfl.distributed.stop_flag import StopFlag, handlers_kept
from lcfl.distributed.worker import Worker
from lcfl.federation.federation import Federation
from lcfl.federation.session import run_of
from lcfl.federation.trial import check_network
from lcfl.fleet.data import FleetData, RemoteDataset, differing, sets_of
from lcfl.fleet.fleet import Fleet, FleetRecord
from lcfl.fleet.link import Link
from lcfl.fleet.members import Admission, Member, numbered, read_members
from lcfl.fleet.newcomers import Newcomers
from lcfl.fleet.node import identity_of
from lcfl.fleet.post import Patience, Post
from lcfl.methods.method import Method
from lcfl.models.module import FederatedModule
from lcfl.runs import checkpoint_lookup
from lcfl.runs.result import Run

__all__ = ["FleetOptions", "fit"]

LOGGER = logging.getLogger(__name__)
LOOK, AGAIN = 0.5, 30.0  # seconds until the next look for nodes, and until one that did not fit is asked again


@dataclass(frozen=True)
class FleetOptions:
    """What the server of a fleet decides of the data and of the messages.

    Args:
        num_clients: N, including newcomers.
        data: ``newcomers``, ``leavers``, ``batch_size``, ``drop_last``, ``protocols`` and ``seed`` of the run.
        patience: how long answers are waited for.
        most_bytes: the largest answer that is accepted.
        newcomer_epochs: epochs for which a node that registers during the run trains the model that it gets.
    """

    num_clients: int
    data: Mapping[str, Any] = field(default_factory=dict)
    patience: Patience = field(default_factory=Patience)
    most_bytes: int = 2**30
    newcomer_epochs: int = 5


@handlers_kept()
def fit(
    federation: Federation,
    module: FederatedModule,
    method: Method,
    link: Link,
    options: FleetOptions,
    ckpt_path: str | Path | None = None,
    proxy: Worker | None = None,
) -> Run:
    """Trains a federation whose clients are the nodes of a fleet.

    A new run begins when as many nodes have joined as it has clients without newcomers. A resumed run knows its
    clients, and goes on with those that can be reached.

    Args:
        federation: the settings, as for a simulation.
        module: network, loss and optimizer.
        method: the method.
        link: carries messages to the nodes.
        options: what the server decides of data and messages.
        ckpt_path: see `lcfl.federation.federation.Federation.fit`.
        proxy: a worker that holds the server's proxy set; None without one.

    Raises:
        ValueError: for settings that a fleet cannot have.
        CheckpointError: if a checkpoint is not one of a fleet.
    """
    _check(federation, method)
    wanted_answers = options.patience.min_answers
    if isinstance(wanted_answers, int) and wanted_answers > options.num_clients:
        raise ValueError(f"min-answers: got {wanted_answers}, but data.num_clients is {options.num_clients}.")
    flag = StopFlag()
    flag.install()
    identity = identity_of(module, method, federation.seed)
    post = Post(link, options.patience, options.most_bytes, lambda: flag.signal != 0)
    sets = sets_of(options.data.get("protocols", ("own_split",)))
    admission = Admission(post, sets, identity, partial(_check_fit, module))
    wanted = None if ckpt_path is None else str(ckpt_path)
    resumed = checkpoint_lookup.find_if_any(wanted, federation.root, federation.name)
    if resumed is None:
        run, members = uuid4().hex, _founders(admission, options)
        if post.stopped():
            raise SystemExit(128 + flag.signal)
    else:
        run, members = read_members(run_of(resumed))
        members = _rejoined(admission, members)
    data = _data(members, options, 0 if proxy is None else len(proxy.data.population.proxy))
    record = FleetRecord(run, members)
    newcomers = [Newcomers(record, admission, options.newcomer_epochs)] if data.newcomer_clients else []
    federation = copy.copy(federation)  # the caller's begins a later run without the callbacks of this one
    federation.callbacks = [record, *newcomers, *federation.all_callbacks]  # before the checkpoint
    metrics = "loss", *map(str, module.metrics)
    kept_out, num_clients, layout = data.newcomer_clients, options.num_clients, module.layout
    fleet = Fleet(post, identity, num_clients, method, layout, record, kept_out, metrics, flag, proxy)
    return federation.fit(module, data, method, ckpt_path, fleet)


def _check(federation: Federation, method: Method) -> None:
    """Refuses what needs one place that knows all of the run."""
    if federation.fast_dev_run:
        raise ValueError("trainer.fast_dev_run: it tries a run on one machine; use it with lcfl fit.")
    if federation.client_timeout is not None:
        raise ValueError(
            "trainer.client_timeout: a fleet has the run-config deadline instead; set client_timeout to null."
        )
    for clustering in method.clustering:
        if clustering.hands_out_uploads:
            raise ValueError(
                f"method.clustering: {type(clustering).__name__} gives clients their models of a warm-up round, but on "
                "a fleet they keep nothing of it. Set keep_offline_models to false."
            )
    if any(noise.epsilon is not None for noise in method.exchange.noises):
        raise ValueError(
            "method.exchange: GaussianNoise got an epsilon, but the nodes of a fleet do not know how often they will "
            "upload. Set sigma instead."
        )


def _founders(admission: Admission, options: FleetOptions) -> dict[int, Member]:
    """Waits for the clients of a new run and returns them by number."""
    post = admission.post
    free = sorted(set(range(options.num_clients)) - set(_data({}, options).newcomer_clients))
    members: list[Member] = []
    again: dict[int, float] = {}  # when a node is asked again that did not fit
    while len(members) < len(free) and not post.stopped():
        now, known = time.monotonic(), {member.node for member in members}
        asked = [node for node in post.link.nodes() if node not in known and again.get(node, 0.0) <= now]
        fit = admission.ask(asked, members) if asked else []
        joined = fit[: len(free) - len(members)]
        members += joined
        again |= dict.fromkeys(asked, time.monotonic() + AGAIN)
        if joined:
            names = ", ".join(each.name for each in joined)
            LOGGER.info("%s joined: %d of %d clients are there", names, len(members), len(free))
        else:
            time.sleep(LOOK)
        for surplus in fit[len(joined) :]:
            so = "it may join as a newcomer" if options.data.get("newcomers") else "data.num_clients counts them"
            warnings.warn(
                f"{surplus.name} (node {surplus.node}) is left out: all {len(free)} places are taken; {so}.",
                stacklevel=2,
            )
    return numbered(members, free)


def _rejoined(admission: Admission, members: dict[int, Member]) -> dict[int, Member]:
    """Asks the known clients that can be reached to join again, and returns all with what is new about them."""

    def fits(spec: Mapping[str, Any]) -> None:
        if any(differing(spec, member.spec) for member in members.values()):
            raise ValueError("they look different from before")

    reachable, number = set(admission.post.link.nodes()), {member.node: each for each, member in members.items()}
    now = dict(members)
    for member in replace(admission, fits=fits).ask([node for node in number if node in reachable]):
        if member.fingerprint != members[number[member.node]].fingerprint:
            warnings.warn(f"{member.name}: its data have changed since it joined.", stacklevel=2)
        now[number[member.node]] = member
    return now


def _check_fit(module: FederatedModule, spec: Mapping[str, Any]) -> None:
    """Raises a ValueError if the network, the loss or a metric cannot take samples that look so."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they are shown once, before training
        check_network(module, FleetData(RemoteDataset(spec), [{}], [""]))


def _data(members: Mapping[int, Member], options: FleetOptions, num_proxy: int = 0) -> FleetData:
    """Returns what the server knows of the clients' data."""
    blank = {"shape": [1], "dtype": "float32", "num_classes": None, "target_shape": [], "target_dtype": "float32"}
    spec = next(
        (dict(member.spec) for member in members.values()),
        blank | dict.fromkeys(("classes", "columns", "normalisation")),
    )
    sizes = [members[i].sizes if i in members else {} for i in range(options.num_clients)]
    names = [members[i].name if i in members else "" for i in range(options.num_clients)]
    return FleetData(RemoteDataset(spec), sizes, names, num_proxy, **options.data)
