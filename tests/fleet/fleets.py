"""Small fleets whose nodes live in the process of the test, and the simulations that they are compared with."""

from functools import partial

import numpy as np
import torch

from lcfl.core.callback import Callback
from lcfl.federation.federation import Federation
from lcfl.federation.settings import Settings
from lcfl.fleet import server
from lcfl.fleet.link import Undelivered
from lcfl.fleet.node import Node, NodeSettings
from lcfl.fleet.post import Patience
from lcfl.fleet.server import FleetOptions
from tests.helpers.builders import Watch, blobs, blobs_module
from tests.helpers.loopback import Loopback

NUM_CLIENTS = 6
BOTH = {"seed": 3, "accelerator": "cpu", "engine": "sequential", "logger": False}  # for the server and its nodes
OPTIONS = {"rounds": 4, "clients_per_round": 4, "evaluate_every": 2, "final_models": None, "devices": 1, **BOTH}
FIRST = 1000  # the number of the first node
SOME = Patience(deadline=0.2, min_answers=0.25)
AWAY = Undelivered("the node is away")
EVERYBODY = Patience(deadline=60, min_answers=1.0)
SERVER = ("global_model", "centres", "assignment", "participated", "active", "codes", "projection", "round")


def module():
    return blobs_module(0.05, cluster_weight=0.1, global_weight=0.1)


def data(num_clients=NUM_CLIENTS, **options):
    return blobs(num_clients, batch_size=8, **options)


def federation(root, **options):
    """Returns a federation that keeps a `Watch` among its callbacks."""
    watch = Watch()
    options = {**OPTIONS, "enable_progress_bar": False, **options}
    made = Federation(default_root_dir=root, name="run", callbacks=[watch, *options.pop("callbacks", ())], **options)
    made.watch = watch
    return made


def simulated(root, method, num_clients=NUM_CLIENTS, **options):
    """Returns the `Watch` of a run whose clients are played by one rank."""
    made, watched = options.pop("data", None), federation(root, **options)
    watched.watch.metrics = watched.fit(module(), made or data(num_clients), method()).metrics
    return watched.watch


def node(root, method, place, section=data, network=module, **settings):
    """Returns a node that plays client `place` of the blobs, made anew from what is on the disk."""
    trainer = Settings(**{**BOTH, **settings})
    own = NodeSettings(root / f"node{place}", f"hospital {place}", place, place)
    return Node(network(), method(), section(), trainer, own)


def nodes(root, method, num_clients=NUM_CLIENTS, **options):
    """Returns what makes each node of a fleet, by the number of the node."""
    section = partial(data, num_clients)
    return {FIRST + i: partial(node, root, method, i, section=section, **options) for i in range(num_clients)}


def on_fleet(root, method, link=None, ckpt_path=None, patience=EVERYBODY, most_bytes=2**20, more=None, **options):
    """Returns the `Watch` of a run whose clients are nodes."""
    watched = federation(root, **options)
    link = link or Loopback(nodes(root, method))
    told = FleetOptions(NUM_CLIENTS, {"batch_size": 8, **(more or {})}, patience, most_bytes)
    run = server.fit(watched, module(), method(), link, told, ckpt_path)
    watched.watch.metrics, watched.watch.link, watched.watch.run = run.metrics, link, run
    return watched.watch


class Stop(Callback):
    """Ends a run with an error after so many rounds."""

    def __init__(self, rounds):
        self.rounds = rounds

    def on_checkpoint(self, state):
        if state.round == self.rounds:
            raise RuntimeError("stop")


def assert_same_fields(one, other):
    """Asserts that two states agree in what the server of a fleet knows, which is less than the whole state."""
    for name in SERVER:
        a, b = getattr(one, name), getattr(other, name)
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, name


def assert_same_server(one, other):
    """Asserts that the servers of two runs know the same, and that all rows and final metrics are equal."""
    assert_same_fields(one.state, other.state)
    assert one.state.total_bytes == other.state.total_bytes
    assert_same_rows(one, other)


def assert_same_rows(one, other):
    for a, b in zip(one.rows, other.rows, strict=True):
        assert_same_numbers(timeless(a), timeless(b))
    assert_same_numbers(one.metrics, other.metrics)


def timeless(row):
    """Returns a row without seconds, and without the index that needs the true groups, which no fleet knows."""
    return {name: value for name, value in row.items() if not name.startswith("time/") and name != "cluster/ari"}


def assert_same_numbers(one, other):
    assert one.keys() == other.keys()
    assert not [name for name in one if not np.array_equal(one[name], other[name], equal_nan=True)]


def dropped(watch):
    return [row.get("train/dropped_clients", 0) for row in watch.rows]
