"""Tests of EM in update space, and of G, split and merge of AS-CFL, against numbers worked by hand and numpy."""

import numpy as np
import pytest
import torch
from sklearn.metrics import adjusted_rand_score

from lcfl.methods.clustering import SplitAndMerge, UpdateEM
from lcfl.methods.clustering.similarity import squared_distances, squared_distances_to_means
from lcfl.methods.clustering.update_em import dispersion, em, separation
from tests.methods.clustering.models import flat
from tests.methods.clustering.models import groups_of as models_of_groups
from tests.methods.clustering.test_greedy_incentive import SIZE, Proxy, answered, state

POINTS = [(0, 0), (2, 0), (10, 0), (10, 2), (0, 30)]


def sent(points):
    return [answered(client, flat(*point)) for client, point in enumerate(points)]


def groups_of(**options):
    changes, groups = models_of_groups(**options)
    return [answered(client, change) for client, change in enumerate(changes)], groups


def test_distances_to_means_follow_from_pairwise_distances():
    draw = torch.Generator().manual_seed(0)
    rows, label = torch.randn(9, 50, generator=draw), torch.tensor([0, 1, 2, 0, 1, 2, 0, 0, 2])
    square = squared_distances(rows)
    means = np.stack([rows.double().numpy()[label == k].mean(axis=0) for k in range(3)])
    expected = ((rows.double().numpy()[:, None] - means) ** 2).sum(axis=2)
    found = squared_distances_to_means(square, label, 4)
    np.testing.assert_allclose(found[:, :3], expected, rtol=1e-10)
    assert found[:, 3].isinf().all()
    apart = np.sqrt(((means[:, None] - means) ** 2).sum(axis=2))
    np.testing.assert_allclose(separation(square, label, 3).fill_diagonal_(0), apart, rtol=1e-9)
    within = [np.sqrt(expected[label == k, k]).mean() for k in range(3)]
    np.testing.assert_allclose(dispersion(square, label, 3), within, rtol=1e-10)


@pytest.mark.parametrize("clustering", [UpdateEM(), SplitAndMerge("silhouette", start=0), SplitAndMerge(start=0)])
def test_clients_that_another_clustering_left_without_a_cluster_stay_without_one(clustering):
    s = state(5, [0, 0, 1, 1, 1])
    s.assignment[4] = -1
    clustering.on_round_end(Proxy(), s, sent(POINTS))
    assert s.assignment[4] == -1 and (s.assignment[:4] >= 0).all()


def test_the_distance_of_equal_updates_is_exactly_zero():
    assert torch.equal(squared_distances(torch.randn(1, 40).repeat(5, 1)), torch.zeros(5, 5, dtype=torch.float64))


def test_granularity_by_hand():
    square, label = squared_distances(torch.stack([flat(*point) for point in POINTS])), torch.tensor([0, 0, 1, 1, 2])
    assert dispersion(square, label, 3).tolist() == pytest.approx([1, 1, 0])
    # The centroids (1, 0), (10, 1), (0, 30) have the distances sqrt(82), sqrt(901), sqrt(941).
    nearest = separation(square, label, 3).min(dim=1).values
    assert nearest.tolist() == pytest.approx([82**0.5, 82**0.5, 901**0.5])
    server = Proxy()
    SplitAndMerge(lower=0.0, upper=9.0).on_round_end(server, state(5, [0, 0, 1, 1, 2]), sent(POINTS))
    assert server.logged["cluster/granularity_00"] == pytest.approx(1 / 82**0.5)
    assert server.logged["cluster/granularity"] == pytest.approx(2 / 82**0.5 / 3)


def test_em_by_hand():
    # On a line, 0 1 | 2 9 10 has the means 0.5 and 7, so 2 moves. With the means 1 and 9.5 nothing changes.
    points = torch.tensor([[0.0], [1.0], [2.0], [9.0], [10.0]])
    label = torch.tensor([0, 0, 1, 1, 1])
    assert em(squared_distances(points), label, 2, 10).tolist() == [0, 0, 0, 1, 1]
    # 0 | 1 2 9 has the means 0 and 4, then 0.5 and 5.5, then 1 and 9, so two iterations are needed.
    square, label = squared_distances(torch.tensor([[0.0], [1.0], [2.9], [9.0]])), torch.tensor([0, 1, 1, 1])
    assert em(square, label, 2, 1).tolist() == [0, 0, 1, 1]
    assert em(square, label, 2, 10).tolist() == [0, 0, 0, 1]


def test_equally_near_clients_stay():
    square = squared_distances(torch.tensor([[1.0], [3.0], [4.0]]))  # 3 is as near to the mean 2 as to 4
    for label in ([0, 0, 1], [1, 1, 0]):
        assert em(square, torch.tensor(label), 2, 1).tolist() == label
    same = squared_distances(torch.ones(6, 3))
    assert em(same, torch.tensor([2, 0, 1, 1, 0, 2]), 3, 10).tolist() == [2, 0, 1, 1, 0, 2]


def test_em_moves_clients_with_updates_and_drops_empty_clusters():
    s = state(6, [0, 0, 1, 1, 1, 2])
    UpdateEM().on_round_end(Proxy(), s, sent([(0,), (1,), (2,), (9,), (10,)]))
    assert s.assignment.tolist() == [0, 0, 0, 1, 1, 2] and s.num_clusters == 3  # client 5 sent nothing
    s = state(4, [0, 1, 1, 2])
    UpdateEM().on_round_end(Proxy(), s, sent([(0,), (0,), (9,), (9,)]))
    assert len(s.assignment.unique()) == s.num_clusters


def test_em_with_one_cluster_or_one_client_each_changes_nothing():
    for label in ([0] * 5, [0, 1, 2, 3, 4]):
        s = state(5, label)
        UpdateEM().on_round_end(Proxy(), s, sent(POINTS))
        assert s.assignment.tolist() == label
    UpdateEM().on_round_end(Proxy(), s, [])


def test_the_printed_rule_merges_clusters_that_are_right():
    uploads, groups = groups_of()
    s, sizes = state(24, groups), []
    for s.round in range(4):
        SplitAndMerge().on_round_end(Proxy(), s, uploads)
        sizes.append(s.num_clusters)
    assert sizes == [3, 2, 2, 2]


def test_a_merge_goes_to_the_nearest_centroid_and_takes_missing_clients_along():
    s = state(7, [0, 0, 1, 1, 2, 2, 0])
    points = [(0, 0), (1, 0), (5, 0), (5, 1), (30, 0), (30, 9)]
    SplitAndMerge(lower=0.13, upper=9.0).on_round_end(Proxy(), s, sent(points))  # G = 0.111, 0.111, 0.177
    assert s.assignment.tolist() == [0, 0, 0, 0, 1, 1, 0]


def test_a_scattered_cluster_is_split_and_its_halves_begin_with_its_model():
    uploads, groups = groups_of(num_groups=3)
    centres = torch.arange(2.0).unsqueeze(1).repeat(1, SIZE)
    s = state(19, [0 if group < 2 else 1 for group in groups] + [0], centres)
    SplitAndMerge(lower=0.0, upper=0.2).on_round_end(Proxy(), s, uploads)
    assert s.num_clusters == 3 and adjusted_rand_score(groups, s.assignment[:18].numpy()) == 1
    assert s.assignment[18] == 0 and s.centres[:, 0].tolist() == [0.0, 1.0, 0.0]


def test_one_cluster_has_no_ratio_and_stays():
    server, s = Proxy(), state(5, [0] * 5)
    SplitAndMerge(min_clusters=1).on_round_end(server, s, sent(POINTS))
    assert server.logged == {} and s.num_clusters == 1


def test_a_cluster_without_updates_is_not_a_neighbour():
    square, label = squared_distances(torch.stack([flat(*point) for point in POINTS])), torch.tensor([0, 0, 2, 2, 2])
    apart = separation(square, label, 4)
    assert apart[1].isinf().all() and apart[:, 3].isinf().all() and apart[0, 2].isfinite()
    assert dispersion(square, label, 4).isnan().tolist() == [False, True, False, True]
    server, s = Proxy(), state(6, [0, 0, 0, 0, 0, 1])  # client 5 sent nothing
    SplitAndMerge(min_clusters=1).on_round_end(server, s, sent(POINTS))
    assert s.assignment.tolist() == [0, 0, 0, 0, 0, 1] and server.logged == {}


@pytest.mark.parametrize("num_clusters", [*(pytest.param(number, marks=pytest.mark.slow) for number in (1, 2, 8)), 12])
def test_silhouette_finds_the_groups_and_stays(num_clusters):
    uploads, groups = groups_of(size=4)
    s = state(16, [client % num_clusters for client in range(16)])
    tuning = SplitAndMerge("silhouette")
    for s.round in range(12):
        tuning.on_round_end(Proxy(), s, uploads)
    assert s.num_clusters == 4 and adjusted_rand_score(groups, s.assignment.numpy()) == 1


def test_the_literal_rule_has_no_bounds():
    uploads, groups = groups_of()
    s = state(24, groups)
    SplitAndMerge(literal=True).on_round_end(Proxy(), s, uploads)
    assert s.num_clusters <= 2
    s = state(24, [group // 2 for group in groups])
    SplitAndMerge(literal=True, lower=0.0, upper=0.3).on_round_end(Proxy(), s, uploads)
    assert s.num_clusters == 4 and adjusted_rand_score(groups, s.assignment.numpy()) == 1


def test_a_cooldown_survives_a_resume():
    uploads, groups = groups_of()
    s, tuning = state(24, groups), SplitAndMerge(cooldown=2)
    tuning.on_round_end(Proxy(), s, uploads)
    other = SplitAndMerge(cooldown=2)
    other.load_state_dict(tuning.state_dict())
    sizes = []
    for s.round in (2, 3, 4):
        other.on_round_end(Proxy(), s, uploads)
        sizes.append(s.num_clusters)
    assert sizes == [3, 3, 2]
