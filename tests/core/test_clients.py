"""The store of the clients' private states, in memory and in memory-mapped files."""

import mmap
import os

import pytest
import torch

from lcfl.core import clients
from lcfl.core.clients import ClientState, ClientStore
from tests.helpers.bits import same


@pytest.fixture(params=["memory", "mapped"])
def folder(request, tmp_path):
    return tmp_path if request.param == "mapped" else None


def vector(number, length=4):
    return torch.arange(length, dtype=torch.float32) + number


def test_a_client_that_never_took_part_is_blank(folder):
    blank = ClientState(model=torch.ones(2))
    store = ClientStore(blank, folder)
    assert store[5] is blank
    assert 5 not in store and list(store) == []


def test_clients_that_never_took_part_share_the_initial_model(folder):
    store = ClientStore(ClientState(model=vector(0)), folder)
    store[3] = ClientState(vector(7))
    assert {store[client].model.data_ptr() for client in (0, 1, 2, 4, 10**9)} == {store.blank.model.data_ptr()}
    assert store[3].model.data_ptr() != store.blank.model.data_ptr()


def test_reading_the_state_of_a_client_does_not_make_it_a_participant(folder):
    store = ClientStore(ClientState(), folder)
    assert store[1].model is None and store[1].consumed == 0
    assert list(store) == []


def test_clients_come_in_ascending_order(folder):
    store = ClientStore(ClientState(), folder)
    for client in (10, 2, 33, 4):
        store[client] = ClientState(consumed=client)
    assert list(store) == [2, 4, 10, 33]
    assert [store[client].consumed for client in store] == [2, 4, 10, 33]


def test_update_replaces_some_and_keeps_the_rest(folder):
    store = ClientStore(ClientState(), folder)
    store.update({1: ClientState(vector(1), consumed=1), 2: ClientState(vector(2), consumed=2)})
    store.update({2: ClientState(vector(20), consumed=20), 3: ClientState(vector(3), consumed=3)})
    assert [(client, store[client].consumed) for client in store] == [(1, 1), (2, 20), (3, 3)]
    assert [store[client].model[0].item() for client in store] == [1, 20, 3]


def test_everything_that_a_client_keeps_is_stored_and_returned(folder):
    store = ClientStore(ClientState(vector(0), buffers=vector(9, 2)), folder)
    full = ClientState(vector(1), 5, vector(2, 2), vector(3))
    store.update({1: full, 2: ClientState(vector(4), 6), 3: ClientState(vector(5), 7, store.blank.buffers)})
    assert same(store[1], full)
    assert store[2].buffers is store.blank.buffers is store[3].buffers
    store[1] = ClientState(consumed=8)
    assert same(store[1], ClientState(None, 8, vector(9, 2), None))


def test_the_received_model_takes_precedence_over_the_personal_model():
    assert same(ClientState(vector(1)).stored_model, vector(1))
    assert same(ClientState(vector(1), received=vector(2)).stored_model, vector(2))


def test_a_forgotten_client_is_blank_and_its_place_is_used_again(tmp_path):
    store = ClientStore(ClientState(vector(0)), tmp_path)
    store.update({client: ClientState(vector(client)) for client in range(3)})
    place = store[1].model.data_ptr()
    store.forget(1)
    store.forget(1)
    assert store[1] is store.blank and list(store) == [0, 2]
    store[7] = ClientState(vector(7))
    assert store[7].model.data_ptr() == place
    assert [store[client].model[0].item() for client in store] == [0, 2, 7]


def test_mapped_vectors_grow_by_blocks_and_keep_their_places(tmp_path, monkeypatch):
    monkeypatch.setattr(clients, "BLOCK_BYTES", 3 * 4 * 4)
    store = ClientStore(ClientState(), tmp_path)
    places = []
    for client in range(8):
        store[client] = ClientState(vector(client))
        places.append(store[client].model.data_ptr())
    assert [store[client].model.data_ptr() for client in range(8)] == places and len(set(places)) == 8
    assert all(same(store[client].model, vector(client)) for client in range(8))
    store[4] = ClientState(vector(40))
    assert store[4].model.data_ptr() == places[4] and same(store[4].model, vector(40))


def test_a_block_of_short_vectors_holds_a_limited_number(tmp_path, monkeypatch):
    monkeypatch.setattr(clients, "BLOCK_VECTORS", 3)
    store = ClientStore(ClientState(), tmp_path)
    store.update({client: ClientState(vector(client)) for client in range(7)})
    assert [store[client].model[0].item() for client in range(7)] == list(range(7))
    begins = [store[client].model.data_ptr() % mmap.PAGESIZE == 0 for client in range(7)]
    assert begins == [True, False, False, True, False, False, True]


def test_a_vector_larger_than_a_block_gets_a_separate_block(tmp_path, monkeypatch):
    monkeypatch.setattr(clients, "BLOCK_BYTES", 4)
    store = ClientStore(ClientState(), tmp_path)
    store.update({client: ClientState(vector(client)) for client in range(3)})
    assert [store[client].model[0].item() for client in range(3)] == [0, 1, 2]


def test_mapped_files_lie_in_the_folder_and_have_no_names(tmp_path):
    store = ClientStore(ClientState(), tmp_path)
    store[0] = ClientState(vector(0))
    assert list(tmp_path.iterdir()) == []
    with open("/proc/self/maps") as file:
        mapped = [line for line in file if str(tmp_path) in line]
    assert mapped and all(line.rstrip().endswith("(deleted)") for line in mapped)


def test_an_error_names_the_folder_without_room(tmp_path, monkeypatch):
    def full(descriptor, offset, length):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    store = ClientStore(ClientState(), tmp_path)
    with pytest.raises(
        OSError, match=r"no room for 64 MiB of clients' models \(trainer.client_store: mapped\) in /.*No"
    ):
        store[0] = ClientState(torch.zeros(2**24))
