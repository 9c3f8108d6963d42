"""Tests which checkpoint ``--ckpt_path`` stands for, and which ones a run removes when it resumes from an older one."""

import json
import os
import pickle
import warnings
from pathlib import Path

import pytest

from lcfl.runs import checkpoint, checkpoint_lookup
from lcfl.runs.checkpoint import CheckpointError, write
from lcfl.runs.checkpoint_lookup import drop_after, find, newest, read_newest
from tests.helpers.checkpoints import Malicious, flip_a_bit, full_state, replace_part


@pytest.fixture
def clock(monkeypatch):
    """Makes every checkpoint one second newer than the previous one."""
    times = iter(range(1000))
    monkeypatch.setattr(checkpoint.time, "time", lambda: float(next(times)))


# the newest


def test_newest_is_the_checkpoint_written_last_in_any_version(tmp_path, clock):
    runs = [tmp_path / "name" / f"version_{number}" for number in range(3)]
    write(runs[1] / "checkpoints", full_state(50), {})
    latest = write(runs[0] / "checkpoints", full_state(7), {})
    (runs[2]).mkdir()
    assert newest(runs) == latest
    assert find("last", tmp_path, "name") == latest
    again = write(runs[1] / "checkpoints", full_state(51), {})
    assert find("last", tmp_path, "name") == again


def test_the_last_round_of_a_run_is_the_newest_even_if_the_clock_was_set_back(tmp_path, monkeypatch):
    runs = [tmp_path / "name" / f"version_{number}" for number in range(2)]
    for run, number, time in ((0, 2, 9.0), (0, 3, 5.0), (1, 1, 7.0)):
        monkeypatch.setattr(checkpoint.time, "time", lambda time=time: time)
        write(runs[run] / "checkpoints", full_state(number), {})
    assert newest(runs).name == newest(runs[:1]).name == "round-000003.ckpt"


@pytest.mark.filterwarnings("error")
def test_newest_is_found_while_another_process_replaces_checkpoints(tmp_path, monkeypatch):
    folder, written = tmp_path / "name" / "version_0" / "checkpoints", []
    read_manifest = checkpoint_lookup.read_manifest

    def replaced_before(path):
        if len(written) < 3:  # the writer is faster than the first two times that the folder is read
            written.append(write(folder, full_state(len(written) + 1), {}))
            checkpoint_lookup.remove(path)
        return read_manifest(path)

    write(folder, full_state(0), {})
    monkeypatch.setattr(checkpoint_lookup, "read_manifest", replaced_before)
    assert newest([folder.parent]) == written[-1]


@pytest.mark.parametrize("part", ["state.pt", "clients-*.pt", "manifest.json"])
def test_newest_skips_a_damaged_checkpoint_with_a_warning(tmp_path, clock, part):
    folder = tmp_path / "version_0" / "checkpoints"
    whole, damaged = write(folder, full_state(1, clients=(2,)), {}), write(folder, full_state(2), {})
    assert newest([tmp_path / "version_0"]) == damaged
    (file,) = damaged.glob(part)
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.warns(UserWarning, match=f"skipped: .*round-000002.ckpt: damaged: {file.name}"):
        assert newest([tmp_path / "version_0"]) == whole


def test_a_changed_file_of_the_same_size_is_found_by_reading_and_the_next_checkpoint_read(tmp_path, clock):
    folder = tmp_path / "version_0" / "checkpoints"
    whole, damaged = write(folder, full_state(1), {}), write(folder, full_state(2), {})
    flip_a_bit(damaged / "state.pt")
    assert newest([tmp_path / "version_0"]) == damaged
    with pytest.warns(UserWarning, match="skipped: .*round-000002.ckpt: damaged: state.pt does not match its SHA-256"):
        assert read_newest([tmp_path / "version_0"], checkpoint.read).path == whole
    flip_a_bit(whole / "state.pt")
    with pytest.warns(UserWarning, match="skipped"), pytest.raises(CheckpointError, match="no complete checkpoint in"):
        read_newest([tmp_path / "version_0"], checkpoint.read)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_a_malicious_checkpoint_is_skipped(tmp_path, clock):
    folder = tmp_path / "version_0" / "checkpoints"
    whole, hostile = write(folder, full_state(1), {}), write(folder, full_state(2), {})
    replace_part(hostile, "state.pt", pickle.dumps(Malicious(tmp_path / "trap")))
    with pytest.warns(UserWarning, match="skipped: .*refused"):
        assert read_newest([tmp_path / "version_0"], checkpoint.read).path == whole
    assert not (tmp_path / "trap").exists()


def test_a_complete_checkpoint_is_found_without_a_warning(tmp_path):
    path = write(tmp_path / "checkpoints", full_state(), {})
    (tmp_path / "checkpoints" / ".round-000009.ckpt.tmp").mkdir()  # left by a writer that was killed
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert newest([tmp_path]) == path


# by name or by path


def test_a_missing_checkpoint_is_reported_with_the_searched_folders(tmp_path):
    with pytest.raises(CheckpointError, match=r"^ckpt_path=last: there is no run of that name, as no .*version_<n>"):
        find("last", tmp_path, "name")
    (tmp_path / "name" / "version_4").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"no complete checkpoint in .*name/version_4/checkpoints"):
        find("last", tmp_path, "name")
    with pytest.raises(CheckpointError, match="no best checkpoint"):
        find("best", tmp_path, "name")


def test_best_is_the_choice_of_the_newest_monitor(tmp_path):
    for number, chosen in ((0, 2), (1, 5)):
        best = write(tmp_path / "name" / f"version_{number}" / "checkpoints", full_state(chosen), {})
        (best.parent / "best.json").write_text(json.dumps({"checkpoint": best.name}))
    (tmp_path / "name" / "version_2").mkdir()
    assert find("best", tmp_path, "name") == best
    checkpoint_lookup.remove(best)
    with pytest.raises(CheckpointError, match=r"best\.json names round-000005\.ckpt, which is gone"):
        find("best", tmp_path, "name")


def test_a_path_stands_for_itself_and_a_run_directory_for_its_newest_checkpoint(tmp_path, clock):
    run = tmp_path / "name" / "version_0"
    older, newer = (write(run / "checkpoints", full_state(number), {}) for number in (1, 2))
    assert find(str(older), tmp_path, "another") == older
    assert find(str(run), tmp_path, "another") == newer
    for other in (tmp_path, Path("some/where")):
        with pytest.raises(CheckpointError, match=f"{other}: there is no checkpoint. Give a run directory, a"):
            find(str(other), tmp_path, "name")


# resuming from an older checkpoint


def test_later_checkpoints_are_dropped(tmp_path):
    for number in (-1, 2, 3, 10):
        write(tmp_path, full_state(number), {})
    (tmp_path / "round-000011.ckpt.bak").mkdir()  # a user's copy
    drop_after(tmp_path, 2)
    assert sorted(os.listdir(tmp_path)) == ["round--00001.ckpt", "round-000002.ckpt", "round-000011.ckpt.bak"]
    drop_after(tmp_path / "nowhere", 2)


@pytest.mark.parametrize(("best", "stays"), [(2, True), (3, False)])
def test_the_choice_of_the_best_is_dropped_with_its_checkpoint(tmp_path, best, stays):
    for number in (2, 3):
        write(tmp_path, full_state(number), {})
    (tmp_path / "best.json").write_text(json.dumps({"checkpoint": f"round-{best:06d}.ckpt"}))
    drop_after(tmp_path, 2)
    assert (tmp_path / "best.json").exists() == stays


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"checkpoint": 3}', '{"checkpoint": "../../elsewhere"}', "[" * 10**5]
)
def test_a_damaged_choice_of_the_best_is_refused(tmp_path, text):
    folder = tmp_path / "name" / "version_0" / "checkpoints"
    write(folder, full_state(2), {})
    (folder / "best.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"best\.json: damaged .* Remove it"):
        find("best", tmp_path, "name")
    with pytest.raises(CheckpointError, match="damaged"):
        drop_after(folder, 2)
