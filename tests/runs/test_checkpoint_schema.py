"""A checkpoint whose hashes match but whose content is wrong is refused in words before anything is used."""

import io
import json
import os
import zipfile

import pytest
import torch

from lcfl.runs.checkpoint import CheckpointError, read, write
from lcfl.runs.checkpoint_schema import Expected
from lcfl.runs.serialization import deserialized, serialized
from tests.helpers.bits import assert_same_state
from tests.helpers.checkpoints import IDENTITY, SIZE, full_state, replace_part, rewrite, shards

EXPECTED = Expected({"N": 5, "S": SIZE, "P": SIZE}, keeps_model=True, num_warmup_rounds=1)


def spoiled(tmp_path, part, spoil, **options):
    """Returns a checkpoint of which one part has been read, spoiled and written again."""
    path = write(tmp_path, full_state(**options), IDENTITY)
    (file,) = path.glob(part)
    content = deserialized(file.read_bytes())
    spoil(content)
    replace_part(path, file.name, serialized(content))
    return path


def put(**values):
    return lambda content: content.update(values)


def without(name):
    return lambda content: content.pop(name)


def test_a_checkpoint_fits_what_its_run_expects(tmp_path):
    path = write(tmp_path, full_state(), IDENTITY)
    assert read(path, expected=EXPECTED).sizes == {"N": 5, "S": SIZE, "P": SIZE, "K": 2, "D": 2}


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (without("centres"), "centres is missing or unknown"),
        (put(more=1), "more is missing or unknown"),
        (put(round="3"), "round: got '3'; it must be int"),
        (put(round=True), "round: got True; it must be int"),
        (put(total_bytes=-1), "total_bytes: got -1; it must lie from 0"),
        (put(should_stop=None), "should_stop: got None; it must be bool"),
        (
            put(initial=torch.zeros(SIZE - 1)),
            rf"global_model: got torch.float32 of shape \[{SIZE}\]; .* \[{SIZE - 1}\]",
        ),
        (put(initial=torch.zeros(SIZE).double()), "initial: got torch.float64 of shape .* must be torch.float32"),
        (put(centres=torch.zeros(0, SIZE), assignment=torch.full((5,), -1)), "centres: there must be at least one"),
        (put(centres=torch.zeros(2, SIZE - 1)), r"centres: got .* must be torch.float32 of shape \[2, 6\]"),
        (put(assignment=torch.tensor([0, 1, 2, 0, 0])), "assignment: got 0 to 2; its entries must lie from -1 to 1"),
        (put(assignment=torch.zeros(4, dtype=torch.int64)), r"participated: got torch.bool of shape \[5\]"),
        (put(participated=torch.ones(5)), "participated: got torch.float32 of shape .* torch.bool"),
        (put(codes=torch.zeros(4, 2)), r"codes: got .* must be torch.float32 of shape \[5, 2\]"),
        (put(projection=[1.0]), "projection: got a list; it must be a tensor or None"),
        (put(callbacks={"Stop": 3}), r"callbacks\['Stop'\]: got 3; it must be dict"),
        (put(aggregation=None), "aggregation: got None"),
        (put(sums={"total": torch.zeros(2, SIZE)}), "sums: error, group, largest is missing"),
        (put(current={"clients-000000-0.pt": torch.tensor([7])}), "entries must lie from 0 to 4"),
    ],
)
def test_a_wrong_state_is_refused_by_name(tmp_path, spoil, message):
    path = spoiled(tmp_path, "state.pt", spoil)
    with pytest.raises(CheckpointError, match=f"round-000003.ckpt: damaged: state.pt: .*{message}"):
        read(path)


def test_a_state_that_is_no_dict_is_refused(tmp_path):
    path = write(tmp_path, full_state(), IDENTITY)
    replace_part(path, "state.pt", serialized([1, 2]))
    with pytest.raises(CheckpointError, match=r"state\.pt: the content: got a list; it must be a dict"):
        read(path)


def test_a_projection_without_codes_and_one_that_does_not_fit_them_are_refused(tmp_path):
    path = spoiled(tmp_path, "state.pt", put(codes=None))
    with pytest.raises(CheckpointError, match="damaged: projection and codes: there must be both or neither"):
        read(path)
    path = spoiled(tmp_path, "state.pt", put(codes=torch.zeros(5, 3)))
    with pytest.raises(CheckpointError, match=r"projection-.*: projection: got .* torch.float32 of shape \[6, 3\]"):
        read(path)
    path = spoiled(tmp_path, "projection-*.pt", put(more=1))
    with pytest.raises(CheckpointError, match=r"projection-[0-9a-f]+\.pt: .*more is missing or unknown"):
        read(path)


def test_a_projection_inside_of_the_state_is_read(tmp_path):
    """Version 0.1.0 wrote it there."""
    state = full_state()
    path = spoiled(tmp_path, "state.pt", put(projection=state.projection))
    digests = json.loads((path / "manifest.json").read_text())["sha256"]
    rewrite(path, sha256={name: each for name, each in digests.items() if not name.startswith("projection")})
    assert_same_state(read(path).state, state)


def vectors(rows, size=SIZE):
    return torch.tensor(rows), torch.zeros(len(rows), size)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (put(clients=torch.tensor([0, 1, 5])), "clients: got 0 to 5; its entries must lie from 0 to 4"),
        (put(clients=torch.tensor([0, 0, 1])), "clients: the numbers must ascend"),
        (put(consumed=torch.tensor([0, 1])), "consumed: got"),
        (put(consumed=torch.tensor([0, 1, -1])), "consumed: got -1 to 1"),
        (put(model=vectors([0, 1, 2], SIZE - 1)), r"model\[1\]: got torch.float32 of shape \[3, 5\]"),
        (put(model=vectors([0, 1, 3])), r"model\[0\]: got 0 to 3"),
        (put(model=vectors([1, 0, 2])), r"model\[0\]: the rows must ascend"),
        (put(model=torch.zeros(3, SIZE)), "model: got torch.float32 .* must be tuple"),
        (put(model=(torch.tensor([0]),)), "model: got 1 values"),
        (without("model"), "model: some clients have none"),
        (put(buffers=vectors([0])), "buffers: the clients of this run keep none"),
        (put(more=1), "more is missing or unknown"),
    ],
)
def test_a_wrong_shard_is_refused_by_name(tmp_path, spoil, message):
    path = spoiled(tmp_path, "clients-*.pt", spoil)
    with pytest.raises(CheckpointError, match=rf"damaged: clients-000000-[0-9a-f]+\.pt: .*{message}"):
        read(path)


def test_a_client_is_in_one_shard_only(tmp_path):
    path = write(tmp_path, full_state(), IDENTITY)
    (shard,) = shards(path)
    content = deserialized((path / "state.pt").read_bytes())
    content["current"] = {shard.name: torch.tensor([0, 1, 2])}
    replace_part(path, "state.pt", serialized(content))
    with pytest.raises(CheckpointError, match="every client must be in one shard"):
        read(path)


@pytest.mark.parametrize(
    ("expected", "message"),
    [
        (EXPECTED._replace(sizes={"N": 6, "S": SIZE, "P": SIZE}), r"assignment: got .* shape \[6\]"),
        (EXPECTED._replace(sizes={"N": 5, "S": 7, "P": 7}), r"initial: got .* shape \[7\]"),
        (EXPECTED._replace(sizes=EXPECTED.sizes | {"B": 2}), "buffers: got False, but .* need True"),
        (EXPECTED._replace(keeps_model=False), "keeps_model: got True, but .* need False"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(tmp_path, expected, message):
    with pytest.raises(CheckpointError, match=message):
        read(write(tmp_path, full_state(), IDENTITY), expected=expected)


def test_a_round_before_the_first_warmup_round_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="round: got -2; it must be at least -1"):
        read(write(tmp_path, full_state(-2), IDENTITY), expected=EXPECTED)


# the manifest


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"round": "3"}, "round: got '3'"),
        ({"created": "now"}, "created: got 'now'"),
        ({"identity": [1]}, "identity: got a list"),
        ({"sha256": {"state.pt": 3}}, r"sha256\['state.pt'\]: got 3"),
        ({"sha256": {"../../state.pt": "0" * 64}}, "the parts must be state.pt"),
        ({"sha256": {}}, "the parts must be state.pt"),
        ({"bytes": {"state.pt": -1}}, r"bytes\['state.pt'\]: got -1"),
    ],
)
def test_a_wrong_manifest_is_refused_by_name(tmp_path, changes, message):
    path = write(tmp_path, full_state(), IDENTITY)
    rewrite(path, **changes)
    with pytest.raises(CheckpointError, match=f"damaged: manifest.json: .*{message}"):
        read(path)


def test_a_deeply_nested_manifest_is_refused(tmp_path):
    path = write(tmp_path, full_state(), IDENTITY)
    (path / "manifest.json").write_text("[" * 100_000 + "]" * 100_000)
    with pytest.raises(CheckpointError, match=r"manifest\.json cannot be read"):
        read(path)


# files that are none, and content that grows


@pytest.mark.parametrize("part", ["state.pt", "manifest.json"])
@pytest.mark.parametrize("kind", ["pipe", "link", "folder"])
def test_only_regular_files_are_read(tmp_path, part, kind):
    path = write(tmp_path, full_state(), IDENTITY)
    (path / part).unlink()
    if kind == "pipe":
        os.mkfifo(path / part)
    elif kind == "link":
        (path / part).symlink_to("/dev/zero")
    else:
        (path / part).mkdir()
    with pytest.raises(CheckpointError, match=f"damaged: {part} cannot be read"):
        read(path)


def test_a_file_of_another_size_is_refused_before_it_is_read(tmp_path):
    path = write(tmp_path, full_state(), IDENTITY)
    with (path / "state.pt").open("r+b") as file:
        file.truncate(2**40)  # a hole, which takes no room on the disk
    with pytest.raises(CheckpointError, match=r"state.pt cannot be read \(it has 1099511627776 bytes instead of"):
        read(path)


def test_a_tensor_that_is_larger_than_its_memory_is_refused(tmp_path):
    path = spoiled(tmp_path, "state.pt", lambda content: content["aggregation"].update(m=torch.zeros(1)))
    content = deserialized((path / "state.pt").read_bytes())
    content["aggregation"]["m"] = torch.zeros(1).expand(2**40)
    replace_part(path, "state.pt", serialized(content))
    with pytest.raises(CheckpointError, match="a tensor is larger than its memory"):
        read(path)


def test_a_compressed_part_is_refused(tmp_path):
    path = write(tmp_path, full_state(), IDENTITY)
    packed = io.BytesIO()
    with zipfile.ZipFile(path / "state.pt") as old, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new:
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry))
        new.writestr("archive/data/99", bytes(2**24))
    replace_part(path, "state.pt", packed.getvalue())
    with pytest.raises(CheckpointError, match="a part is larger than the file"):
        read(path)


def test_a_manifest_without_sizes_is_read(tmp_path):
    """Version 0.1.0 wrote none."""
    path = write(tmp_path, full_state(), IDENTITY)
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["bytes"], manifest["digest"]
    (path / "manifest.json").write_text(json.dumps(manifest))
    rewrite_digest(path, manifest)
    assert read(path).state.round == 3


def rewrite_digest(path, manifest):
    from lcfl.runs import checkpoint

    (path / "manifest.json").write_text(json.dumps(manifest | {"digest": checkpoint._digest(manifest)}))
