"""Tests of the number of clusters: G by hand, what the paper's rule does, and a criterion that finds the groups."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn.metrics import adjusted_rand_score

from lcfl.core import rng
from lcfl.methods.aggregation import ClusterMean
from lcfl.methods.clustering import (
    ClusterNumberTuning,
    HierarchicalUpdates,
    ModelKMeans,
    OneShotHierarchical,
    PrincipalAngles,
    UpdateDirections,
)
from lcfl.methods.clustering.cluster_moves import silhouette_moves
from lcfl.methods.clustering.tuning import StoredModelGeometry, granularity
from lcfl.methods.exchange import ClusterModel, FullModel
from lcfl.methods.local import LocalTraining
from lcfl.methods.method import Method
from tests.helpers.builders import blobs, blobs_module, fedac, fit, state_of
from tests.methods.clustering.models import LAYOUT, SIZE, flat, groups_of


def state(models, assignment, **fields):
    """Returns a state in which all clients have taken part and the centres are means."""
    assignment = torch.as_tensor(assignment)
    centres = [
        torch.stack([m for m, k in zip(models, assignment.tolist(), strict=True) if k == cluster]).mean(dim=0)
        for cluster in range(int(assignment.max()) + 1)
    ]
    return state_of(models, assignment, torch.stack(centres), **fields)


def server():
    logged = {}
    return SimpleNamespace(seed=0, layout=LAYOUT, log=logged.__setitem__, logged=logged)


def assert_means(s):
    assert sorted(s.assignment.unique().tolist()) == list(range(s.num_clusters))
    for cluster in range(s.num_clusters):
        members = torch.stack([s.stored_model(client) for client in s.members(cluster)])
        torch.testing.assert_close(s.centres[cluster], members.mean(dim=0))


FOUR = [flat(0, 0), flat(2, 0), flat(10, 0), flat(10, 2), flat(0, 30)]


def test_granularity_by_hand():
    models = [flat(0, 0), flat(4, 0), flat(10, 0), flat(10, 6), flat(0, 30)]
    intra, inter = granularity(state(models, [0, 0, 1, 1, 2]), SIZE)
    # Members are at the distances 2, 3 and 0 from the centres (2, 0), (10, 3), (0, 30), whose squared distances are 73,
    # 904, 829.
    torch.testing.assert_close(intra, torch.tensor([4.0, 9.0, 0.0], dtype=torch.float64))
    torch.testing.assert_close(inter, torch.tensor([977 / 2, 902 / 2, 1733 / 2], dtype=torch.float64))


def test_granularity_is_the_mean_over_members_whose_distances_differ():
    intra, _ = granularity(state([flat(0), flat(0), flat(9), flat(50)], [0, 0, 0, 1]), SIZE)
    assert intra.tolist() == [(9 + 9 + 36) / 3, 0]  # squared distances of 0, 0, 9 to their mean 3


def test_a_cluster_whose_clients_never_took_part_neither_counts_nor_absorbs():
    """Clusters at 0 and 2 have a member each side of them at a distance of 1; that of client 4 has its centre at 5."""
    models = [flat(-1), flat(1), flat(1), flat(3), flat(5)]
    s = state(models, [0, 0, 1, 1, 2])
    without = granularity(state(models[:4], [0, 0, 1, 1]), SIZE)
    s.participated[4] = False
    intra, inter = granularity(s, SIZE)
    assert intra[:2].tolist() == without[0].tolist() == [1, 1] and intra[2].isnan()
    assert inter[:2].tolist() == without[1].tolist() == [4, 4]
    groups = StoredModelGeometry(server(), s)
    assert groups.num_clusters == 2
    s.centres[2] = flat(2.5)  # nearest to the cluster at 2
    assert groups.closest(1) == 0
    ClusterNumberTuning(lower=0.3, upper=9.0, start=0, min_clusters=1).on_aggregated(server(), s)
    assert s.assignment.tolist() == [0, 0, 0, 0, 1]


def test_granularity_is_logged_per_cluster_and_on_average():
    where, s = server(), state(FOUR, [0, 0, 1, 1, 2])
    ClusterNumberTuning(lower=0.0, upper=9.0).on_aggregated(where, s)
    assert where.logged["cluster/granularity_01"] == pytest.approx(2 / 1023)
    assert where.logged["cluster/granularity"] == pytest.approx((2 / 983 + 2 / 1023 + 0) / 3)
    assert s.assignment.tolist() == [0, 0, 1, 1, 2]


@pytest.mark.parametrize("criterion", ["ratio", "silhouette"])
def test_no_stored_model_is_read_for_g_in_a_round_in_which_nothing_is_due(monkeypatch, criterion):
    passes = []
    monkeypatch.setattr(
        "lcfl.methods.clustering.tuning.granularity", lambda *args: passes.append(1) or granularity(*args)
    )
    models, groups = groups_of()
    s, where = state(models, groups), server()
    each = ClusterNumberTuning(criterion, start=3, interval=2)
    counts = []
    for s.round in range(6):
        where.logged.clear()
        each.on_aggregated(where, s)
        counts.append((len(passes), "cluster/granularity" in where.logged))
    assert counts == [(0, False)] * 4 + [(1, True), (1, False)]


def test_one_cluster_has_no_granularity_and_stays():
    where, s = server(), state(FOUR, [0] * 5)
    ClusterNumberTuning(min_clusters=1).on_aggregated(where, s)
    assert where.logged == {} and s.num_clusters == 1


def test_the_printed_rule_merges_clusters_that_are_right():
    models, groups = groups_of()
    s = state(models, groups)
    sizes = []
    for s.round in range(4):
        ClusterNumberTuning("ratio").on_aggregated(server(), s)
        sizes.append(s.num_clusters)
        assert_means(s)
    assert sizes == [3, 2, 2, 2]


def test_a_merge_goes_to_the_closest_centre():
    s = state([flat(0, 0), flat(1, 0), flat(5, 0), flat(5, 1), flat(30, 0), flat(30, 9)], [0, 0, 1, 1, 2, 2])
    ClusterNumberTuning("ratio", lower=0.01, upper=9.0).on_aggregated(server(), s)
    assert s.assignment.tolist() == [0, 0, 0, 0, 1, 1]
    assert_means(s)


def test_a_loose_cluster_is_split_in_two():
    models, groups = groups_of(num_groups=3, size=6)
    s = state(models, [0 if group < 2 else 1 for group in groups])
    ClusterNumberTuning("ratio", lower=0.0, upper=0.2).on_aggregated(server(), s)
    assert s.num_clusters == 3 and adjusted_rand_score(groups, s.assignment.numpy()) == 1
    assert_means(s)


def test_a_scattered_cluster_that_is_too_small_does_not_keep_another_from_its_split():
    """G is 0.96 for the three clients of cluster 0 and 0.04 for the six of cluster 1, of which each half is a group."""
    models = [flat(0, 30), flat(0, -30), flat(0, 0)]
    models += [flat(20, 6 if client > 2 else -6) for client in range(6)]
    s = state(models, [0] * 3 + [1] * 6)
    ratio = StoredModelGeometry(server(), s).ratio()
    assert ratio[0] > ratio[1] > 0.03
    ClusterNumberTuning("ratio", lower=0.0, upper=0.03).on_aggregated(server(), s)
    assert s.assignment.tolist() in ([0] * 3 + [1] * 3 + [2] * 3, [0] * 3 + [2] * 3 + [1] * 3)
    assert_means(s)


SLOW = pytest.mark.slow
ANY_NUMBER = [1, pytest.param(2, marks=SLOW), pytest.param(8, marks=SLOW), 12]


@pytest.mark.parametrize("num_clusters", ANY_NUMBER)
def test_silhouette_finds_the_groups_and_stays(num_clusters):
    models, groups = groups_of(size=4)
    s = state(models, [client % num_clusters if num_clusters > 1 else 0 for client in range(len(models))])
    each = ClusterNumberTuning("silhouette")
    for s.round in range(12):
        each.on_aggregated(server(), s)
        assert_means(s)
    assert s.num_clusters == 4 and adjusted_rand_score(groups, s.assignment.numpy()) == 1


def test_silhouette_leaves_one_group_alone():
    models, _ = groups_of(num_groups=1, size=40)
    s = state(models, [0] * 40)
    ClusterNumberTuning("silhouette", min_clusters=1).on_aggregated(server(), s)
    assert s.num_clusters == 1


def test_a_cluster_without_models_does_not_make_a_single_group_two():
    models, _ = groups_of(num_groups=1, size=40)
    s = state(models, [0] * 39 + [1])
    s.participated[39] = False
    assert silhouette_moves(StoredModelGeometry(server(), s), 0.01, 0.25, 2) == []


def test_clients_without_a_cluster_are_in_none_that_is_tuned():
    models = [torch.full((SIZE,), float(value)) for value in (1, 2, 3, -1)]
    s = state(models, [0, -1, 0, -1])
    geometry = StoredModelGeometry(server(), s)
    assert geometry.clients == [0, 2]


def test_the_time_of_tuning_is_part_of_the_time_of_clustering(tmp_path, monkeypatch):
    clock = SimpleNamespace(now=0.0)

    class Slow(ClusterNumberTuning):
        def on_aggregated(self, server, state):
            clock.now += 7.0
            super().on_aggregated(server, state)

    for module in ("server", "round_row", "run_log"):
        monkeypatch.setattr(f"lcfl.server.{module}.time", SimpleNamespace(perf_counter=lambda: clock.now))
    row = fit(blobs_module(), blobs(8), fedac(2, tuning=Slow()), tmp_path).rows[0]
    assert (row["time/cluster_s"], row["time/aggregate_s"], row["time/round_s"]) == (7.0, 0.0, 7.0)


def test_codes_are_used_if_there_are_any():
    models, _ = groups_of(num_groups=2)
    codes = torch.zeros(12, 2)
    codes[range(12), [client // 6 for client in range(12)]] = 1.0  # suggests other groups than the models
    s = state(models, [0] * 12, codes=codes)
    ClusterNumberTuning("silhouette").on_aggregated(server(), s)
    assert adjusted_rand_score([0] * 6 + [1] * 6, s.assignment.numpy()) == 1


def test_an_empty_cluster_is_dropped():
    s = state(FOUR, [0, 0, 1, 1, 2])
    s.assignment[4] = 1
    ClusterNumberTuning(start=99).on_aggregated(server(), s)
    assert s.num_clusters == 2 and s.assignment.tolist() == [0, 0, 1, 1, 1]


def test_clients_that_never_took_part_follow_their_cluster():
    models, groups = groups_of(num_groups=3, size=6)
    s = state(models, [0 if group < 2 else 1 for group in groups])
    s.participated[[0, 1]] = False
    ClusterNumberTuning("ratio", lower=0.0, upper=0.2, start=0).on_aggregated(server(), s)
    assert s.num_clusters == 3 and s.assignment[[0, 1]].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("options", "number", "moves"),
    [
        ({"start": 5}, 4, False),
        ({"start": 5}, 5, True),
        ({"interval": 3}, 4, False),
        ({"interval": 3}, 6, True),
        ({"min_clusters": 4}, 5, False),
    ],
)
def test_when_clusters_may_change(options, number, moves):
    models, groups = groups_of()
    s = state(models, groups)
    s.round = number
    ClusterNumberTuning("ratio", **options).on_aggregated(server(), s)
    assert (s.num_clusters < 4) == moves


def test_tuning_waits_until_nearly_all_clients_have_taken_part():
    models, groups = groups_of()
    s = state(models, groups)
    s.participated[:3] = False
    ClusterNumberTuning("ratio").on_aggregated(server(), s)
    assert s.num_clusters == 4
    s.participated[0] = True  # 22 of 24
    ClusterNumberTuning("ratio").on_aggregated(server(), s)
    assert s.num_clusters == 3


def test_a_cooldown_survives_a_resume():
    models, groups = groups_of()
    s = state(models, groups)
    tuning = ClusterNumberTuning("ratio", cooldown=3)
    tuning.on_aggregated(server(), s)
    assert s.num_clusters == 3 and tuning.state_dict() == {"moved": 1}
    other = ClusterNumberTuning("ratio", cooldown=3)
    other.load_state_dict(tuning.state_dict())
    sizes = []
    for s.round in (2, 3, 4, 5):
        other.on_aggregated(server(), s)
        sizes.append(s.num_clusters)
    assert sizes == [3, 3, 3, 2]


def test_the_literal_rule_merges_nearly_everything():
    models, groups = groups_of()
    s = state(models, groups)
    ClusterNumberTuning("ratio", literal=True).on_aggregated(server(), s)
    assert s.num_clusters <= 2
    assert_means(s)


def test_the_literal_rule_also_visits_a_cluster_that_has_absorbed_another():
    """Cluster 0 is merged into 1. Now G is (1/4) / (49/2)^2 for that one and 225 / (49/2)^2 = 0.37 for cluster 2."""
    s = state([flat(0), flat(1), flat(10), flat(40)], [0, 1, 2, 2])
    ClusterNumberTuning("ratio", literal=True).on_aggregated(server(), s)
    assert s.num_clusters == 1


def algorithm_3(models, codes, labels, a, b):
    """Transcribes FedAC's Algorithm 3: a list of clusters, each a list of members; returns the clusters at the end.

    A cluster is None once it has been merged. Where the paper says "divide", two members are drawn as centres, the
    second with odds proportional to its squared distance in the direction of the codes, and every member goes to the
    nearer one.
    """
    clusters = [[i for i, label in enumerate(labels) if label == k] for k in range(max(labels) + 1)]
    for k in range(len(clusters)):  # line 1: each cluster k in [K]
        alive = [j for j, members in enumerate(clusters) if members is not None]
        others = [j for j in alive if j != k]
        if clusters[k] is None or not others:
            continue
        centre = {j: models[clusters[j]].mean(axis=0) for j in alive}
        intra = np.mean([((models[i] - centre[k]) ** 2).sum() for i in clusters[k]])  # line 2
        inter = np.mean([((centre[k] - centre[j]) ** 2).sum() for j in others])  # line 3
        if intra / inter < a:  # lines 5 and 6
            closest = min(others, key=lambda j: ((centre[k] - centre[j]) ** 2).sum())
            clusters[closest] = sorted(clusters[closest] + clusters[k])
            clusters[k] = None
        elif intra / inter > b and len(clusters[k]) > 1:  # lines 7 and 8
            direction = codes[clusters[k]] / np.linalg.norm(codes[clusters[k]], axis=1, keepdims=True)
            draw = rng.generator(0, "split", 1, alive.index(k))
            first = direction[draw.integers(len(direction))]
            odds = ((direction - first) ** 2).sum(axis=1)
            second = direction[draw.choice(len(direction), p=odds / odds.sum())]
            nearer = direction @ second > direction @ first
            clusters.append([i for i, moves in zip(clusters[k], nearer, strict=True) if moves])
            clusters[k] = [i for i, moves in zip(clusters[k], nearer, strict=True) if not moves]
    return [members for members in clusters if members is not None]


def test_the_literal_rule_is_algorithm_3_in_random_cases():
    draw, kept, ended = np.random.default_rng(0), 0, set()
    for _ in range(300):
        num_clusters = int(draw.integers(2, 7))
        labels = np.concatenate([np.arange(num_clusters), draw.integers(num_clusters, size=20)]).tolist()
        models = draw.standard_normal((num_clusters, SIZE))[labels] * draw.uniform(0.2, 2)
        models = (models + draw.standard_normal(models.shape) * draw.uniform(0.1, 1.5)).astype(np.float32)
        codes, (a, b) = models[:, :3], np.sort(draw.uniform(0, 2, size=2))
        s = state(list(torch.tensor(models)), labels, codes=torch.tensor(codes))
        ClusterNumberTuning("ratio", literal=True, lower=a, upper=b).on_aggregated(server(), s)
        expected = algorithm_3(models.astype(np.float64), codes.astype(np.float64), labels, a, b)
        assert [s.members(k) for k in range(s.num_clusters)] == expected
        kept += s.assignment.tolist() == labels
        ended.add(s.num_clusters)
    assert kept < 100 and len(ended) > 5  # most cases move clients, to various numbers of clusters


def test_the_literal_rule_splits_every_loose_cluster():
    models, groups = groups_of(num_groups=4, size=6)
    s = state(models, [group // 2 for group in groups])
    ClusterNumberTuning("ratio", literal=True, lower=0.0, upper=0.2).on_aggregated(server(), s)
    assert s.num_clusters == 4 and adjusted_rand_score(groups, s.assignment.numpy()) == 1


@pytest.mark.parametrize(
    ("options", "assignment", "norms"),
    [
        ({}, "512061602422413621315341", [2.84975, 1.68034, 1.41654, 2.00747, 1.72989, 1.92551, 2.04479]),
        (
            {"literal": True},
            "382074102822445621563574",
            [2.84975, 2.08745, 1.41654, 1.92551, 1.8301, 2.00747, 2.25932, 1.83998, 2.55117],
        ),
        ({"criterion": "silhouette"}, "010001000000010001010101", [1.10147, 1.74644]),
    ],
)
def test_results_are_unchanged_since_the_criteria_were_shared(options, assignment, norms):
    models, _ = groups_of(noise=0.6, seed=1)
    first = torch.randint(3, (24,), generator=torch.Generator().manual_seed(8))
    first[:3] = torch.arange(3)
    s, tuning = state(models, first.tolist()), ClusterNumberTuning(**options)
    where = server()
    where.seed = 1
    for s.round in range(4):
        tuning.on_aggregated(where, s)
    assert "".join(map(str, s.assignment.tolist())) == assignment
    assert s.centres.norm(dim=1).tolist() == pytest.approx(norms, rel=1e-4)


def test_tuning_needs_stored_models():
    mean = ClusterMean("participants", "participants")
    with pytest.raises(ValueError, match="ClusterNumberTuning uses stored models, but FullModel keeps none"):
        Method(LocalTraining(steps=1), FullModel(), mean, [ClusterNumberTuning()])


@pytest.mark.parametrize("num_clusters", ANY_NUMBER)
def test_the_groups_of_a_federation_are_found_from_any_number_of_clusters(tmp_path, num_clusters):
    method = fedac(num_clusters, tuning=ClusterNumberTuning("silhouette"), dimension=8, refresh_every=5)
    module = blobs_module(cluster_weight=0.1, global_weight=0.1)
    watch = fit(module, blobs(24), method, tmp_path, rounds=16, clients_per_round=12)
    assert [(row["cluster/count"], row["cluster/ari"]) for row in watch.rows[-4:]] == [(4.0, 1.0)] * 4


@pytest.mark.parametrize(
    "clustering",
    [
        OneShotHierarchical(num_clusters=7, choose=None),
        ModelKMeans(6),
        pytest.param(PrincipalAngles(num_clusters=7), marks=SLOW),
        pytest.param(HierarchicalUpdates(1, num_clusters=6), marks=SLOW),
        pytest.param(UpdateDirections(6, pretrain_steps=5), marks=SLOW),
    ],
    ids=lambda clustering: type(clustering).__name__,
)
def test_tuning_works_after_any_clustering_whose_models_the_server_keeps(tmp_path, clustering):
    mean, tuning = ClusterMean("participants", "participants"), ClusterNumberTuning("silhouette", start=2)
    method = Method(LocalTraining(steps=3), ClusterModel(keeps_model=True), mean, [clustering, tuning])
    watch = fit(blobs_module(), blobs(12), method, tmp_path, rounds=8)
    assert (watch.rows[-1]["cluster/count"], watch.rows[-1]["cluster/ari"]) == (4.0, 1.0)
    alone = Method(LocalTraining(steps=3), ClusterModel(keeps_model=True), mean, [clustering])
    plain = fit(blobs_module(), blobs(12), alone, tmp_path / "alone", rounds=8)
    assert plain.rows[-1]["cluster/count"] != 4.0
