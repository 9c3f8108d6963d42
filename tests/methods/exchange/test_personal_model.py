"""Tests of CGPFL in its two readings: runs in numpy, and properties that hold exactly."""

import numpy as np
import pytest
from torch import nn

from lcfl.methods.aggregation import BlendedClusterMean, ClusterMean
from lcfl.methods.clustering import ModelKMeans
from lcfl.methods.local import LocalTraining
from lcfl.methods.method import Method
from lcfl.models import Layout
from tests.helpers.bits import same
from tests.helpers.builders import alone, blobs, blobs_module, fit, linear_module, state_of, upload
from tests.helpers.clustered import UNIFORM, Evaluations, cgpfl, cgpfl_prox
from tests.methods.in_numpy import Clients, best_parts

CLIENTS = Clients(6, 6, 5, 5)  # means are unweighted all the same


def envelope(w, client, batches=2, inner=3, a=0.2, eta=0.1, pull=4.0):
    theta = w
    for _ in range(batches):
        for _ in range(inner):
            slope = CLIENTS.slope(theta, client)
            theta = theta - a * (slope + pull * (theta - w))
        w = w - eta * pull * (w - theta)
    return w, theta


@pytest.mark.parametrize(("num_clusters", "beta"), [(1, 1.0), (2, 1.0), (2, 0.5)])
def test_three_rounds_of_envelopes_in_numpy(tmp_path, num_clusters, beta):
    options = {"steps": 2, "inner_steps": 3, "inner_lr": 0.2, "outer_lr": 0.1, "penalty": 4.0}
    method = cgpfl(num_clusters, BlendedClusterMean("participants", "participants", beta=beta), **options)
    watch = fit(linear_module(), CLIENTS.data(), method, tmp_path, rounds=3)
    omega, r = linear_module().initial_model(0).double().numpy()[None], np.zeros(4, dtype=int)
    for number, each in enumerate(watch.history):
        w, theta = (np.stack(parts) for parts in zip(*(envelope(omega[r[i]], i) for i in range(4)), strict=True))
        if number == 0:
            r = best_parts(w) if num_clusters == 2 else r
            omega = np.stack([w[r == k].mean(axis=0) for k in range(num_clusters)])
        else:
            r = ((w[:, None] - omega[None]) ** 2).sum(axis=2).argmin(axis=1)
            mean = np.stack([w[r == k].mean(axis=0) for k in range(num_clusters)])
            omega = (1 - beta) * omega + beta * mean
        np.testing.assert_allclose(each.centres[each.assignment], omega[r], atol=2e-6)
    for client in range(4):
        np.testing.assert_allclose(watch.state.clients[client].model, theta[client], atol=2e-6)
    assert len(set(r.tolist())) == num_clusters


def test_two_rounds_of_the_proximal_reading_in_numpy(tmp_path):
    mu, lr = 0.6, 0.5
    module = linear_module(lr, cluster_weight=mu)
    watch = fit(module, CLIENTS.data(), cgpfl_prox(2, steps=2), tmp_path, rounds=3)
    w0 = module.initial_model(0).double().numpy()
    w, omega, r = np.stack([w0] * 4), w0[None], np.zeros(4, dtype=int)
    for number, each in enumerate(watch.history):
        reference = omega[r]
        for _ in range(2):
            slopes = np.stack([CLIENTS.slope(w[i], i) for i in range(4)])
            w = w - lr * (slopes + mu * (w - reference))
        r = best_parts(w) if number == 0 else ((w[:, None] - omega[None]) ** 2).sum(axis=2).argmin(axis=1)
        omega = np.stack([w[r == k].mean(axis=0) for k in (0, 1)])
        np.testing.assert_allclose(each.centres[each.assignment], omega[r], atol=2e-6)
    for client in range(4):
        np.testing.assert_allclose(watch.state.clients[client].model, w[client], atol=2e-6)


def test_the_proximal_reading_without_a_pull_is_local(tmp_path):
    options = {"rounds": 4, "clients_per_round": 5}
    runs = [fit(blobs_module(), blobs(12), method, tmp_path, **options).state for method in (cgpfl_prox(3), alone())]
    assert all(same(runs[0].clients[client], runs[1].clients[client]) for client in range(12))


def test_blending_by_hand():
    centres = [[0.0, 4.0], [1.0, 1.0]]
    uploads = [upload(0, [2.0, 0.0]), upload(1, [4.0, 4.0])]
    layout = Layout.from_network(nn.Linear(1, 1), cut=None)
    for beta, expected in ((1.0, [3.0, 2.0]), (0.5, [1.5, 3.0]), (2.0, [6.0, 0.0])):
        state = state_of([[0.0, 0.0]] * 2, [0, 0], centres)
        BlendedClusterMean("participants", "participants", beta=beta)(state, uploads, layout)
        assert state.centres.tolist() == [expected, [1.0, 1.0]]  # the second cluster has no members
        assert state.global_model.tolist() == [3.0, 2.0]
    layout = Layout.from_network(nn.BatchNorm1d(1), cut=None)  # weight, bias, running mean and variance, counter
    uploads = [upload(0, [2.0, 0.0, 8.0, 0.5, 7.0]), upload(1, [4.0, 4.0, 4.0, 0.1, 3.0])]
    for beta, expected in ((0.5, [1.5, 3.0, 3.0, 0.65, 7.0]), (2.0, [6.0, 0.0, 6.0, 0.3, 7.0])):
        state = state_of([[0.0] * 5] * 2, [0, 0], [[0.0, 4.0, 0.0, 1.0, 2.0]])
        BlendedClusterMean("participants", "participants", beta=beta)(state, uploads, layout)
        assert state.centres[0].tolist() == pytest.approx(expected)  # no variance may fall below zero
    with pytest.raises(ValueError, match=r"beta=0\.0; allowed are numbers above 0"):
        BlendedClusterMean(beta=0.0)


@pytest.mark.parametrize("make", [cgpfl, cgpfl_prox])
def test_a_client_that_was_never_sampled_has_its_clusters_model(tmp_path, make):
    evaluations, module = Evaluations(), blobs_module(0.05, cluster_weight=0.5 if make is cgpfl_prox else 0.0)
    watch = fit(module, blobs(12), make(2), tmp_path, rounds=2, clients_per_round=3, callbacks=[evaluations])
    never = ~watch.state.participated.numpy()
    found = {name: metric.values for name, metric in evaluations.found[-1].by_name.items()}
    personal, cluster = found["test/own_split/personal/loss"], found["test/own_split/cluster/loss"]
    # The two also agree for a client that is alone in its cluster, because its personal model is the one that was sent.
    alike = personal == cluster
    assert never.any() and alike[never].all() and not alike.all()


def test_stored_personal_models_cannot_be_clustered_or_merged():
    method = cgpfl(2)
    with pytest.raises(ValueError, match="ModelKMeans uses stored models, but EnvelopeModel keeps none"):
        Method(method.local_update, method.exchange, UNIFORM, [ModelKMeans(2, "stored")])
    with pytest.raises(ValueError, match="over stored models needs an exchange"):
        Method(method.local_update, method.exchange, ClusterMean(), [])
    with pytest.raises(ValueError, match="EnvelopeModel uploads model, which LocalTraining does not provide"):
        Method(LocalTraining(steps=1), method.exchange, UNIFORM, [])
