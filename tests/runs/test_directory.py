"""Tests that every version of a run directory is claimed once and has one writer at a time."""

import errno
import multiprocessing
import os
import signal

import pytest

import lcfl.runs.directory
from lcfl.runs.directory import MEMBERS, RunDirectory, how_to_resume, run_versions

FORK = multiprocessing.get_context("fork")


def test_versions_count_up(tmp_path):
    runs = [RunDirectory.claim(tmp_path, "name") for _ in range(3)]
    assert [run.path for run in runs] == [tmp_path / "name" / f"version_{number}" for number in range(3)]
    assert RunDirectory.claim(tmp_path, "other").path.name == "version_0"
    assert runs[0].checkpoints == tmp_path / "name" / "version_0" / "checkpoints"


def test_a_run_is_resumed_with_the_option_of_its_kind(tmp_path):
    assert how_to_resume(tmp_path) == "with --ckpt_path last"
    (tmp_path / MEMBERS).touch()
    assert how_to_resume(tmp_path) == "with ckpt-path='last'"


def test_versions_are_sorted_as_numbers_and_other_names_are_ignored(tmp_path):
    for name in (
        "version_9",
        "version_10",
        "version_2",
        "version_x",
        "version_3.bak",
        "run_versions",
        "old_version_70",
    ):
        (tmp_path / "name" / name).mkdir(parents=True)
    assert [path.name for path in run_versions(tmp_path, "name")] == ["version_10", "version_9", "version_2"]
    assert RunDirectory.claim(tmp_path, "name").path.name == "version_11"
    assert run_versions(tmp_path, "never") == []


def test_a_version_that_another_process_has_just_claimed_is_skipped(tmp_path, monkeypatch):
    monkeypatch.setattr(
        lcfl.runs.directory, "run_versions", lambda root, name: []
    )  # what several processes see if they look at the same time
    assert [RunDirectory.claim(tmp_path, "name").path.name for _ in range(3)] == [
        "version_0",
        "version_1",
        "version_2",
    ]


def test_processes_that_claim_at_once_get_different_versions(tmp_path, deadline):
    start, claimed = FORK.Barrier(4), FORK.SimpleQueue()

    def claim():
        start.wait()
        claimed.put([RunDirectory.claim(tmp_path, "name").path.name for _ in range(10)])

    processes = [FORK.Process(target=claim) for _ in range(4)]
    for process in processes:
        process.start()
    got = [name for _ in processes for name in claimed.get()]
    for process in processes:
        process.join()
    assert sorted(got) == sorted(f"version_{number}" for number in range(40))


def test_a_second_writer_is_refused(tmp_path):
    run = RunDirectory.claim(tmp_path, "name")
    with pytest.raises(ValueError, match=r"version_0: another process is writing this run\. Wait for it"):
        RunDirectory(run.path)
    run.close()
    again = RunDirectory(run.path)
    run.close()  # closing twice has no effect, not even on the lock of the new holder
    with pytest.raises(ValueError, match="another process"):
        RunDirectory(run.path)
    again.close()


def test_a_killed_process_loses_its_lock(tmp_path, deadline):
    locked = FORK.SimpleQueue()

    def hold():
        run = RunDirectory.claim(tmp_path, "name")
        locked.put(str(run.path))
        signal.pause()

    process = FORK.Process(target=hold)
    process.start()
    locked.get()
    with pytest.raises(ValueError, match="another process"):
        RunDirectory(tmp_path / "name" / "version_0")
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    RunDirectory(tmp_path / "name" / "version_0").close()


@pytest.fixture
def flock_fails(monkeypatch):
    """Returns a function that makes ``flock`` fail with the given ``errno`` from then on."""

    def set_up(number):
        def fails(file, operation):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(lcfl.runs.directory.fcntl, "flock", fails)

    return set_up


@pytest.mark.parametrize("number", [errno.EWOULDBLOCK, errno.EACCES])
def test_a_lock_that_another_process_holds_is_refused(tmp_path, flock_fails, number):
    flock_fails(number)
    with pytest.raises(ValueError, match="another process is writing this run"):
        RunDirectory(tmp_path)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK])
def test_a_file_system_without_locks_gives_a_warning(tmp_path, flock_fails, number):
    flock_fails(number)
    expected = rf"version_0: this file system has no locks \({os.strerror(number)}\)"
    with pytest.warns(UserWarning, match=expected) as caught:
        run = RunDirectory.claim(tmp_path, "name")
    assert len(caught) == 1
    run.close()


def test_any_other_failure_of_the_lock_is_reported_unchanged(tmp_path, flock_fails):
    flock_fails(errno.EIO)
    with pytest.raises(OSError, match=r"cannot be locked: Input/output error: '.*\.lock'") as raised:
        RunDirectory(tmp_path)
    assert raised.value.errno == errno.EIO
