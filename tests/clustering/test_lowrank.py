"""LCFed's clustering: the opening round, the E-step with the centres of before, and its edges."""

import warnings

import numpy as np
import pytest
import torch
from sklearn.metrics import adjusted_rand_score

from lcfl.aggregation import ClusterMean
from lcfl.clustering import LowRankCosine
from lcfl.local import LocalTraining
from lcfl.networks import Layout
from lcfl.similarity import assign, cosine, principal_components, project
from tests.builders import (
    Normed,
    blobs,
    blobs_module,
    dealt,
    fit,
    lcfed,
    linear,
    linear_module,
    server_of,
    state_of,
    two_sided,
    upload,
)

LAYOUT = Layout.of(linear())  # P = 17
SIZE = LAYOUT.size


def axis(place, value=1.0):
    model = torch.zeros(SIZE)
    model[place] = value
    return model


def opened(clustering, models, num_clients=None, layout=LAYOUT, initial=None):
    """The state after the opening round of clients 0, 1, ... with these models."""
    num_clients = num_clients or len(models)
    size = layout.size
    state = state_of([], [0] * num_clients, [[0.0] * size], [False] * num_clients, initial)
    clustering.on_opening_end(server_of(layout), state, [upload(i, model) for i, model in enumerate(models)])
    return state


def four_ways(num=12, seed=0):
    """Models near four axes in turn, of different lengths: by direction the groups are clear."""
    draw = torch.Generator().manual_seed(seed)
    models = [axis(i % 4, 1 + i / 4) + 0.02 * torch.randn(SIZE, generator=draw) for i in range(num)]
    return models, np.arange(num) % 4


# the opening round


def test_the_opening_round_fits_m_and_separates_the_groups():
    clustering = LowRankCosine(num_clusters=4, dimension=4)
    models, groups = four_ways()
    state = opened(clustering, models)
    stacked = torch.stack(models)
    assert torch.equal(state.projection, principal_components(stacked, 4))
    assert torch.equal(state.codes, project(stacked, state.projection))
    assert adjusted_rand_score(groups, state.assignment.numpy()) == 1
    for client, group in enumerate(groups):
        torch.testing.assert_close(state.centres[state.assignment[client]], stacked[groups == group].mean(dim=0))


def test_directions_count_and_not_lengths():
    """By distance the short models would be one group, the long ones two others."""
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
        warnings.simplefilter("error")  # k-means is not asked for more clusters than there are directions
        state = opened(LowRankCosine(num_clusters=4, dimension=1), models, initial=initial)
    assert adjusted_rand_score([0, 1, 0, 1, 0], state.assignment.numpy()) == 1
    empty = [cluster for cluster in range(4) if cluster not in state.assignment]
    assert len(empty) == 2
    assert all(torch.equal(state.centres[cluster], initial) for cluster in empty)


def test_fewer_components_than_wanted_warn():
    models, _ = four_ways(5)
    with pytest.warns(UserWarning, match=r"dimension=50, but 5 models span only 4 components; going on with 4"):
        state = opened(LowRankCosine(num_clusters=2, dimension=50), models)
    assert state.projection.shape == (SIZE, 4)
    assert state.codes.shape == (5, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opened(LowRankCosine(num_clusters=2, dimension=4), models)


def test_buffers_take_no_part_in_similarity_but_travel_in_centres():
    layout = Layout.of(Normed())
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
    with pytest.raises(ValueError, match=r"0 of the offline models came up finite.*learning rate"), pytest.warns():
        fit(blobs_module(lr=1e20), blobs(4), lcfed(2), tmp_path)


def test_the_offline_phase_is_spread_over_the_client_numbers():
    (opening,) = LowRankCosine(offline_clients=5).openings(101)
    assert list(opening.clients) == [0, 25, 50, 75, 100]
    assert opening.local_update is None
    (opening,) = LowRankCosine(offline_steps=7).openings(3)
    assert list(opening.clients) == [0, 1, 2]
    assert opening.local_update == LocalTraining(steps=7)


@pytest.mark.parametrize("num_clients", [2, 3, 10, 99, 100, 101])
def test_no_client_is_chosen_twice_for_the_offline_phase(num_clients):
    for wanted in range(2, num_clients + 1):
        (opening,) = LowRankCosine(offline_clients=wanted).openings(num_clients)
        assert len(set(opening.clients)) == wanted
        assert set(opening.clients) <= set(range(num_clients))


def test_offline_steps_and_ordinary_runs(tmp_path):
    """The offline phase changes nothing of how the clients' own training goes on."""
    inputs, targets, train, test = two_sided(4)
    data = dealt(inputs, targets, train, test=test, batch_size=4)
    codes = []
    for options in ({}, {"offline_steps": 3}, {"offline_steps": 9}):
        watch = fit(linear_module(), data, lcfed(2, dimension=2, **options), tmp_path, rounds=0)
        assert all(watch.state.clients[i].consumed == 0 for i in range(4))
        codes.append(watch.state.codes)
    assert torch.equal(codes[0], codes[1])  # an ordinary run has 3 steps
    assert not torch.equal(codes[0], codes[2])


# the E-step


def angled(degrees, length=1.0):
    return np.array([np.cos(np.radians(degrees)), np.sin(np.radians(degrees))] + [0.0] * (SIZE - 2)) * length


def e_step(own, assignment, centres, uploads, participated=None, center=False, offset=None, aggregate=False):
    """One round's end in the plane of the first two parameters; M keeps that plane as it is."""
    clustering = LowRankCosine(num_clusters=len(centres), dimension=2, center=center)
    if offset is not None:
        clustering.load_state_dict({"offset": torch.tensor(offset, dtype=torch.float32)})
    state = state_of(own, assignment, np.array(centres), participated)
    state.projection = torch.eye(SIZE)[:, :2]
    state.codes = torch.stack([torch.zeros(2) if w is None else torch.tensor(w[:2]).float() for w in own])
    sent = [upload(client, model) for client, model in uploads.items()]
    clustering.on_round_end(server_of(LAYOUT), state, sent)
    if aggregate:
        ClusterMean()(state, sent, LAYOUT)
    return state


def test_the_e_step_compares_with_omega_of_before_the_aggregation():
    """Client 0 has gone to 50 degrees: nearer to the old centre at 90 than to the old one at 0.

    After this round's aggregation of the old clusters their centres would stand at 25 and 150 degrees,
    and 0 would have stayed where it was.
    """
    own = [angled(50), angled(0), angled(150), angled(150)]
    state = e_step(own, [0, 0, 1, 1], [angled(0), angled(90)], {0: own[0]}, aggregate=True)
    assert state.assignment.tolist() == [1, 0, 1, 1]
    later = state_of(own, [0, 0, 1, 1], np.array([angled(0), angled(90)]))
    ClusterMean()(later, [upload(0, own[0])], LAYOUT)
    would_be = assign(cosine(torch.stack([torch.tensor(own[0])]).float(), later.centres), torch.tensor([0]))
    assert would_be.tolist() == [0]
    torch.testing.assert_close(state.centres[0], torch.tensor(own[1]).float())


def test_this_rounds_upload_makes_the_code():
    own = [angled(0), angled(90)]
    state = e_step(own, [0, 1], [angled(0), angled(90)], {0: angled(80)})
    assert state.assignment.tolist() == [1, 1]
    torch.testing.assert_close(state.codes[0], torch.tensor(angled(80)[:2]).float())


def test_clients_that_were_not_sampled_are_assigned_anew_to_moved_centres():
    own = [angled(0), angled(40)]
    state = e_step(own, [0, 0], [angled(0), angled(50)], {0: own[0]})
    assert state.assignment.tolist() == [0, 1]


def test_clients_that_never_took_part_keep_their_cluster():
    own = [angled(0), angled(90), None]
    state = e_step(own, [0, 0, 0], [angled(0), angled(90)], {0: own[0]}, participated=[True, False, False])
    assert state.assignment.tolist() == [0, 0, 0]
    state = e_step(own, [0, 0, 0], [angled(0), angled(90)], {0: own[0]}, participated=[True, True, False])
    assert state.assignment.tolist() == [0, 1, 0]


@pytest.mark.parametrize("before", [[0, 1, 2, 1], [2, 2, 2, 2]])
def test_ties_keep_r(before):
    same = [angled(30), angled(30, 2.0), angled(30)]
    own = [angled(0), angled(45), angled(90), angled(200)]
    state = e_step(own, before, [same[0], same[0], same[2]], {0: own[0], 3: own[3]})
    assert state.assignment.tolist() == before


def test_center_compares_w_minus_the_mean():
    """The client lies at 9 degrees from the origin, its centres at 0 and 6; from the mean at 34, they at 0 and 90."""
    mean, own = angled(0, 10.0), [angled(0, 13.0) + angled(90, 2.0), angled(0)]
    centres = [angled(0, 15.0), angled(0, 10.0) + angled(90, 1.0)]
    for before in (0, 1):
        plain = e_step(own, [before, 0], centres, {0: own[0]})
        centred = e_step(own, [before, 0], centres, {0: own[0]}, center=True, offset=mean)
        assert (plain.assignment[0], centred.assignment[0]) == (1, 0)
    torch.testing.assert_close(centred.codes[0], torch.tensor([3.0, 2.0]))


def test_center_subtracts_the_mean_of_the_offline_models():
    models, _ = four_ways()
    clustering = LowRankCosine(num_clusters=4, dimension=4, center=True)
    state = opened(clustering, models)
    stacked = torch.stack(models)
    torch.testing.assert_close(state.codes, (stacked - stacked.mean(dim=0)) @ state.projection)
    kept = LowRankCosine(num_clusters=4, dimension=4, center=True)
    kept.load_state_dict(clustering.state_dict())
    state.participated[:] = True
    for each in (clustering, kept):
        each.on_round_end(server_of(LAYOUT), state, [upload(0, models[5])])
        torch.testing.assert_close(state.codes[0], (models[5] - stacked.mean(dim=0)) @ state.projection)
        state.codes = torch.zeros_like(state.codes)


def test_codes_of_before_are_not_written_into():
    own = [angled(0), angled(90)]
    state = state_of(own, [0, 1], np.array(own))
    state.projection, state.codes = torch.eye(SIZE)[:, :2], torch.zeros(2, 2)
    codes, assignment = state.codes, state.assignment
    LowRankCosine(2, 2).on_round_end(server_of(LAYOUT), state, [upload(0, own[1])])
    assert not codes.any()
    assert assignment.tolist() == [0, 1]


# in a federation


@pytest.mark.parametrize("options", [{}, {"center": True}, {"keep_offline_models": True}])
def test_finds_four_true_groups_within_a_few_rounds_and_stays(tmp_path, options):
    module = blobs_module(cluster_weight=0.5, global_weight=0.1)
    watch = fit(module, blobs(20), lcfed(4, **options), tmp_path, rounds=15, clients_per_round=10)
    truth = [row["cluster/ari"] for row in watch.rows]
    assert truth[4:] == [1.0] * 11
    assert [row["cluster/count"] for row in watch.rows[4:]] == [4.0] * 11
    assert [row["cluster/moved"] for row in watch.rows[5:]] == [0.0] * 10


def test_in_a_federation_too_omega_is_that_of_before_the_aggregation(tmp_path):
    seen = []

    class Watched(LowRankCosine):
        def on_round_end(self, server, state, uploads):
            seen.append((state.centres.clone(), state.global_model.clone()))
            super().on_round_end(server, state, uploads)

    method = lcfed(4)
    method.clustering = [Watched(num_clusters=4, dimension=8)]
    watch = fit(blobs_module(cluster_weight=0.5), blobs(12), method, tmp_path, rounds=3)
    for (centres, mean), before, after in zip(seen, watch.history, watch.history[1:], strict=False):
        assert torch.equal(centres, before.centres)
        assert torch.equal(mean, before.global_model)
        assert not torch.equal(centres, after.centres)
    assert len(seen) == 3


def test_finds_them_without_pulls_too(tmp_path):
    """The own models then never see a centre: only their codes tell them apart."""
    watch = fit(blobs_module(), blobs(20), lcfed(4), tmp_path, rounds=15, clients_per_round=10)
    assert watch.rows[-1]["cluster/ari"] == 1


def test_an_offline_phase_of_some_clients_is_enough(tmp_path):
    module = blobs_module(cluster_weight=0.5)
    watch = fit(module, blobs(20), lcfed(4, offline_clients=8, dimension=7), tmp_path, rounds=15, clients_per_round=10)
    assert watch.history[0].row["comm/up_bytes"] == 8 * 4 * module.layout.size
    assert watch.rows[-1]["cluster/ari"] == 1


@pytest.mark.parametrize("num_clusters", [1, 12])
def test_the_extremes_of_k_run(tmp_path, num_clusters):
    watch = fit(blobs_module(cluster_weight=0.5), blobs(12), lcfed(num_clusters), tmp_path, rounds=3)
    assert watch.state.num_clusters == num_clusters
    assert watch.state.centres.isfinite().all()
    assert [row["cluster/count"] for row in watch.rows] == [1] * 3 if num_clusters == 1 else [12, 12, 12]


# settings


@pytest.mark.parametrize("name", ["num_clusters", "dimension", "offline_clients", "offline_steps"])
def test_counts_are_at_least_one(name):
    with pytest.raises(ValueError, match=f"LowRankCosine: got {name}=0; it must be at least 1"):
        LowRankCosine(**{name: 0})


def test_one_offline_client_is_not_enough():
    with pytest.raises(ValueError, match=r"got offline_clients=1; principal components need at least 2 models"):
        LowRankCosine(offline_clients=1)


def test_a_misspelt_init_is_refused():
    with pytest.raises(ValueError, match=r"got init='k-means'; allowed are kmeans and random"):
        LowRankCosine(init="k-means")


def test_more_clusters_than_clients_are_refused():
    LowRankCosine(num_clusters=5).check(5)
    with pytest.raises(ValueError, match=r"num_clusters=6 for data.num_clients=5; .*lower num_clusters or raise data"):
        LowRankCosine(num_clusters=6).check(5)


def test_a_single_client_is_refused():
    with pytest.raises(ValueError, match=r"got data.num_clients=1; .*at least 2 clients"):
        LowRankCosine(num_clusters=1).check(1)
