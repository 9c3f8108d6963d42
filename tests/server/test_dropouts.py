"""Results that are not finite are left out of their round, as if the client had never answered."""

from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest
import torch

import lcfl.distributed.worker
import lcfl.federation.session
import lcfl.server.server
from lcfl.core.messages import Uplink
from lcfl.methods.clustering import ClusterNumberTuning
from tests.helpers.bits import assert_same_clients, assert_same_state
from tests.helpers.builders import (
    alone,
    blobs,
    blobs_module,
    fedac,
    fedavg,
    fednova,
    fedper,
    fedprox,
    fit,
    lcfed,
    lg_fedavg,
    per_fedavg,
)
from tests.helpers.clustered import cfl, cgpfl, cgpfl_prox, fedgroup, fesem, fl_hc, ifca, pacfl


def spoil(kind, value):
    """Returns a function that makes the upload, model or loss of a result not finite."""

    def spoiled(result):
        if kind == "loss":
            return replace(result, output=replace(result.output, loss=value))
        model = result.output.model.clone()
        model[3] = value
        if kind == "model":
            return replace(result, output=replace(result.output, model=model))
        name, sent = next(iter(result.uplink.payload.items()))
        sent = sent.clone()
        sent[3] = value
        payload = {**result.uplink.payload, name: sent}
        return replace(result, uplink=Uplink(result.uplink.client, payload, result.uplink.num_samples))

    return spoiled


def faulty(client, number, change):
    """Returns a worker class that spoils what `client` sends in round `number`."""

    class Faulty(lcfl.distributed.worker.Worker):
        def train(self, task, engine=None):
            result = super().train(task, engine)
            return change(result) if (task.client, task.round) == (client, number) else result

    return Faulty


def dropping(client, number):
    """Returns a server class that drops `client` before its upload of round `number` arrives."""

    class Dropping(lcfl.server.server.Server):
        def train(self, tasks, dropped=()):
            results = super().train(tasks, dropped)
            if self.state.round == number:
                del results[client]
            return results

    return Dropping


METHODS = {
    "fedavg": fedavg,
    "lcfed": lcfed,
    "fedac": partial(fedac, 3, tuning=ClusterNumberTuning("silhouette")),
    "alone": alone,
    "fednova": partial(fednova, momentum=0.5),
    "fedper": fedper,
    "per_fedavg": per_fedavg,
    "fedprox": fedprox,
    "lg_fedavg": lg_fedavg,
    "ifca": ifca,
    "fesem": fesem,
    "cfl": partial(cfl, eps1=1e9, eps2=0.0, min_round=0, stale_max=9),
    "fedgroup": fedgroup,
    "fl_hc": fl_hc,
    "pacfl": pacfl,
    "cgpfl": cgpfl,
    "cgpfl_prox": cgpfl_prox,
}
PULLED = {"lcfed", "fedac", "fedprox", "cgpfl_prox"}
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
        *((name, "upload", float("nan")) for name in METHODS if name not in ("alone", "per_fedavg")),
        ("lcfed", "upload", float("-inf")),
        ("lcfed", "loss", float("nan")),
        ("alone", "model", float("nan")),
        ("per_fedavg", "loss", float("nan")),
    ],
)
def test_result_that_is_not_finite_is_treated_as_a_dropout(tmp_path, monkeypatch, whole, name, kind, value):
    for client in chosen(whole(name)):
        with monkeypatch.context() as patch:
            patch.setattr(lcfl.federation.session, "Worker", faulty(client, 1, spoil(kind, value)))
            with pytest.warns(UserWarning, match=rf"^round 1: .* 1 of \d+ clients .* \({client}\); .* left out"):
                broken = watched(tmp_path, name)
        with monkeypatch.context() as patch:
            patch.setattr(lcfl.federation.session, "Server", dropping(client, 1))
            dropped = watched(tmp_path, name)
        assert_same_state(broken.state, dropped.state, but=["total_bytes"])
        assert [row["train/failed_clients"] for row in broken.rows] == [0, 1, 0, 0]
        assert [row["train/failed_clients"] for row in whole(name).rows] == [0, 0, 0, 0]
        with pytest.raises(AssertionError):
            assert_same_state(broken.state, whole(name).state, but=["total_bytes"])
        assert broken.state.total_bytes == whole(name).state.total_bytes  # because the client did send


def test_failing_client_keeps_its_model_and_its_position_in_its_data(tmp_path, monkeypatch, whole):
    old, new = chosen(whole("lcfed"))
    before = watched(tmp_path, "lcfed", rounds=1).state
    for client in (old, new):
        with monkeypatch.context() as patch, pytest.warns(UserWarning, match=rf"round 1: .* \({client}\)"):
            patch.setattr(lcfl.federation.session, "Worker", faulty(client, 1, spoil("upload", float("nan"))))
            after = watched(tmp_path, "lcfed", rounds=2).state
        assert after.clients[client].consumed == before.clients[client].consumed
        assert torch.equal(after.clients[client].model, before.clients[client].model)
        assert bool(after.participated[client]) == (client == old)
        assert torch.equal(after.codes[client], before.codes[client])


def test_loss_of_a_round_is_the_mean_of_the_other_clients(tmp_path, monkeypatch, whole):
    client, _ = chosen(whole("fedavg"))
    monkeypatch.setattr(lcfl.federation.session, "Worker", faulty(client, 1, spoil("loss", float("nan"))))
    with pytest.warns(UserWarning, match="not finite"):
        watch = watched(tmp_path, "fedavg")
    assert np.isfinite([row["train/loss"] for row in watch.rows]).all()


def test_client_that_fails_in_the_warmup_round_is_only_left_out_of_it(tmp_path, monkeypatch):
    with monkeypatch.context() as patch, pytest.warns(UserWarning, match=r"round -1: .* \(4\)"):
        patch.setattr(lcfl.federation.session, "Worker", faulty(4, -1, spoil("upload", float("nan"))))
        broken = watched(tmp_path, "lcfed").state
    with monkeypatch.context() as patch:
        patch.setattr(lcfl.federation.session, "Server", dropping(4, -1))
        assert_same_state(broken, watched(tmp_path, "lcfed").state, but=["total_bytes"])


@pytest.mark.parametrize("name", METHODS)
def test_round_in_which_all_clients_fail_changes_nothing(tmp_path, monkeypatch, name):
    class Faulty(lcfl.distributed.worker.Worker):
        def train(self, task, engine=None):
            result = super().train(task, engine)
            return spoil("loss", float("nan"))(result) if task.round == 1 else result

    before = watched(tmp_path, name, rounds=1)
    monkeypatch.setattr(lcfl.federation.session, "Worker", Faulty)
    with pytest.warns(UserWarning, match="not finite"):
        after = watched(tmp_path, name, rounds=2)
    assert_same_clients(before.state, after.state)
    assert torch.equal(before.state.centres, after.state.centres)
    assert torch.equal(before.state.global_model, after.state.global_model)
    assert after.rows[1]["train/failed_clients"] == 7
    assert "train/loss" not in after.rows[1]


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

    class Faulty(lcfl.distributed.worker.Worker):
        def train(self, task, engine=None):
            result = super().train(task, engine)
            return spoil("loss", float("nan"))(result) if (task.round, task.client) in lost else result

    monkeypatch.setattr(lcfl.federation.session, "Worker", Faulty)
    with pytest.warns(UserWarning, match="not finite"):
        failed = run(client_dropout=0.0)
    assert lost
    assert_same_state(watch.state, failed.state, but=["total_bytes"])


@pytest.mark.parametrize("name", ["lcfed", "fedac", "fesem"])
def test_dropout_gives_the_same_state_as_a_failure(tmp_path, monkeypatch, name):
    assert_not_reporting_is_like_failing(partial(watched, tmp_path, name), monkeypatch)


@pytest.mark.parametrize("chance", [-0.1, 1.0])
def test_client_dropout_out_of_range_is_refused(tmp_path, chance):
    with pytest.raises(ValueError, match=rf"trainer.client_dropout: got {chance}; it must lie in \[0, 1\)"):
        watched(tmp_path, "fedavg", client_dropout=chance)
