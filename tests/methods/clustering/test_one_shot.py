"""Tests of FedClust's clustering: the warm-up round by hand and in whole runs."""

import numpy as np
import pytest
import torch
from sklearn.metrics import adjusted_rand_score

from lcfl.core.messages import Uplink
from lcfl.methods.aggregation import ClusterMean
from lcfl.methods.clustering import OneShotHierarchical
from lcfl.methods.exchange import ClusterModel, NamedLayers
from lcfl.methods.local import LocalTraining
from lcfl.methods.method import Method
from lcfl.models import Layout, LeNet5
from tests.helpers.bits import same
from tests.helpers.builders import Normed, alone, blobs, blobs_module, fit, linear_module, server_of, state_of
from tests.methods.clustering.models import LAYOUT
from tests.methods.in_numpy import Clients

BY_NUMBER = {"choose": None, "num_clusters": 2}


def fedclust(local=None, **options):
    clustering = OneShotHierarchical(**{**({"choose": None} if "num_clusters" in options else {}), **options})
    mean = ClusterMean("participants", "participants", "samples")
    return Method(LocalTraining(**(local or {"steps": 3})), ClusterModel(), mean, [clustering])


def opened(clustering, points, num_clients=None, active=None):
    """Returns the state after a warm-up round in which the clients of `points` sent these numbers as last layers."""
    num_clients = num_clients or len(points)
    state = state_of(
        [], [0] * num_clients, [[0.5] * LAYOUT.size], [False] * num_clients, torch.full((LAYOUT.size,), 0.5)
    )
    uploads = [Uplink(client, {"layers": torch.tensor([float(x)] * 8)}, 1) for client, x in points.items()]
    logged = {}
    server = server_of(LAYOUT)
    server.log = logged.__setitem__
    clustering.on_extra_round_end(server, state, uploads)
    state.logged = logged
    return state


LINE = dict(enumerate([0.0, 10.0, 1.0, 13.0, 30.0]))  # average linkage joins at 1, 3, 11 and 24 times sqrt(8)


# the warm-up round


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"choose": None, "threshold": 0.9 * 8**0.5}, [0, 1, 2, 3, 4]),
        ({"choose": None, "threshold": 3.1 * 8**0.5}, [0, 1, 0, 1, 2]),
        ({"choose": None, "threshold": 1e9}, [0, 0, 0, 0, 0]),
        ({"choose": None, "num_clusters": 4}, [0, 1, 0, 2, 3]),
        ({"choose": "gap"}, [0, 0, 0, 0, 1]),
        ({"choose": "silhouette"}, [0, 1, 0, 1, 2]),
        ({"choose": None, "threshold": 11.5 * 8**0.5, "linkage": "complete"}, [0, 1, 0, 1, 2]),
        ({"choose": None, "threshold": 11.5 * 8**0.5, "linkage": "single"}, [0, 0, 0, 0, 1]),
    ],
)
def test_clusters_by_hand(options, expected):
    state = opened(OneShotHierarchical(**options), LINE)
    assert state.assignment.tolist() == expected
    assert state.num_clusters == max(expected) + 1 == state.logged["cluster/count"]
    assert torch.equal(state.centres, torch.full_like(state.centres, 0.5)), "every cluster begins at theta^0"
    assert not state.participated.any()


def test_the_threshold_in_use_and_the_silhouette_are_logged():
    by_gap, by_silhouette = (
        opened(OneShotHierarchical(choose=choose), LINE).logged for choose in ("gap", "silhouette")
    )
    assert by_gap["cluster/threshold"] == pytest.approx(17.5 * 8**0.5)
    assert by_silhouette["cluster/silhouette"] == pytest.approx(0.652, abs=1e-3)  # test_agglomerative.py has it by hand
    assert "cluster/silhouette" not in by_gap


def test_without_restart_a_cluster_begins_with_its_members_mean_layers():
    state = opened(OneShotHierarchical(**BY_NUMBER, restart=False), LINE)
    assert torch.equal(state.centres[:, :9], torch.full((2, 9), 0.5))
    torch.testing.assert_close(state.centres[:, 9:], torch.tensor([[6.0], [30.0]]).repeat(1, 8))


def test_a_client_without_a_vector_joins_the_largest_cluster():
    points = {0: 0.0, 2: 1.0, 3: 10.0, 4: 10.5, 6: 11.0}
    state = opened(OneShotHierarchical(**BY_NUMBER), points, num_clients=7)
    assert state.assignment.tolist() == [0, 1, 0, 1, 1, 1, 1]


def test_fewer_vectors_than_clusters():
    state = opened(OneShotHierarchical(choose=None, num_clusters=4), {1: 0.0, 2: 5.0}, num_clients=3)
    assert state.num_clusters == 2 and state.assignment.tolist() == [0, 0, 1]


def test_no_vector_at_all_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"got no usable layers from the warm-up round.*learning rate"), pytest.warns():
        fit(blobs_module(lr=1e20), blobs(4), fedclust(), tmp_path)


def test_all_clients_warm_up():
    (opening,) = OneShotHierarchical().warmup_rounds(5)
    assert list(opening.clients) == list(range(5)) and opening.local_update is None
    assert opening.exchange == NamedLayers(None)
    (opening,) = OneShotHierarchical(warmup_steps=7, layers=["a"]).warmup_rounds(5)
    assert opening.local_update == LocalTraining(steps=7) and opening.exchange == NamedLayers(["a"])
    (opening,) = OneShotHierarchical(warmup_epochs=2).warmup_rounds(5)
    assert opening.local_update == LocalTraining(epochs=2)


# layers


def test_the_layers_that_are_sent():
    layout = Layout.from_network(LeNet5())

    def part(layers):
        return NamedLayers(layers).subset(layout)

    assert part(None).size == 850 and part(None).slices[-1].stop == 62006
    assert part(["decision"]) == part(None)
    first = layout.parameters[0][0].rpartition(".")[0]
    assert part([first]).slices[0].start == 0 and part([first]).size == 456
    assert part(["embedding", "decision"]).size == layout.num_parameters
    assert part(["embedding", first]).size == layout.num_embedding, "no parameter is counted twice"
    buffered = Layout.from_network(Normed())
    assert NamedLayers(["embedding", "decision"]).subset(buffered).size == buffered.num_parameters < buffered.size


def test_an_unknown_layer_is_refused_before_training(tmp_path):
    with pytest.raises(ValueError, match=r"OneShotHierarchical.layers: the trained part .* no layer or parameter 'fc'"):
        fit(blobs_module(), blobs(4), fedclust(layers=["fc"]), tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("layers", "up"), [(None, 136), (["decision"], 136), (["embedding"], 272), (["embedding", "decision"], 408)]
)
def test_bytes_match_the_formula(tmp_path, layers, up):
    """All clients cost P down and P_L up once, then each sampled client costs 2 P; P = 16 * 16 + 16 + 136."""
    watch = fit(blobs_module(), blobs(12), fedclust(layers=layers), tmp_path, 2, 5)
    opening, *rounds = watch.history
    assert opening.round == -1
    assert (opening.row["comm/down_bytes"], opening.row["comm/up_bytes"]) == (4 * 12 * 408, 4 * 12 * up)
    for each in rounds:
        assert (each.row["comm/down_bytes"], each.row["comm/up_bytes"]) == (4 * 5 * 408, 4 * 5 * 408)
    assert watch.state.total_bytes == 4 * 12 * (408 + up) + 2 * 4 * 5 * 816


# whole runs


@pytest.mark.parametrize(
    "options", [{"choose": None, "num_clusters": 4}, {"choose": "gap", "linkage": "ward"}, {"choose": "silhouette"}]
)
def test_separable_groups_are_found_at_once(tmp_path, options):
    watch = fit(blobs_module(), blobs(12), fedclust(**options), tmp_path, 1)
    assert watch.history[0].row["cluster/count"] == 4
    assert watch.rows[0]["cluster/ari"] == 1


def test_as_many_clusters_as_clients_equals_local_training(tmp_path):
    clustered = fit(blobs_module(), blobs(12), fedclust(num_clusters=12), tmp_path, 4, 5).state
    local = fit(blobs_module(), blobs(12), alone(), tmp_path, 4, 5).state
    assert clustered.assignment.tolist() == list(range(12))
    for client in range(12):
        model = local.clients[client].model
        assert torch.equal(clustered.centre_of(client), local.initial if model is None else model)
    assert 0 < len(list(local.clients)) < 12


def test_the_warm_up_does_not_change_the_clients_training(tmp_path):
    runs = [fit(blobs_module(), blobs(12), fedclust(num_clusters=1, warmup_steps=n), tmp_path, 2).state for n in (1, 9)]
    assert torch.equal(runs[0].centres, runs[1].centres)
    assert all(same(runs[0].clients[i], runs[1].clients[i]) for i in range(12))
    assert runs[0].clients[0].consumed > 0


def test_clusters_stay(tmp_path):
    watch = fit(blobs_module(), blobs(12), fedclust(num_clusters=4), tmp_path, 3, 4)
    for each in watch.history:
        assert torch.equal(each.assignment, watch.history[0].assignment)


def test_a_cluster_without_a_sampled_member_keeps_its_model(tmp_path):
    watch = fit(blobs_module(), blobs(12), fedclust(num_clusters=4), tmp_path, 4, 2)
    kept = 0
    for before, after in zip(watch.history, watch.history[1:], strict=False):
        there = {int(after.assignment[i]) for i in watch.sampled[after.round]}
        for cluster in range(4):
            assert torch.equal(before.centres[cluster], after.centres[cluster]) == (cluster not in there)
            kept += cluster not in there
    assert kept >= 8


def test_a_whole_run_matches_numpy(tmp_path):
    """Covers warm-up, distances, average linkage, and rounds of FedAvg inside the clusters.

    Every batch holds all samples.
    """
    clients, module = Clients(6, 5, 4, 3), linear_module(lr=0.5)
    watch = fit(module, clients.data(), fedclust({"steps": 2}, num_clusters=2, warmup_steps=3), tmp_path, rounds=2)
    w0 = module.initial_model(0).double().numpy()
    last = [clients.trained(w0, client, 3)[9:] for client in range(4)]  # decision head: 3 * 2 weights and 2 biases
    clusters = [[client] for client in range(4)]
    while len(clusters) > 2:  # average linkage, naively
        pairs = [(i, j) for i in range(len(clusters)) for j in range(i + 1, len(clusters))]
        mean = [
            np.mean([np.linalg.norm(last[p] - last[q]) for p in clusters[i] for q in clusters[j]]) for i, j in pairs
        ]
        i, j = pairs[int(np.argmin(mean))]
        clusters[i] += clusters.pop(j)
    r = [next(k for k, members in enumerate(sorted(clusters, key=min)) if i in members) for i in range(4)]
    assert watch.history[0].assignment.tolist() == r
    omega = np.stack([w0, w0])
    for each in watch.history[1:]:
        w = [clients.trained(omega[r[i]], i, 2) for i in range(4)]
        omega = np.stack([clients.mean(w, [i for i in range(4) if r[i] == k]) for k in (0, 1)])
        np.testing.assert_allclose(each.centres, omega, atol=2e-6)
    assert len(set(r)) == 2
    assert np.abs(omega[0] - omega[1]).max() > 0.1


def test_a_leaver_is_not_part_of_a_reference(tmp_path):
    groups = {"leavers": {0: 1}}
    method = fedclust(num_clusters=4)
    watch = fit(blobs_module(), blobs(12, **groups), method, tmp_path, 3)
    clustering = method.clustering[0]
    cluster = int(watch.history[0].assignment[0])
    members = [i for i in range(1, 12) if watch.state.assignment[i] == cluster]
    mean = clustering._means(watch.state)[cluster]
    torch.testing.assert_close(mean, clustering._vectors[members].double().mean(dim=0))
    assert members


def test_more_clusters_than_clients_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"num_clusters=5 for the 4 clients .*Lower num_clusters"):
        fit(blobs_module(), blobs(4), fedclust(num_clusters=5), tmp_path)


def test_groups_by_distance_and_not_by_number_of_clients():
    """A linkage uses distances. There are 20 equal vectors and one that is far away."""
    points = dict.fromkeys(range(20), 0.0) | {20: 1.0}
    state = opened(OneShotHierarchical(choose="silhouette"), points)
    assert adjusted_rand_score([0] * 20 + [1], state.assignment) == 1
