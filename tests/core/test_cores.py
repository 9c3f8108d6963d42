"""The cores that a process may use, and work that is spread over them."""

import os
import threading
from pathlib import Path

import pytest

from lcfl.core import cores
from lcfl.core.cores import in_threads, usable_cores


@pytest.mark.parametrize(
    ("quota", "expected"), [("max 100000", 6), ("250000 100000", 2), ("50000 100000", 1), ("900000 100000", 6)]
)
def test_usable_cores_are_the_affinity_limited_by_the_quota(monkeypatch, tmp_path, quota, expected):
    (tmp_path / "cpu.max").write_text(quota)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)))
    monkeypatch.setattr(cores, "Path", lambda path: tmp_path / Path(path).name)
    assert usable_cores() == expected


@pytest.mark.parametrize(("number", "expected"), [(1, 1), (3, 3), (64, 4)])
def test_a_function_is_called_once_for_each_argument_by_a_thread_per_core(monkeypatch, number, expected):
    monkeypatch.setattr(cores, "usable_cores", lambda: number)
    meeting, calls = threading.Barrier(expected), []

    def call(argument):
        meeting.wait(60)  # breaks unless so many threads are at work
        calls.append(argument)

    in_threads(call, range(12))
    assert sorted(calls) == list(range(12))


def test_the_exception_of_a_call_is_raised():
    with pytest.raises(ZeroDivisionError):
        in_threads(lambda number: 1 / number, [1, 0, 2])
