"""Tests that checkpoints are read back bit for bit and share unchanged shards."""

import os
import shutil
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

from lcfl.core.callback import Callback, with_state_keys
from lcfl.core.clients import ClientState
from lcfl.core.schema import Number
from lcfl.core.state import FederationState
from lcfl.runs import checkpoint, client_shards, serialization
from lcfl.runs.checkpoint import read, read_manifest, write
from lcfl.runs.checkpoint_lookup import remove
from lcfl.runs.serialization import write_serialized
from tests.helpers.bits import assert_same_state
from tests.helpers.checkpoints import IDENTITY, SIZE, full_state, model, shards


@pytest.fixture
def two_clients_a_shard(monkeypatch):
    monkeypatch.setattr(client_shards, "SHARD_BYTES", 2 * (16 + 4 * SIZE))


# whole states


@pytest.mark.parametrize("keeps_model", [True, False])
@pytest.mark.parametrize("number", [-2, 0, 3, 1234567])
def test_a_state_is_read_back_bit_for_bit(tmp_path, number, keeps_model):
    state = full_state(number, keeps_model=keeps_model)
    path = write(tmp_path / "checkpoints", state, IDENTITY)
    back = read(path)
    assert_same_state(state, back.state)
    assert back.identity == IDENTITY and back.path == path
    assert checkpoint.NAME.fullmatch(path.name)[1] == {-2: "-00002", 0: "000000", 3: "000003"}.get(number, str(number))


def test_special_numbers_are_read_back_bit_for_bit(tmp_path):
    state = full_state()
    state.initial = torch.tensor([float("nan"), -0.0, float("inf"), 1e-45, -3.4e38, 1 / 3])
    state.clients.blank = ClientState(state.initial)
    state.clients[1] = ClientState(-state.initial, 2**40)
    assert_same_state(state, read(write(tmp_path, state, {})).state)


def test_a_state_before_the_first_round_is_read_back(tmp_path):
    state = FederationState.create(model(0), 5, keeps_model=True, num_warmup_rounds=1)
    path = write(tmp_path, state, {})
    assert_same_state(state, read(path).state)
    assert shards(path) == []


def test_some_clients_may_have_a_model_and_others_none(tmp_path):
    state = full_state(keeps_model=False)
    state.clients[1] = ClientState(model(5), 3)
    state.clients[4] = ClientState(model(6), 0)
    assert_same_state(state, read(write(tmp_path, state, {})).state)


def test_writing_does_not_change_the_state(tmp_path):
    state = full_state()
    write(tmp_path, state, {})
    assert_same_state(state, full_state())


# files


def test_the_manifest_lists_every_file(tmp_path):
    path = write(tmp_path, full_state(), IDENTITY)
    manifest = read_manifest(path)
    assert sorted(file.name for file in path.iterdir()) == sorted([*manifest["sha256"], "manifest.json"])
    assert manifest["schema"] == checkpoint.SCHEMA and manifest["round"] == 3 and manifest["identity"] == IDENTITY


def test_clients_are_spread_over_several_shards(tmp_path, two_clients_a_shard):
    state = full_state()
    path = write(tmp_path, state, {})
    assert [name.name[:14] for name in shards(path)] == ["clients-000000", "clients-000004"]
    assert_same_state(state, read(path).state)


def test_unchanged_shards_are_shared_and_survive_the_removal_of_the_first_checkpoint(tmp_path, two_clients_a_shard):
    first_state, second_state = full_state(3), full_state(4)
    second_state.clients[4] = ClientState(model(77), 1)
    first, second = write(tmp_path, first_state, {}), write(tmp_path, second_state, {})
    unchanged, changed = zip(shards(first), shards(second), strict=True)
    assert os.path.samefile(*unchanged)
    assert changed[0].name != changed[1].name
    remove(first)
    assert_same_state(second_state, read(second).state)
    third = write(tmp_path, second_state, {})  # overwrites the second checkpoint
    assert_same_state(second_state, read(third).state)


def test_a_view_is_saved_without_the_rest_of_its_memory(tmp_path):
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


def test_numpy_scalars_come_back_as_plain_numbers(tmp_path):
    state = full_state()
    state.should_stop, state.total_bytes = np.bool_(True), np.int64(2**40)
    content = {"best": np.float64(1 / 3), np.int64(4): (np.float32(0.1), {np.str_("x")}), "none": [None, np.int16(-1)]}
    state.callbacks = {"Spread": content}
    back = read(write(tmp_path, state, {})).state
    expected = {"best": 1 / 3, 4: (float(np.float32(0.1)), {"x"}), "none": [None, -1]}
    assert back.callbacks == {"Spread": expected} == state.callbacks
    numbers = [back.should_stop, back.total_bytes, back.callbacks["Spread"]["best"], *back.callbacks["Spread"]]
    assert [type(each) for each in numbers] == [bool, int, float, str, int, str]


@pytest.mark.parametrize(
    "value",
    [b"ab", 1j, (), {1, (2, None)}, torch.Size([2]), torch.float32, bytearray(b"a"), True],
    ids=lambda value: type(value).__name__,
)
def test_every_plain_value_is_read_back_unchanged(tmp_path, value):
    state = full_state()
    state.callbacks = {"Spread": {"deep": [{"value": value}]}}
    back = read(write(tmp_path, state, {})).state.callbacks["Spread"]["deep"][0]["value"]
    assert back == value and type(back) is type(value)


@pytest.mark.parametrize(
    ("value", "where"),
    [
        (np.zeros(2), r"\['best'\] holds a numpy\.ndarray"),
        (Path("x"), r"\['best'\] holds a pathlib[\w.]*Path"),
        ([1, {"deep": (2, {frozenset()})}], r"\['best'\]\['deep'\] holds a builtins\.frozenset"),
        ({Path("x"): 1}, r"\['best'\] holds a pathlib"),
        (np.datetime64("2020-01-01"), r"\['best'\] holds a numpy\.datetime64"),
        (lambda: None, r"\['best'\] holds a builtins\.function"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_that_could_not_be_read_back_is_refused_before_anything_is_written(tmp_path, value, where):
    state = full_state()
    state.callbacks["Spread"] = {"best": value}
    with pytest.raises(ValueError, match=rf"Spread\.state_dict\(\){where}.*\. It may hold tensors, numbers"):
        write(tmp_path, state, {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda state: state.aggregation.update({0: 1}), "a key of aggregation: got 0; it must be str"),
        (lambda state: state.callbacks.update({"Spread": None}), r"callbacks\['Spread'\]: got None; it must be dict"),
        (
            lambda state: state.aggregation.update({"of": torch.eye(3).to_sparse()}),
            r"state\.aggregation\['of'\] holds a tensor with the layout torch.sparse_coo; store value.to_dense",
        ),
    ],
)
def test_a_state_of_another_form_than_is_read_is_refused_before_anything_is_written(tmp_path, spoil, message):
    state = full_state()
    spoil(state)
    with pytest.raises(ValueError, match=message):
        write(tmp_path, state, {})
    assert list(tmp_path.iterdir()) == []


def test_a_field_that_could_not_be_read_back_is_named(tmp_path):
    state = full_state()
    state.assignment = state.assignment.numpy()
    with pytest.raises(ValueError, match=r"state\.assignment holds a numpy\.ndarray"):
        write(tmp_path, state, {})


def test_many_tensors_are_checked_without_serializing_each_of_them(tmp_path, monkeypatch):
    state, written = full_state(), []
    state.callbacks = {"Updates": {"of": {client: model(client) for client in range(100)}}}
    for module in (checkpoint, client_shards):
        monkeypatch.setattr(module, "write_serialized", lambda *each: written.append(each) or write_serialized(*each))
    monkeypatch.setattr(serialization, "serialized", written.append)
    write(tmp_path, state, {})
    assert len(written) == 3  # one shard, the projection and state.pt


def test_a_model_that_was_read_does_not_keep_its_shard_in_memory(tmp_path):
    path = write(tmp_path, full_state(), {})
    assert read(path).state.clients[4].model.untyped_storage().nbytes() == 4 * SIZE


def test_a_removed_checkpoint_leaves_nothing_behind(tmp_path):
    remaining, removed = write(tmp_path, full_state(3), {}), write(tmp_path, full_state(4), {})
    remove(removed)
    assert list(tmp_path.iterdir()) == [remaining]


def test_a_checkpoint_whose_removal_was_interrupted_has_no_name(tmp_path, monkeypatch):
    path = write(tmp_path, full_state(), {})

    def dies(doomed):
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", dies)
    with pytest.raises(KeyboardInterrupt):
        remove(path)
    assert list(tmp_path.glob("round-*")) == []


class Counted(Callback):
    """A callback that remembers a number, of which a run may have several."""

    remembers: ClassVar = {"count": Number(int)}

    def __init__(self, count=0):
        self._count = count

    def forget(self):
        self._count = 0


def test_callbacks_of_one_class_start_anew_if_their_number_has_changed(tmp_path):
    """Nobody knows which one is which."""
    state = FederationState.create(model(0), 5, keeps_model=True)
    state.callbacks = {key: each.state_dict() for key, each in with_state_keys([Counted(1), Counted(2)])}
    saved = read(write(tmp_path, state, {}))
    one, other = Counted(), Counted()
    saved.restore([one, other], {})
    assert (one._count, other._count) == (1, 2)
    with pytest.warns(UserWarning, match="has 2 Counted and not 1: these callbacks start anew"):
        saved.restore([one], {})
    assert one._count == 0
