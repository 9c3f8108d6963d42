"""Tests of LCFed's warm-up round: its clients, the projection, the first clusters, and invalid settings."""

import warnings

import pytest
import torch
from sklearn.metrics import adjusted_rand_score

from lcfl.methods.clustering import LowRankCosine
from lcfl.methods.clustering.similarity import principal_components, project
from lcfl.methods.local import LocalTraining
from lcfl.models import Layout
from tests.helpers.builders import (
    Normed,
    blobs,
    blobs_module,
    dealt,
    fit,
    lcfed,
    linear_module,
    server_of,
    two_sided,
    upload,
)
from tests.methods.clustering.models import LAYOUT, SIZE, axis, four_ways, opened


def test_the_warm_up_round_fits_m_and_separates_the_groups():
    clustering = LowRankCosine(num_clusters=4, dimension=4)
    models, groups = four_ways()
    state = opened(clustering, models)
    stacked = torch.stack(models)
    assert torch.equal(state.projection, principal_components(stacked, 4))
    assert torch.equal(state.codes, project(stacked, state.projection))
    assert adjusted_rand_score(groups, state.assignment.numpy()) == 1
    for client, group in enumerate(groups):
        torch.testing.assert_close(state.centres[state.assignment[client]], stacked[groups == group].mean(dim=0))


def test_directions_count_but_lengths_do_not():
    """By distance, the short models would form one group and the long models two others."""
    models = [axis(0, 0.1), axis(1, 0.1), axis(0, 10.0), axis(1, 10.0), axis(0, 9.0)]
    state = opened(LowRankCosine(num_clusters=2, dimension=2), models)
    assert adjusted_rand_score([0, 1, 0, 1, 0], state.assignment.numpy()) == 1


def test_offline_models_are_not_kept():
    state = opened(LowRankCosine(num_clusters=4, dimension=4), four_ways()[0])
    assert list(state.clients) == []
    assert not state.participated.any()


def test_keep_offline_models():
    models, _ = four_ways()
    state = opened(LowRankCosine(num_clusters=4, dimension=4, keep_offline_models=True), models, num_clients=14)
    assert list(state.clients) == list(range(12))
    assert all(torch.equal(state.clients[i].model, model) for i, model in enumerate(models))
    assert state.participated.tolist() == [True] * 12 + [False] * 2


def test_clients_outside_the_offline_phase_are_spread_evenly():
    models, groups = four_ways()
    state = opened(LowRankCosine(num_clusters=4, dimension=4), models, num_clients=400)
    assert adjusted_rand_score(groups, state.assignment[:12].numpy()) == 1
    assert state.assignment[12:].bincount().max() <= 100
    assert state.assignment[12:].bincount().min() >= 100 - 12
    assert not state.codes[12:].any()


def test_init_random_is_balanced_and_takes_its_centres_from_the_offline_models():
    models, groups = four_ways()
    state = opened(LowRankCosine(num_clusters=4, dimension=4, init="random"), models)
    assert state.assignment.bincount().tolist() == [3, 3, 3, 3]
    assert adjusted_rand_score(groups, state.assignment.numpy()) < 1
    for cluster in range(4):
        members = [model for i, model in enumerate(models) if state.assignment[i] == cluster]
        torch.testing.assert_close(state.centres[cluster], torch.stack(members).mean(dim=0))


def test_one_cluster():
    models, _ = four_ways()
    clustering = LowRankCosine(num_clusters=1, dimension=4)
    state = opened(clustering, models)
    assert state.assignment.tolist() == [0] * 12
    torch.testing.assert_close(state.centres, torch.stack(models).mean(dim=0, keepdim=True))
    state.participated[:] = True
    clustering.on_round_end(server_of(LAYOUT), state, [upload(3, -models[3])])
    assert state.assignment.tolist() == [0] * 12


def test_as_many_clusters_as_clients():
    models = [axis(i) for i in range(6)]
    state = opened(LowRankCosine(num_clusters=6, dimension=5), models)
    assert sorted(state.assignment.tolist()) == list(range(6))
    for client, model in enumerate(models):
        torch.testing.assert_close(state.centres[state.assignment[client]], model)


def test_more_clusters_than_distinct_models_leaves_some_empty_at_the_initial_model():
    models = [axis(0), axis(1), axis(0), axis(1), axis(0)]
    initial = torch.full((SIZE,), 0.25)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # k-means would warn about more clusters than directions
        state = opened(LowRankCosine(num_clusters=4, dimension=1), models, initial=initial)
    assert adjusted_rand_score([0, 1, 0, 1, 0], state.assignment.numpy()) == 1
    empty = [cluster for cluster in range(4) if cluster not in state.assignment]
    assert len(empty) == 2
    assert all(torch.equal(state.centres[cluster], initial) for cluster in empty)


def test_fewer_components_than_requested_give_a_warning():
    models, _ = four_ways(5)
    with pytest.warns(UserWarning, match=r"dimension=50, but 5 models span only 4 components; using 4"):
        state = opened(LowRankCosine(num_clusters=2, dimension=50), models)
    assert state.projection.shape == (SIZE, 4)
    assert state.codes.shape == (5, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opened(LowRankCosine(num_clusters=2, dimension=4), models)


def test_buffers_do_not_count_for_similarity_but_are_part_of_centres():
    layout = Layout.from_network(Normed())
    draw = torch.Generator().manual_seed(0)
    models = [torch.randn(30, generator=draw) for _ in range(4)]
    shifted = [torch.cat([model[:23], model[23:] + 100 * i]) for i, model in enumerate(models)]
    plain, moved = (opened(LowRankCosine(2, 3), each, layout=layout) for each in (models, shifted))
    assert plain.projection.shape == (23, 3)
    assert torch.equal(plain.codes, moved.codes)
    assert torch.equal(plain.assignment, moved.assignment)
    assert not torch.equal(plain.centres[:, 23:], moved.centres[:, 23:])


def test_equal_offline_models_are_an_error(tmp_path):
    with pytest.raises(ValueError, match="the models are all equal"):
        fit(blobs_module(lr=0.0), blobs(4), lcfed(2), tmp_path)


def test_an_offline_phase_without_two_finite_models_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"got 0 usable offline models.*learning rate"), pytest.warns():
        fit(blobs_module(lr=1e20), blobs(4), lcfed(2), tmp_path)


def test_the_offline_phase_is_spread_over_the_client_numbers():
    (opening,) = LowRankCosine(offline_clients=5).warmup_rounds(101)
    assert list(opening.clients) == [0, 25, 50, 75, 100]
    assert opening.local_update is None
    (opening,) = LowRankCosine(offline_steps=7).warmup_rounds(3)
    assert list(opening.clients) == [0, 1, 2]
    assert opening.local_update == LocalTraining(steps=7)


@pytest.mark.parametrize("num_clients", [2, 3, 10, 99, 100, 101])
def test_no_client_is_chosen_twice_for_the_offline_phase(num_clients):
    for wanted in range(2, num_clients + 1):
        (opening,) = LowRankCosine(offline_clients=wanted).warmup_rounds(num_clients)
        assert len(set(opening.clients)) == wanted
        assert set(opening.clients) <= set(range(num_clients))


def test_offline_steps_and_ordinary_runs(tmp_path):
    """The offline phase does not change how the clients' training continues."""
    inputs, targets, train, test = two_sided(4)
    data = dealt(inputs, targets, train, test=test, batch_size=4)
    codes = []
    for options in ({}, {"offline_steps": 3}, {"offline_steps": 9}):
        watch = fit(linear_module(), data, lcfed(2, dimension=2, **options), tmp_path, rounds=0)
        assert all(watch.state.clients[i].consumed == 0 for i in range(4))
        codes.append(watch.state.codes)
    assert torch.equal(codes[0], codes[1])  # an ordinary run has 3 steps
    assert not torch.equal(codes[0], codes[2])


def test_more_clusters_than_clients_are_refused():
    LowRankCosine(num_clusters=5).check(5)
    with pytest.raises(ValueError, match=r"num_clusters=6 for the 5 clients .*Lower num_clusters or raise data"):
        LowRankCosine(num_clusters=6).check(5)


def test_a_single_client_is_refused():
    with pytest.raises(ValueError, match=r"got data.num_clients=1; .*at least 2 clients"):
        LowRankCosine(num_clusters=1).check(1)
