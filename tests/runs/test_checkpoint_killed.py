"""Tests that a checkpoint is complete or absent, and that earlier ones survive, if writing is killed or fails."""

import os
import shutil

import pytest

from lcfl.core.files import remove_leftovers
from lcfl.runs import serialization
from lcfl.runs.checkpoint import read, write
from tests.helpers.bits import assert_same_state
from tests.helpers.checkpoints import IDENTITY, full_state

STEPS = ["fsync", "rename", "replace", "link", "mkdir", "unlink", "rmdir", "open"]  # the calls that change the disk


def counted(monkeypatch, act):
    """Makes every call that changes the disk call ``act(number of the call)`` first."""
    calls = iter(range(10_000))
    for name in STEPS:
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, _real=real, **k: (act(next(calls)), _real(*a, **k))[1])


def killed_at(step, monkeypatch, folder, state):
    """Writes in a process that is killed at that step. Returns whether it got that far."""
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


@pytest.mark.parametrize("replaces", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_checkpoint_killed_at_any_step_is_complete_or_absent(tmp_path, monkeypatch, replaces):
    steps, absent = 0, 0
    old, new = full_state(3, clients=(0, 1)), full_state(3, clients=(0, 1, 4))
    before = full_state(2, clients=(0, 1, 4))
    while True:
        folder = tmp_path / str(steps)
        earlier = write(folder, before, IDENTITY)
        final = folder / "round-000003.ckpt"
        if replaces:
            write(folder, old, IDENTITY)
        died = killed_at(steps, monkeypatch, folder, new)
        assert_same_state(before, read(earlier).state)
        if final.exists():
            assert list(read(final).state.clients) in ([0, 1] if replaces else None, [0, 1, 4])
        absent += not final.exists()
        if not died:
            break
        assert_same_state(new, read(write(folder, new, IDENTITY)).state)  # leftovers do not disturb
        remove_leftovers(folder)  # as a resumed run does
        assert sorted(os.listdir(folder)) == [earlier.name, final.name]
        steps += 1
    assert final.exists() and steps > 10
    if replaces:
        assert absent == 1  # only between the two renames
    else:
        assert absent > 5  # until the checkpoint is complete


@pytest.mark.parametrize("step", ["fsync", "rename", "replace"])
def test_an_error_at_any_step_leaves_no_incomplete_checkpoint(tmp_path, monkeypatch, step):
    earlier = write(tmp_path, full_state(2), IDENTITY)
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
                final = write(tmp_path, full_state(3, clients=(1,)), IDENTITY)
                break
            except OSError as error:
                assert str(error) == "no space left"
        assert sorted(os.listdir(tmp_path)) in ([earlier.name], [earlier.name, "round-000003.ckpt"])
        for name in os.listdir(tmp_path):
            read(tmp_path / name)
        shutil.rmtree(tmp_path / "round-000003.ckpt", ignore_errors=True)
        failures += 1
    assert failures >= 1
    assert list(read(final).state.clients) == [1]


@pytest.mark.parametrize("error", [OSError("no space left"), KeyboardInterrupt()], ids=["full", "interrupted"])
def test_what_stops_a_write_is_raised_as_it_is(tmp_path, monkeypatch, error):
    earlier = write(tmp_path, full_state(2), IDENTITY)
    real, failures = serialization._HashedFile.write, 0
    while True:
        calls = iter(range(1000))

        def fails(file, content, calls=calls, number=failures):
            if next(calls) == number:
                raise error
            return real(file, content)

        with monkeypatch.context() as patch:
            patch.setattr(serialization._HashedFile, "write", fails)
            try:
                write(tmp_path, full_state(3), IDENTITY)
                break
            except type(error) as raised:
                assert raised is error
        assert os.listdir(tmp_path) == [earlier.name]
        failures += 1
    assert failures > 10
