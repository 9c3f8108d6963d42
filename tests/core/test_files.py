"""Files and directories are either replaced completely or left as they were."""

import json
import os

import pytest

from lcfl.core.files import atomic_directory, read_json, remove_leftovers, write_bytes, write_json


def test_a_failed_write_changes_nothing(tmp_path):
    path = tmp_path / "folder" / "file.json"
    write_json(path, {"a": [1]})
    with pytest.raises(TypeError):
        write_json(path, {"a": [2], "b": object()})
    assert json.loads(path.read_text()) == {"a": [1]}
    assert os.listdir(path.parent) == ["file.json"]
    write_json(path, {"a": [3]})
    assert json.loads(path.read_text()) == {"a": [3]}


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_full_disk_changes_nothing(tmp_path, monkeypatch, step):
    def full(*args, **kwargs):
        raise OSError("no space left")

    write_json(tmp_path / "file.json", {"a": 1})
    monkeypatch.setattr(os, step, full)
    with pytest.raises(OSError, match="no space left"):
        write_json(tmp_path / "file.json", {"a": 2})
    assert json.loads((tmp_path / "file.json").read_text()) == {"a": 1}
    assert os.listdir(tmp_path) == ["file.json"]


def test_bytes_are_on_the_disk_when_write_bytes_returns(tmp_path, monkeypatch):
    path, synced, fsync = tmp_path / "file", [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(path.read_bytes()) or fsync(descriptor))
    write_bytes(path, b"\x00\xff" * 1000)
    assert synced == [b"\x00\xff" * 1000]
    write_bytes(path, b"short")
    assert path.read_bytes() == b"short"


def test_a_directory_appears_when_its_block_ends(tmp_path):
    final = tmp_path / "a" / "final"
    with atomic_directory(final) as temporary:
        (temporary / "part").write_text("x")
        assert temporary.parent == final.parent  # a rename across file systems would be a copy
        assert not final.exists()
    assert os.listdir(final) == ["part"]
    assert os.listdir(final.parent) == ["final"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_directory_is_absent_after_an_error(tmp_path, error):
    with pytest.raises(error), atomic_directory(tmp_path / "final") as temporary:
        (temporary / "part").write_text("x")
        raise error
    assert os.listdir(tmp_path) == []


def test_a_directory_is_replaced_as_a_whole(tmp_path):
    final = tmp_path / "final"
    with atomic_directory(final, replaces=True) as temporary:
        (temporary / "old").write_text("x")
    with pytest.raises(ValueError), atomic_directory(final, replaces=True) as temporary:
        (temporary / "new").write_text("x")
        raise ValueError
    assert os.listdir(final) == ["old"]
    with atomic_directory(final, replaces=True) as temporary:
        (temporary / "new").write_text("x")
        assert os.listdir(final) == ["old"]
    assert os.listdir(final) == ["new"]
    assert os.listdir(tmp_path) == ["final"]


def test_remains_of_a_killed_writer_do_not_enter_the_next_directory(tmp_path):
    for name in (f".final.{os.getpid()}", f".final.{os.getpid()}.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "torn").write_text("x")
    (tmp_path / "final").mkdir()
    with atomic_directory(tmp_path / "final", replaces=True) as temporary:
        (temporary / "part").write_text("x")
    assert os.listdir(tmp_path / "final") == ["part"]
    assert os.listdir(tmp_path) == ["final"]


def test_damaged_json_is_named(tmp_path):
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(ValueError, match=r"a\.json: damaged \(Expecting"):
        read_json(tmp_path / "a.json")


def test_a_new_directory_replaces_nothing(tmp_path):
    """Neither its own name, which another process may take in the meantime, nor names that look like its own."""
    for name in (".final.old", ".final.tmp"):
        (tmp_path / name).mkdir()
    with pytest.raises(FileExistsError, match="final exists already"), atomic_directory(tmp_path / "final"):
        (tmp_path / "final").mkdir()
    with pytest.raises(FileExistsError, match="final exists already"), atomic_directory(tmp_path / "final"):
        pytest.fail("it was known at the beginning")
    assert sorted(os.listdir(tmp_path)) == [".final.old", ".final.tmp", "final"]


def test_remains_of_killed_writers_are_removed(tmp_path):
    inside = tmp_path / "checkpoints"
    for name in (".round-000003.ckpt.7.old", ".round-000001.ckpt.old", ".round-000002.ckpt.tmp", "round-000003.ckpt"):
        (inside / name).mkdir(parents=True)
        (inside / name / ".best.json.7").write_text("torn")
    for name in (".metrics.csv.123", ".lock", ".hidden", "metrics.csv.123"):
        (tmp_path / name).write_text("")
    remove_leftovers(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [".hidden", ".lock", "checkpoints", "metrics.csv.123"]
    assert os.listdir(inside) == ["round-000003.ckpt"] and os.listdir(inside / "round-000003.ckpt") == []


def test_what_was_put_aside_gets_its_name_back_if_its_successor_never_came(tmp_path):
    """A process was killed between the two renames."""
    for name in (".final.7.old", ".final.7"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "content").write_text(name)
    remove_leftovers(tmp_path)
    assert os.listdir(tmp_path) == ["final"] and (tmp_path / "final/content").read_text() == ".final.7.old"
