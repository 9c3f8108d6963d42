"""Tests that damaged and malicious checkpoints and those of other schemas are refused with a precise message."""

import json
import pickle

import pytest
import torch

from lcfl.runs.checkpoint import CheckpointError, read, write
from tests.helpers.checkpoints import IDENTITY, Malicious, flip_a_bit, full_state, replace_part, rewrite, shards

PARTS = ["state.pt", "projection-*.pt", "clients-*.pt"]


# damaged


@pytest.mark.parametrize("part", PARTS)
def test_a_flipped_bit_anywhere_in_a_part_is_detected(tmp_path, part):
    (file,) = write(tmp_path, full_state(), {}).glob(part)
    content = file.read_bytes()
    for position in range(0, len(content), len(content) // 20):
        file.write_bytes(content)
        flip_a_bit(file, position)
        with pytest.raises(CheckpointError, match=f"round-000003.ckpt: damaged: {file.name} does not match"):
            read(file.parent)


@pytest.mark.parametrize("part", PARTS)
def test_a_truncated_part_is_detected(tmp_path, part):
    (file,) = write(tmp_path, full_state(), {}).glob(part)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=f"damaged: {file.name}"):
        read(file.parent)


def test_a_flipped_bit_anywhere_in_the_manifest_is_detected(tmp_path):
    path = write(tmp_path, full_state(), IDENTITY)
    file = path / "manifest.json"
    content = file.read_bytes()
    original, detected = json.loads(content), 0
    for position in range(0, len(content), 3):
        file.write_bytes(content)
        flip_a_bit(file, position)
        try:
            if json.loads(file.read_bytes()) == original:  # the bit only changed white space
                continue
        except ValueError:
            pass
        with pytest.raises(CheckpointError, match=r"round-000003\.ckpt: damaged: manifest\.json"):
            read(path)
        detected += 1
    assert detected > 100


@pytest.mark.parametrize("content", ["", "[]", "null", "3", "{}", '{"digest": "x"}'])
def test_a_file_that_is_not_a_manifest_is_refused(tmp_path, content):
    path = write(tmp_path, full_state(), {})
    (path / "manifest.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"damaged: manifest\.json"):
        read(path)


@pytest.mark.parametrize("part", [*PARTS, "manifest.json"])
def test_a_missing_part_is_named(tmp_path, part):
    (file,) = write(tmp_path, full_state(), {}).glob(part)
    file.unlink()
    with pytest.raises(CheckpointError, match=f"damaged: {file.name} cannot be read .*No such file"):
        read(file.parent)


def test_a_damaged_shard_is_not_linked(tmp_path):
    first = write(tmp_path, full_state(3), {})
    (shard,) = shards(first)
    flip_a_bit(shard)
    second = write(tmp_path, full_state(4), {})
    read(second)
    with pytest.raises(CheckpointError):
        read(first)


# other schemas, and paths without a checkpoint


def test_another_schema_is_named(tmp_path):
    path = write(tmp_path, full_state(), {})
    rewrite(path, schema=99, lcfl="7.0")
    with pytest.raises(CheckpointError, match=r"has schema 99 \(lcfl 7\.0\).* which reads schemas 2 and 3\."):
        read(path)


@pytest.mark.parametrize("is_file", [False, True])
def test_a_path_without_a_checkpoint_is_refused(tmp_path, is_file):
    path = tmp_path / "round-000001.ckpt"
    if is_file:
        path.write_text("x")
    with pytest.raises(
        CheckpointError, match=r"round-000001\.ckpt: there is no checkpoint\. Give a run directory, a directory"
    ) as error:
        read(path)
    assert ("are for model.init_from" in str(error.value)) == is_file  # it may be one of lightning.Trainer


# malicious


def saved(path, folder):
    file = folder / "saved.pt"
    torch.save({"initial": Malicious(path)}, file)
    return file.read_bytes()


def pickled(path, folder):
    return pickle.dumps(Malicious(path))


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("serialized", [saved, pickled])
def test_code_is_never_run_even_if_every_hash_matches(tmp_path, serialized):
    path, trap = write(tmp_path / "checkpoints", full_state(), {}), tmp_path / "trap"
    replace_part(path, "state.pt", serialized(trap, tmp_path))
    with pytest.raises(CheckpointError, match=r"round-000003\.ckpt: refused: state\.pt holds more than tensors"):
        read(path)
    assert not trap.exists()


def test_the_malicious_content_runs_code_when_plain_pickle_loads_it(tmp_path):
    pickle.loads(pickled(tmp_path / "trap", tmp_path))
    assert (tmp_path / "trap").is_dir()
