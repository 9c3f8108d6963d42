"""Tests of what a client and the server make of messages that hold a part of the model."""

import pytest
import torch

from lcfl.core.clients import ClientState
from lcfl.core.messages import Downlink, Uplink
from lcfl.methods.exchange import SharedEmbedding, SharedLayers
from lcfl.methods.local import LocalOutput
from lcfl.models import Layout
from lcfl.models.module import FederatedModule
from tests.helpers.builders import Normed, blobs, fedper, fit, lg_fedavg, linear_module, state_of

LAYOUT = Layout.from_network(Normed())  # P = 23, P_phi = 15; buffers of the embedding [23, 30)
OWN, SERVER = torch.full((30,), 1.0), torch.full((30,), 2.0)


def state():
    return state_of([OWN, None], [0, 0], [SERVER.tolist()], initial=torch.full((30,), 3.0))


def test_a_client_receives_its_own_model_with_the_servers_part():
    exchange = SharedEmbedding()
    sent = exchange.down(state(), 0, LAYOUT)
    assert list(sent.payload) == list(exchange.sends) == ["shared"]
    assert sent.num_bytes == 4 * 22
    received = exchange.at_client(sent, ClientState(OWN), LAYOUT)
    assert received.payload["model"].tolist() == [2.0] * 15 + [1.0] * 8 + [2.0] * 7
    assert exchange.personal(state(), 0, LAYOUT).tolist() == received.payload["model"].tolist()
    assert exchange.personal(state(), 1, LAYOUT).tolist() == [2.0] * 15 + [3.0] * 8 + [2.0] * 7
    assert OWN.tolist() == [1.0] * 30


def test_the_server_receives_its_own_model_with_the_clients_part():
    exchange = SharedLayers(1)
    trained = torch.full((30,), 5.0)
    payload = exchange.up(LocalOutput(trained, 0, 0.0), Downlink({}), LAYOUT)
    assert list(payload) == ["shared"] and len(payload["shared"]) == 8
    delivered = exchange.at_server(Uplink(0, payload, 7), state(), LAYOUT)
    assert list(delivered.payload) == list(exchange.returns) == ["model"]
    assert delivered.payload["model"].tolist() == [2.0] * 15 + [5.0] * 8 + [2.0] * 7
    assert (delivered.client, delivered.num_samples) == (0, 7)


def test_the_whole_model_of_a_warmup_round_stays_unchanged():
    whole = Downlink({"model": SERVER})
    assert SharedEmbedding().at_client(whole, ClientState(OWN), LAYOUT) is whole


def test_the_change_of_a_part_is_measured_in_warmup_rounds_too():
    exchange, trained = SharedEmbedding(), torch.full((30,), 5.0)
    payload = exchange.up(LocalOutput(trained, 0, 0.0), Downlink({}), LAYOUT)
    for sent in (Downlink({"model": SERVER}), exchange.down(state(), 0, LAYOUT)):
        assert exchange.change_of(payload, sent, LAYOUT).tolist() == [3.0] * 15 + [0.0] * 8
        assert exchange.update_norm(payload, sent, LAYOUT) == pytest.approx(3 * 15**0.5)


@pytest.mark.parametrize("method", [fedper, lg_fedavg])
def test_batch_normalisation_keeps_the_statistics_of_its_layer(tmp_path, method):
    """Checks that FedPer shares the statistics with the embedding and LG-FedAvg keeps them with the lower layers."""
    watch = fit(FederatedModule(Wide), blobs(6, batch_size=7), method(), tmp_path, rounds=2)
    layout, state = watch.server.layout, watch.state
    buffers = slice(layout.num_parameters, None)
    shared = method is fedper
    personal = [watch.server.method.exchange.personal(state, client, layout)[buffers] for client in (0, 1)]
    assert torch.equal(*personal) == shared
    assert torch.equal(personal[0], state.global_model[buffers]) == shared
    assert torch.equal(state.global_model[buffers], state.initial[buffers]) == (not shared)


class Wide(Normed):
    """A network with batch normalisation that takes the inputs of `blobs`."""

    def __init__(self):
        super().__init__()
        self.embedding[0] = torch.nn.Linear(16, 3)
        self.decision = torch.nn.Linear(3, 8)


def test_the_shared_part_is_that_of_the_clients_cluster():
    state = state_of([OWN, OWN], [0, 1], [SERVER.tolist(), [9.0] * 30])
    assert SharedEmbedding().down(state, 1, LAYOUT).payload["shared"].tolist() == [9.0] * 22
    assert SharedEmbedding().down(state, 0, LAYOUT).payload["shared"].tolist() == [2.0] * 22


def test_sharing_no_layer_or_every_layer_warns():
    with pytest.warns(UserWarning, match="SharedLayers shares every layer, so nothing is personal"):
        SharedLayers(3).check(LAYOUT)
    with pytest.warns(UserWarning, match="SharedEmbedding shares every layer"):
        SharedEmbedding().check(Layout.from_network(Normed(), cut=None))
    with pytest.warns(UserWarning, match="model.cut"):
        layout = Layout.from_network(Normed(), cut="embedding.0")
    with pytest.warns(UserWarning, match="SharedEmbedding shares no layer, so every client trains alone"):
        SharedEmbedding().check(layout)


@pytest.mark.parametrize("layers", [0, -1, []])
def test_a_number_of_layers_is_at_least_one(layers):
    with pytest.raises(ValueError, match=r"method.exchange: got global_layers=.*; allowed are a number >= 1 of"):
        SharedLayers(layers)


def test_a_missing_layer_is_reported_before_data_is_loaded(tmp_path):
    with pytest.raises(ValueError, match=r"method.exchange: SharedLayers: got 3 layers; the network has 2 with"):
        fit(linear_module(), blobs(4), lg_fedavg(3), tmp_path)
    assert not any(tmp_path.iterdir())
