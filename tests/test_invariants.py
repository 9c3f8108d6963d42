"""Runs that must be equal, bit for bit or to rounding, and whole rounds derived anew in numpy."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import lcfl.clustering.lowrank
import lcfl.server
import lcfl.session
import lcfl.worker
from lcfl.aggregation import ClusterMean, GlobalMean
from lcfl.exchange import FullModel
from lcfl.local import LocalTraining
from lcfl.messages import Uplink
from lcfl.method import Method
from lcfl.module import FederatedModule
from lcfl.networks import SplitNetwork
from tests.builders import (
    alone,
    blobs,
    blobs_module,
    dealt,
    fedavg,
    fit,
    lcfed,
    linear_module,
    linear_step,
    two_sided,
)


def assert_same_clients(one, other):
    """Bit for bit what the clients keep."""
    assert list(one.clients) == list(other.clients)
    assert torch.equal(one.participated, other.participated)
    for client in one.clients:
        left, right = one.clients[client], other.clients[client]
        assert left.consumed == right.consumed
        assert (left.model is None) == (right.model is None)
        assert left.model is None or torch.equal(left.model, right.model)


def assert_same_state(one, other):
    """Bit for bit everything but the counted bytes."""
    assert_same_clients(one, other)
    for name in ("global_model", "centres", "assignment", "projection", "codes"):
        left, right = getattr(one, name), getattr(other, name)
        assert (left is None and right is None) or torch.equal(left, right), name


# 23.1: what a method is when its own part is switched off


def noisy():
    """With dropout, so that the clients' random streams count too."""
    return SplitNetwork(nn.Sequential(nn.Linear(16, 12), nn.ReLU(), nn.Dropout(0.3)), nn.Linear(12, 8))


@pytest.mark.parametrize("local", [{"steps": 3}, {"epochs": 1}])
def test_lcfed_without_pulls_is_local(tmp_path, local):
    runs = [
        fit(FederatedModule(noisy), blobs(12), method, tmp_path, rounds=4, clients_per_round=5).state
        for method in (lcfed(local=LocalTraining(**local)), alone(**local))
    ]
    assert_same_clients(*runs)
    assert 0 < len(list(runs[0].clients)) < 12
    pulled = FederatedModule(noisy, cluster_weight=0.1)
    third = fit(pulled, blobs(12), lcfed(local=LocalTraining(**local)), tmp_path, rounds=4, clients_per_round=5).state
    client = next(iter(third.clients))
    assert not torch.equal(third.clients[client].model, runs[0].clients[client].model)


def test_one_cluster_of_participants_that_starts_from_its_centre_is_fedavg(tmp_path):
    """From the first centre on, the mean of the offline models, which FedAvg is given as its initial model."""
    local, mean = LocalTraining(steps=3, start="centre"), ClusterMean("participants", "participants")
    clustered = fit(blobs_module(), blobs(12), lcfed(1, local, mean), tmp_path, rounds=4, clients_per_round=5)

    class Warm(FederatedModule):
        def initial_model(self, seed, number=0):
            return clustered.history[0].centres[0]

    plain = Method(LocalTraining(steps=3), FullModel(), GlobalMean("uniform"))
    module = blobs_module()
    warm = Warm(module.make_network, module.optimizer)
    averaged = fit(warm, blobs(12), plain, tmp_path, rounds=4, clients_per_round=5)
    for left, right in zip(clustered.history[1:], averaged.history, strict=True):
        assert torch.equal(left.centres, right.centres)
        assert torch.equal(left.global_model, right.global_model)
    assert not torch.equal(averaged.history[0].global_model, averaged.history[-1].global_model)


# 23.2: ties


def test_r_never_changes_while_all_similarities_tie(tmp_path, monkeypatch):
    monkeypatch.setattr(lcfl.clustering.lowrank, "cosine", lambda codes, centres: torch.zeros(len(codes), len(centres)))
    method = lcfed(4, init="random")
    watch = fit(blobs_module(cluster_weight=0.5), blobs(12), method, tmp_path, rounds=3, clients_per_round=5)
    assert watch.history[0].assignment.bincount().tolist() == [3, 3, 3, 3]
    for each in watch.history:
        assert torch.equal(each.assignment, watch.history[0].assignment)


# 23.5: the numbers of the clients


def test_permuting_the_clients_permutes_the_results(tmp_path):
    inputs, targets, train, test = two_sided(6, size=8)
    train = [share[: 8 - i] for i, share in enumerate(train)]  # different sizes: weights go along
    order = [4, 2, 0, 5, 1, 3]
    for method, module in (
        (partial(fedavg, steps=2), linear_module(lr=0.3)),
        (
            partial(lcfed, 2, LocalTraining(steps=2), dimension=3),
            linear_module(0.3, cluster_weight=0.4, global_weight=0.2),
        ),
    ):
        plain = fit(module, dealt(inputs, targets, train, test=test), method(), tmp_path, rounds=3).state
        moved_data = dealt(inputs, targets, [train[i] for i in order], test=[test[i] for i in order])
        moved = fit(module, moved_data, method(), tmp_path, rounds=3).state
        torch.testing.assert_close(moved.global_model, plain.global_model, rtol=0, atol=1e-6)
        for new, old in enumerate(order):
            torch.testing.assert_close(moved.centre_of(new), plain.centre_of(old), rtol=0, atol=1e-6)
            if plain.clients[old].model is not None:
                torch.testing.assert_close(moved.clients[new].model, plain.clients[old].model, rtol=0, atol=1e-6)
        assert not torch.allclose(plain.centre_of(0), plain.initial, atol=1e-2)
    assert plain.num_clusters == 2
    assert len(plain.assignment.unique()) == 2


# 23.11: NaN


def spoil(kind, value):
    """A result whose upload, model or loss is not finite."""

    def spoiled(result):
        if kind == "loss":
            return replace(result, trained=replace(result.trained, loss=value))
        model = result.trained.model.clone()
        model[3] = value
        if kind == "model":
            return replace(result, trained=replace(result.trained, model=model))
        return replace(result, uplink=Uplink(result.uplink.client, {"model": model}, result.uplink.num_samples))

    return spoiled


def faulty(client, number, change):
    """Workers that spoil what `client` sends in round `number`."""

    class Faulty(lcfl.worker.Worker):
        def train(self, task):
            result = super().train(task)
            return change(result) if (task.client, task.round) == (client, number) else result

    return Faulty


def dropping(client, number):
    """Servers that `client` has left before its upload of round `number` came in."""

    class Dropping(lcfl.server.Server):
        def train(self, tasks):
            results = super().train(tasks)
            if self.state.round == number:
                del results[client]
            return results

    return Dropping


METHODS = {"fedavg": fedavg, "lcfed": lcfed, "alone": alone}
SETUP = {"rounds": 4, "clients_per_round": 7}


def watched(tmp_path, name, **options):
    module = blobs_module(cluster_weight=0.5 * (name == "lcfed"))
    return fit(module, blobs(12), METHODS[name](), tmp_path, **{**SETUP, **options})


def chosen(tmp_path, name):
    """Two clients of round 1: one that took part in round 0 and will again, and one that is new."""
    sampled = watched(tmp_path, name).sampled
    old = next(i for i in sampled[1] if i in sampled[0] and i in sampled[2] + sampled[3])
    new = next(i for i in sampled[1] if i not in sampled[0])
    return old, new


@pytest.mark.parametrize(
    ("name", "kind", "value"),
    [
        ("fedavg", "upload", float("nan")),
        ("lcfed", "upload", float("nan")),
        ("lcfed", "upload", float("-inf")),
        ("lcfed", "loss", float("nan")),
        ("alone", "model", float("nan")),
    ],
)
def test_a_broken_upload_is_a_client_that_dropped_out(tmp_path, monkeypatch, name, kind, value):
    for client in chosen(tmp_path, name):
        with monkeypatch.context() as patch:
            patch.setattr(lcfl.session, "Worker", faulty(client, 1, spoil(kind, value)))
            with pytest.warns(UserWarning, match=rf"^client {client}, round 1: .* left out of this round"):
                broken = watched(tmp_path, name)
        with monkeypatch.context() as patch:
            patch.setattr(lcfl.session, "Server", dropping(client, 1))
            dropped = watched(tmp_path, name)
        assert_same_state(broken.state, dropped.state)
        whole = watched(tmp_path, name)
        assert [row["train/failed_clients"] for row in broken.rows] == [0, 1, 0, 0]
        assert [row["train/failed_clients"] for row in whole.rows] == [0, 0, 0, 0]
        with pytest.raises(AssertionError):
            assert_same_state(broken.state, whole.state)
        assert broken.state.total_bytes == whole.state.total_bytes  # it did send


def test_a_failing_client_keeps_its_model_and_its_place_in_its_data(tmp_path, monkeypatch):
    old, new = chosen(tmp_path, "lcfed")
    before = watched(tmp_path, "lcfed", rounds=1).state
    for client in (old, new):
        with monkeypatch.context() as patch, pytest.warns(UserWarning, match=f"client {client}, round 1"):
            patch.setattr(lcfl.session, "Worker", faulty(client, 1, spoil("upload", float("nan"))))
            after = watched(tmp_path, "lcfed", rounds=2).state
        assert after.clients[client].consumed == before.clients[client].consumed
        assert torch.equal(after.clients[client].model, before.clients[client].model)
        assert bool(after.participated[client]) == (client == old)
        assert torch.equal(after.codes[client], before.codes[client])


def test_the_loss_of_a_round_is_that_of_the_others(tmp_path, monkeypatch):
    client, _ = chosen(tmp_path, "fedavg")
    monkeypatch.setattr(lcfl.session, "Worker", faulty(client, 1, spoil("loss", float("nan"))))
    with pytest.warns(UserWarning, match="not finite"):
        watch = watched(tmp_path, "fedavg")
    assert np.isfinite([row["train/loss"] for row in watch.rows]).all()


def test_a_client_that_fails_offline_only_leaves_the_fit(tmp_path, monkeypatch):
    with monkeypatch.context() as patch, pytest.warns(UserWarning, match="client 4, round -1"):
        patch.setattr(lcfl.session, "Worker", faulty(4, -1, spoil("upload", float("nan"))))
        broken = watched(tmp_path, "lcfed").state
    with monkeypatch.context() as patch:
        patch.setattr(lcfl.session, "Server", dropping(4, -1))
        assert_same_state(broken, watched(tmp_path, "lcfed").state)


@pytest.mark.parametrize("name", METHODS)
def test_a_round_in_which_everybody_fails_changes_nothing(tmp_path, monkeypatch, name):
    class Faulty(lcfl.worker.Worker):
        def train(self, task):
            result = super().train(task)
            return spoil("loss", float("nan"))(result) if task.round == 1 else result

    before = watched(tmp_path, name, rounds=1)
    monkeypatch.setattr(lcfl.session, "Worker", Faulty)
    with pytest.warns(UserWarning, match="not finite"):
        after = watched(tmp_path, name, rounds=2)
    assert_same_clients(before.state, after.state)
    assert torch.equal(before.state.centres, after.state.centres)
    assert torch.equal(before.state.global_model, after.state.global_model)
    assert after.rows[1]["train/failed_clients"] == 7
    assert "train/loss" not in after.rows[1]


# whole rounds in numpy: an independent derivation from the papers' equations


INPUTS, TARGETS, TRAIN, TEST = two_sided(2, size=6)
TRAIN = [TRAIN[0], TRAIN[1][:4]]


def descend(w, client, lr, steps, mu=0.0, lam=0.0, omega=None, phi=None):
    """LocalUpdate of LCFed's Algorithm 1 with all of the client's samples in every batch."""
    losses = []
    for _ in range(steps):
        loss, slope = linear_step(w, INPUTS[TRAIN[client]], TARGETS[TRAIN[client]])
        if omega is not None:
            loss += mu / 2 * ((w - omega) ** 2).sum() + lam / 2 * ((w[:9] - phi) ** 2).sum()
            slope = slope + mu * (w - omega)
            slope[:9] += lam * (w[:9] - phi)
        losses.append(loss)
        w = w - lr * slope
    return w, np.mean(losses)


def test_one_round_of_fedavg_in_numpy(tmp_path):
    module = linear_module(lr=0.5)
    watch = fit(module, dealt(INPUTS, TARGETS, TRAIN, test=TEST), fedavg(steps=2), tmp_path)
    w0 = module.initial_model(0).double().numpy()
    (w_0, loss_0), (w_1, loss_1) = (descend(w0, client, 0.5, 2) for client in (0, 1))
    np.testing.assert_allclose(watch.state.global_model, (6 * w_0 + 4 * w_1) / 10, atol=1e-6)
    assert watch.rows[0]["train/loss"] == pytest.approx((loss_0 + loss_1) / 2, rel=1e-5)
    assert [watch.state.clients[i].consumed for i in (0, 1)] == [12, 8]
    assert [watch.state.clients[i].model for i in (0, 1)] == [None, None]
    assert np.abs(w_0 - w_1).max() > 0.1


def test_two_rounds_of_lcfed_in_numpy(tmp_path):
    lr, mu, lam = 0.5, 0.6, 0.4
    module = linear_module(lr, cluster_weight=mu, global_weight=lam)
    data = dealt(INPUTS, TARGETS, TRAIN, test=TEST)
    with pytest.warns(UserWarning, match="going on with 1"):
        watch = fit(module, data, lcfed(2, LocalTraining(steps=2), dimension=5), tmp_path, rounds=2)
    w0 = module.initial_model(0).double().numpy()

    # Algorithm 1 line 2: M from the models of one local run without pulls; two models span one direction.
    offline = np.stack([descend(w0, client, lr, 2)[0] for client in (0, 1)])
    m = offline[0] - offline[1]
    m /= np.linalg.norm(m)
    code = offline @ m
    assert code[0] > 0 > code[1]  # opposite directions, hence two clusters
    omega, r, phi, w = offline.copy(), np.array([0, 1]), w0[:9], np.stack([w0, w0])
    opening = watch.history[0]
    assert abs(watch.state.projection[:, 0].double().numpy() @ m) == pytest.approx(1, abs=1e-6)
    np.testing.assert_allclose(opening.centres[opening.assignment], omega[r], atol=1e-6)
    np.testing.assert_array_equal(opening.global_model, module.initial_model(0))

    for each in watch.history[1:]:
        trained = [descend(w[i], i, lr, 2, mu, lam, omega[r[i]], phi) for i in (0, 1)]
        w = np.stack([model for model, _ in trained])
        similarity = np.sign(np.outer(w @ m, omega @ m))  # the cosine of numbers
        r = similarity.argmax(axis=1)  # Eq. 3 with Omega of before
        omega = np.stack([w[r == k].mean(axis=0) if (r == k).any() else omega[k] for k in (0, 1)])
        phi = w.mean(axis=0)[:9]
        np.testing.assert_allclose(each.centres[each.assignment], omega[r], atol=2e-6)
        np.testing.assert_allclose(each.global_model[:9], phi, atol=2e-6)
        assert each.row["train/loss"] == pytest.approx(np.mean([loss for _, loss in trained]), rel=1e-5)
    for client in (0, 1):
        np.testing.assert_allclose(watch.state.clients[client].model, w[client], atol=2e-6)
    assert r.tolist() == [0, 1]
