"""Tests that a checkpoint writes only the clients that have changed and links old shards as long as they are useful."""

import functools
import os

import pytest
import torch

from lcfl.core.clients import ClientState, ClientStore
from lcfl.core.state import FederationState
from lcfl.runs import checkpoint, client_shards
from lcfl.runs.checkpoint import read, write
from lcfl.runs.checkpoint_lookup import remove
from tests.helpers.bits import assert_same_state
from tests.helpers.checkpoints import SIZE, flip_a_bit, model, shards

NUM_CLIENTS = 20


@pytest.fixture(autouse=True)
def five_clients_a_shard(monkeypatch):
    monkeypatch.setattr(client_shards, "SHARD_BYTES", 5 * (16 + 4 * SIZE))


@pytest.fixture
def state():
    """A state in which every client has taken part."""
    state = FederationState.create(model(0), NUM_CLIENTS, keeps_model=True)
    state.participated[:] = True
    train(state, range(NUM_CLIENTS))
    return state


def train(state, clients):
    state.round += 1
    for client in clients:
        state.clients[client] = ClientState(model(1000 * state.round + client), state.round)


def written(path):
    """Returns the clients in the files that no other checkpoint links."""
    new = [file for file in shards(path) if file.stat().st_nlink == 1]
    return sorted(client for file in new for client in torch.load(file)["clients"].tolist())


def test_changed_clients_are_written_and_the_others_are_linked(tmp_path, state):
    first = write(tmp_path, state, {})
    assert written(first) == list(range(NUM_CLIENTS)) and len(shards(first)) == 4
    train(state, [3, 11])
    second = write(tmp_path, state, {})
    assert written(second) == [3, 11] and len(shards(second)) == 5
    for path in (first, second):
        assert read(path).state.round == int(path.name[6:12])
    assert_same_state(read(second).state, state)
    assert read(first).state.clients[3].consumed == 1 and read(second).state.clients[3].consumed == 2


def test_no_client_is_written_if_none_has_changed(tmp_path, state):
    write(tmp_path, state, {})
    state.round += 1
    second = write(tmp_path, state, {})
    assert written(second) == []
    assert_same_state(read(second).state, state)


def test_the_projection_is_written_only_if_it_has_changed(tmp_path, state):
    def links(path):
        return next(path.glob("projection-*.pt")).stat().st_nlink

    state.projection, state.codes = torch.stack([model(1), model(2)], dim=1), torch.zeros(NUM_CLIENTS, 2)
    write(tmp_path, state, {})
    state.round += 1
    second = write(tmp_path, state, {})
    assert links(second) == 2
    back = read(second).state
    back.round += 1
    third = write(tmp_path, back, {})
    assert links(third) == 3
    back.round += 1
    back.projection.numpy()[0, 0] += 1  # torch does not notice it
    fourth = write(tmp_path, back, {})
    assert links(fourth) == 1
    assert_same_state(read(fourth).state, back)
    assert torch.equal(read(third).state.projection, state.projection)


def test_a_shard_of_which_less_than_half_is_current_is_written_again(tmp_path, state):
    write(tmp_path, state, {})
    train(state, [0, 1])
    second = write(tmp_path, state, {})
    assert written(second) == [0, 1]
    train(state, [2])
    third = write(tmp_path, state, {})
    assert written(third) == [2, 3, 4]
    assert len(shards(third)) == 5
    assert_same_state(read(third).state, state)


def test_shards_never_hold_more_than_twice_the_clients(tmp_path, state):
    draw = torch.Generator().manual_seed(0)
    for _ in range(30):
        train(state, torch.randperm(NUM_CLIENTS, generator=draw)[:4].tolist())
        path = write(tmp_path, state, {})
        held = sum(len(torch.load(file)["clients"]) for file in shards(path))
        assert held <= 2 * NUM_CLIENTS
    assert_same_state(read(path).state, state)


def test_a_client_that_has_left_is_not_in_the_next_checkpoint(tmp_path, state):
    write(tmp_path, state, {})
    state.leave([7])
    state.round += 1
    back = read(write(tmp_path, state, {})).state
    assert 7 not in back.clients
    assert_same_state(back, state)


def test_removing_checkpoints_does_not_damage_later_ones(tmp_path, state):
    paths = []
    for clients in ([1], [6], [11], [16]):
        paths.append(write(tmp_path, state, {}))
        train(state, clients)
    last = write(tmp_path, state, {})
    for path in paths:
        remove(path)
    assert_same_state(read(last).state, state)
    train(state, [19])
    newest = write(tmp_path, state, {})
    assert written(newest) == [19]
    assert_same_state(read(newest).state, state)


def test_clients_whose_shards_were_removed_are_written_again(tmp_path, state):
    remove(write(tmp_path, state, {}))
    state.round += 1
    path = write(tmp_path, state, {})
    assert written(path) == list(range(NUM_CLIENTS))
    other = write(tmp_path / "other", state, {})
    assert written(other) == list(range(NUM_CLIENTS))
    assert_same_state(read(other).state, state)


@pytest.mark.parametrize("replaced", [False, True])
def test_a_shard_that_was_touched_is_not_linked(tmp_path, state, replaced):
    first = write(tmp_path, state, {})
    damaged = shards(first)[1]
    if replaced:
        content = damaged.read_bytes()
        damaged.unlink()
        damaged.write_bytes(content)
    flip_a_bit(damaged)
    state.round += 1
    second = write(tmp_path, state, {})
    assert written(second) == [5, 6, 7, 8, 9]
    assert_same_state(read(second).state, state)
    with pytest.raises(checkpoint.CheckpointError, match="does not match its SHA-256"):
        read(first)


def test_a_resumed_run_links_the_shards_that_it_read(tmp_path, state):
    write(tmp_path, state, {})
    train(state, [3])
    back = read(write(tmp_path, state, {})).state
    train(back, [12])
    path = write(tmp_path, back, {})
    assert written(path) == [12]
    assert_same_state(read(path).state, back)
    assert_same_state(read(write(tmp_path, back, {})).state, back)  # overwrites itself


def test_a_failed_write_loses_no_change(tmp_path, state, monkeypatch):
    write(tmp_path, state, {})
    train(state, [3, 4])

    def full(path, content, indent=None):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr(checkpoint, "write_json", full)
        write(tmp_path, state, {})
    path = write(tmp_path, state, {})
    assert set(written(path)) >= {3, 4}
    assert_same_state(read(path).state, state)


def test_clients_without_vectors_share_one_file(tmp_path, monkeypatch):
    monkeypatch.setattr(client_shards, "SHARD_BYTES", 2**20)
    state = FederationState.create(model(0), 5000, keeps_model=False)
    state.clients.update({client: ClientState(consumed=client) for client in range(5000)})
    path = write(tmp_path, state, {})
    (file,) = shards(path)
    assert file.stat().st_size < 100_000
    assert read(path).state.clients[4321].consumed == 4321


def test_clients_are_read_into_memory_mapped_files(tmp_path, state):
    path = write(tmp_path, state, {})
    mapped = read(path, functools.partial(ClientStore, folder=tmp_path)).state
    assert_same_state(mapped, state)
    with open("/proc/self/maps") as file:
        regions = [line.split()[0].split("-") for line in file if str(tmp_path) in line]
    address = mapped.clients[4].model.data_ptr()
    assert any(int(begin, 16) <= address < int(end, 16) for begin, end in regions)
    train(mapped, [2])
    assert written(write(tmp_path, mapped, {})) == [2]
    assert sorted(os.listdir(tmp_path)) == [path.name, "round-000002.ckpt"]
