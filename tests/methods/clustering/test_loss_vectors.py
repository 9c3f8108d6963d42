"""Tests of clusters of loss vectors: against numpy, the matching with models, the end of the clustering, and bytes."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lcfl.core.messages import Uplink
from lcfl.data.faults import ScaledUpdate
from lcfl.methods import ClusterLosses, LocalTraining, LossVector
from lcfl.methods.clustering import LossVectorKMeans
from lcfl.methods.clustering.loss_vectors import match_to_models
from lcfl.methods.local.least_loss import NO_LOSS
from lcfl.methods.method import Method
from lcfl.runs.serialization import plain_copy
from tests.helpers.bits import same
from tests.helpers.builders import blobs, blobs_module, fit, linear_module, state_of
from tests.helpers.clustered import SAMPLES, clove
from tests.methods.in_numpy import Clients

CLIENTS = Clients(6, 4, 5, 3, 6)


def nearest_groups(points, num_groups):
    """Returns the labels of the k-means optimum, found by trying all labels."""

    def scatter(labels):
        groups = [points[np.array(labels) == k] for k in range(num_groups)]
        return sum(((group - group.mean(axis=0)) ** 2).sum() if len(group) else np.inf for group in groups)

    return np.array(min(itertools.product(range(num_groups), repeat=len(points)), key=scatter))


def cheapest_models(losses, labels):
    """Returns the model of every client by the cheapest way to give each group a model of its own."""
    groups, num_models = int(max(labels)) + 1, losses.shape[1]

    def cost(models):
        return sum(losses[i, models[label]] for i, label in enumerate(labels))

    return np.array(min(itertools.permutations(range(num_models), groups), key=cost))[labels]


@pytest.mark.parametrize("engine", ["sequential", "compiled", "stacked"])
def test_two_rounds_against_numpy(tmp_path, engine):
    module = linear_module()
    method = clove(2, steps=2)
    watch = fit(module, CLIENTS.data(), method, tmp_path, rounds=3, engine=engine)
    omega = [module.initial_model(0, k).double().numpy() for k in range(2)]
    as_ifca = []
    for each in watch.history:
        losses = np.array([[CLIENTS.loss(w, i) for w in omega] for i in range(5)])
        chosen = cheapest_models(losses, nearest_groups(losses, 2))
        trained = [CLIENTS.trained(omega[k], i, 2) for i, k in enumerate(chosen)]
        omega = [CLIENTS.mean(trained, np.flatnonzero(chosen == k)) for k in range(2)]
        assert each.assignment.tolist() == chosen.tolist()
        np.testing.assert_allclose(each.centres, omega, atol=1e-5)
        as_ifca.append((losses.argmin(axis=1) == chosen).all())
    assert not all(as_ifca)  # IFCA would give some clients other models


def test_a_model_that_has_diverged_goes_to_no_client(tmp_path):
    """One faulty client makes its cluster's model huge. The others go on with the models that are left."""
    data = blobs(12, faults=[ScaledUpdate([0], [1, 1], 1e36)])
    watch = fit(blobs_module(), data, clove(4), tmp_path, rounds=4)
    sizes = [centre.abs().max() for centre in watch.history[1].centres]
    broken = max(range(4), key=lambda cluster: sizes[cluster])
    assert sizes[broken] > 1e30
    for each in watch.history[2:]:
        assert each.row["train/failed_clients"] == 0
        assert broken not in each.assignment.tolist()


def test_there_are_as_many_groups_as_models_at_most():
    losses = torch.tensor([[1.0, 5.0, NO_LOSS], [5.0, 1.0, 2.0], [5.0, 1.2, 2.0], [1.1, 5.0, 3.0]])
    state = state_of([], [-1] * 4, torch.zeros(3, 2), [False] * 4)
    answers = [Uplink(client, {"losses": row}, 1, None) for client, row in enumerate(losses)]
    clustering = LossVectorKMeans(4)
    clustering.on_extra_round_end(SimpleNamespace(seed=0), state, answers)
    assert state.assignment.tolist() == [0, 1, 1, 0]
    before = state.assignment
    clustering.on_extra_round_end(
        SimpleNamespace(seed=0), state, [Uplink(0, {"losses": torch.full((3,), NO_LOSS)}, 1, None)]
    )
    assert state.assignment is before


def test_a_client_without_losses_does_not_keep_the_others_from_their_clusters():
    losses = torch.tensor([[1.0, 5.0, 9.0], [5.0, 1.0, 9.0], [NO_LOSS] * 3, [5.0, 1.2, 9.0], [1.1, 5.0, 9.0]])
    state = state_of([], [-1] * 5, torch.zeros(3, 2), [False] * 5)
    answers = [Uplink(client, {"losses": row}, 1, None) for client, row in enumerate(losses)]
    LossVectorKMeans(2).on_extra_round_end(SimpleNamespace(seed=0), state, answers)
    assert state.assignment.tolist() == [0, 1, -1, 1, 0]


def test_the_first_round_may_deal_the_models_out_at_random(tmp_path):
    watch = fit(blobs_module(), blobs(12), clove(4, "random"), tmp_path, rounds=2, clients_per_round=8)
    first, second = watch.history
    sampled = watch.sampled[0]
    assert first.assignment[sampled].bincount().tolist() == [2, 2, 2, 2]
    assert (first.assignment[[i for i in range(12) if i not in sampled]] == -1).all()
    size = 4 * watch.state.initial.numel()
    assert (first.row["comm/down_bytes"], first.row["comm/up_bytes"]) == (8 * size, 8 * size)
    assert second.row["comm/down_bytes"] == 8 * (4 + 1) * size  # all models, and then the one to train
    assert second.row["comm/up_bytes"] == 8 * (size + 4 * 4)


def matched(losses, labels):
    return match_to_models(torch.tensor(losses), torch.tensor(labels)).tolist()


def test_groups_get_the_models_with_the_smallest_total_loss():
    assert matched([[1.0, 9.0], [9.0, 1.0]], [0, 1]) == matched([[1.0, 9.0], [9.0, 1.0]], [1, 0]) == [0, 1]
    # Both groups would like model 0, but the second loses more by giving it up.
    assert matched([[1.0, 2.0], [1.0, 2.0], [1.0, 9.0]], [0, 0, 1]) == [1, 1, 0]
    # There are fewer groups than models.
    assert matched([[3.0, 2.0, 1.0], [3.0, 2.0, 1.5]], [0, 0]) == [2, 2]


def test_ties_do_not_depend_on_the_names_of_the_groups():
    tied = [[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]]
    assert matched(tied, [0, 1, 1]) == matched(tied, [1, 0, 0]) == [0, 1, 1]


class Drawing:
    """A server whose initial model with number n is n."""

    seed = 0

    def initial_model(self, number):
        return torch.tensor([float(number)])


def began(clustering):
    state = state_of([], [0] * 5, [[0.0]])
    state.round = 0
    clustering.on_fit_start(Drawing(), state)
    return state


def sent(clustering, state, losses):
    """Hands the loss vectors of some clients to the clustering, as the next round would."""
    asked = clustering.extra_round(state, list(losses))
    clients = [] if asked is None else asked.clients
    uploads = [Uplink(client, {"losses": torch.tensor(losses[client])}, 1) for client in clients]
    clustering.on_extra_round_end(Drawing(), state, uploads)
    assert clustering.extra_round(state, list(losses)) is None
    state.round += 1
    return clients


FIRST, SECOND = [1.0, 5.0], [5.0, 1.0]


def test_clustering_ends_when_the_clients_of_a_round_have_kept_their_models():
    clustering = LossVectorKMeans(2, stable_rounds=2)
    state = began(clustering)
    assert sent(clustering, state, {0: FIRST, 1: SECOND, 2: FIRST}) == [0, 1, 2]
    assert sent(clustering, state, {0: FIRST, 1: SECOND, 3: FIRST}) == [0, 1, 3]  # client 3 is new
    assert sent(clustering, state, {0: FIRST, 1: SECOND}) == [0, 1]
    assert state.assignment.tolist() == [0, 1, 0, 0, -1]
    saved = clustering.state_dict()
    assert saved == {"streaks": {0: 3, 1: 3, 2: 1, 3: 1}, "is_stable": True}
    assert plain_copy(saved, "LossVectorKMeans") == saved
    assert sent(clustering, state, {0: SECOND, 1: FIRST}) == []  # no loss vectors any more
    assert sent(clustering, state, {0: SECOND, 4: SECOND}) == [4]  # but for clients without a cluster
    assert state.assignment.tolist() == [0, 1, 0, 0, 1]


def test_by_default_clustering_does_not_end():
    clustering = LossVectorKMeans(2)
    state = began(clustering)
    for _ in range(9):
        assert sent(clustering, state, {0: FIRST, 1: SECOND}) == [0, 1]
    assert clustering.state_dict() == {"streaks": {}, "is_stable": False}


def test_a_model_that_changes_begins_a_new_streak():
    clustering = LossVectorKMeans(2, stable_rounds=9)
    state = began(clustering)
    for losses in ({0: FIRST, 1: SECOND}, {0: FIRST, 1: SECOND}, {0: SECOND, 1: FIRST}):
        sent(clustering, state, losses)
    assert clustering.state_dict()["streaks"] == {0: 1, 1: 1}


def test_fewer_clients_than_clusters_leave_the_other_models_as_they_are(tmp_path):
    watch = fit(blobs_module(), blobs(12), clove(5), tmp_path, rounds=1, clients_per_round=2)
    chosen = set(watch.state.assignment.tolist()) - {-1}
    assert 1 <= len(chosen) <= 2
    for k in range(5):
        assert same(watch.state.centres[k], blobs_module().initial_model(0, k)) is (k not in chosen)


def test_equal_initial_models_are_refused_unless_they_are_dealt_out_at_random(tmp_path):
    torch.save(blobs_module().network.state_dict(), tmp_path / "weights.pt")
    module = blobs_module(init_from=tmp_path / "weights.pt")
    with pytest.raises(ValueError, match=r"LossVectorKMeans: the initial models are equal.*Set first: random"):
        fit(module, blobs(12), clove(2), tmp_path)
    fit(module, blobs(12), clove(2, "random"), tmp_path)


def test_losses_are_no_exchange_for_training():
    with pytest.raises(ValueError, match="ClusterLosses uploads losses"):
        Method(LocalTraining(steps=1), ClusterLosses(), SAMPLES, [LossVectorKMeans()])
    with pytest.raises(ValueError, match="reads model from the uploads, but ClusterLosses uploads losses"):
        Method(LossVector(), ClusterLosses(), SAMPLES, [LossVectorKMeans()])
