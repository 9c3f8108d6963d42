"""`lossy_output`: a closed pipe and a full disk lose text, and nothing else."""

import io
import os
import sys

import pytest

from lcfl.core.output import lossy_output
from tests.helpers.pipes import closed_pipe


def test_text_goes_to_standard_output(capsys):
    print("round 1", file=lossy_output(), flush=True)
    assert capsys.readouterr().out == "round 1\n"


@pytest.mark.parametrize("text", ["round 1", "round 1\n" * 10_000])  # less and more than a buffer holds
def test_a_closed_pipe_loses_text_and_stays_standard_output(monkeypatch, text):
    with closed_pipe() as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        before = os.fstat(stream.fileno())
        for _ in range(2):
            print(text, file=lossy_output(), flush=True)
        stream.flush()  # as a process does at its end
        assert os.fstat(stream.fileno()) == before and not os.get_inheritable(stream.fileno())
        with pytest.raises(BrokenPipeError):
            print("of the program around", flush=True)
        lossy_output().flush()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_a_full_disk_loses_text(monkeypatch):
    with open("/dev/full", "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        print("round 1", file=lossy_output(), flush=True)


def test_a_stream_without_a_file_may_fail_too(monkeypatch):
    stream = io.StringIO()
    stream.write = lambda text: (_ for _ in ()).throw(BrokenPipeError)
    for each in (stream, None):
        monkeypatch.setattr(sys, "stdout", each)
        print("round 1", file=lossy_output(), flush=True)
