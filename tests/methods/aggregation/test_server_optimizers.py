"""Optimizers of the server: three rounds worked out again in numpy, clusters, and values that are refused."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lcfl.methods.aggregation import (
    ClusterMean,
    GlobalMean,
    ServerAdagrad,
    ServerAdam,
    ServerMomentum,
    ServerYogi,
)
from lcfl.methods.clustering.cluster_moves import ClusterMove
from lcfl.methods.clustering.tuning import StoredModelGeometry
from lcfl.models import Layout
from tests.helpers.builders import Normed, state_of, upload

LAYOUT = Layout.from_network(Normed())
P = LAYOUT.num_parameters


def momentum(change, v, _):
    v = 0.9 * v + change
    return 0.5 * v, v, None


def adaptive(eta, beta1, tau, second):
    def step(change, m, v):
        m, v = beta1 * m + (1 - beta1) * change, second(v, change**2)
        return eta * m / (np.sqrt(v) + tau), m, v

    return step


STEPS = {
    "momentum": (ServerMomentum(0.5, 0.9), momentum),
    "adagrad": (ServerAdagrad(0.2, 0.3, 0.01), adaptive(0.2, 0.3, 0.01, lambda v, square: v + square)),
    "adam": (ServerAdam(0.2, 0.9, 0.01, 0.8), adaptive(0.2, 0.9, 0.01, lambda v, square: 0.8 * v + 0.2 * square)),
    "yogi": (
        ServerYogi(0.2, 0.9, 0.01, 0.8),
        adaptive(0.2, 0.9, 0.01, lambda v, square: v - 0.2 * square * np.sign(v - square)),
    ),
}


def drawn(number, seed):
    return list(torch.randn(number, LAYOUT.size, generator=torch.Generator().manual_seed(seed)))


def start(num_clusters=1):
    centres = torch.stack(drawn(num_clusters, 9))
    state = state_of([None] * 4, [0, 0, num_clusters - 1, num_clusters - 1], centres.tolist(), [True] * 4)
    state.global_model = centres[0]
    return state


@pytest.mark.parametrize("name", STEPS)
def test_three_rounds_give_what_numpy_gives(name):
    optimizer, step = STEPS[name]
    state = start()
    model = state.global_model[:P].double().numpy()
    first, second = np.zeros(P), np.full(P, 0.01**2)
    for number in range(3):
        models = drawn(4, number)
        GlobalMean(optimizer=optimizer)(state, [upload(i, each, i + 1) for i, each in enumerate(models)], LAYOUT)
        mean = np.average(torch.stack(models).double(), axis=0, weights=[1, 2, 3, 4])
        change, first, second = step(mean[:P] - model, first, second)
        model = model + change
        np.testing.assert_allclose(state.global_model[:P], model, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(state.global_model[P:-1], mean[P:-1], rtol=1e-5, atol=1e-6)  # the last is an integer
    assert torch.equal(state.centres[0], state.global_model)


def test_without_momentum_a_whole_step_is_the_mean():
    one, other, models = start(), start(), drawn(4, 0)
    uploads = [upload(i, each) for i, each in enumerate(models)]
    GlobalMean(optimizer=ServerMomentum(1.0, 0.0))(one, uploads, LAYOUT)
    GlobalMean()(other, uploads, LAYOUT)
    torch.testing.assert_close(one.global_model, other.global_model, rtol=1e-6, atol=1e-6)


def test_every_centre_has_a_momentum_of_its_own_and_one_without_an_upload_stays():
    mean = ClusterMean("participants", "participants", optimizer=ServerMomentum(1.0, 0.5))
    state, models = start(2), drawn(4, 0)
    first, second = state.centres.clone()
    mean(state, [upload(0, models[0]), upload(3, models[3])], LAYOUT)
    torch.testing.assert_close(state.centres[:, :P], torch.stack([models[0], models[3]])[:, :P])
    mean(state, [upload(0, models[1])], LAYOUT)
    velocity = 0.5 * (models[0] - first)[:P] + (models[1] - models[0])[:P]
    torch.testing.assert_close(state.centres[0, :P], models[0][:P] + velocity)
    torch.testing.assert_close(state.centres[1, :P], models[3][:P])
    torch.testing.assert_close(state.aggregation["velocity"][1], (models[3] - second)[:P])


def test_moments_and_control_variates_follow_clusters_that_are_split_merged_and_renumbered():
    """Cluster 1 is split and cluster 0 joins cluster 2, so their number stays the same."""
    mean = ClusterMean("participants", "participants", optimizer=ServerMomentum(1.0, 0.5))
    models, centres = drawn(6, 0), torch.stack(drawn(3, 9))
    state = state_of([each.tolist() for each in models], [0, 0, 1, 1, 2, 2], centres.tolist(), [True] * 6)
    mean(state, [upload(i, model) for i, model in enumerate(models)], LAYOUT)
    state.aggregation |= {"control": torch.arange(3.0).repeat(P, 1).T, "other": torch.arange(3.0), "steps": 3}
    velocity, groups = state.aggregation["velocity"], StoredModelGeometry(SimpleNamespace(layout=LAYOUT), state)
    groups.apply(ClusterMove(1, second_half=(3,)))
    groups.apply(ClusterMove(0, other=2))
    assert state.assignment.tolist() == [1, 1, 0, 2, 1, 1]  # 1, 2 and the new cluster
    assert torch.equal(state.aggregation["velocity"], velocity[[1, 2, 1]])
    assert state.aggregation["control"][:, 0].tolist() == [1, 2, 1]
    assert state.aggregation["other"].tolist() == [0, 1, 2] and state.aggregation["steps"] == 3
    assert state.centres.shape == centres.shape


@pytest.mark.parametrize(
    "optimizer", [ServerAdagrad(), ServerAdam(), ServerYogi(), ServerAdam(tau=1e30), ServerYogi(tau=1e200)]
)
def test_enormous_numbers_do_not_make_later_models_nan(optimizer):
    mean, state = GlobalMean("uniform", optimizer=optimizer), start()
    state.centres = state.global_model.unsqueeze(0)
    for number in range(3):
        sent = torch.full((LAYOUT.size,), 1e30) if number == 0 else state.global_model
        mean(state, [upload(0, sent)], LAYOUT)
        assert state.global_model[:P].isfinite().all() and state.aggregation["second_moment"].isfinite().all()


def test_a_new_number_of_clusters_begins_anew():
    mean = ClusterMean("participants", "participants", optimizer=ServerMomentum(1.0, 0.5))
    state, models = start(2), drawn(4, 0)
    mean(state, [upload(0, models[0]), upload(3, models[3])], LAYOUT)
    state.centres = torch.cat([state.centres, state.centres[:1]])
    state.assignment[1] = 2
    mean(state, [upload(1, models[1])], LAYOUT)
    torch.testing.assert_close(state.centres[2, :P], models[1][:P])
    assert state.aggregation["velocity"].shape == (3, P)
    assert not state.aggregation["velocity"][:2].any()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ServerMomentum(lr=0.0), "ServerMomentum got lr=0.0; it must be above 0"),
        (lambda: ServerMomentum(momentum=1.0), "ServerMomentum got momentum=1.0"),
        (lambda: ServerAdam(beta2=1.0), "ServerAdam got beta2=1.0"),
        (lambda: ServerYogi(beta1=-0.1), "ServerYogi got beta1=-0.1"),
        (lambda: ServerAdagrad(tau=0.0), "ServerAdagrad got tau=0.0"),
    ],
)
def test_values_that_no_optimizer_can_have_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_a_cluster_without_uploads_keeps_its_parameters_and_its_buffers():
    layout = Layout.from_network(Normed())
    models = torch.arange(4 * layout.size, dtype=torch.float32).view(4, layout.size)
    state = state_of(models[:2], [0, 1], models[2:])
    ClusterMean(optimizer=ServerMomentum())(state, [upload(0, models[0])], layout)
    assert torch.equal(state.centres[1], models[3])
    assert torch.equal(state.centres[0], models[0])  # the first step of momentum is the whole change
