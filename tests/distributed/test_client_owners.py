"""Several hosts, each of which owns clients, give the same bits as one."""

import functools
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lcfl.callbacks import Checkpoint, LabelSimilarity
from lcfl.core.callback import Callback
from lcfl.core.messages import Downlink
from lcfl.distributed import hosts as hosts_of_a_run
from lcfl.distributed.client_output import ClientError
from lcfl.distributed.hosts import Host, Hosts, HostTransport, StateElsewhere
from lcfl.distributed.ranks import Ranks
from lcfl.distributed.tasks import EvaluationTask
from lcfl.distributed.worker import Worker
from lcfl.federation.federation import Federation
from lcfl.methods.exchange import CentreAndEmbedding
from lcfl.methods.exchange.transforms import LowRankCompression
from lcfl.methods.local import LocalTraining
from lcfl.models import SplitNetwork
from lcfl.models.module import FederatedModule
from lcfl.runs import client_shards
from tests.helpers.bits import assert_same_state
from tests.helpers.builders import NormedMLP, blobs, blobs_module, lcfed, loaded
from tests.helpers.commandline import CONFIGS
from tests.helpers.fits import ROUNDS, assert_same_run, fit, newest_run, newest_state, started  # noqa: F401 - fixture

METHODS = sorted(path.stem for path in Path(f"{CONFIGS}/methods").glob("*.yaml"))
QUICK = ("lcfed", "fedac", "lg_fedavg")  # all others are marked slow


@pytest.mark.parametrize(
    "method", [pytest.param(each, marks=[] if each in QUICK else [pytest.mark.slow]) for each in METHODS]
)
def test_hosts_that_own_clients_do_not_change_bits(tmp_path, reference, apart, method):
    one, _ = reference(method)
    apart(1)
    assert_same_run(one, fit(tmp_path, method, 2).path)


@pytest.mark.filterwarnings("ignore:trainer.devices")
def test_hosts_of_different_size(tmp_path, reference, apart):
    one, _ = reference("lcfed")
    apart(2)
    assert_same_run(one, fit(tmp_path, "lcfed", 3, ROUNDS, "--trainer.client_store=mapped").path)


@pytest.mark.filterwarnings("ignore:trainer.devices")
@pytest.mark.parametrize(("before", "after"), [(3, 1), (1, 2), pytest.param(2, 3, marks=pytest.mark.slow)])
def test_a_run_goes_on_with_another_number_of_hosts(tmp_path, reference, apart, before, after):
    one, _ = reference("lcfed")
    apart(1)
    fit(tmp_path, "lcfed", before, 4)
    assert_same_run(one, fit(tmp_path, "lcfed", after, ROUNDS, "--ckpt_path=last").path)


def settings(root, devices, callbacks=()):
    return Federation(
        3, 0.5, evaluate_every=1, final_models=None, devices=devices, accelerator="cpu", logger=False,
        callbacks=[Checkpoint(every_n_rounds=1), *callbacks], enable_progress_bar=False, default_root_dir=root,
        name="run",
    )  # fmt: skip


def small(root, devices, method, module=blobs_module, callbacks=(), **options):
    """Returns the last state of a run of 12 clients, half of which take part in a round."""
    federation = settings(root, devices, callbacks)
    return newest_state(federation.fit(module(), blobs(12, **options), method).path)


def compressed():
    method = lcfed()
    method.exchange = CentreAndEmbedding(transforms=[LowRankCompression(energy=0.9)])
    return method


def normed(policy):
    return FederatedModule(NormedMLP, functools.partial(torch.optim.SGD, lr=0.05), buffer_policy=policy)


@pytest.mark.parametrize(
    ("method", "module", "options"),
    [
        (compressed, blobs_module, {}),
        (lcfed, functools.partial(normed, "local"), {}),
        (lcfed, functools.partial(normed, "average"), {}),
        (lcfed, blobs_module, {"leavers": {1: 1, 8: 2}, "newcomers": 2}),
        (functools.partial(lcfed, similarity="cosine"), blobs_module, {}),
        (functools.partial(lcfed, keep_offline_models=True), blobs_module, {}),
    ],
    ids=["compressed", "local_buffers", "mean_buffers", "leavers", "whole_models", "offline_models"],
)
def test_everything_that_clients_keep_stays_with_its_owner(tmp_path, apart, method, module, options):
    one = small(tmp_path / "one", 1, method(), module, **options)
    apart(1)
    assert_same_state(one, small(tmp_path / "two", 2, method(), module, **options))
    assert len(list(one.clients)) > 6


class RandomFeatures(SplitNetwork):
    """A network with a random buffer."""

    def __init__(self):
        super().__init__(nn.Linear(12, 8), nn.Linear(8, 8))
        self.register_buffer("projection", torch.randn(16, 12))

    def forward(self, x):
        return super().forward(torch.cos(x @ self.projection))


def featured():
    return FederatedModule(RandomFeatures, functools.partial(torch.optim.SGD, lr=0.05), buffer_policy="keep_server")


@pytest.mark.parametrize("module", [blobs_module, featured])
def test_a_checkpoint_is_tested_on_several_hosts_as_on_one(tmp_path, apart, module):
    small(tmp_path, 1, lcfed(), module)
    one = settings(tmp_path, 1).test(module(), blobs(12), lcfed())
    apart(1)
    assert settings(tmp_path, 2).test(module(), blobs(12), lcfed()) == one
    assert len(one) > 8


class Looking(Callback):
    """Writes down what the process of the server keeps of its clients, and where they are."""

    def on_round_logged(self, server, state):
        clients = list(state.clients)
        kept = state.clients.at_owners(_process, clients)
        with (server.run_dir / "kept").open("a") as file:
            print(
                os.getpid(),
                len(state.clients._states),
                len(clients),
                *(each for pair in kept for each in pair),
                file=file,
            )


def _process(store, clients):
    return os.getpid(), len(clients)


def test_clients_are_compared_by_their_models_on_several_hosts_as_on_one(tmp_path, apart, monkeypatch):
    monkeypatch.setattr("lcfl.callbacks.label_similarity.figures.save", lambda *_: None)
    small(tmp_path / "one", 1, lcfed(), callbacks=[LabelSimilarity(dimension=3)])
    apart(1)
    small(tmp_path / "two", 2, lcfed(), callbacks=[LabelSimilarity(dimension=3)])
    one, two = (next((tmp_path / name).rglob("label_similarity.json")).read_text() for name in ("one", "two"))
    assert one == two


def test_the_server_keeps_no_model_of_clients_that_others_own(tmp_path, apart):
    apart(1)
    small(tmp_path, 2, lcfed(), callbacks=[Looking()])
    lines = [list(map(int, line.split())) for line in (newest_run(tmp_path) / "kept").read_text().splitlines()]
    for pid, here, number, first, count, second, rest in lines[1:]:
        assert here == 0 and count + rest == number and count > 0 < rest
        assert pid == first != second
    assert len(lines) > 2


class Failing(LocalTraining):
    """Fails in a later round on the second host."""

    def __call__(self, state, downlink, data, engine):
        if dist.get_rank() == 1 and data.round > 0:
            raise KeyError("of a client")
        return super().__call__(state, downlink, data, engine)


def test_an_error_of_a_client_on_another_host_is_raised_on_the_server(tmp_path, apart):
    apart(1)
    with pytest.raises(ClientError, match=r"^client \d+, round 1, rank 1: KeyError: 'of a client'") as caught:
        small(tmp_path, 2, lcfed(local=Failing(steps=1)))
    assert any('raise KeyError("of a client")' in note for note in caught.value.__notes__)


class Remembering(LocalTraining):
    """Keeps a longer memory for clients of the second host, from their second time on, when their states are there."""

    def __call__(self, state, downlink, data, engine):
        is_second = data.client >= 6
        memory = None if is_second and not state.consumed else torch.zeros(1 + is_second)
        return replace(super().__call__(state, downlink, data, engine), memory=memory)


@pytest.mark.parametrize("devices", [1, 2])
def test_memories_of_several_lengths_are_refused_wherever_they_are_kept(tmp_path, apart, devices):
    apart(1)
    with pytest.raises(ValueError, match=r"^client \d+: LocalOutput\.memory has 2 numbers, and an earlier one has 1"):
        settings(tmp_path, devices).fit(blobs_module(), blobs(12), lcfed(local=Remembering(steps=1)))


def test_an_owner_writes_its_states_itself(tmp_path, apart, monkeypatch):
    written, original = tmp_path / "written", client_shards._written

    def noting(folder, prefix, *more):
        with written.open("a") as file:
            print(dist.get_rank(), prefix, file=file)
        return original(folder, prefix, *more)

    monkeypatch.setattr(client_shards, "_written", noting)
    apart(1)
    small(tmp_path, 2, lcfed())
    lines = [line.split() for line in written.read_text().splitlines()]
    assert {rank for rank, _ in lines} == {"0", "1"}
    assert ["0", "projection"] in lines
    clients = [(rank, int(number)) for rank, name in lines if (number := name.partition("-")[2])]
    assert len(clients) > 2 and all((client >= 6) == (rank == "1") for rank, client in clients)


def test_an_owner_that_does_not_see_the_disk_sends_its_states(tmp_path, apart, monkeypatch):
    one, is_dir, original = small(tmp_path / "one", 1, lcfed()), Path.is_dir, client_shards.write_serialized

    def seen(path):
        return is_dir(path) and not (".ckpt" in path.name and dist.is_initialized() and dist.get_rank())

    def noting(path, content):
        (tmp_path / f"written by {dist.get_rank()}").touch()
        return original(path, content)

    monkeypatch.setattr(Path, "is_dir", seen)
    monkeypatch.setattr(client_shards, "write_serialized", noting)
    apart(1)
    assert_same_state(one, small(tmp_path / "two", 2, lcfed()))
    assert [path.name for path in tmp_path.glob("written by *")] == ["written by 0"]


def test_an_owner_that_may_not_write_sends_its_states(tmp_path, apart, monkeypatch):
    one, original = small(tmp_path / "one", 1, lcfed()), client_shards.write_serialized

    def write(path, content):
        if dist.is_initialized() and dist.get_rank():
            (tmp_path / "refused").touch()
            raise OSError(30, "Read-only file system")
        return original(path, content)

    monkeypatch.setattr(client_shards, "write_serialized", write)
    apart(1)
    assert_same_state(one, small(tmp_path / "two", 2, lcfed()))
    assert (tmp_path / "refused").exists()


def test_an_owner_with_a_folder_of_the_same_name_on_its_own_disk_sends_its_states(tmp_path, apart, monkeypatch):
    one, original = small(tmp_path / "one", 1, lcfed()), client_shards._written

    def write(folder, *rest):
        if dist.is_initialized() and dist.get_rank():
            folder = tmp_path / "another disk"
            folder.mkdir(exist_ok=True)
        return original(folder, *rest)

    monkeypatch.setattr(client_shards, "_written", write)
    apart(1)
    assert_same_state(one, small(tmp_path / "two", 2, lcfed()))
    assert list((tmp_path / "another disk").iterdir())


@pytest.mark.parametrize("kind", [ClientError, OSError])
def test_an_error_on_the_servers_host_leaves_no_answer_on_its_way(with_hosts, kind):
    def fail(tasks, costs):
        raise kind("client 0")

    def lead(hosts):
        hosts._host.map = fail
        with pytest.raises(kind, match="client 0"):
            hosts.ask("map", {0: ([], []), 1: ([], [])})
        return hosts._owed, hosts.ask("forget", {1: ([0],)})

    assert with_hosts(2, lead) == (set(), {1: None})


def test_tasks_without_a_host_balance_those_with_one(with_hosts):
    def lead(hosts):
        hosts.sizes = [2, 1]
        return hosts.place([4, 1, 8, 3, 2], [1, None, None, None, 0]), hosts.place([1] * 6, [None] * 6)

    assert with_hosts(2, lead) == ([1, 1, 0, 0, 0], [0, 0, 1, 0, 0, 1])


def test_a_stop_on_any_host_reaches_the_server(on_ranks, apart):
    from lcfl.distributed.stop_flag import StopFlag

    apart(1)

    def session(fabric, flag):
        own = StopFlag()  # ranks that were not forked do not share their flags
        worker = Worker(fabric, blobs_module(), loaded(blobs(4)), lcfed(), 0)
        if fabric.global_rank == 1:
            own._shared.fill_(15)
        with Ranks(fabric, worker.run_all, own) as ranks:
            if not fabric.is_global_zero:
                return Host(ranks, worker).serve()
            with Hosts(Host(ranks, worker)) as hosts:
                return hosts.stop_signal, hosts.map([], []), hosts.ask("forget", {1: ([0],)}), hosts.stop_signal

    assert on_ranks(2, session) == (0, [], {1: None}, 15)


def test_models_that_hosts_keep_are_measured_some_at_a_time(with_hosts, monkeypatch):
    monkeypatch.setattr(hosts_of_a_run, "TASKS_AT_A_TIME", 2)

    def task(client, state):
        downlink = Downlink({"model": torch.zeros(1)}) if client % 3 else Downlink({})
        return EvaluationTask(client, 0, state, "personal", downlink, None, ("test/own_split",))

    def lead(hosts):
        asked = []
        transport = HostTransport(hosts, hosts._host._transport._worker)
        hosts.spread = lambda method, places, tasks: asked.append(places) or [{"kept": each.client} for each in tasks]
        transport._anywhere.evaluate = lambda tasks: [{"shared": each.client} for each in tasks]
        elsewhere = [StateElsewhere(owner=client % 2) for client in range(7)]
        return transport.evaluate(task(client, state) for client, state in enumerate(elsewhere)), asked

    kept = {0, 3, 6}
    assert with_hosts(2, lead) == (
        [{"kept" if client in kept else "shared": client} for client in range(7)], [[0, 1], [0]],
    )  # fmt: skip
