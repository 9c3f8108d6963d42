"""Tests of whole rounds against numpy, derived independently from the papers' equations."""

import numpy as np
import pytest

from lcfl.methods.local import LocalTraining
from tests.helpers.builders import alone, dealt, fedac, fedavg, fit, lcfed, linear_module, linear_step, two_sided

INPUTS, TARGETS, TRAIN, TEST = two_sided(2, size=6)
TRAIN = [TRAIN[0], TRAIN[1][:4]]


def run_optimizer(w, client, lr, steps, mu=0.0, lam=0.0, omega=None, phi=None, population=(INPUTS, TARGETS, TRAIN)):
    """Computes LocalUpdate of LCFed's Algorithm 1 with all of the client's samples in every batch."""
    inputs, targets, train = population
    losses = []
    for _ in range(steps):
        loss, slope = linear_step(w, inputs[train[client]], targets[train[client]])
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
    (w_0, loss_0), (w_1, loss_1) = (run_optimizer(w0, client, 0.5, 2) for client in (0, 1))
    np.testing.assert_allclose(watch.state.global_model, (6 * w_0 + 4 * w_1) / 10, atol=1e-6)
    assert watch.rows[0]["train/loss"] == pytest.approx((loss_0 + loss_1) / 2, rel=1e-5)
    assert [watch.state.clients[i].consumed for i in (0, 1)] == [12, 8]
    assert [watch.state.clients[i].model for i in (0, 1)] == [None, None]
    assert np.abs(w_0 - w_1).max() > 0.1


def test_two_rounds_of_lcfed_in_numpy(tmp_path):
    lr, mu, lam = 0.5, 0.6, 0.4
    module = linear_module(lr, cluster_weight=mu, global_weight=lam)
    data = dealt(INPUTS, TARGETS, TRAIN, test=TEST)
    with pytest.warns(UserWarning, match="using 1"):
        watch = fit(module, data, lcfed(2, LocalTraining(steps=2), dimension=5), tmp_path, rounds=2)
    w0 = module.initial_model(0).double().numpy()

    # Algorithm 1 line 2 fits M to the models of one local run without pulls. Two models span one direction.
    offline = np.stack([run_optimizer(w0, client, lr, 2)[0] for client in (0, 1)])
    m = offline[0] - offline[1]
    m /= np.linalg.norm(m)
    code = offline @ m
    assert code[0] > 0 > code[1]  # opposite directions give two clusters
    omega, r, phi, w = offline.copy(), np.array([0, 1]), w0[:9], np.stack([w0, w0])
    warmup = watch.history[0]
    assert abs(watch.state.projection[:, 0].double().numpy() @ m) == pytest.approx(1, abs=1e-6)
    np.testing.assert_allclose(warmup.centres[warmup.assignment], omega[r], atol=1e-6)
    np.testing.assert_array_equal(warmup.global_model, module.initial_model(0))

    for each in watch.history[1:]:
        trained = [run_optimizer(w[i], i, lr, 2, mu, lam, omega[r[i]], phi) for i in (0, 1)]
        w = np.stack([model for model, _ in trained])
        similarity = np.sign(np.outer(w @ m, omega @ m))  # the cosine of two numbers is the sign of their product
        r = similarity.argmax(axis=1)  # Eq. 3 with Omega from before the aggregation
        omega = np.stack([w[r == k].mean(axis=0) if (r == k).any() else omega[k] for k in (0, 1)])
        phi = w.mean(axis=0)[:9]
        np.testing.assert_allclose(each.centres[each.assignment], omega[r], atol=2e-6)
        np.testing.assert_allclose(each.global_model[:9], phi, atol=2e-6)
        assert each.row["train/loss"] == pytest.approx(np.mean([loss for _, loss in trained]), rel=1e-5)
    for client in (0, 1):
        np.testing.assert_allclose(watch.state.clients[client].model, w[client], atol=2e-6)
    assert r.tolist() == [0, 1]


SIX = two_sided(6, size=6)


def test_rounds_of_lcfed_with_partial_participation_in_numpy(tmp_path):
    """Two of six clients take part in a round, from a random R. Means are over all that ever took part."""
    lr, mu, lam, population = 0.5, 0.6, 0.4, SIX[:3]
    module = linear_module(lr, cluster_weight=mu, global_weight=lam)
    data = dealt(*population, test=SIX[3])
    method = lcfed(2, LocalTraining(steps=2), dimension=3, init="random")
    watch = fit(module, data, method, tmp_path, rounds=8, clients_per_round=2, seed=1)
    w0 = module.initial_model(1).double().numpy()

    offline = np.stack([run_optimizer(w0, client, lr, 2, population=population)[0] for client in range(6)])
    m = np.linalg.svd(offline - offline.mean(axis=0), full_matrices=False)[2][:3]  # line 2
    r = first = watch.history[0].assignment.numpy()
    omega, phi, w, known = np.stack([offline[r == k].mean(axis=0) for k in (0, 1)]), w0[:9], np.stack([w0] * 6), set()
    for t, each in enumerate(watch.history[1:]):
        sampled = watch.sampled[t]
        trained = [run_optimizer(w[i], i, lr, 2, mu, lam, omega[r[i]], phi, population) for i in sampled]
        w[sampled] = [model for model, _ in trained]
        known |= set(sampled)
        own = sorted(known)
        codes, centres = w[own] @ m.T, omega @ m.T
        lengths = np.outer(np.linalg.norm(codes, axis=1), np.linalg.norm(centres, axis=1))
        r = r.copy()
        r[own] = (codes @ centres.T / lengths).argmax(axis=1)  # line 10, with Omega from before the aggregation
        members = [[i for i in own if r[i] == k] for k in (0, 1)]
        omega = np.stack([w[of].mean(axis=0) if of else omega[k] for k, of in enumerate(members)])  # line 11
        phi = w[own].mean(axis=0)[:9]
        np.testing.assert_array_equal(each.assignment, r)
        np.testing.assert_allclose(each.centres, omega, atol=5e-6)
        np.testing.assert_allclose(each.global_model[:9], phi, atol=5e-6)
        if t == 0:
            assert len(known) == 2  # four clients have not taken part, and no mean has their initial models
    for client in known:
        np.testing.assert_allclose(watch.state.clients[client].model, w[client], atol=5e-6)
    assert len(known) > 3 and r[sorted(known)].tolist() != first[sorted(known)].tolist()


def test_rounds_of_fedac_in_numpy(tmp_path):
    """Checks Algorithm 1 from a random R, with three of six clients per round.

    M is refreshed from all models that were ever uploaded.
    """
    lr, mu, lam, population = 0.5, 0.6, 0.4, SIX[:3]
    module = linear_module(lr, cluster_weight=mu, global_weight=lam)
    method = fedac(2, LocalTraining(steps=2), dimension=3, refresh_every=2, init="random")
    data = dealt(*population, test=SIX[3])
    watch = fit(module, data, method, tmp_path, rounds=8, clients_per_round=3, seed=1)
    w0 = module.initial_model(1).double().numpy()

    w, known, fitted = np.stack([w0] * 6), set(), None
    r = watch.history[0].assignment.numpy()  # still as drawn, because nothing is fitted in round 0
    omega, phi = np.stack([w0, w0]), w0[:9]
    assert r.tolist() == [1, 0, 0, 1, 1, 0]
    for t, each in enumerate(watch.history):
        sampled = watch.sampled[t]
        trained = [run_optimizer(w[i], i, lr, 2, mu, lam, omega[r[i]], phi, population) for i in sampled]
        w[sampled] = [model for model, _ in trained]
        known |= set(sampled)
        own = sorted(known)
        if (fitted is None and len(own) >= 4) or (fitted is not None and t - fitted >= 2):
            _, _, right = np.linalg.svd(w[own] - w[own].mean(axis=0), full_matrices=False)
            m, fitted = right[:3], t  # line 10: the leading principal components; they project uncentred models (A4)
        if fitted is not None:
            codes, centres = w[own] @ m.T, omega @ m.T
            lengths = np.outer(np.linalg.norm(codes, axis=1), np.linalg.norm(centres, axis=1))
            r = r.copy()
            r[own] = (codes @ centres.T / lengths).argmax(axis=1)  # line 11, with Omega from before the aggregation
        members = [[i for i in own if r[i] == k] for k in (0, 1)]
        omega = np.stack([w[of].mean(axis=0) if of else omega[k] for k, of in enumerate(members)])  # line 12
        phi = w[sampled].mean(axis=0)[:9]  # line 9
        np.testing.assert_array_equal(each.assignment, r)
        np.testing.assert_allclose(each.centres, omega, atol=5e-6)
        np.testing.assert_allclose(each.global_model[:9], phi, atol=5e-6)
    for client in known:
        np.testing.assert_allclose(watch.state.clients[client].model, w[client], atol=5e-6)
    assert r.tolist() == [1, 0, 1, 0, 1, 0]  # the two kinds of clients are found from a random start


def test_rounds_of_local_in_numpy(tmp_path):
    """Checks that a sampled client continues from its own model and batches, and that no other client changes."""
    data = dealt(*SIX[:3], test=SIX[3])
    watch = fit(linear_module(0.5), data, alone(steps=2), tmp_path, rounds=4, clients_per_round=2)
    w0 = linear_module(0.5).initial_model(0).double().numpy()
    times = [sum(client in sampled for sampled in watch.sampled.values()) for client in range(6)]
    assert 0 in times and max(times) > 1
    for client, number in enumerate(times):
        expected = run_optimizer(w0, client, 0.5, 2 * number, population=SIX[:3])[0] if number else w0
        np.testing.assert_allclose(watch.state.clients[client].model, expected, atol=2e-6)
