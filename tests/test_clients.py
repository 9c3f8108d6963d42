"""The store of the clients' private parts."""

import torch

from lcfl.clients import ClientState, ClientStore


def test_a_client_that_never_took_part_is_blank():
    blank = ClientState(model=torch.ones(2))
    store = ClientStore(blank)
    assert store[5] is blank
    assert 5 not in store and list(store) == []


def test_looking_at_a_client_does_not_make_it_one_that_took_part():
    store = ClientStore(ClientState())
    assert store[1].model is None and store[1].consumed == 0
    assert list(store) == []


def test_clients_come_in_ascending_order():
    store = ClientStore(ClientState())
    for client in (10, 2, 33, 4):
        store[client] = ClientState(consumed=client)
    assert list(store) == [2, 4, 10, 33]
    assert [store[client].consumed for client in store] == [2, 4, 10, 33]


def test_update_replaces_some_and_keeps_the_rest():
    store = ClientStore(ClientState())
    store.update({1: ClientState(consumed=1), 2: ClientState(consumed=2)})
    store.update({2: ClientState(consumed=20), 3: ClientState(consumed=3)})
    assert [(client, store[client].consumed) for client in store] == [(1, 1), (2, 20), (3, 3)]
