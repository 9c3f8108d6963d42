"""Tests of FedAC's clustering: the random start, the first fit, refreshes, and the four similarities."""

import pytest
import torch
from sklearn.metrics import adjusted_rand_score

from lcfl.methods.clustering import RefreshedLowRankCosine
from lcfl.methods.clustering.similarity import principal_components, project
from lcfl.models import Layout
from tests.helpers.builders import Normed, blobs, blobs_module, fedac, fit, server_of, state_of, upload
from tests.methods.clustering.models import LAYOUT, SIZE


def grouped(num_clients=12, num_groups=4, seed=0):
    """Returns models near one axis per group, and the group i % num_groups of each client i."""
    draw = torch.Generator().manual_seed(seed)
    models = 0.02 * torch.randn(num_clients, SIZE, generator=draw)
    for client in range(num_clients):
        models[client, client % num_groups] += 1 + client / 4
    return models, [client % num_groups for client in range(num_clients)]


def begun(clustering, num_clients=12):
    """Returns a state before round 0, as the clustering sets it up."""
    state = state_of([], [0] * num_clients, [[0.0] * SIZE], [False] * num_clients)
    state.round = 0
    clustering.on_fit_start(server_of(LAYOUT), state)
    return state


def take_part(clustering, state, models, clients, server=None):
    """Plays a round with these clients: stores their models, runs the clustering, and ends the round."""
    for client in clients:
        state.clients[client] = type(state.clients[client])(models[client])
        state.participated[client] = True
    clustering.on_round_end(server or server_of(LAYOUT), state, [upload(i, models[i]) for i in clients])
    state.round += 1


def test_the_start_is_a_random_balanced_assignment_with_equal_centres():
    state = begun(RefreshedLowRankCosine(4))
    assert state.assignment.bincount().tolist() == [3, 3, 3, 3]
    assert torch.equal(state.centres, torch.zeros(4, SIZE))


def test_the_first_fit_waits_for_half_of_the_clients_and_two_per_cluster():
    models, groups = grouped()
    clustering = RefreshedLowRankCosine(4, dimension=4)
    state = begun(clustering)
    before = state.assignment.clone()
    take_part(clustering, state, models, range(4))
    assert state.projection is None and torch.equal(state.assignment, before)
    take_part(clustering, state, models, range(2, 8))
    assert torch.equal(state.projection, principal_components(models[:8], 4))
    torch.testing.assert_close(state.codes[:8], project(models[:8], state.projection))
    assert not state.codes[8:].any()
    assert adjusted_rand_score(groups[:8], state.assignment[:8].numpy()) == 1
    assert torch.equal(state.assignment[8:], before[8:])


def test_a_random_start_continues_from_its_centres():
    models, groups = grouped()
    clustering = RefreshedLowRankCosine(4, dimension=4, init="random")
    state = begun(clustering)
    order = [2, 0, 3, 1]
    state.centres = torch.stack([models[group] for group in order])
    before = state.assignment.clone()
    take_part(clustering, state, models, range(9))
    assert state.assignment[:9].tolist() == [order.index(group) for group in groups[:9]]
    assert torch.equal(state.assignment[9:], before[9:])


def test_equal_centres_leave_a_random_start_as_it_is():
    models, _ = grouped()
    clustering = RefreshedLowRankCosine(4, dimension=4, init="random")
    state = begun(clustering)
    state.centres = models[:1].repeat(4, 1)
    before = state.assignment.clone()
    take_part(clustering, state, models, range(12))
    assert state.projection is not None and torch.equal(state.assignment, before)


def test_a_common_start_is_one_cluster_that_is_divided_once():
    models, groups = grouped()
    clustering = RefreshedLowRankCosine(4, dimension=4, init="common")
    state = begun(clustering)
    assert state.assignment.tolist() == [0] * 12 and torch.equal(state.centres, torch.zeros(1, SIZE))
    state.centres = torch.full((1, SIZE), 0.5)  # stands for the result of the first rounds
    take_part(clustering, state, models, range(4))
    assert state.num_clusters == 1
    take_part(clustering, state, models, range(4, 8))
    assert torch.equal(state.centres, torch.full((4, SIZE), 0.5))
    assert adjusted_rand_score(groups[:8], state.assignment[:8].numpy()) == 1
    assert state.assignment[8:].tolist() == [-1] * 4, "they begin at the global model"
    state.centres = torch.stack([models[state.assignment.tolist().index(cluster)] for cluster in range(4)])
    take_part(clustering, state, models, range(8, 12))
    assert adjusted_rand_score(groups, state.assignment.numpy()) == 1


def test_the_first_fit_makes_k_clusters_even_if_a_tuning_has_divided_the_common_one():
    models, groups = grouped()
    clustering = RefreshedLowRankCosine(4, dimension=4, init="common")
    state = begun(clustering)
    take_part(clustering, state, models, range(4))
    state.take_clusters([0, 0, 0])
    state.assignment[:3] = torch.tensor([1, 2, 1])
    take_part(clustering, state, models, range(4, 12))
    assert state.num_clusters == 4
    assert adjusted_rand_score(groups, state.assignment.numpy()) == 1


def test_the_e_step_compares_with_the_centres_from_before_the_aggregation():
    models, groups = grouped()
    clustering = RefreshedLowRankCosine(4, dimension=4)
    state = begun(clustering)
    take_part(clustering, state, models, range(12))
    order = [2, 0, 3, 1]
    state.centres = torch.stack([models[group] for group in order])
    take_part(clustering, state, models, [0, 5])
    assert state.assignment.tolist() == [order.index(group) for group in groups]


@pytest.mark.parametrize("fit_over", ["stored", "participants"])
def test_a_refresh_comes_at_regular_intervals_and_renews_all_codes(fit_over):
    models, _ = grouped()
    clustering = RefreshedLowRankCosine(4, dimension=3, refresh_every=2, fit_over=fit_over)
    state = begun(clustering)
    take_part(clustering, state, models, range(12))
    first = state.projection
    state.centres = models[:4].clone()
    moved = models + 0.3 * torch.randn(12, SIZE, generator=torch.Generator().manual_seed(1))
    take_part(clustering, state, moved, [0, 1, 2, 3])
    assert torch.equal(state.projection, first)
    torch.testing.assert_close(state.codes[0], project(moved[0], first))
    take_part(clustering, state, moved, [4, 5, 6, 7])
    stored = torch.cat([moved[:8], models[8:]])
    expected = principal_components(stored if fit_over == "stored" else moved[4:8], 3)
    assert torch.equal(state.projection, expected)
    torch.testing.assert_close(state.codes, project(stored, expected))


@pytest.mark.parametrize("similarity", ["low_rank_cosine", "cosine", "low_rank_l2", "l2"])
def test_what_the_e_step_compares(similarity):
    models, _ = grouped(num_clients=4, num_groups=2)
    clustering = RefreshedLowRankCosine(2, dimension=2, similarity=similarity)
    state = begun(clustering, 4)
    take_part(clustering, state, models, range(4))
    far_along, close_by = torch.zeros(SIZE), torch.zeros(SIZE)
    far_along[0], close_by[0], close_by[1] = 50.0, 1.0, 0.7  # client 0 is with the first by angle only
    state.centres = torch.stack([far_along, close_by])
    take_part(clustering, state, models, [0])
    assert int(state.assignment[0]) == (0 if similarity.endswith("cosine") else 1)


def test_a_fit_may_subtract_the_mean():
    models, _ = grouped()
    clustering = RefreshedLowRankCosine(2, dimension=2, center=True)
    state = begun(clustering)
    take_part(clustering, state, models, range(12))
    torch.testing.assert_close(state.codes, project(models, state.projection, models.mean(dim=0)))
    other = RefreshedLowRankCosine(2, dimension=2, center=True)
    other.load_state_dict(clustering.state_dict())
    assert torch.equal(other.state_dict()["offset"], models.mean(dim=0)) and other.state_dict()["fitted"] == 0


def test_buffers_are_not_compared():
    layout = Layout.from_network(Normed())
    clustering = RefreshedLowRankCosine(1, dimension=2)
    state = state_of([], [0] * 4, [[0.0] * layout.size], [False] * 4)
    state.round = 0
    server = server_of(layout)
    clustering.on_fit_start(server, state)
    models = torch.randn(4, layout.size, generator=torch.Generator().manual_seed(0))
    take_part(clustering, state, models, range(4), server)
    assert state.projection.shape == (layout.num_parameters, 2)


def test_at_least_two_clients_and_one_per_cluster_are_needed():
    for num_clusters, num_clients in ((4, 3), (1, 1)):
        with pytest.raises(ValueError, match=rf"num_clusters={num_clusters} for data.num_clients={num_clients}; at le"):
            RefreshedLowRankCosine(num_clusters).check(num_clients)
    RefreshedLowRankCosine(4).check(4)


def test_with_fewer_than_two_clients_per_cluster_the_first_fit_waits_for_all():
    models, _ = grouped(num_clients=6)
    clustering = RefreshedLowRankCosine(4, dimension=3)
    state = begun(clustering, 6)
    take_part(clustering, state, models, range(5))
    assert state.projection is None
    take_part(clustering, state, models, [5])
    assert state.projection is not None


@pytest.mark.parametrize("begin", [0, 2])
def test_a_client_that_all_others_have_left_continues_alone(tmp_path, begin):
    """A single model has no principal component, so nothing is fitted, or the earlier fit stays."""
    data = blobs(4, leavers=dict.fromkeys(range(3), begin))
    watch = fit(blobs_module(), data, fedac(2, refresh_every=1), tmp_path, rounds=5)
    assert watch.sampled[4] == [3] and (watch.state.projection is None) == (begin == 0)
    assert torch.equal(watch.state.centre_of(3), watch.state.clients[3].model)


@pytest.mark.parametrize(
    "similarity",
    ["low_rank_cosine", "l2", *(pytest.param(s, marks=pytest.mark.slow) for s in ("cosine", "low_rank_l2"))],
)
def test_the_groups_of_a_federation_are_found(tmp_path, similarity):
    method = fedac(4, dimension=8, refresh_every=4, similarity=similarity)
    module = blobs_module(cluster_weight=0.1, global_weight=0.1)
    watch = fit(module, blobs(12), method, tmp_path, rounds=10, clients_per_round=6)
    assert [row["cluster/ari"] for row in watch.rows[-3:]] == [1.0] * 3


def test_one_cluster_is_the_mean_of_all_clients_that_took_part(tmp_path):
    watch = fit(blobs_module(), blobs(12), fedac(1), tmp_path, rounds=3, clients_per_round=7)
    state = watch.state
    known = torch.nonzero(state.participated).flatten().tolist()
    assert state.assignment.tolist() == [0] * 12 and 7 < len(known) <= 12
    mean = torch.stack([state.stored_model(client) for client in known]).mean(dim=0)
    torch.testing.assert_close(state.centres, mean[None])


def test_a_cluster_that_loses_its_only_client_keeps_its_model(tmp_path):
    watch = fit(blobs_module(), blobs(12), fedac(12, dimension=8), tmp_path, rounds=4)
    first, last = watch.history[0], watch.history[-1]
    assert first.assignment.sort().values.tolist() == list(range(12))
    empty = sorted(set(range(12)) - set(last.assignment.tolist()))
    left = [each for each in watch.history if set(empty) <= set(each.assignment.tolist())][-1]
    assert empty and torch.equal(last.centres[empty], left.centres[empty])
