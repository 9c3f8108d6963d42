"""What was written comes back bit for bit; what did not change is shared."""

import os
import shutil

import pytest
import torch

from lcfl import checkpoint
from lcfl.checkpoint import read, read_manifest, remove, write
from lcfl.clients import ClientState
from lcfl.state import FederationState
from tests.bits import assert_same_state
from tests.checkpoints import IDENTITY, SIZE, full_state, model, shards


@pytest.fixture
def two_clients_a_shard(monkeypatch):
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", 2 * (16 + 4 * SIZE))


# whole states


@pytest.mark.parametrize("keeps_model", [True, False])
@pytest.mark.parametrize("number", [-2, 0, 3, 1234567])
def test_everything_comes_back_bit_for_bit(tmp_path, number, keeps_model):
    state = full_state(number, keeps_model=keeps_model)
    path = write(tmp_path / "checkpoints", state, IDENTITY)
    back = read(path)
    assert_same_state(state, back.state)
    assert back.identity == IDENTITY and back.path == path
    assert checkpoint.NAME.fullmatch(path.name)[1] == {-2: "-00002", 0: "000000", 3: "000003"}.get(number, str(number))


def test_odd_numbers_come_back_bit_for_bit(tmp_path):
    state = full_state()
    state.initial = torch.tensor([float("nan"), -0.0, float("inf"), 1e-45, -3.4e38, 1 / 3])
    state.clients.blank = ClientState(state.initial)
    state.clients[1] = ClientState(-state.initial, 2**40)
    assert_same_state(state, read(write(tmp_path, state, {})).state)


def test_a_state_before_any_round_comes_back(tmp_path):
    state = FederationState.begin(model(0), 5, keeps_model=True, num_opening=1)
    path = write(tmp_path, state, {})
    assert_same_state(state, read(path).state)
    assert shards(path) == []


def test_some_clients_may_have_a_model_and_others_none(tmp_path):
    state = full_state(keeps_model=False)
    state.clients[1] = ClientState(model(5), 3)
    state.clients[4] = ClientState(model(6), 0)
    assert_same_state(state, read(write(tmp_path, state, {})).state)


def test_writing_changes_nothing_in_memory(tmp_path):
    state = full_state()
    write(tmp_path, state, {})
    assert_same_state(state, full_state())


# files


def test_every_part_is_in_the_manifest_and_nothing_else_is_there(tmp_path):
    path = write(tmp_path, full_state(), IDENTITY)
    manifest = read_manifest(path)
    assert sorted(file.name for file in path.iterdir()) == sorted([*manifest["sha256"], "manifest.json"])
    assert manifest["schema"] == checkpoint.SCHEMA and manifest["round"] == 3 and manifest["identity"] == IDENTITY


def test_clients_spread_over_several_shards(tmp_path, two_clients_a_shard):
    state = full_state()
    path = write(tmp_path, state, {})
    assert [name.name[:14] for name in shards(path)] == ["clients-000000", "clients-000004"]
    assert_same_state(state, read(path).state)


def test_unchanged_shards_are_shared_and_survive_the_removal_of_the_first(tmp_path, two_clients_a_shard):
    first_state, second_state = full_state(3), full_state(4)
    second_state.clients[4] = ClientState(model(77), 1)
    first, second = write(tmp_path, first_state, {}), write(tmp_path, second_state, {})
    unchanged, changed = zip(shards(first), shards(second), strict=True)
    assert os.path.samefile(*unchanged)
    assert changed[0].name != changed[1].name
    remove(first)
    assert_same_state(second_state, read(second).state)
    third = write(tmp_path, second_state, {})  # over itself
    assert_same_state(second_state, read(third).state)


def test_a_view_is_not_saved_with_all_that_it_looks_into(tmp_path):
    big = torch.zeros(500_000)
    state = full_state()
    state.initial = big[:SIZE]
    state.clients.blank = ClientState(state.initial)
    state.codes = big[:10].view(5, 2)
    state.callbacks = {"a": {"deep": {"row": big[3:5]}, "list": [big[7:9], [big[:1]]]}}
    state.clients[0] = ClientState(big[SIZE : 2 * SIZE])
    path = write(tmp_path, state, {})
    assert sum(file.stat().st_size for file in path.iterdir()) < 20_000
    assert_same_state(state, read(path).state)


def test_a_model_that_was_read_does_not_hold_its_shard(tmp_path):
    path = write(tmp_path, full_state(), {})
    assert read(path).state.clients[4].model.untyped_storage().nbytes() == 4 * SIZE


def test_a_removed_one_leaves_no_name_behind(tmp_path):
    kept, removed = write(tmp_path, full_state(3), {}), write(tmp_path, full_state(4), {})
    remove(removed)
    assert list(tmp_path.iterdir()) == [kept]


def test_one_whose_removal_was_cut_short_is_not_there(tmp_path, monkeypatch):
    path = write(tmp_path, full_state(), {})

    def dies(doomed):
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", dies)
    with pytest.raises(KeyboardInterrupt):
        remove(path)
    assert list(tmp_path.glob("round-*")) == []
