"""Results that are not finite are left out of their round, as if the client had never answered."""

from dataclasses import replace
from functools import cache, partial
from math import inf, nan

import numpy as np
import pytest
import torch

import lcfl.distributed.worker
import lcfl.federation.session
import lcfl.server.server
from lcfl.core.messages import Uplink
from lcfl.distributed.tasks import TrainingResult
from lcfl.methods.aggregation import ServerAdam, ServerMomentum, ServerYogi
from lcfl.methods.clustering import ClusterNumberTuning
from tests.helpers.bits import assert_same_clients, assert_same_state, same
from tests.helpers.builders import (
    alone,
    apfl,
    blobs,
    blobs_module,
    ditto,
    fedac,
    fedala,
    fedamp,
    fedavg,
    fedbabu,
    feddyn,
    fedlc,
    fednova,
    fedopt,
    fedper,
    fedprox,
    fedrep,
    fit,
    lcfed,
    lg_fedavg,
    per_fedavg,
    scaffold,
)
from tests.helpers.clustered import cfl, cgpfl, cgpfl_prox, clove, fedgroup, fesem, fl_hc, ifca, pacfl
from tests.helpers.commandline import KINDS


def remade(result, **changes):
    """Returns the result of the same run with other values in its output."""
    return TrainingResult.of(result.uplink, replace(result.output, **changes), result.state, result.is_noisy)


def spoil(kind, value):
    """Returns a function that makes the upload, model or loss of a result not finite."""

    def spoiled(result):
        if kind == "loss":
            return remade(result, loss=value)
        model = result.output.model.clone()
        model[3] = value
        if kind == "model":
            return remade(result, model=model)
        name, sent = next(iter(result.uplink.payload.items()))
        sent = sent.clone()
        sent[3] = value
        payload = {**result.uplink.payload, name: sent}
        return replace(result, uplink=Uplink(result.uplink.client, payload, result.uplink.num_samples))

    return spoiled


def spoiling(lost, change):
    """Returns a worker class that spoils the results of the (round, client) pairs in `lost`."""

    class Faulty(lcfl.distributed.worker.Worker):
        def train(self, task, engine=None):
            result = super().train(task, engine)
            return change(result) if (task.round, task.client) in lost else result

    return Faulty


def losing(lost):
    """Returns a server class that drops the (round, client) pairs in `lost` before their uploads arrive."""

    class Dropping(lcfl.server.server.Server):
        def train(self, tasks, dropped=()):
            received = super().train(tasks, dropped)
            kept = {i: result for i, result in received.results.items() if (self.state.round, i) not in lost}
            return replace(received, results=kept)

    return Dropping


def faulty(client, number, change):
    return spoiling({(number, client)}, change)


def dropping(client, number):
    return losing({(number, client)})


METHODS = {
    "fedavg": fedavg,
    "lcfed": lcfed,
    "fedac": partial(fedac, 3, tuning=ClusterNumberTuning("silhouette")),
    "alone": alone,
    "fednova": partial(fednova, momentum=0.5),
    "fedper": fedper,
    "fedrep": fedrep,
    "fedbabu": fedbabu,
    "per_fedavg": per_fedavg,
    "fedprox": fedprox,
    "lg_fedavg": lg_fedavg,
    "ifca": ifca,
    "clove": clove,
    "fesem": fesem,
    "cfl": partial(cfl, eps1=1e9, eps2=0.0, min_round=0, stale_max=9),
    "fedgroup": fedgroup,
    "fl_hc": fl_hc,
    "pacfl": pacfl,
    "cgpfl": cgpfl,
    "cgpfl_prox": cgpfl_prox,
    "scaffold": scaffold,
    "feddyn": feddyn,
    "fedlc": fedlc,
    "fedavgm": partial(fedopt, ServerMomentum()),
    "fedadam": partial(fedopt, ServerAdam()),
    "fedyogi": partial(fedopt, ServerYogi()),
    "ditto": ditto,
    "apfl": apfl,
    "fedala": fedala,
    "fedamp": fedamp,
}
# Aggregation with a momentum is the only one in the default selection that is no kind of clustering.
KIND_OF_METHOD = [
    pytest.param(name, marks=[] if name in (*KINDS, "fednova") else [pytest.mark.slow]) for name in METHODS
]
PULLED = {"lcfed", "fedac", "fedprox", "cgpfl_prox", "feddyn", "ditto", "fedamp"}
TWICE = {"clove"}  # clients also fail in the extra round before the training round
SETUP = {"rounds": 4, "clients_per_round": 7}


def watched(tmp_path, name, **options):
    module = blobs_module(cluster_weight=0.5 * (name in PULLED))
    return fit(module, blobs(12), METHODS[name](), tmp_path, **{**SETUP, **options})


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """``whole(name)``: the run of a method in which nothing fails, computed once."""
    return cache(lambda name: watched(tmp_path_factory.mktemp(name), name))


def chosen(run):
    """Returns two clients of round 1: one that took part in round 0 and will again, and one that is new."""
    sampled = run.sampled
    old = next(i for i in sampled[1] if i in sampled[0] and i in sampled[2] + sampled[3])
    new = next(i for i in sampled[1] if i not in sampled[0])
    return old, new


@pytest.mark.parametrize(
    ("name", "kind", "value"),
    [
        ("lcfed", "upload", nan),
        ("fedavg", "upload", -inf),
        ("fednova", "loss", nan),
        ("alone", "model", nan),
        *(
            pytest.param(name, "upload", nan, marks=pytest.mark.slow)
            for name in METHODS
            if name not in ("lcfed", "alone")
        ),
    ],
)
def test_result_that_is_not_finite_is_treated_as_a_dropout(tmp_path, monkeypatch, whole, name, kind, value):
    clients = chosen(whole(name))
    lost = {(1, client) for client in clients}
    said = rf"^round 1: .* 2 of \d+ clients .* \({', '.join(map(str, sorted(clients)))}\); .* left out"
    with monkeypatch.context() as patch, pytest.warns(UserWarning, match=said):
        patch.setattr(lcfl.federation.session, "Worker", spoiling(lost, spoil(kind, value)))
        broken = watched(tmp_path, name)
    monkeypatch.setattr(lcfl.federation.session, "Server", losing(lost))
    dropped = watched(tmp_path, name)
    assert_same_state(broken.state, dropped.state, but=["total_bytes"])
    assert [row["train/failed_clients"] for row in broken.rows] == [0, 4 if name in TWICE else 2, 0, 0]
    assert [row["train/failed_clients"] for row in whole(name).rows] == [0, 0, 0, 0]
    with pytest.raises(AssertionError):
        assert_same_state(broken.state, whole(name).state, but=["total_bytes"])
    assert broken.state.total_bytes == whole(name).state.total_bytes  # because the clients did send


def test_failing_clients_keep_their_models_and_their_positions_in_their_data(tmp_path, monkeypatch, whole):
    old, new = chosen(whole("lcfed"))
    before = watched(tmp_path, "lcfed", rounds=1).state
    worker = spoiling({(1, old), (1, new)}, spoil("upload", nan))
    monkeypatch.setattr(lcfl.federation.session, "Worker", worker)
    with pytest.warns(UserWarning, match="round 1: "):
        after = watched(tmp_path, "lcfed", rounds=2).state
    for client in (old, new):
        assert same(after.clients[client], before.clients[client])
        assert torch.equal(after.codes[client], before.codes[client])
    assert after.participated[old] and not after.participated[new]


@pytest.mark.parametrize("kind", ["loss", "upload"])
def test_loss_of_a_round_is_the_mean_of_the_other_clients(tmp_path, monkeypatch, whole, kind):
    client, _ = chosen(whole("fedavg"))
    losses = []

    def spoiled(result):
        return spoil(kind, nan)(result if kind == "loss" else spoil("loss", 1e6)(result))

    class Recording(faulty(client, 1, spoiled)):
        def train(self, task, engine=None):
            result = super().train(task, engine)
            if task.round == 1 and task.client != client:
                losses.append(result.output.loss)
            return result

    monkeypatch.setattr(lcfl.federation.session, "Worker", Recording)
    with pytest.warns(UserWarning, match="not finite"):
        watch = watched(tmp_path, "fedavg")
    assert watch.rows[1]["train/loss"] == pytest.approx(np.mean(losses))
    assert np.isfinite([row["train/loss"] for row in watch.rows]).all()


def test_client_that_fails_in_the_warmup_round_is_only_left_out_of_it(tmp_path, monkeypatch):
    with monkeypatch.context() as patch, pytest.warns(UserWarning, match=r"round -1: .* \(4\)"):
        patch.setattr(lcfl.federation.session, "Worker", faulty(4, -1, spoil("upload", nan)))
        broken = watched(tmp_path, "lcfed").state
    with monkeypatch.context() as patch:
        patch.setattr(lcfl.federation.session, "Server", dropping(4, -1))
        assert_same_state(broken, watched(tmp_path, "lcfed").state, but=["total_bytes"])


@pytest.mark.parametrize("name", KIND_OF_METHOD)
def test_round_in_which_all_clients_fail_changes_nothing(tmp_path, monkeypatch, name):
    before = watched(tmp_path, name, rounds=1)
    worker = spoiling({(1, client) for client in range(12)}, spoil("loss", nan))
    monkeypatch.setattr(lcfl.federation.session, "Worker", worker)
    with pytest.warns(UserWarning, match="not finite"):
        after = watched(tmp_path, name, rounds=2)
    assert_same_clients(before.state, after.state)
    assert torch.equal(before.state.centres, after.state.centres)
    assert torch.equal(before.state.global_model, after.state.global_model)
    assert after.rows[1]["train/failed_clients"] == (14 if name in TWICE else 7)
    assert "train/loss" not in after.rows[1]


@pytest.mark.parametrize(("name", "devices"), [("fedavg", 2), ("lcfed", 1)])  # LCFed's warm-up round succeeds
@pytest.mark.filterwarnings("ignore:round .* not finite")
def test_a_run_whose_training_rounds_all_fail_ends_with_an_error(tmp_path, monkeypatch, name, devices):
    worker = spoiling({(number, client) for number in (0, 1) for client in range(12)}, spoil("loss", nan))
    monkeypatch.setattr(lcfl.federation.session, "Worker", worker)
    wanted = r"run/version_0: nothing was learned, because no update could be used: 14 were not finite \("
    with pytest.raises(ValueError, match=wanted):
        watched(tmp_path, name, rounds=2, devices=devices)


def test_a_run_whose_updates_are_all_refused_ends_with_an_error(tmp_path):
    wanted = r"nothing was learned, .*: 28 were beyond trainer\.max_update_norm=1e-09 \(raise it\)\.$"
    with pytest.warns(UserWarning, match="beyond trainer"), pytest.raises(ValueError, match=wanted):
        watched(tmp_path, "fedavg", max_update_norm=1e-9)


def test_a_run_whose_clients_are_all_dropped_is_no_error(tmp_path):
    watch = watched(tmp_path, "fedavg", client_dropout=0.999999)
    assert not watch.state.participated.any() and watch.metrics


def test_a_client_that_fails_in_the_warm_up_of_a_run_without_rounds_is_no_error(tmp_path, monkeypatch):
    monkeypatch.setattr(lcfl.federation.session, "Worker", faulty(4, -1, spoil("upload", nan)))
    with pytest.warns(UserWarning, match="round -1: .*not finite"):
        watch = watched(tmp_path, "lcfed", rounds=0)
    assert watch.metrics and watch.server.table.column("train/failed_clients") == [1]


def test_a_dry_run_whose_random_samples_all_fail_is_no_error(tmp_path, monkeypatch):
    worker = spoiling({(0, client) for client in range(12)}, spoil("loss", nan))
    monkeypatch.setattr(lcfl.federation.session, "Worker", worker)
    with pytest.warns(UserWarning, match="2 of 2 clients is not finite"):
        assert watched(tmp_path, "fedavg", fast_dev_run=True).metrics


def dropped(watch, number, sampled):
    return watch.server.schedule.sample_dropouts(watch.server.seed, number, sampled)


def test_dropouts_are_drawn_by_round_and_client(tmp_path):
    watch = watched(tmp_path, "fedavg", client_dropout=0.3, rounds=6)
    lost = [dropped(watch, number, watch.sampled[number]) for number in range(6)]
    assert [row["train/dropped_clients"] for row in watch.rows] == [len(each) for each in lost]
    assert 0 < sum(map(len, lost)) < 6 * 7
    more = dropped(watch, 0, range(12))
    assert lost[0] == more & set(watch.sampled[0])  # whichever other clients were sampled
    participated = set().union(*({*watch.sampled[number]} - lost[number] for number in range(6)))
    assert set(torch.nonzero(watch.state.participated).flatten().tolist()) == participated


def test_bytes_sent_to_dropouts_are_counted(tmp_path, whole):
    watch = watched(tmp_path, "fedavg", client_dropout=0.3)
    size = 4 * watch.state.initial.numel()
    for row in watch.rows:
        assert row["comm/down_bytes"] == 7 * size
        assert row["comm/up_bytes"] == (7 - row["train/dropped_clients"]) * size
    assert "train/dropped_clients" not in whole("fedavg").rows[0]


def assert_not_reporting_is_like_failing(run, monkeypatch):
    """Checks that dropouts give the same state as failures.

    Args:
        run: ``run(client_dropout=...)`` returns a `Watch` of a few rounds.
        monkeypatch: pytest's fixture.
    """
    watch = run(client_dropout=0.2)
    lost = {(number, i) for number, sampled in watch.sampled.items() for i in dropped(watch, number, sampled)}
    assert lost
    monkeypatch.setattr(lcfl.federation.session, "Worker", spoiling(lost, spoil("loss", nan)))
    with pytest.warns(UserWarning, match="not finite"):
        failed = run(client_dropout=0.0)
    assert_same_state(watch.state, failed.state, but=["total_bytes"])


@pytest.mark.parametrize(
    "name", ["lcfed", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fedac", "fesem"))]
)
def test_dropout_gives_the_same_state_as_a_failure(tmp_path, monkeypatch, name):
    assert_not_reporting_is_like_failing(partial(watched, tmp_path, name), monkeypatch)


@pytest.mark.parametrize("chance", [-0.1, 1.0])
def test_client_dropout_out_of_range_is_refused(tmp_path, chance):
    with pytest.raises(ValueError, match=rf"trainer.client_dropout: got {chance}; it must lie in \[0, 1\)"):
        watched(tmp_path, "fedavg", client_dropout=chance)
