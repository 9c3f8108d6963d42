"""Tests of LCFed's E-step with the centres from before the aggregation, and of the clusters in a federation."""

import numpy as np
import pytest
import torch

from lcfl.methods import ClusterModel, LocalTraining, SharedEmbedding
from lcfl.methods.aggregation import ClusterMean
from lcfl.methods.clustering import LowRankCosine
from lcfl.methods.clustering.similarity import assign, cosine
from lcfl.methods.method import Method
from tests.helpers.builders import blobs, blobs_module, fit, lcfed, server_of, state_of, upload
from tests.methods.clustering.models import LAYOUT, SIZE, four_ways, opened

# the E-step


def angled(degrees, length=1.0):
    return np.array([np.cos(np.radians(degrees)), np.sin(np.radians(degrees))] + [0.0] * (SIZE - 2)) * length


def e_step(own, assignment, centres, uploads, participated=None, offset=None, aggregate=False, **options):
    """Runs the end of a round in the plane of the first two parameters, which M keeps as it is."""
    clustering = LowRankCosine(num_clusters=len(centres), dimension=2, **options)
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


def test_the_e_step_compares_with_omega_from_before_the_aggregation():
    """Client 0 has moved to 50 degrees, which is nearer to the old centre at 90 than to the old centre at 0.

    After this round's aggregation of the old clusters, their centres would be at 25 and 150 degrees, and client 0 would
    have stayed in its cluster.
    """
    own = [angled(50), angled(0), angled(150), angled(150)]
    state = e_step(own, [0, 0, 1, 1], [angled(0), angled(90)], {0: own[0]}, aggregate=True)
    assert state.assignment.tolist() == [1, 0, 1, 1]
    later = state_of(own, [0, 0, 1, 1], np.array([angled(0), angled(90)]))
    ClusterMean()(later, [upload(0, own[0])], LAYOUT)
    would_be = assign(cosine(torch.stack([torch.tensor(own[0])]).float(), later.centres), torch.tensor([0]))
    assert would_be.tolist() == [0]
    torch.testing.assert_close(state.centres[0], torch.tensor(own[1]).float())


def test_the_code_comes_from_this_rounds_upload():
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
def test_ties_keep_the_current_cluster(before):
    same = [angled(30), angled(30, 2.0), angled(30)]
    own = [angled(0), angled(45), angled(90), angled(200)]
    state = e_step(own, before, [same[0], same[0], same[2]], {0: own[0], 3: own[3]})
    assert state.assignment.tolist() == before


@pytest.mark.parametrize(
    ("similarity", "chosen"), [("low_rank_cosine", 0), ("low_rank_l2", 1), ("cosine", 2), ("l2", 3)]
)
def test_each_similarity_chooses_another_cluster(similarity, chosen):
    """M keeps the first two of three parameters. The client is at (1, 0, 4), or (1, 0) for the low-rank similarities.

    Its cosine with the four centres is 0.62, -0.89, 0.993 and 0.987, and 1, 0.91, 0.90 and 0.78 in low rank. Its
    squared distance from them is 81, 64, 1,427 and 1.6, and 81, 0.2, 102 and 0.6 in low rank.
    """
    centres = [[10, 0, 4.5], [0.9, 0.4, -4], [9.9, 4.8, 40.4], [1, 0.8, 5]]
    own = [np.array([1.0, 0.0, 4.0] + [0.0] * (SIZE - 3)), angled(0)]
    padded = [np.array([*map(float, centre)] + [0.0] * (SIZE - 3)) for centre in centres]
    state = e_step(own, [3 if chosen != 3 else 0, 0], padded, {0: own[0]}, similarity=similarity)
    assert state.assignment[0] == chosen


def test_center_compares_w_minus_the_mean():
    """From the origin, the client is at 9 degrees and the centres are at 0 and 6.

    From the mean, the client is at 34 degrees and the centres are at 0 and 90.
    """
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


def test_earlier_codes_are_not_overwritten():
    own = [angled(0), angled(90)]
    state = state_of(own, [0, 1], np.array(own))
    state.projection, state.codes = torch.eye(SIZE)[:, :2], torch.zeros(2, 2)
    codes, assignment = state.codes, state.assignment
    LowRankCosine(2, 2).on_round_end(server_of(LAYOUT), state, [upload(0, own[1])])
    assert not codes.any()
    assert assignment.tolist() == [0, 1]


@pytest.mark.parametrize("similarity", ["l2", "cosine", "low_rank_l2", "low_rank_cosine"])
def test_a_round_before_any_client_has_taken_part(similarity):
    state = state_of([angled(0)], [0], np.array([angled(0), angled(90)]), [False])
    state.projection, state.codes = torch.eye(SIZE)[:, :2], torch.zeros(1, 2)
    LowRankCosine(2, 2, similarity=similarity).on_round_end(server_of(LAYOUT), state, [])
    assert state.assignment.tolist() == [0]


# in a federation


@pytest.mark.parametrize(
    ("options", "mu", "lam"),
    [
        ({}, 0.5, 0.1),
        ({"center": True}, 0.5, 0.1),
        ({"keep_offline_models": True}, 0.5, 0.1),
        ({"similarity": "l2"}, 0.5, 0.1),
        ({"offline_clients": 8, "dimension": 7}, 0.5, 0.0),
        ({}, 0.0, 0.0),  # the personal models then never see a centre, so only their codes tell them apart
    ],
)
def test_four_true_groups_are_found_within_a_few_rounds_and_stay(tmp_path, options, mu, lam):
    module = blobs_module(cluster_weight=mu, global_weight=lam)
    watch = fit(module, blobs(20), lcfed(4, **options), tmp_path, rounds=9, clients_per_round=10)
    found = [(row["cluster/ari"], row["cluster/count"], row["cluster/moved"]) for row in watch.rows]
    assert found[5:] == [(1, 4, 0)] * 4
    offline = options.get("offline_clients", 20)
    assert watch.history[0].row["comm/up_bytes"] == offline * 4 * module.layout.size


def test_a_federation_also_uses_omega_from_before_the_aggregation(tmp_path):
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


@pytest.mark.parametrize("num_clusters", [1, 12])
def test_the_smallest_and_the_largest_k_work(tmp_path, num_clusters):
    watch = fit(blobs_module(cluster_weight=0.5), blobs(12), lcfed(num_clusters), tmp_path, rounds=3)
    assert watch.state.num_clusters == num_clusters
    assert watch.state.centres.isfinite().all()
    counts = [row["cluster/count"] for row in watch.rows]
    assert counts[0] == num_clusters and all(1 <= count <= num_clusters for count in counts)


@pytest.mark.parametrize("options", [{"similarity": "cosine"}, {"similarity": "l2"}, {"keep_offline_models": True}])
def test_what_needs_stored_models_is_refused_without_them(options):
    clustering = [LowRankCosine(2, dimension=2, **options)]
    for exchange in (ClusterModel(), SharedEmbedding()):
        with pytest.raises(ValueError, match=f"LowRankCosine uses stored models, but {type(exchange).__name__} keeps"):
            Method(LocalTraining(steps=2), exchange, ClusterMean("participants", "participants"), clustering)
