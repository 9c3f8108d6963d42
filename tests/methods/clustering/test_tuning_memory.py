"""Tuning the number of clusters holds few of the stored models at a time, and a cap changes no bits below it."""

import weakref

import pytest
import torch
from torch.nn.functional import normalize

from lcfl.core.state import FederationState
from lcfl.methods.aggregation import base
from lcfl.methods.clustering import similarity
from lcfl.methods.clustering.cluster_moves import ClusterMove
from lcfl.methods.clustering.tuning import StoredModelGeometry
from tests.helpers.builders import server_of, state_of
from tests.methods.clustering.models import LAYOUT, groups_of


@pytest.fixture
def held(monkeypatch):
    """Makes stored models copies, as those from other hosts are, and provides how many there were at the same time."""
    alive, most = weakref.WeakSet(), []

    def stored_models(state, clients):
        for client in clients:
            model = state.stored_model(client).clone()
            alive.add(model)
            most.append(len(alive))
            yield model
            del model

    monkeypatch.setattr(FederationState, "stored_models", stored_models)
    return most


def geometry():
    models, groups = groups_of(size=10)
    centres = torch.stack([torch.stack(models[group::4]).mean(dim=0) for group in range(4)])
    return StoredModelGeometry(server_of(LAYOUT), state_of(models, groups, centres))


def test_directions_are_fitted_to_few_models_and_the_others_are_projected_in_blocks(monkeypatch, held):
    clusters = geometry()
    model_nP = torch.stack(list(clusters.state.stored_models(clusters.clients)))
    exact = similarity.project(model_nP, similarity.principal_components(model_nP, 50))
    assert torch.equal(clusters.directions(clusters.clients), normalize(exact.double(), dim=1))
    monkeypatch.setattr(similarity, "MOST_FITTED", 8)
    monkeypatch.setattr(similarity, "MODELS_AT_A_TIME", 4)
    held.clear()
    found = clusters.directions(clusters.clients)
    assert max(held) <= 8 + 1
    fitted = model_nP[similarity.spread(clusters.clients)]
    expected = model_nP @ similarity.principal_components(fitted, 50)
    torch.testing.assert_close(found, normalize(expected.double(), dim=1), atol=1e-5, rtol=1e-4)


def test_a_move_holds_few_models_and_gives_the_mean_of_all(monkeypatch, held):
    clusters = geometry()
    members = clusters.members(0) + clusters.members(1)
    expected = base.mean_model([clusters.state.stored_model(each) for each in members], [1] * 20, LAYOUT)
    monkeypatch.setattr(base, "MODELS_AT_A_TIME", 4)
    clusters.apply(ClusterMove(1, 0))
    (merged,) = {clusters.state.assignment[each].item() for each in members}
    assert torch.equal(clusters.state.centres[merged], expected)
    assert max(held) <= 4 + 1
