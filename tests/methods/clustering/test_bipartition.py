"""Tests of CFL: when and how a cluster is split, a run in numpy, and regression tests for defects of public code."""

from itertools import combinations
from math import sqrt

import numpy as np
import pytest
import torch

from lcfl.methods.clustering import RecursiveBipartition
from lcfl.methods.clustering.bipartition import bipartition_of
from tests.helpers.bits import same
from tests.helpers.builders import blobs, blobs_module, fit, linear_module, server_of, state_of, upload
from tests.helpers.clustered import ALWAYS, cfl, normed_module
from tests.methods.clustering.models import LAYOUT, axis
from tests.methods.in_numpy import Clients

CLIENTS = Clients(6, 6, 5, 5)  # means are unweighted all the same


def cosines(rows):
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return unit @ unit.T


def least_across(rows):
    """Finds the bipartition whose largest cosine across is smallest, by trying all.

    Returns 1 for each client that is not with client 0, and the largest cosine across.
    """
    number, cosine = len(rows), cosines(rows)
    parts = [set(part) for size in range(1, number) for part in combinations(range(1, number), size)]

    def across(part):
        rest = sorted(set(range(number)) - part)
        return cosine[np.ix_(sorted(part), rest)].max()

    best = min(parts, key=across)
    return np.array([int(i in best) for i in range(number)]), across(best)


def test_three_rounds_with_a_split_match_numpy(tmp_path):
    lr, start = 0.5, linear_module().initial_model(0).double().numpy()
    omega, r, history, norms = start[None], np.zeros(4, dtype=int), [], []
    for number in range(3):
        delta = np.stack([CLIENTS.trained(omega[r[i]], i, 2, lr) for i in range(4)]) - omega[r]
        if number == 1:
            r, _ = least_across(delta)
            omega = np.stack([omega[0], omega[0]])
        norms.append((np.linalg.norm(delta.mean(axis=0)), np.linalg.norm(delta, axis=1).max()))
        omega = np.stack([omega[k] + delta[r == k].mean(axis=0) for k in range(len(omega))])
        history.append((r, omega))
    (_, first), (mean, largest) = norms[:2]
    # The thresholds are shares of round 0's largest norm, and round 1 just meets them.
    method = cfl(steps=2, eps1=1.01 * mean / first, eps2=0.99 * largest / first, relative=True, min_round=1)
    method.clustering[0].bipartition = "optimal"
    method.clustering[0].min_size = 4
    watch = fit(linear_module(lr), CLIENTS.data(), method, tmp_path, rounds=3)
    for each, (r, omega) in zip(watch.history, history, strict=True):
        assert each.assignment.tolist() == r.tolist()
        np.testing.assert_allclose(each.centres, omega, atol=3e-6)
    assert r.tolist() == [0, 1, 0, 1]
    assert watch.rows[1]["cluster/mean_update_0"] == pytest.approx(mean, rel=1e-4)
    assert watch.rows[1]["cluster/max_update_0"] == pytest.approx(largest, rel=1e-4)
    method.clustering[0].eps1 = 0.99 * mean / first
    again = fit(linear_module(lr), CLIENTS.data(), method, tmp_path, rounds=2)
    assert again.state.num_clusters == 1


def test_the_optimal_bipartition_is_the_best_of_all():
    for seed in range(20):
        rows = np.random.default_rng(seed).normal(size=(6, 8))
        label, across = bipartition_of(torch.from_numpy(rows), "optimal")
        expected, least = least_across(rows)
        assert across == pytest.approx(least, abs=1e-9)
        assert label.tolist() == expected.tolist()


def test_complete_and_optimal_bipartitions_differ():
    """The directions are at 0, 20, 40 and 72 degrees. The widest gap is the last one; the tightest groups are halves.

    Average linkage would also put 40 with 0 and 20, because 40 is 30 degrees away on average and 32 from the last.
    """
    angle = np.radians([0.0, 20.0, 40.0, 72.0])
    rows = torch.from_numpy(np.stack([np.cos(angle), np.sin(angle)], axis=1))
    optimal, across = bipartition_of(rows, "optimal")
    assert optimal.tolist() == [0, 0, 0, 1] and across == pytest.approx(np.cos(np.radians(32)))
    complete, across = bipartition_of(rows, "complete")
    assert complete.tolist() == [0, 0, 1, 1] and across == pytest.approx(np.cos(np.radians(20)))


def played(clustering, rounds, num_clients):
    """Returns the state after rounds with these updates by client. Nothing is aggregated: the centres stay at zero."""
    state = state_of([None] * num_clients, [0] * num_clients, [[0.0] * LAYOUT.size])
    for number, updates in enumerate(rounds):
        state.round = number
        clustering.on_round_end(server_of(LAYOUT), state, [upload(i, update) for i, update in updates.items()])
    return state


def test_after_two_splits_the_clusters_hold_clients_not_positions():
    """The second cluster has the members 1, 3, 5, 7. A cut by their positions 0 to 3 would tear the first one apart."""
    first = {i: axis(i % 2, 1 + i / 10) for i in range(8)}
    second = dict(first) | {3: axis(5), 7: axis(5, 2.0)}
    clustering = RecursiveBipartition(**ALWAYS | {"min_size": 4, "gamma_max": 0.3})
    state = played(clustering, [first], 8)
    assert state.assignment.tolist() == [0, 1] * 4 and state.num_clusters == 2
    state.centres = torch.stack([axis(9), axis(10)])
    uploads = [upload(i, state.centre_of(i) + update) for i, update in second.items()]
    clustering.on_round_end(server_of(LAYOUT), state, uploads)
    assert state.assignment.tolist() == [0, 1, 0, 2, 0, 1, 0, 2]
    assert torch.equal(state.centres, torch.stack([axis(9), axis(10), axis(10)]))


@pytest.mark.parametrize(
    ("options", "splits"),
    [
        ({}, True),
        ({"eps1": 0.7}, False),  # the mean of two axes has norm sqrt(1/2) = 0.7071
        ({"eps1": 0.71}, True),
        ({"eps2": 1.0}, False),
        ({"eps2": 0.99}, True),
        ({"eps1": 0.71, "eps2": 0.99, "relative": True}, True),
        ({"min_size": 5}, False),
        ({"min_round": 1}, False),
        ({"gamma_max": sqrt(0.5) - 1e-6}, True),  # cosine 0 across: sqrt((1 - 0) / 2)
        ({"gamma_max": sqrt(0.5) + 1e-6}, False),
    ],
)
def test_when_a_cluster_is_split(options, splits):
    clustering = RecursiveBipartition(**ALWAYS | options)
    state = played(clustering, [{i: axis(i % 2) for i in range(4)}], 4)
    assert state.num_clusters == (2 if splits else 1)
    assert state.assignment.tolist() == ([0, 1, 0, 1] if splits else [0] * 4)


def test_both_halves_continue_from_their_shared_model():
    common = axis(3, 5.0)
    state = state_of([None] * 4, [0] * 4, [common.tolist()])
    uploads = [upload(i, common + axis(i % 2)) for i in range(4)]
    state.aggregation = {"velocity": common.unsqueeze(0)}
    RecursiveBipartition(**ALWAYS).on_round_end(server_of(LAYOUT), state, uploads)
    assert torch.equal(state.centres, common.repeat(2, 1)) and not torch.equal(state.initial, common)
    assert torch.equal(state.aggregation["velocity"], common.repeat(2, 1))  # with the server's momentum


def test_equal_updates_and_zero_updates_are_not_split():
    state = played(RecursiveBipartition(**ALWAYS | {"gamma_max": 0.0}), [{i: axis(0) for i in range(4)}], 4)
    assert state.num_clusters == 1  # gamma is 0, which is not above gamma_max
    state = played(RecursiveBipartition(**ALWAYS), [{i: axis(0, 0.0) for i in range(4)}], 4)
    assert state.num_clusters == 1  # no update is above eps2


def test_a_split_waits_until_every_member_has_a_recent_update():
    halves_of = [{0: axis(0), 1: axis(1)}, {2: axis(0)}, {3: axis(1)}, {0: axis(0)}]
    assert played(RecursiveBipartition(**ALWAYS, stale_max=2), halves_of[:3], 4).assignment.tolist() == [0, 1, 0, 1]
    assert played(RecursiveBipartition(**ALWAYS, stale_max=1), halves_of, 4).num_clusters == 1
    assert played(RecursiveBipartition(**ALWAYS, stale_max=9), halves_of[:2], 4).num_clusters == 1


@pytest.mark.parametrize(("weights", "splits"), [("uniform", False), ("samples", True)])
def test_a_weighted_mean_vanishes_at_the_weighted_optimum(weights, splits):
    """Two clients of 1 and 3 samples pull by 3 and 1 in opposite directions: 1 * 3 - 3 * 1 = 0, and (3 - 1) / 2 = 1."""
    clustering = RecursiveBipartition(eps1=0.5, eps2=2.0, min_round=0, min_size=2, weights=weights)
    state = state_of([None] * 2, [0] * 2, [[0.0] * LAYOUT.size])
    uploads = [upload(0, axis(0, 3.0), 1), upload(1, -axis(0), 3)]
    logged = {}
    server = server_of(LAYOUT)
    server.log = logged.__setitem__
    clustering.on_round_end(server, state, uploads)
    assert state.num_clusters == (2 if splits else 1)
    assert logged["cluster/mean_update_0"] == pytest.approx(0.0 if splits else 1.0)


def test_a_split_discards_the_earlier_updates():
    clustering = RecursiveBipartition(**ALWAYS, stale_max=9)
    state = played(clustering, [{i: axis(i % 2, 1 + i) for i in range(4)}, {0: axis(0)}], 4)
    assert state.num_clusters == 2 and list(clustering.state_dict()["updates"]) == [0]


def test_a_half_without_a_participant_keeps_its_model(tmp_path):
    method = cfl(**ALWAYS, stale_max=20)
    watch = fit(blobs_module(), blobs(6), method, tmp_path, rounds=12, clients_per_round=2)
    counts = [each.row["cluster/count"] for each in watch.history]
    number = next(t for t, count in enumerate(counts) if count == 2)
    before, after = watch.history[number - 1].centres, watch.history[number].centres
    assert len(before) == 1 and len(after) == 2
    sampled = {int(watch.history[number].assignment[i]) for i in watch.sampled[number]}
    assert [same(centre, before[0]) for centre in after] == [k not in sampled for k in range(2)]


def test_earlier_updates_are_kept_without_buffers(tmp_path):
    watch = fit(normed_module(), blobs(12), cfl(), tmp_path, rounds=1)
    updates = watch.server.method.clustering[0].state_dict()["updates"].values()
    assert {len(update) for update in updates} == {watch.server.layout.num_parameters}
