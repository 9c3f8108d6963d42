"""A store that is spread over hosts holds what one store holds, and so do sums over its models."""

import os
import re
import signal

import pytest
import torch
import torch.distributed as dist

from lcfl.core.clients import ClientState, ClientStore
from lcfl.core.model_sums import ModelSums
from lcfl.distributed.client_output import ClientError
from lcfl.distributed.hosts import Host, StateElsewhere
from lcfl.distributed.launch import LostRankError
from lcfl.distributed.spread_client_store import SpreadClientStore
from tests.helpers.bits import same

N, SIZE = 10, 3


def vector(*values):
    return torch.tensor(values, dtype=torch.float32)


def changed(store):
    """Makes changes of all kinds and returns what the store then holds."""
    store.update({client: ClientState(vector(client, 1, 2), 5 * client) for client in (0, 3, 4, 9)})
    store.update(
        {1: ClientState(consumed=7), 4: ClientState(consumed=8), 9: ClientState(vector(9, 9, 9), 1, vector(1))}
    )
    store[5] = ClientState(vector(5, 5, 5), received=vector(6, 6, 6), memory=vector(1, 2))
    store[2] = ClientState(vector(0, 0, 0))
    store.forget(2)
    store.forget(3)
    store.forget(8)
    return [
        list(store), [client in store for client in range(N)], [store[client] for client in range(N)],
        list(store.states([9, 1, 0, 5])), sorted(store.checkpoint_shards.unsaved),
        [each for part in store.at_owners(_numbers, list(store)) for each in part],
    ]  # fmt: skip


def _numbers(store, clients):
    return [(client, store[client].consumed) for client in clients]


@pytest.mark.parametrize("number", [2, 3])
@pytest.mark.parametrize("mapped", [False, True])
def test_a_store_that_is_spread_holds_what_one_store_holds(tmp_path, with_hosts, number, mapped):
    blank, folder = ClientState(vector(7, 7, 7), buffers=vector(0)), tmp_path if mapped else None

    def lead(hosts):
        torch.save(changed(SpreadClientStore(blank, hosts, N, folder)), tmp_path / "spread.pt")

    with_hosts(number, lead)
    held = torch.load(tmp_path / "spread.pt", weights_only=False)
    expected = changed(ClientStore(blank))
    for values in (held, expected):
        values[-1].sort()  # states without vectors come first, because they stay on the server
    assert same(held, expected)


def follow(store):
    """Returns sums that have followed changes of models and groups."""
    draw = torch.Generator().manual_seed(0)
    groups = torch.randint(-1, 3, (5, N), generator=draw)
    store.update({client: ClientState(torch.randn(SIZE, generator=draw)) for client in range(N)})
    store.sums = ModelSums.from_models(groups[0], 3, SIZE, store.move_models)
    for group_N in groups[1:]:
        clients = torch.randperm(N, generator=draw)[:4].sort().values.tolist()
        store.update({client: ClientState(1e4 * torch.randn(SIZE, generator=draw)) for client in clients})
        store.sums.regroup(group_N, store.move_models)
    return store.sums


@pytest.mark.parametrize("number", [2, 3, 4])
def test_sums_over_models_of_several_owners_have_the_bits_of_sums_on_one_host(tmp_path, with_hosts, number):
    def lead(hosts):
        torch.save(follow(SpreadClientStore(ClientState(vector(0, 0, 0)), hosts, N)), tmp_path / "sums.pt")

    with_hosts(number, lead)
    assert same(torch.load(tmp_path / "sums.pt", weights_only=False), follow(ClientStore(ClientState(vector(0, 0, 0)))))


def test_an_error_on_the_way_of_sums_reaches_the_server(with_hosts):
    def lead(hosts):
        store = SpreadClientStore(ClientState(vector(0, 0, 0)), hosts, N)
        store.update({client: ClientState(vector(1, 2, 3)) for client in range(N)})
        hosts.ask("update", {1: ({4: ClientState(vector(1, 2))},)})  # a model of another length, behind its back
        with pytest.raises(ClientError, match=re.escape("Host.move: ValueError: got a model of shape [2] in a mean")):
            ModelSums.from_models(torch.zeros(N, dtype=torch.int64), 1, SIZE, store.move_models)
        return [store[client].model.tolist() for client in (0, 9)]  # all hosts still answer

    assert with_hosts(3, lead) == [[1, 2, 3], [1, 2, 3]]


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_a_host_that_is_lost_while_sums_go_from_host_to_host_ends_the_run(with_hosts, monkeypatch, rank):
    original = Host.move

    def move(self, *arguments):
        if dist.get_rank() == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, *arguments)

    def lead(hosts):
        store = SpreadClientStore(ClientState(vector(0, 0, 0)), hosts, N)
        store.update({client: ClientState(vector(1, 2, 3)) for client in range(N)})
        ModelSums.from_models(torch.zeros(N, dtype=torch.int64), 1, SIZE, store.move_models)

    monkeypatch.setattr(Host, "move", move)
    with pytest.raises(LostRankError, match=rf"rank {rank} ended with SIGKILL"):
        with_hosts(4, lead)


def test_memories_of_several_owners_have_one_length(with_hosts):
    def lead(hosts):
        store = SpreadClientStore(ClientState(), hosts, N)
        store.update({0: ClientState(memory=vector(1, 2)), 5: ClientState(consumed=3)})
        words = re.escape("client 9: LocalOutput.memory has 1 numbers, and an earlier one has 2")
        for state in (ClientState(memory=vector(1)), StateElsewhere(owner=1, length=1)):
            with pytest.raises(ValueError, match=words):
                store.update({9: state})
        return list(store)

    assert with_hosts(2, lead) == [0, 5]


def test_a_state_elsewhere_names_its_owner(with_hosts):
    def lead(hosts):
        store = SpreadClientStore(ClientState(), hosts, N)
        store.update({0: ClientState(vector(1)), 9: ClientState(vector(1)), 5: ClientState(consumed=3)})
        return [
            (type(state) is StateElsewhere, getattr(state, "owner", None)) for state in map(store.for_task, (0, 9, 5))
        ]

    assert with_hosts(2, lead) == [(True, 0), (True, 1), (False, None)]
