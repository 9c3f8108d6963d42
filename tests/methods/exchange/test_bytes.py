"""Tests of the bytes on the wire: the papers' formulas, for the messages and in a run's comm/* columns."""

from functools import partial

import pytest
import torch

from lcfl.core.messages import Downlink, Uplink
from lcfl.methods.exchange import CentreAndEmbedding, ClusterModel, FullModel, NoExchange
from lcfl.methods.local import LocalOutput
from lcfl.models import Layout, LeNet5
from tests.helpers.builders import (
    Normed,
    alone,
    apfl,
    blobs,
    blobs_module,
    fedac,
    fedala,
    fedamp,
    fedavg,
    fedbabu,
    fedlc,
    fednova,
    fedper,
    fedprox,
    fedrep,
    fit,
    lcfed,
    lg_fedavg,
    per_fedavg,
    state_of,
)
from tests.helpers.clustered import cfl, cgpfl, cgpfl_prox, fesem, ifca
from tests.methods.test_ascfl import ascfl

P, P_PHI = 62_006, 61_156
LENET = Layout.from_network(LeNet5())
NOTHING = Downlink({})


def state(size=30, participated=(True, False)):
    centres = torch.arange(2.0).unsqueeze(1).repeat(1, size)
    models = [torch.full((size,), 5.0), torch.full((size,), 6.0)]
    result = state_of(models, [1, 0], centres, participated)
    result.global_model = torch.full((size,), 9.0)
    return result


@pytest.mark.parametrize(
    ("exchange", "down", "up"),
    [(FullModel(), P, P), (ClusterModel(), P, P), (CentreAndEmbedding(), P + P_PHI, P), (NoExchange(), 0, 0)],
)
def test_floats_of_one_client_in_one_round(exchange, down, up):
    assert exchange.down(state(P), 0, LENET).num_bytes == 4 * down
    assert Uplink(0, exchange.up(LocalOutput(torch.zeros(P), 0, 0.0), NOTHING, LENET), 1).num_bytes == 4 * up


def test_full_model_sends_the_global_model():
    payload = FullModel().down(state(), 0, Layout.from_network(Normed())).payload
    assert list(payload) == list(FullModel.sends) == ["model"]
    assert payload["model"].tolist() == [9.0] * 30


def test_cluster_model_sends_the_model_of_the_clients_cluster():
    for client, cluster in ((0, 1.0), (1, 0.0)):
        payload = ClusterModel().down(state(), client, Layout.from_network(Normed())).payload
        assert list(payload) == list(ClusterModel.sends) == ["model"]
        assert payload["model"].tolist() == [cluster] * 30


def test_lcfed_sends_the_clusters_centre_and_the_global_embedding():
    layout = Layout.from_network(Normed())
    for client, cluster in ((0, 1.0), (1, 0.0)):
        payload = CentreAndEmbedding().down(state(), client, layout).payload
        assert list(payload) == list(CentreAndEmbedding.sends)
        assert payload["centre"].tolist() == [cluster] * 30
        assert payload["embedding"].tolist() == [9.0] * 15


@pytest.mark.parametrize("exchange", [FullModel(), ClusterModel(), CentreAndEmbedding()])
def test_the_whole_model_is_uploaded_with_its_buffers(exchange):
    trained = LocalOutput(torch.arange(30.0), consumed=0, loss=0.0)
    payload = exchange.up(trained, NOTHING, Layout.from_network(Normed()))
    assert list(payload) == ["model"]
    assert torch.equal(payload["model"], trained.model)


@pytest.mark.parametrize("exchange", [CentreAndEmbedding(), NoExchange()])
def test_a_personal_model_is_the_clients_own_or_what_the_server_would_send(exchange):
    assert exchange.personal(state(), 0, LENET).tolist() == [5.0] * 30
    assert exchange.personal(state(), 1, LENET).tolist() == [0.0] * 30  # the client has a model but never took part
    assert exchange.personal(state(participated=(True, True)), 1, LENET).tolist() == [6.0] * 30


SIZE, EMBEDDING = 16 * 16 + 16 + 16 * 8 + 8, 16 * 16 + 16


@pytest.mark.parametrize(
    ("method", "down", "up", "warmup"),
    [
        (fedavg, SIZE, SIZE, 0),
        (alone, 0, 0, 0),
        (fedprox, SIZE, SIZE, 0),
        (fednova, SIZE, SIZE + 1, 0),
        (fedper, EMBEDDING, EMBEDDING, 0),
        (fedrep, EMBEDDING, EMBEDDING, 0),
        (fedbabu, EMBEDDING, EMBEDDING, 0),
        (lg_fedavg, SIZE - EMBEDDING, SIZE - EMBEDDING, 0),  # P_g of the last layer
        (per_fedavg, SIZE, SIZE, 0),
        (apfl, SIZE, SIZE, 0),
        (fedala, SIZE, SIZE, 0),
        (fedamp, SIZE, SIZE, 0),
        (fedlc, SIZE, SIZE, 0),
        (partial(ifca, 3), 3 * SIZE, SIZE + 1, 0),  # the models of all clusters down, and the choice up
        (fesem, SIZE, SIZE, 0),
        (cfl, SIZE, SIZE, 0),
        (cgpfl, SIZE, SIZE, 0),
        (cgpfl_prox, SIZE, SIZE, 0),
        (partial(ascfl, incentive=False), SIZE, SIZE, 0),
        (fedac, SIZE + EMBEDDING, SIZE, 0),
        (lcfed, SIZE + EMBEDDING, SIZE, 12 * 2 * SIZE),  # |S_d| = all 12 clients, P down and P up
    ],
)
def test_the_byte_counters_of_a_run_follow_the_formulas(tmp_path, method, down, up, warmup):
    watch = fit(blobs_module(), blobs(12), method(), tmp_path, rounds=2, clients_per_round=5)
    total = 4 * warmup
    if warmup:
        assert watch.history[0].row["comm/down_bytes"] == watch.history[0].row["comm/up_bytes"] == 2 * warmup
    for row in watch.rows:
        total += 4 * 5 * (down + up)
        assert row["comm/down_bytes"] == 4 * 5 * down
        assert row["comm/up_bytes"] == 4 * 5 * up
        assert row["comm/total_bytes"] == total
    assert watch.state.total_bytes == total


def test_the_bytes_of_a_projection_at_the_clients_are_counted_apart(tmp_path):
    watch = fit(blobs_module(), blobs(12), lcfed(dimension=3), tmp_path, clients_per_round=5)
    warmup, first = (each.row["comm/client_projection_bytes"] for each in watch.history)
    assert warmup == 4 * (12 * 3 * SIZE + 12 * 3)  # M to all clients, and a code from each client in S_d
    assert first == 4 * 5 * 3


def test_the_bytes_of_fedacs_projection_recur_with_every_refresh(tmp_path):
    watch = fit(blobs_module(), blobs(12), fedac(2, dimension=3, refresh_every=2), tmp_path, rounds=4)
    codes = 4 * 12 * 3
    with_m = codes + 4 * 12 * 3 * SIZE
    assert [row["comm/client_projection_bytes"] for row in watch.rows] == [with_m, codes, with_m, codes]


def test_only_clients_that_have_taken_part_send_a_code_at_a_refresh(tmp_path):
    method = fedac(2, dimension=3, refresh_every=2)
    watch = fit(blobs_module(), blobs(12), method, tmp_path, rounds=3, clients_per_round=4)
    known, with_m = set(), []
    for number, row in enumerate(watch.rows):
        known.update(watch.sampled[number])
        if row.get("comm/client_projection_bytes", 0) > 4 * 4 * 3:
            with_m.append((row["comm/client_projection_bytes"], 4 * 12 * 3 * SIZE + 4 * len(known) * 3))
    assert with_m and len(known) < 12 and all(one == other for one, other in with_m)
