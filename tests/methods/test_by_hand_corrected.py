"""Tests of SCAFFOLD, FedDyn and FedLC against numpy, and of what they must have in common with FedAvg and FedProx."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from lcfl.methods import (
    CalibratedTraining,
    CentreAndEmbedding,
    ClusterMean,
    ClusterReference,
    ControlledClusterModel,
    ControlledModel,
    ControlledTraining,
    DynamicTraining,
    FullModel,
    GlobalMean,
    GlobalReference,
    Krum,
    Method,
    NoAggregation,
    NoExchange,
    NormalisedMean,
    ServerDynamics,
    UpdateMean,
)
from lcfl.methods.local import calibrated
from lcfl.models import SplitNetwork
from lcfl.models.module import FederatedModule
from tests.helpers.builders import (
    WIDTHS,
    alone,
    blobs,
    blobs_module,
    dealt,
    fedavg,
    feddyn,
    fedlc,
    fit,
    linear,
    linear_module,
    scaffold,
)
from tests.methods.clustering.test_one_shot import fedclust
from tests.methods.test_by_hand_baselines import (
    INPUTS,
    LR,
    TARGETS,
    TRAIN,
    batches,
    close,
    run,
    run_optimizer,
    started,
)

P = 17


@pytest.mark.parametrize("engine", ["sequential", "compiled", "stacked"])
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_scaffold_corrects_by_control_variates(tmp_path, engine, momentum):
    """Batches of 2 are three steps for client 0 and two for client 1."""
    module = FederatedModule(linear, partial(torch.optim.SGD, lr=LR, momentum=momentum))
    watch = run(scaffold(epochs=1), tmp_path, module, rounds=3, engine=engine, batch_size=2)
    w, c, own = started(module), np.zeros(P), [np.zeros(P), np.zeros(P)]
    lengths = [1 + 1 + momentum + 1 + momentum + momentum**2, 1 + 1 + momentum]  # the sums of the gradients' weights
    for number, each in enumerate(watch.history):
        steps = [batches(i, number * len(TRAIN[i]), 3 - i) for i in (0, 1)]
        ends = [run_optimizer(w, steps[i], momentum=momentum, correction=c - own[i]) for i in (0, 1)]
        news = [own[i] - c + (w - ends[i]) / (LR * lengths[i]) for i in (0, 1)]
        c = c + np.mean([new - old for new, old in zip(news, own, strict=True)], axis=0)
        plain, w, own = w, np.mean(ends, axis=0), news
        close(each.global_model, w)
        assert number == 0 or np.abs(run_optimizer(plain, steps[0], momentum=momentum) - ends[0]).max() > 1e-3
    np.testing.assert_allclose(watch.state.aggregation["control"], c[None], atol=2e-5)
    np.testing.assert_allclose(c, np.mean(own, axis=0), atol=1e-12)
    assert watch.rows[0]["comm/up_bytes"] == watch.rows[0]["comm/down_bytes"] == 2 * 4 * 2 * P


def test_a_client_that_does_not_take_part_counts_for_the_control_variate(tmp_path):
    """c changes by the sum over participants, divided by the number of all clients."""
    watch = fit(blobs_module(), blobs(6), scaffold(), tmp_path, rounds=4, clients_per_round=2, final_models=None)
    memories = [state.memory for state in watch.state.clients.states(range(6)) if state.memory is not None]
    torch.testing.assert_close(watch.state.aggregation["control"][0], sum(memories) / 6, rtol=1e-4, atol=1e-5)
    assert 2 < len(memories) <= 6


@pytest.mark.parametrize("engine", ["sequential", "compiled", "stacked"])
def test_feddyn_adds_a_linear_and_a_proximal_term(tmp_path, engine):
    alpha = 0.3
    module = linear_module(LR, cluster_weight=alpha)
    watch = run(feddyn(), tmp_path, module, rounds=3, engine=engine)
    w, h, g = started(module), np.zeros(P), [np.zeros(P), np.zeros(P)]
    for each in watch.history:
        ends = [run_optimizer(w, [TRAIN[i]] * 3, alpha, correction=-g[i]) for i in (0, 1)]
        g = [g[i] - alpha * (ends[i] - w) for i in (0, 1)]
        h = h - alpha * np.mean([end - w for end in ends], axis=0)
        w = np.mean(ends, axis=0) - h / alpha
        close(each.global_model, w)
    assert watch.rows[0]["comm/up_bytes"] == watch.rows[0]["comm/down_bytes"] == 2 * 4 * P


def calibrated_slope(w, rows, margin):
    """The gradient of the softmax cross-entropy of lower scores W2 (W1 x + b1) + b2 - margin."""
    n_in, n_mid, n_out = WIDTHS
    w1, b1, w2, b2 = np.split(w, np.cumsum([n_mid * n_in, n_mid, n_out * n_mid]))
    middle = INPUTS[rows] @ w1.reshape(n_mid, n_in).T + b1
    scores = np.exp(middle @ w2.reshape(n_out, n_mid).T + b2 - margin)
    error = (scores / scores.sum(axis=1, keepdims=True) - np.eye(n_out)[TARGETS[rows]]) / len(rows)
    below = error @ w2.reshape(n_out, n_mid)
    parts = below.T @ INPUTS[rows], below.sum(axis=0), error.T @ middle, error.sum(axis=0)
    return np.concatenate([part.ravel() for part in parts])


@pytest.mark.parametrize("engine", ["sequential", "compiled", "stacked"])
@pytest.mark.parametrize("pull", [0.0, 0.4])
def test_fedlc_lowers_the_scores_of_rare_classes(tmp_path, engine, pull):
    """Without a pull as FedAvg; with it as FedProx, whose pull is that of the plain biases."""
    counts = [np.bincount(TARGETS[TRAIN[i]], minlength=2) for i in (0, 1)]
    margins, weights = [2.0 * np.maximum(count, 1e-8) ** -0.25 for count in counts], [len(TRAIN[i]) for i in (0, 1)]
    assert all(abs(margin[0] - margin[1]) > 0.2 for margin in margins)
    method = fedlc(2.0)
    if pull:
        method = Method(CalibratedTraining(3, start="centre", tau=2.0), GlobalReference(), GlobalMean())
    module = linear_module(LR, cluster_weight=pull)
    watch, w = run(method, tmp_path, module, rounds=2, engine=engine), started(module)
    for each in watch.history:
        ends = [w, w]
        for i, margin in enumerate(margins):
            for _ in range(3):
                ends[i] = ends[i] - LR * (calibrated_slope(ends[i], TRAIN[i], margin) + pull * (ends[i] - w))
        w = np.average(ends, axis=0, weights=weights)
        close(each.global_model, w)
    assert [state.memory.tolist() for state in watch.state.clients.states([0, 1])] == [each.tolist() for each in counts]


def test_fedlc_leaves_the_biases_of_missing_classes_as_they_are(tmp_path):
    data, module = blobs(4), blobs_module()
    method = Method(CalibratedTraining(3), NoExchange(), NoAggregation())
    state = fit(module, data, method, tmp_path, rounds=2, final_models=None).state
    for own in state.clients.states(range(4)):
        has = own.memory > 0
        assert 0 < int(has.sum()) < 8
        moved = own.model[-8:] != state.initial[-8:]
        assert torch.equal(moved, has)


def test_fedlc_without_margins_is_fedavg(tmp_path):
    one, other = run(fedlc(0.0), tmp_path / "one", rounds=3), run(fedavg(), tmp_path / "other", rounds=3)
    torch.testing.assert_close(one.state.global_model, other.state.global_model, rtol=1e-5, atol=1e-6)


def test_fedlc_lowers_the_bias_of_an_embedding_that_contains_the_output_layer(tmp_path):
    """Without a cut, Phi is the whole model, and the pull to it must not move the biases of missing classes."""
    module = blobs_module(cut=None, global_weight=1.0)
    method = Method(CalibratedTraining(3, start="centre"), CentreAndEmbedding(), ClusterMean())
    state = fit(module, blobs(4), method, tmp_path, rounds=2, final_models=None).state
    assert (state.global_model[-8:] - state.initial[-8:]).abs().max() < 1


class Tagger(nn.Module):
    """Scores ``[N, C, L]`` for the classes of L words."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, words):
        return self.head(words).transpose(1, 2)


def test_fedlc_counts_the_targets_of_every_word_but_not_those_that_the_loss_ignores(tmp_path):
    targets = [[0, 0, 2], [1, 0, 2], [1, 1, 1]]
    data = dealt(torch.zeros(3, 3, 4), targets, [[0, 1], [2]])
    loss = nn.CrossEntropyLoss(ignore_index=2)
    module = FederatedModule(Tagger, partial(torch.optim.SGD, lr=LR), cut=None, loss=loss)
    state = fit(module, data, fedlc(1.0), tmp_path, rounds=1, final_models=None).state
    assert [each.memory.tolist() for each in state.clients.states([0, 1])] == [[3, 1, 0], [0, 3, 0]]


class Reversed(nn.Module):
    """Registers its output layer first."""

    def __init__(self):
        super().__init__()
        self.head, self.body = nn.Linear(4, 2), nn.Linear(8, 4)

    def forward(self, inputs):
        return self.head(self.body(inputs))


def test_fedlc_finds_the_output_layer_in_a_head_that_is_registered_first(tmp_path):
    module = FederatedModule(Reversed, partial(torch.optim.SGD, lr=LR), cut=["head"])
    CalibratedTraining(1).check(module)
    assert calibrated._output_bias(module) == slice(8 * 4 + 4 + 4 * 2, 8 * 4 + 4 + 4 * 2 + 2)


def decaying(parameters):
    return torch.optim.SGD(parameters, lr=0.1, weight_decay=1e-3)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"trainable": ["embedding"]}, "registers last, decision, is not a linear layer with a trained bias"),
        ({"loss": nn.MSELoss()}, "got model.loss MSELoss; it must be CrossEntropyLoss or NLLLoss"),
        ({"optimizer": decaying}, "weight_decay=0.001 for the bias of the output layer"),
    ],
)
def test_fedlc_refuses_modules_that_it_cannot_calibrate(options, words):
    module = FederatedModule(linear, **{"optimizer": partial(torch.optim.SGD, lr=LR), **options})
    with pytest.raises(ValueError, match=words):
        CalibratedTraining(1).check(module)


@pytest.mark.parametrize(
    ("network", "words"),
    [
        (
            lambda: SplitNetwork(nn.Linear(8, 4), nn.Linear(4, 2, bias=False)),
            "registers last, decision, is not a linear layer",
        ),
        (
            lambda: SplitNetwork(nn.Linear(8, 4), nn.LayerNorm(4)),
            "registers last, decision, is not a linear layer with a trained bias",
        ),
    ],
)
def test_fedlc_needs_a_bias_to_lower(network, words):
    with pytest.raises(ValueError, match=words):
        CalibratedTraining(1).check(FederatedModule(network))
    with pytest.raises(ValueError, match="tau=-1"):
        CalibratedTraining(1, tau=-1.0)


def test_the_first_round_of_scaffold_is_that_of_fedavg(tmp_path):
    one = run(scaffold(), tmp_path / "one", rounds=1)
    other = run(Method(fedavg().local_update, FullModel(), GlobalMean("uniform")), tmp_path / "other", rounds=1)
    torch.testing.assert_close(one.state.global_model, other.state.global_model)


def test_with_one_client_scaffold_is_training_alone(tmp_path):
    """c is c_i, so that nothing is corrected."""
    one = fit(blobs_module(), blobs(1), scaffold(), tmp_path / "one", rounds=3, final_models=None)
    other = fit(blobs_module(), blobs(1), alone(), tmp_path / "other", rounds=3, final_models=None)
    own = next(iter(other.state.clients.states([0]))).model
    torch.testing.assert_close(one.state.global_model, own, rtol=1e-4, atol=1e-5)


def test_clusters_have_control_variates_of_their_own(tmp_path):
    method = fedclust()
    method = Method(
        ControlledTraining(steps=3), ControlledClusterModel(), ClusterMean("participants", "participants"),
        method.clustering,
    )  # fmt: skip
    watch = fit(blobs_module(), blobs(8), method, tmp_path, rounds=4, final_models=None)
    control, state = watch.state.aggregation["control"], watch.state
    assert len(control) == state.num_clusters > 1
    for cluster, own in enumerate(control):
        memories = [each.memory for each in state.clients.states(state.members(cluster))]
        torch.testing.assert_close(own, sum(memories) / len(memories), rtol=1e-4, atol=1e-5)
    assert not torch.equal(control[0], control[1])


def test_clusters_have_an_h_of_their_own(tmp_path):
    """A cluster's h is the mean of its members' g_i, as FedDyn's h is that of all clients'."""
    dynamics = ClusterMean("participants", "participants", optimizer=ServerDynamics())
    method = Method(DynamicTraining(steps=3, start="centre"), ClusterReference(), dynamics, fedclust().clustering)
    watch = fit(blobs_module(cluster_weight=0.3), blobs(8), method, tmp_path, rounds=4, final_models=None)
    velocity, state = watch.state.aggregation["velocity"], watch.state
    assert len(velocity) == state.num_clusters > 1
    for cluster, own in enumerate(velocity):
        memories = [each.memory for each in state.clients.states(state.members(cluster))]
        torch.testing.assert_close(own, -sum(memories) / len(memories) / 0.3, rtol=1e-4, atol=1e-5)
    assert not torch.equal(velocity[0], velocity[1])


def test_clusters_with_control_variates_may_keep_models(tmp_path):
    """A mean over stored models has those of all clients, not only of this round's."""
    method = Method(
        ControlledTraining(steps=3), ControlledClusterModel(keeps_model=True), ClusterMean("stored", "stored"),
        fedclust().clustering,
    )  # fmt: skip
    state = fit(blobs_module(), blobs(8), method, tmp_path, rounds=4, clients_per_round=4, final_models=None).state
    for cluster, centre in enumerate(state.centres):
        models = [state.stored_model(client) for client in state.members(cluster) if state.participated[client]]
        if models:
            torch.testing.assert_close(centre, sum(models) / len(models))


@pytest.mark.parametrize("method", [scaffold, feddyn])
def test_a_client_that_leaves_is_warned_of(tmp_path, method):
    data = blobs(4, leavers={0: 2})
    with pytest.warns(UserWarning, match="data.leavers: (Controlled|Dynamic)Training corrects with [ch], a mean"):
        fit(blobs_module(cluster_weight=0.3), data, method(), tmp_path, rounds=1, final_models=None)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: scaffold(NormalisedMean()), "reads normaliser"),
        (lambda: scaffold(UpdateMean()), "reads update"),
        (lambda: scaffold(GlobalMean(rule=Krum())), "uploads control variates, to which the rule"),
        (lambda: Method(ControlledTraining(steps=1), FullModel(), GlobalMean()), "reads control from the downlink"),
        (
            lambda: Method(fedavg().local_update, ControlledModel(), GlobalMean()),
            "uploads control_change, which LocalTraining does not",
        ),
    ],
)
def test_parts_that_do_not_fit_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_scaffold_needs_sgd_and_feddyn_a_weight(tmp_path):
    adam = FederatedModule(linear, partial(torch.optim.Adam, lr=0.1))
    with pytest.raises(ValueError, match="ControlledTraining got the optimizer Adam"):
        run(scaffold(), tmp_path, adam)
    with pytest.raises(ValueError, match=r"DynamicTraining got model\.cluster_weight=0, which is alpha of FedDyn"):
        run(feddyn(), tmp_path, linear_module(LR))
