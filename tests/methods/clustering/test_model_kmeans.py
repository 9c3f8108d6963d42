"""Tests of FeSEM: k-means of whole models, a run in numpy, the first clusters, and exact properties."""

import numpy as np
import pytest
import torch

from lcfl.methods.aggregation import ClusterMean
from lcfl.methods.clustering import ModelKMeans
from lcfl.methods.exchange import ClusterModel
from lcfl.methods.local import LocalTraining
from lcfl.methods.method import Method
from lcfl.models import Layout
from tests.helpers.bits import same
from tests.helpers.builders import Normed, blobs, blobs_module, fit, linear_module, server_of, state_of, upload
from tests.helpers.clustered import UNIFORM, Evaluations, fesem
from tests.methods.clustering.models import LAYOUT, axis
from tests.methods.in_numpy import Clients, best_parts

CLIENTS = Clients(6, 6, 5, 5)  # means are unweighted all the same
STORED = ClusterMean("stored", "stored", "uniform")


@pytest.mark.parametrize("mean", [STORED, UNIFORM], ids=["stored", "participants"])
def test_three_rounds_match_numpy(tmp_path, mean):
    module = linear_module(lr=0.5)
    method = fesem(2, mean.over, mean, steps=2)
    watch = fit(module, CLIENTS.data(), method, tmp_path, rounds=3)
    w0 = module.initial_model(0).double().numpy()
    start, omega = [w0] * 4, None
    for each in watch.history:
        w = np.stack([CLIENTS.trained(start[i], i, 2) for i in range(4)])
        r = best_parts(w) if omega is None else ((w[:, None] - omega[None]) ** 2).sum(axis=2).argmin(axis=1)
        omega = np.stack([w[r == k].mean(axis=0) if (r == k).any() else omega[k] for k in (0, 1)])
        np.testing.assert_allclose(each.centres[each.assignment], omega[r], atol=2e-6)
        np.testing.assert_allclose(each.global_model, w.mean(axis=0), atol=2e-6)
        start = list(omega[r])
    assert r.tolist() in ([0, 1, 0, 1], [1, 0, 1, 0])


def rounds_of(clustering, models, uploads, state):
    clustering.on_round_end(server_of(LAYOUT), state, [upload(i, models[i]) for i in uploads])


def test_all_parameters_count_not_only_one_layer():
    """Models that differ only in the first layer, or only in the last one, fall into two clusters."""
    for place in (0, LAYOUT.num_parameters - 1):
        models = [axis(place, value) for value in (1.0, 1.1, -1.0, -1.1)]
        state, clustering = state_of(models, [0] * 4, [[0.0] * LAYOUT.size]), ModelKMeans(2)
        rounds_of(clustering, models, range(4), state)
        assert state.assignment.tolist() in ([0, 0, 1, 1], [1, 1, 0, 0])
        assert [round(float(state.centre_of(i)[place]), 4) for i in range(4)] == [1.05, 1.05, -1.05, -1.05]


@pytest.mark.parametrize("place", [0, LAYOUT.num_parameters - 1])
def test_all_parameters_count_in_every_later_round_too(place):
    """Two clients have changed sides, in the first layer or in the last one."""
    clustering = ModelKMeans(2)
    clustering.load_state_dict({"is_begun": True})
    models = [axis(place, value) for value in (1.0, -1.1, -1.0, 1.1)]
    state = state_of(models, [0, 0, 1, 1], torch.stack([axis(place), axis(place, -1.0)]))
    rounds_of(clustering, models, range(4), state)
    assert state.assignment.tolist() == [0, 1, 1, 0]


def test_buffers_do_not_count():
    """The buffers are large and suggest the opposite clusters, for the first clusters and in the E-step."""
    layout = Layout.from_network(Normed())

    def model(parameter, buffer):
        rest = torch.zeros(layout.num_parameters - 1)
        return torch.cat([torch.tensor([parameter]), rest, torch.full((7,), buffer)])

    models, clustering = [model(1.0, 0.0), model(1.1, 90.0), model(-1.0, 0.0), model(-1.1, 90.0)], ModelKMeans(2)
    state = state_of(models, [0] * 4, [[0.0] * layout.size])
    clustering.on_round_end(server_of(layout), state, [upload(i, each) for i, each in enumerate(models)])
    assert state.assignment.tolist() in ([0, 0, 1, 1], [1, 1, 0, 0])
    state = state_of(models, [1, 0, 0, 1], torch.stack([model(1.0, 0.0), model(-1.0, 90.0)]))
    clustering.on_round_end(server_of(layout), state, [upload(i, each) for i, each in enumerate(models)])
    assert state.assignment.tolist() == [0, 0, 1, 1]


def test_no_clusters_before_k_different_models_are_known():
    models, clustering = [axis(0), axis(0), axis(0), axis(1)], ModelKMeans(2, "stored")
    state = state_of([models[0], models[1], None, None], [0] * 4, [[0.0] * LAYOUT.size])
    rounds_of(clustering, models, [0, 1], state)
    assert state.assignment.tolist() == [0] * 4 and state.num_clusters == 1
    state = state_of([*models[:2], None, models[3]], [0] * 4, [[0.0] * LAYOUT.size])
    rounds_of(clustering, models, [3], state)
    assert state.num_clusters == 2
    assert state.assignment[2] == -1  # never took part, so it has no cluster and gets the global model
    assert torch.equal(state.centre_of(2), state.global_model)


def test_with_few_participants_several_rounds_form_the_first_clusters_together():
    """This also holds over participants, and if the run is resumed in between.

    Otherwise no client would ever be clustered.
    """
    models = [axis(0), axis(1), axis(2), axis(0, 1.1)]
    state, clustering = state_of([None] * 5, [0] * 5, [[0.0] * LAYOUT.size]), ModelKMeans(3, "participants")
    rounds_of(clustering, models, [0, 1], state)
    assert state.num_clusters == 1 and state.assignment.tolist() == [0] * 5
    again = ModelKMeans(3, "participants")
    again.load_state_dict(clustering.state_dict())
    rounds_of(again, models, [2, 3], state)
    assert state.num_clusters == len(state.assignment[:3].unique()) == 3
    assert state.assignment[3] == state.assignment[0] and state.assignment[4] == -1
    assert again.state_dict() == {"is_begun": True, "waiting": {}}


def test_ties_keep_the_cluster_and_clients_without_one_take_the_first():
    clustering = ModelKMeans(2)
    clustering.load_state_dict({"is_begun": True})
    models = [axis(0)] * 4
    state = state_of(models, [1, 0, -1, 1], [[0.0] * LAYOUT.size] * 2)
    rounds_of(clustering, models, range(4), state)
    assert state.assignment.tolist() == [1, 0, 0, 1]


@pytest.mark.parametrize(("over", "expected"), [("stored", [0, 1]), ("participants", [1, 1])])
def test_whose_models_are_compared(over, expected):
    clustering = ModelKMeans(2, over)
    clustering.load_state_dict({"is_begun": True})
    models = [axis(0), axis(1)]
    state = state_of(models, [1, 0], torch.stack(models))
    rounds_of(clustering, models, [1], state)
    assert state.assignment.tolist() == expected


def test_an_empty_cluster_keeps_its_centre(tmp_path):
    class Emptied(ModelKMeans):
        def on_round_end(self, server, state, uploads):
            super().on_round_end(server, state, uploads)
            if state.round == 1:
                state.assignment = torch.ones_like(state.assignment)

    method = fesem(3)
    method.clustering = [Emptied(3)]
    first, second = fit(blobs_module(), blobs(12), method, tmp_path, rounds=2).history
    assert same(first.centres[[0, 2]], second.centres[[0, 2]]) and not same(first.centres[1], second.centres[1])


def test_a_client_that_was_never_sampled_is_evaluated_with_the_global_model(tmp_path):
    evaluations = Evaluations()
    watch = fit(
        blobs_module(), blobs(12), fesem(2), tmp_path, clients_per_round=4, final_models=None, callbacks=[evaluations]
    )
    found = {name: metric.values for name, metric in evaluations.found[-1].by_name.items()}
    never = ~watch.state.participated.numpy()
    same_for = found["test/own_split/cluster/loss"] == found["test/own_split/global/loss"]
    assert never.sum() == 8 and same_for.tolist() == never.tolist()


def test_more_clusters_than_clients_and_an_exchange_without_models_are_refused():
    with pytest.raises(ValueError, match=r"num_clusters=5 for the 4 clients"):
        ModelKMeans(5).check(4)
    with pytest.raises(ValueError, match="uses stored models, but ClusterModel keeps none"):
        Method(LocalTraining(steps=1), ClusterModel(), UNIFORM, [ModelKMeans(2, "stored")])
