"""Tests of the baselines' rounds against numpy, derived independently from their papers' equations."""

from functools import partial

import numpy as np
import pytest
import torch

from lcfl.core import rng
from lcfl.federation.federation import Federation
from lcfl.methods import (
    BlendedClusterMean,
    EnvelopeModel,
    EnvelopeTraining,
    GlobalMean,
    Method,
    ServerMomentum,
)
from lcfl.models.module import FederatedModule
from tests.helpers.builders import (
    alone,
    dealt,
    ditto,
    fednova,
    fedper,
    fedprox,
    fit,
    lg_fedavg,
    linear,
    linear_module,
    linear_step,
    per_fedavg,
    two_sided,
)

INPUTS, TARGETS, TRAIN, TEST = two_sided(2, size=6)
TRAIN = [TRAIN[0], TRAIN[1][:4]]
SHARE = np.array([0.6, 0.4])
LR = 0.5


def slope_of(w, rows):
    return linear_step(w, INPUTS[rows], TARGETS[rows])[1]


def run_optimizer(w, rows_of_steps, mu=0.0, momentum=0.0, correction=0.0):
    """Runs SGD on these samples with torch's momentum, pulled to the starting point and with corrected gradients."""
    start, velocity = w, 0.0
    for rows in rows_of_steps:
        velocity = momentum * velocity + slope_of(w, rows) + correction + mu * (w - start)
        w = w - LR * velocity
    return w


def order(client, consumed, batch_size=2):
    """Yields the batches of the client's endless order after `consumed` samples, drawn from the addressed stream."""
    number, position = divmod(consumed, len(TRAIN[client]))
    while True:
        shuffled = rng.generator(0, "order", client, number).permutation(len(TRAIN[client]))
        for start in range(position, len(shuffled), batch_size):
            yield TRAIN[client][shuffled[start : start + batch_size]]
        number, position = number + 1, 0


def batches(client, consumed, number, batch_size=2):
    return [rows for rows, _ in zip(order(client, consumed, batch_size), range(number), strict=False)]


def started(module):
    return module.initial_model(0).double().numpy()


def run(method, tmp_path, module=None, rounds=2, engine="auto", **options):
    data = dealt(INPUTS, TARGETS, TRAIN, test=TEST, **options)
    return fit(module or linear_module(LR), data, method, tmp_path, rounds=rounds, engine=engine, final_models=None)


def loss_on_test(models):
    """Returns the mean over clients of their models' loss on their test samples."""
    return np.mean([linear_step(w, INPUTS[rows], TARGETS[rows])[0] for w, rows in zip(models, TEST, strict=True)])


def close(model, expected):
    np.testing.assert_allclose(model, expected, atol=2e-6)


@pytest.mark.parametrize("engine", ["sequential", "compiled", "stacked"])
def test_fedprox_pulls_to_the_model_that_was_sent(tmp_path, engine):
    """Checks that the pull is not to the model in training, which would always be zero."""
    module = linear_module(LR, cluster_weight=0.7)
    watch = run(fedprox(steps=3), tmp_path, module, engine=engine)
    w = started(module)
    for each in watch.history:
        plain = SHARE @ [run_optimizer(w, [TRAIN[i]] * 3) for i in (0, 1)]
        w = SHARE @ [run_optimizer(w, [TRAIN[i]] * 3, mu=0.7) for i in (0, 1)]
        close(each.global_model, w)
        assert np.abs(plain - w).max() > 0.02


@pytest.mark.parametrize("gamma", [0.0, 0.4])
def test_fednova_with_momentum_at_clients_and_server(tmp_path, gamma):
    """Uses batches of 2, which are three steps for client 0 and two for client 1."""
    rho = 0.9
    module = FederatedModule(linear, partial(torch.optim.SGD, lr=LR, momentum=rho))
    watch = run(fednova(gamma, epochs=1), tmp_path, module, batch_size=2)
    w, velocity, taus = started(module), 0.0, np.array([3, 2])
    a = (taus - rho * (1 - rho**taus) / (1 - rho)) / (1 - rho)
    np.testing.assert_allclose(a, [1 + 1.9 + 2.71, 1 + 1.9])  # worked from FedNova section 4
    for number, each in enumerate(watch.history):
        ends = [run_optimizer(w, batches(i, number * len(TRAIN[i]), taus[i]), momentum=rho) for i in (0, 1)]
        d = [(w - end) / length for end, length in zip(ends, a, strict=True)]
        velocity = gamma * velocity + (SHARE @ a) * (SHARE @ d)
        fedavg, w = SHARE @ ends, w - velocity
        close(each.global_model, w)
        assert np.abs(fedavg - w).max() > 1e-3


def test_fednova_with_a_proximal_term(tmp_path):
    """Checks a <- (1 - eta mu) a + 1 per step.

    tau_eff is the mean of a_i, or of tau_i as in the authors' code.
    """
    mu = 0.5
    module = linear_module(LR, cluster_weight=mu)
    a = np.array([1 + 0.75 * (1 + 0.75), 1 + 0.75])
    w = started(module)
    ends = [run_optimizer(w, batches(i, 0, 3 - i), mu=mu) for i in (0, 1)]
    d = SHARE @ [(w - end) / length for end, length in zip(ends, a, strict=True)]
    for word, tau_eff in (("normaliser", SHARE @ a), ("steps", 0.6 * 3 + 0.4 * 2)):
        watch = run(fednova(epochs=1, effective_steps=word), tmp_path, module, rounds=1, batch_size=2)
        close(watch.state.global_model, w - tau_eff * d)
        assert watch.rows[0]["comm/up_bytes"] == 4 * 2 * (17 + (2 if word == "steps" else 1))


@pytest.mark.parametrize(("method", "shared"), [(fedper, slice(0, 9)), (lg_fedavg, slice(9, 17))])
def test_a_part_is_shared_and_the_rest_stays_with_the_client(tmp_path, method, shared):
    """Checks FedPer, which shares the embedding [0, 9), and LG-FedAvg with one global layer, the decision [9, 17).

    The evaluated model has the client's own part and the current shared part, not the shared part from its training.
    """
    watch = run(method(steps=2), tmp_path, rounds=3)
    w0 = started(linear_module(LR))
    own, part = [w0.copy(), w0.copy()], w0[shared]
    for each in watch.history:
        for client in (0, 1):
            own[client][shared] = part
            own[client] = run_optimizer(own[client], [TRAIN[client]] * 2)
        part = SHARE @ [model[shared] for model in own]
        close(each.global_model[shared], part)
    state, exchange, layout = watch.state, watch.server.method.exchange, watch.server.layout
    stale = [model.copy() for model in own]
    for client in (0, 1):
        close(state.clients[client].model, own[client])
        own[client][shared] = part
        close(exchange.personal(state, client, layout), own[client])
    assert watch.metrics["test/own_split/personal/loss"] == pytest.approx(loss_on_test(own), rel=1e-5)
    assert abs(loss_on_test(stale) / loss_on_test(own) - 1) > 1e-3
    rest = np.delete(np.arange(17), np.arange(17)[shared])
    np.testing.assert_array_equal(state.global_model[rest], w0[rest].astype(np.float32))
    assert np.abs(own[0] - own[1])[rest].max() > 0.1


ALPHA, BETA = 0.3, 0.2


def meta_step(w, b1, b2, b3=None):
    adapted = w - ALPHA * slope_of(w, b1)
    direction = slope_of(adapted, b2)
    if b3 is not None:  # compute H(w; b3) v by central differences in float64
        h = 1e-5
        curved = (slope_of(w + h * direction, b3) - slope_of(w - h * direction, b3)) / (2 * h)
        direction = direction - ALPHA * curved
    return direction


@pytest.mark.parametrize("hessian", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.6])
def test_per_fedavg_on_consecutive_batches(tmp_path, hessian, momentum):
    local = {"inner_lr": ALPHA, "outer_lr": BETA, "outer_momentum": momentum, "hessian": hessian}
    watch = run(per_fedavg(steps=2, **local), tmp_path, linear_module(7.0), batch_size=2)
    w, size = started(linear_module()), 3 if hessian else 2
    for number, each in enumerate(watch.history):
        ends = []
        for client in (0, 1):
            consumed = 2 * 2 * size * number  # no batch of 2 is short in this data set
            drawn, end, velocity = batches(client, consumed, 2 * size), w, 0.0
            for step in (0, 1):
                velocity = momentum * velocity + meta_step(end, *drawn[size * step : size * (step + 1)])
                end = end - BETA * velocity
            ends.append(end)
        w = SHARE @ ends
        close(each.global_model, w)
    assert np.abs(w - started(linear_module())).max() > 0.05


def test_per_fedavg_with_epochs_takes_pairs_and_leaves_out_the_odd_batch(tmp_path):
    """Uses passes of three batches for client 0 and two for client 1, which are one pair each.

    Beta is the optimizer's rate.
    """
    watch = run(per_fedavg(epochs=2, inner_lr=ALPHA), tmp_path, rounds=1, batch_size=2)
    ends = []
    for client, per_pass in ((0, 3), (1, 2)):
        drawn, end = batches(client, 0, 2 * per_pass), started(linear_module())
        for start in (0, per_pass):
            end = end - LR * meta_step(end, drawn[start], drawn[start + 1])
        ends.append(end)
        assert watch.state.clients[client].consumed == 2 * len(TRAIN[client])
    close(watch.state.global_model, SHARE @ ends)


@pytest.mark.parametrize("amount", [{"steps": 2}, {"epochs": 2}])
@pytest.mark.parametrize("hessian", [False, True])
def test_per_fedavg_with_one_batch_uses_it_for_all_gradients(tmp_path, amount, hessian):
    """Checks a case in which public code takes no step at all and sends w back."""
    watch = run(per_fedavg(inner_lr=ALPHA, hessian=hessian, **amount), tmp_path, rounds=1)
    ends = []
    for rows in TRAIN:
        end = started(linear_module())
        for _ in range(2):
            end = end - LR * meta_step(end, rows, rows, rows if hessian else None)
        ends.append(end)
    close(watch.state.global_model, SHARE @ ends)
    assert [watch.state.clients[i].consumed for i in (0, 1)] == [12, 8]


def test_per_fedavg_is_evaluated_after_one_step_on_training_data(tmp_path):
    watch = run(per_fedavg(steps=1, inner_lr=ALPHA), tmp_path, rounds=1)
    w = watch.state.global_model.double().numpy()
    for kind, models in (
        ("personal", [w - ALPHA * slope_of(w, rows) for rows in TRAIN]),
        ("global", [w, w]),
        ("after_local", [w - LR * meta_step(w, rows, rows) for rows in TRAIN]),
    ):
        losses = [linear_step(model, INPUTS[TEST[i]], TARGETS[TEST[i]])[0] for i, model in enumerate(models)]
        assert watch.metrics[f"test/own_split/{kind}/loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    with pytest.raises(KeyError):
        watch.metrics["test/own_split/cluster/loss"]


def test_per_fedavgs_personal_models_are_not_kept(tmp_path):
    federation = Federation(rounds=1, devices=1, accelerator="cpu", logger=False, default_root_dir=tmp_path)
    done = federation.fit(linear_module(LR), dealt(INPUTS, TARGETS, TRAIN, test=TEST), per_fedavg())
    assert done.model("global") is not None
    with pytest.raises(ValueError, match=r"got kind='personal', which a client makes from its own data, .* has global"):
        done.model("personal", client=0)
    with pytest.raises(ValueError, match="got kind='after'; the method of this run has global"):
        done.model("after", client=0)


def test_local_with_its_full_budget_trains_all_clients_in_every_round(tmp_path):
    data = dealt(INPUTS, TARGETS, TRAIN, test=TEST)
    watch = fit(linear_module(LR), data, alone(full_budget=True, steps=2), tmp_path, rounds=3, clients_per_round=1)
    assert watch.sampled == {0: [0, 1], 1: [0, 1], 2: [0, 1]}
    for client in (0, 1):
        close(watch.state.clients[client].model, run_optimizer(started(linear_module()), [TRAIN[client]] * 6))
    assert watch.state.total_bytes == 0


@pytest.mark.parametrize("engine", ["sequential", "compiled", "stacked"])
def test_ditto_pulls_personal_models_to_the_model_that_was_sent(tmp_path, engine):
    mu = 0.7
    module = linear_module(LR, cluster_weight=mu)
    watch = run(ditto(steps=2), tmp_path, module, engine=engine, rounds=3, batch_size=2)
    w, own = started(module), [started(module), started(module)]
    for number, each in enumerate(watch.history):
        steps = [batches(i, 4 * number, 2) for i in (0, 1)]
        for i in (0, 1):
            for rows in steps[i]:
                own[i] = own[i] - LR * (slope_of(own[i], rows) + mu * (own[i] - w))
        w = SHARE @ [run_optimizer(w, steps[i]) for i in (0, 1)]
        close(each.global_model, w)
    for state, expected in zip(watch.state.clients.states([0, 1]), own, strict=True):
        close(state.model, expected)


def test_without_a_pull_the_personal_models_of_ditto_are_those_of_clients_that_train_alone(tmp_path):
    one, other = (run(method, tmp_path / str(i), batch_size=2) for i, method in enumerate((ditto(), alone())))
    for own, expected in zip(*(each.state.clients.states([0, 1]) for each in (one, other)), strict=True):
        assert torch.equal(own.model, expected.model)


def test_pfedme_is_cgpfl_with_one_cluster_and_blends_old_and_new(tmp_path):
    local = EnvelopeTraining(steps=2, inner_steps=3, outer_lr=0.05)
    means = (
        GlobalMean("uniform", optimizer=ServerMomentum(0.7, 0.0)),
        BlendedClusterMean("participants", "participants", "uniform", 0.7),
    )
    one, other = (
        run(Method(local, EnvelopeModel(), mean), tmp_path / str(number), rounds=3) for number, mean in enumerate(means)
    )
    torch.testing.assert_close(one.state.centres, other.state.centres)
    assert one.state.centres.shape == (1, 17)
