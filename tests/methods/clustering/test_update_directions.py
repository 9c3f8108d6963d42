"""Tests of FedGroup: its measures against plain numpy, a run with a cold start in numpy, and exact properties."""

import tracemalloc
from itertools import combinations

import numpy as np
import pytest
import torch
from sklearn.metrics import adjusted_rand_score

from lcfl.methods.clustering import UpdateDirections
from lcfl.methods.clustering.update_directions import decomposed_cosines, mean_cosine_differences
from lcfl.models import Layout
from lcfl.models.module import FederatedModule
from tests.helpers.builders import Normed, blobs, blobs_module, dealt, fedavg, fit, linear_module, server_of, upload
from tests.helpers.clustered import Evaluations, fedgroup
from tests.methods.clustering.models import LAYOUT, SIZE, axis, four_ways, opened
from tests.methods.clustering.runs import assert_same_models
from tests.methods.in_numpy import Clients, best_parts

CLIENTS = Clients(6, 6, 5, 5, 4)
LR = 0.5


def cosine(a, b):
    return a @ b / (np.linalg.norm(a) * np.linalg.norm(b))


def test_pre_training_a_cold_start_and_a_round_match_numpy(tmp_path):
    module = linear_module(LR)
    data = CLIENTS.data()
    watch = fit(module, data, fedgroup(2, 3, 2, steps=2), tmp_path)
    w0 = module.initial_model(0).double().numpy()
    early, delta = [0, 1, 3, 4], {i: CLIENTS.trained(w0, i, 3) - w0 for i in range(5)}
    matrix = np.stack([delta[i] for i in early], axis=1)  # P x n
    direction = np.linalg.svd(matrix, full_matrices=False)[0][:, :2]
    embedding = np.array([[cosine(delta[i], v) for v in direction.T] for i in early])
    parts = best_parts(embedding)
    groups = [[i for i, part in zip(early, parts, strict=True) if part == k] for k in (0, 1)]
    omega = [w0 + np.mean([delta[i] for i in group], axis=0) for group in groups]
    opening = watch.history[0]
    assert opening.round == -1 and opening.assignment[2] == -1
    for group, centre in zip(groups, omega, strict=True):
        (number,) = set(opening.assignment[group].tolist())
        np.testing.assert_allclose(opening.centres[number], centre, atol=2e-6)
    means = [np.mean([delta[i] for i in group], axis=0) for group in groups]
    groups[int(np.argmin([(1 - cosine(delta[2], mean)) / 2 for mean in means]))].append(2)
    for group, centre in zip(groups, omega, strict=True):
        (number,) = set(watch.state.assignment[group].tolist())
        expected = CLIENTS.mean({i: CLIENTS.trained(centre, i, 2) for i in group}, group)
        np.testing.assert_allclose(watch.state.centres[number], expected, atol=3e-6)
    assert sorted(map(sorted, groups)) == [[0, 2, 4], [1, 3]]
    size = len(w0)
    assert opening.row["comm/down_bytes"] == opening.row["comm/up_bytes"] == 4 * 4 * size
    assert watch.rows[0]["comm/down_bytes"] == watch.rows[0]["comm/up_bytes"] == (1 + 5) * 4 * size
    assert watch.rows[0]["cluster/moved"] == 1  # joining a group counts as a move, even before the round's training


def test_measures_match_plain_numpy():
    rows = np.random.default_rng(0).normal(size=(6, 20))
    u = np.linalg.svd(rows.T, full_matrices=False)[0][:, :3]
    expected = np.array([[cosine(row, v) for v in u.T] for row in rows])
    np.testing.assert_allclose(decomposed_cosines(torch.from_numpy(rows), 3).abs(), np.abs(expected), atol=1e-9)
    cos = np.array([[cosine(a, b) for b in rows] for a in rows])
    found = mean_cosine_differences(torch.from_numpy(rows))
    for i, j in combinations(range(6), 2):
        others = [z for z in range(6) if z not in (i, j)]
        assert found[i, j] == pytest.approx(np.mean([abs(cos[i, z] - cos[j, z]) for z in others]), abs=1e-9)
    assert (np.diag(found) == 0).all() and (found == found.T).all()


def test_mean_cosine_differences_take_memory_for_pairs_and_not_for_triples():
    rows = torch.randn(200, 5, generator=torch.Generator().manual_seed(0))
    tracemalloc.start()
    try:
        mean_cosine_differences(rows)
        assert tracemalloc.get_traced_memory()[1] < 200**3  # bytes
    finally:
        tracemalloc.stop()


def test_mean_cosine_differences_are_joined_by_complete_linkage():
    """Average linkage would leave the sixth client alone, and single linkage would leave four clients alone."""
    models = list(torch.randn(8, SIZE, generator=torch.Generator().manual_seed(0)))
    state = opened(UpdateDirections(3, measure="madc"), models)
    assert adjusted_rand_score([0, 1, 1, 2, 1, 2, 0, 1], state.assignment) == 1


@pytest.mark.parametrize("measure", ["edc", "madc"])
def test_directions_count_and_lengths_do_not(measure):
    models, groups = four_ways()
    state = opened(UpdateDirections(4, measure=measure), models)
    assert adjusted_rand_score(groups, state.assignment) == 1
    assert state.num_clusters == 4


@pytest.mark.parametrize("measure", ["edc", "madc"])
def test_updates_are_compared_not_models(measure):
    """The large common model makes models that moved far look alike, and also models that moved a little."""
    initial, updates = axis(3, 100.0), [axis(0), axis(0, 50.0), axis(0, 2.0), axis(1), axis(1, 50.0), axis(1, 2.0)]
    state = opened(UpdateDirections(2, measure=measure), [initial + each for each in updates], initial=initial)
    assert state.assignment.tolist() in ([0, 0, 0, 1, 1, 1], [1, 1, 1, 0, 0, 0])


def test_a_cold_client_joins_by_direction_not_by_distance():
    """Its short update is nearer to the mean of the other group, and its model even more so."""
    initial, clustering = axis(0, 5.0), UpdateDirections(2)
    models = [initial + each for each in (axis(0), axis(0), axis(1, 10.0), axis(1, 10.0))]
    state = opened(clustering, models, num_clients=5, initial=initial)
    assert state.assignment[4] == -1
    clustering.on_extra_round_end(server_of(LAYOUT), state, [upload(4, initial + axis(1, 0.5))])
    assert state.assignment[4] == state.assignment[2] != state.assignment[0]


def test_a_groups_direction_is_the_mean_of_its_members_updates():
    """The members are at 0 and 40 degrees, so the direction is at 20. The other group is at 100.

    The client at 55 is nearer to 20 than to 100, and nearer to 100 than to 0.
    """

    def at(degrees):
        return axis(0, np.cos(np.radians(degrees))) + axis(1, np.sin(np.radians(degrees)))

    clustering = UpdateDirections(2)
    state = opened(clustering, [at(0), at(40), at(100), 2 * at(100)], num_clients=5)
    clustering.on_extra_round_end(server_of(LAYOUT), state, [upload(4, at(55))])
    first, second, third, fourth, fifth = state.assignment.tolist()
    assert first == second == fifth != third == fourth


def test_fewer_directions_than_groups_give_fewer_groups():
    state = opened(UpdateDirections(4), [axis(0), axis(0, 2.0), axis(1), axis(1, 3.0)])
    assert state.num_clusters == 2 and state.assignment.tolist() in ([0, 0, 1, 1], [1, 1, 0, 0])


def test_a_zero_update_joins_a_random_group():
    models = [axis(0), axis(1)] + [axis(0, 0.0)] * 20
    state = opened(UpdateDirections(2), models)
    assert set(state.assignment[2:].tolist()) == {0, 1}
    assert opened(UpdateDirections(2), [axis(0, 0.0)] * 3).assignment.tolist() == [0, 0, 0]


def test_the_random_group_of_a_client_does_not_depend_on_the_other_uploads():
    assignments = []
    for clients in (range(2, 22), range(21, 1, -1)):
        clustering = UpdateDirections(2)
        state = opened(clustering, [axis(0), axis(1)], num_clients=22)
        clustering.on_extra_round_end(server_of(LAYOUT), state, [upload(i, axis(0, 0.0)) for i in clients])
        assignments.append(state.assignment.tolist())
    assert assignments[0] == assignments[1]


def test_one_group_is_fedavg_from_the_mean_pre_trained_model(tmp_path):
    grouped = fit(blobs_module(), blobs(12), fedgroup(1), tmp_path, rounds=4, clients_per_round=5)

    class Warm(FederatedModule):
        def initial_model(self, seed, number=0):
            return grouped.history[0].centres[0]

    module = blobs_module()
    warm = Warm(module.make_network, module.optimizer)
    averaged = fit(warm, blobs(12), fedavg(), tmp_path, rounds=4, clients_per_round=5)
    assert_same_models(grouped.history[1:], averaged.history)


def test_every_client_pre_trains_once_and_keeps_its_group(tmp_path):
    watch = fit(blobs_module(), blobs(12), fedgroup(2, clients_per_group=2), tmp_path, rounds=6, clients_per_round=4)
    size, grouped = watch.state.initial.numel(), set(torch.nonzero(watch.history[0].assignment >= 0).flatten().tolist())
    assert len(grouped) == 4
    before = watch.history[0].assignment
    for each in watch.history[1:]:
        new = set(watch.sampled[each.round]) - grouped
        assert each.row["comm/down_bytes"] == 4 * size * (4 + len(new))
        grouped |= new
        assert set(torch.nonzero(each.assignment >= 0).flatten().tolist()) == grouped
        known = before >= 0
        assert torch.equal(each.assignment[known], before[known])
        before = each.assignment
    assert watch.state.participated.sum() < len(grouped)


def test_a_client_without_a_group_is_evaluated_with_the_mean_of_all(tmp_path):
    evaluations, method = Evaluations(), fedgroup(2, clients_per_group=2)
    watch = fit(
        blobs_module(), blobs(12), method, tmp_path, clients_per_round=5, final_models=None, callbacks=[evaluations]
    )
    found = {name: metric.values for name, metric in evaluations.found[-1].by_name.items()}
    alike = found["test/own_split/cluster/loss"] == found["test/own_split/global/loss"]
    without = (watch.state.assignment < 0).numpy()
    assert without.any() and alike.tolist() == without.tolist()


def test_a_new_client_whose_pre_training_fails_has_no_group_and_the_round_continues(tmp_path):
    inputs = CLIENTS.inputs.copy()
    inputs[CLIENTS.train[2]] *= 1e30
    with pytest.warns(UserWarning, match=r"round 0: the loss or the upload of 1 of 1 clients is not finite \(2\)"):
        watch = fit(
            linear_module(LR),
            dealt(inputs, CLIENTS.targets, CLIENTS.train, test=CLIENTS.test),
            fedgroup(2, 3, 2, steps=2),
            tmp_path,
        )
    assert watch.state.assignment.tolist()[2] == -1
    assert watch.rows[0]["train/failed_clients"] == 2  # in the extra round and in the round itself
    assert watch.state.centres.isfinite().all()


def test_later_clients_find_their_group_after_clusters_were_merged():
    """Groups 0 to 3 lie on four axes. The first two clusters become one, and the others are renumbered without gaps."""
    models, _ = four_ways(8)
    clustering = UpdateDirections(4, clients_per_group=2)
    state = opened(clustering, models, num_clients=12)
    merged = {int(state.assignment[0]), int(state.assignment[1])}
    rest = sorted(set(range(4)) - merged)
    number = dict.fromkeys(merged, 0) | {cluster: place for place, cluster in enumerate(rest, 1)}
    state.assignment = torch.tensor([number.get(cluster, -1) for cluster in state.assignment.tolist()])
    state.centres = state.centres[:3]
    again = UpdateDirections(4, clients_per_group=2)
    again.load_state_dict(clustering.state_dict())
    again.on_extra_round_end(server_of(LAYOUT), state, [upload(8 + way, models[way]) for way in range(4)])
    assert state.assignment[8:].tolist() == state.assignment[:4].tolist() == [0, 0, *state.assignment[2:4].tolist()]
    assert sorted(state.assignment[2:4].tolist()) == [1, 2]


def test_buffers_do_not_count():
    """The buffers are large and suggest the opposite groups, for the first clients and for later ones."""
    layout = Layout.from_network(Normed())

    def model(place, buffer):
        return torch.cat([axis(place), torch.zeros(layout.num_parameters - LAYOUT.size), torch.full((7,), buffer)])

    clustering, initial = UpdateDirections(2), torch.zeros(layout.size)
    models = [model(0, 90.0), model(0, -90.0), model(1, 90.0), model(1, -90.0)]
    state = opened(clustering, models, 5, layout, initial)
    assert state.assignment[:4].tolist() in ([0, 0, 1, 1], [1, 1, 0, 0])
    clustering.on_extra_round_end(server_of(layout), state, [upload(4, model(1, 90.0))])
    assert state.assignment[4] == state.assignment[2]
