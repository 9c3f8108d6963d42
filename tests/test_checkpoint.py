"""Checkpoints: what was written comes back bit for bit, and anything else is refused by name."""

import json
import os
import pickle
import shutil
import warnings
from pathlib import Path

import pytest
import torch

from lcfl import checkpoint
from lcfl.checkpoint import CheckpointError, find, newest, read, read_manifest, write
from lcfl.clients import ClientState
from lcfl.state import FederationState

SIZE = 6
IDENTITY = {"seed": 1, "method": {"mu": 0.1, "parts": ["a", None, True]}}


def model(seed):
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))


def state_of(number=3, clients=(0, 1, 4), keeps_model=True):
    state = FederationState.begin(model(0), 5, keeps_model)
    state.round = number
    state.global_model = model(1)
    state.centres = torch.stack([model(2), model(3)])
    state.assignment = torch.tensor([0, 1, 1, 0, 1])
    state.participated[list(clients)] = True
    state.projection, state.codes = torch.randn(SIZE, 2), torch.randn(5, 2)
    state.total_bytes = 2**40 + 1
    state.should_stop = True
    state.callbacks = {"Stop": {"best": 0.1, "wait": 3, "names": ["x"], "none": None}, "Rank#2": {"offset": model(9)}}
    for client in clients:
        state.clients[client] = ClientState(model(100 + client) if keeps_model else None, consumed=client * 7)
    return state


def same(one, other):
    """Equal to the last bit, in type and in structure."""
    if isinstance(one, torch.Tensor):
        return (
            isinstance(other, torch.Tensor)
            and (one.dtype, one.shape) == (other.dtype, other.shape)
            and one.contiguous().view(torch.uint8).tolist() == other.contiguous().view(torch.uint8).tolist()
        )
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


def assert_same(one, other):
    for name in (name for name in vars(one) if name != "clients"):
        assert same(getattr(one, name), getattr(other, name)), name
    assert list(one.clients) == list(other.clients)
    for client in range(one.num_clients):
        mine, theirs = one.clients[client], other.clients[client]
        assert same(mine.model, theirs.model) and mine.consumed == theirs.consumed, client


def shards(path):
    return sorted(path.glob("clients-*.pt"))


def rewrite(path, **changes):
    """Changes the manifest and makes its digest fit, as an attacker would."""
    manifest = json.loads((path / "manifest.json").read_text()) | changes
    del manifest["digest"]
    manifest["digest"] = checkpoint._digest(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("keeps_model", [True, False])
@pytest.mark.parametrize("number", [-2, 0, 3, 1234567])
def test_everything_comes_back_bit_for_bit(tmp_path, number, keeps_model):
    state = state_of(number, keeps_model=keeps_model)
    path = write(tmp_path / "checkpoints", state, IDENTITY)
    back = read(path)
    assert_same(state, back.state)
    assert back.identity == IDENTITY and back.path == path
    assert checkpoint.NAME.fullmatch(path.name)[1] == {-2: "-00002", 0: "000000", 3: "000003"}.get(number, str(number))


def test_odd_numbers_come_back_bit_for_bit(tmp_path):
    state = state_of()
    state.initial = torch.tensor([float("nan"), -0.0, float("inf"), 1e-45, -3.4e38, 1 / 3])
    state.clients.blank = ClientState(state.initial)
    state.clients[1] = ClientState(-state.initial, 2**40)
    assert_same(state, read(write(tmp_path, state, {})).state)


def test_a_state_before_any_round_comes_back(tmp_path):
    state = FederationState.begin(model(0), 5, keeps_model=True, num_opening=1)
    path = write(tmp_path, state, {})
    assert_same(state, read(path).state)
    assert shards(path) == []


def test_some_clients_may_have_a_model_and_others_none(tmp_path):
    state = state_of(keeps_model=False)
    state.clients[1] = ClientState(model(5), 3)
    state.clients[4] = ClientState(model(6), 0)
    assert_same(state, read(write(tmp_path, state, {})).state)


def test_writing_changes_nothing_in_memory(tmp_path):
    state = state_of()
    write(tmp_path, state, {})
    state_again = state_of()
    state_again.projection, state_again.codes = state.projection, state.codes
    assert_same(state, state_again)


def test_clients_spread_over_several_shards(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", 2 * 4 * SIZE)
    state = state_of()
    path = write(tmp_path, state, {})
    assert [name.name[:14] for name in shards(path)] == ["clients-000000", "clients-000002"]
    assert_same(state, read(path).state)


def test_unchanged_shards_are_shared_and_survive_pruning(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", 2 * 4 * SIZE)
    first_state, second_state = state_of(3), state_of(4)
    second_state.clients[4] = ClientState(model(77), 1)
    first, second = write(tmp_path, first_state, {}), write(tmp_path, second_state, {})
    unchanged, changed = zip(shards(first), shards(second), strict=True)
    assert os.path.samefile(*unchanged)
    assert changed[0].name != changed[1].name
    shutil.rmtree(first)
    assert_same(second_state, read(second).state)
    third = write(tmp_path, second_state, {})  # over itself
    assert_same(second_state, read(third).state)


def test_a_damaged_shard_is_not_handed_on(tmp_path):
    first = write(tmp_path, state_of(3), {})
    (shard,) = shards(first)
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    second = write(tmp_path, state_of(4), {})
    read(second)
    with pytest.raises(CheckpointError):
        read(first)


def test_a_view_is_not_saved_with_all_that_it_looks_into(tmp_path):
    big = torch.zeros(500_000)
    state = state_of()
    state.initial = big[:SIZE]
    state.clients.blank = ClientState(state.initial)
    state.codes = big[:10].view(5, 2)
    state.callbacks = {"a": {"deep": {"row": big[3:5]}, "list": [big[7:9], [big[:1]]]}}
    state.clients[0] = ClientState(big[SIZE : 2 * SIZE])
    path = write(tmp_path, state, {})
    assert sum(file.stat().st_size for file in path.iterdir()) < 20_000
    assert_same(state, read(path).state)


def test_a_model_that_was_read_does_not_hold_its_shard(tmp_path):
    path = write(tmp_path, state_of(), {})
    assert read(path).state.clients[4].model.untyped_storage().nbytes() == 4 * SIZE


def test_every_part_is_in_the_manifest_and_nothing_else_is_there(tmp_path):
    path = write(tmp_path, state_of(), IDENTITY)
    manifest = read_manifest(path)
    assert sorted(file.name for file in path.iterdir()) == sorted([*manifest["sha256"], "manifest.json"])
    assert manifest["schema"] == checkpoint.SCHEMA and manifest["round"] == 3 and manifest["identity"] == IDENTITY


@pytest.mark.parametrize("part", ["state.pt", "clients-*.pt"])
def test_a_flipped_bit_anywhere_in_a_part_is_found(tmp_path, part):
    (file,) = write(tmp_path, state_of(), {}).glob(part)
    content = file.read_bytes()
    for position in range(0, len(content), len(content) // 20):
        damaged = bytearray(content)
        damaged[position] ^= 1
        file.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=f"round-000003.ckpt: damaged: {file.name} does not match"):
            read(file.parent)
    file.write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match=f"damaged: {file.name}"):
        read(file.parent)


def test_a_flipped_bit_anywhere_in_the_manifest_is_found(tmp_path):
    path = write(tmp_path, state_of(), IDENTITY)
    content = (path / "manifest.json").read_bytes()
    meant = json.loads(content)
    for position in range(0, len(content), 3):
        damaged = bytearray(content)
        damaged[position] ^= 1
        try:
            if json.loads(damaged) == meant:  # another kind of white space
                continue
        except ValueError:
            pass
        (path / "manifest.json").write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"round-000003\.ckpt: damaged: manifest\.json"):
            read(path)


@pytest.mark.parametrize("content", ["", "[]", "null", "3", "{}", '{"digest": "x"}'])
def test_a_manifest_that_is_none_is_refused(tmp_path, content):
    path = write(tmp_path, state_of(), {})
    (path / "manifest.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"damaged: manifest\.json"):
        read(path)


@pytest.mark.parametrize("part", ["state.pt", "clients-*.pt", "manifest.json"])
def test_a_missing_part_is_named(tmp_path, part):
    (file,) = write(tmp_path, state_of(), {}).glob(part)
    file.unlink()
    with pytest.raises(CheckpointError, match=f"damaged: {file.name} cannot be read .*No such file"):
        read(file.parent)


def test_another_schema_is_named(tmp_path):
    path = write(tmp_path, state_of(), {})
    rewrite(path, schema=99, lcfl="7.0")
    with pytest.raises(CheckpointError, match=r"has schema 99 \(lcfl 7\.0\).* which reads schema 1\."):
        read(path)


@pytest.mark.parametrize("is_file", [False, True])
def test_a_path_without_a_checkpoint_says_so(tmp_path, is_file):
    path = tmp_path / "round-000001.ckpt"
    if is_file:
        path.write_text("x")
    with pytest.raises(CheckpointError, match=r"round-000001\.ckpt: there is no checkpoint\. Give a directory"):
        read(path)


class Malicious:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("kind", ["torch", "pickle"])
def test_code_is_never_run_even_if_every_hash_fits(tmp_path, kind):
    path = write(tmp_path, state_of(), {})
    trap = str(tmp_path / "trap")
    if kind == "torch":
        torch.save({"initial": Malicious(trap)}, path / "state.pt")
    else:
        (path / "state.pt").write_bytes(pickle.dumps(Malicious(trap)))
    content = (path / "state.pt").read_bytes()
    rewrite(path, sha256=read_manifest(path)["sha256"] | {"state.pt": checkpoint.hashlib.sha256(content).hexdigest()})
    with pytest.raises(CheckpointError, match=r"round-000003\.ckpt: refused: state\.pt holds more than tensors"):
        read(path)
    assert not Path(trap).exists()


@pytest.fixture
def clock(monkeypatch):
    """Every checkpoint is written a second after the one before."""
    times = iter(range(1000))
    monkeypatch.setattr(checkpoint.time, "time", lambda: float(next(times)))


def test_newest_is_the_one_written_last_in_any_version(tmp_path, clock):
    runs = [tmp_path / "name" / f"version_{number}" for number in range(3)]
    write(runs[1] / "checkpoints", state_of(50), {})
    latest = write(runs[0] / "checkpoints", state_of(7), {})
    (runs[2]).mkdir()
    assert newest(runs) == latest
    assert find("last", tmp_path, "name") == latest
    again = write(runs[1] / "checkpoints", state_of(-1), {})
    assert find("last", tmp_path, "name") == again


@pytest.mark.parametrize("part", ["state.pt", "clients-*.pt", "manifest.json"])
def test_newest_passes_over_a_damaged_one_and_says_so(tmp_path, clock, part):
    folder = tmp_path / "version_0" / "checkpoints"
    whole, damaged = write(folder, state_of(1, clients=(2,)), {}), write(folder, state_of(2), {})
    assert newest([tmp_path / "version_0"]) == damaged
    (file,) = damaged.glob(part)
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.warns(UserWarning, match=f"passed over: .*round-000002.ckpt: damaged: {file.name}"):
        assert newest([tmp_path / "version_0"]) == whole


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_newest_passes_over_a_hostile_one(tmp_path, clock):
    folder = tmp_path / "version_0" / "checkpoints"
    whole, hostile = write(folder, state_of(1), {}), write(folder, state_of(2), {})
    (hostile / "state.pt").write_bytes(pickle.dumps(Malicious(str(tmp_path / "trap"))))
    digest = checkpoint.hashlib.sha256((hostile / "state.pt").read_bytes()).hexdigest()
    rewrite(hostile, sha256=read_manifest(hostile)["sha256"] | {"state.pt": digest})
    with pytest.warns(UserWarning, match="passed over: .*refused"):
        assert newest([tmp_path / "version_0"]) == whole


def test_a_whole_one_is_found_without_a_warning(tmp_path):
    path = write(tmp_path / "checkpoints", state_of(), {})
    (tmp_path / "checkpoints" / ".round-000009.ckpt.tmp").mkdir()  # of a writer that was killed
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert newest([tmp_path]) == path


def test_none_at_all_says_where_it_looked(tmp_path):
    with pytest.raises(CheckpointError, match=r"there is no run of that name: no .*name/version_<n>"):
        find("last", tmp_path, "name")
    (tmp_path / "name" / "version_4").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"looked in .*name/version_4/checkpoints"):
        find("last", tmp_path, "name")
    with pytest.raises(CheckpointError, match="no best checkpoint"):
        find("best", tmp_path, "name")


def test_best_is_what_the_newest_monitor_chose(tmp_path):
    for number, chosen in ((0, "round-000002.ckpt"), (1, "round-000005.ckpt")):
        folder = tmp_path / "name" / f"version_{number}" / "checkpoints"
        folder.mkdir(parents=True)
        (folder / "best.json").write_text(json.dumps({"checkpoint": chosen}))
    (tmp_path / "name" / "version_2").mkdir()
    assert find("best", tmp_path, "name") == folder / "round-000005.ckpt"
    assert find("some/where", tmp_path, "name") == Path("some/where")


STEPS = ["fsync", "rename", "replace", "link", "mkdir", "unlink", "rmdir", "open"]


def counted(monkeypatch, act):
    """Every call that changes the disk first calls ``act(number of the call)``."""
    calls = iter(range(10_000))
    for name in STEPS:
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, _real=real, **k: (act(next(calls)), _real(*a, **k))[1])


def killed_at(step, monkeypatch, folder, state):
    """Writes in a process that ends at once at that step; whether it came so far."""
    child = os.fork()
    if child == 0:
        try:
            counted(monkeypatch, lambda number: number == step and os._exit(9))
            write(folder, state, IDENTITY)
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 9)
    return status == 9


@pytest.mark.parametrize("replaces", [False, True])
def test_killed_at_any_step_it_is_whole_or_absent(tmp_path, monkeypatch, replaces):
    steps, absent = 0, 0
    old, new = state_of(3, clients=(0, 1)), state_of(3, clients=(0, 1, 4))
    before = state_of(2, clients=(0, 1, 4))
    while True:
        folder = tmp_path / str(steps)
        earlier = write(folder, before, IDENTITY)
        final = folder / "round-000003.ckpt"
        if replaces:
            write(folder, old, IDENTITY)
        died = killed_at(steps, monkeypatch, folder, new)
        assert_same(before, read(earlier).state)
        if final.exists():
            assert list(read(final).state.clients) in ([0, 1] if replaces else None, [0, 1, 4])
        absent += not final.exists()
        if not died:
            break
        assert_same(new, read(write(folder, new, IDENTITY)).state)  # what is left is in nobody's way
        assert sorted(path.name for path in folder.iterdir()) == [earlier.name, final.name]
        steps += 1
    assert final.exists() and steps > 10
    assert absent == 1 if replaces else absent > 5  # between two renames, and while it is written


@pytest.mark.parametrize("step", ["fsync", "rename", "replace"])
def test_an_error_at_any_step_leaves_nothing_half(tmp_path, monkeypatch, step):
    earlier = write(tmp_path, state_of(2), IDENTITY)
    real, failures = getattr(os, step), 0
    while True:
        calls = iter(range(1000))

        def fails(*args, calls=calls, number=failures, **kwargs):
            if next(calls) == number:
                raise OSError("no space left")
            return real(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(os, step, fails)
            try:
                final = write(tmp_path, state_of(3, clients=(1,)), IDENTITY)
                break
            except OSError as error:
                assert str(error) == "no space left"
        left = sorted(path.name for path in tmp_path.iterdir())
        assert left[0] == earlier.name and left[1:] in ([], ["round-000003.ckpt"])
        for name in left:
            read(tmp_path / name)
        shutil.rmtree(tmp_path / "round-000003.ckpt", ignore_errors=True)
        failures += 1
    assert failures >= 1
    assert list(read(final).state.clients) == [1]
