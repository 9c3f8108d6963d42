"""A client that hangs ends the run within a bounded time, and one that crashes is named."""

import multiprocessing.connection
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

import pytest
import torch

from lcfl.distributed.client_deadline import ClientDeadline, ClientTookTooLong
from lcfl.distributed.client_output import ClientTimeoutError
from lcfl.distributed.launch import LostRankError
from lcfl.methods.aggregation import GlobalMean
from lcfl.methods.exchange import FullModel
from lcfl.methods.local import LocalTraining
from lcfl.methods.method import Method
from tests.helpers.builders import blobs, blobs_module, fedavg, fit

FOREVER = 10_000
SECONDS = 180  # a process that takes longer hangs, even on a busy machine


@dataclass(frozen=True)
class Hanging(LocalTraining):
    """Waits for something that never comes, at one client."""

    def __call__(self, state, downlink, data, engine):
        try:
            time.sleep(FOREVER * (data.client == 2))
        except Exception:  # code of the user's own that tries again
            time.sleep(FOREVER)
        return super().__call__(state, downlink, data, engine)


@dataclass(frozen=True)
class Crashing(LocalTraining):
    """Ends the process that trains one client, as a segmentation fault would."""

    def __call__(self, state, downlink, data, engine):
        if data.client == 2:
            os.kill(os.getpid(), signal.SIGSEGV)
        return super().__call__(state, downlink, data, engine)


@dataclass(frozen=True)
class Deaf(LocalTraining):
    """Hangs without ever looking for a signal, as code outside of Python may do."""

    def __call__(self, state, downlink, data, engine):
        if data.client == 2:
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
            time.sleep(FOREVER)
        return super().__call__(state, downlink, data, engine)


def method(local_update):
    return Method(local_update, FullModel(), GlobalMean())


@pytest.mark.parametrize("devices", [1, 2])
def test_a_client_that_hangs_ends_the_run_and_is_named(tmp_path, deadline, devices):
    signal.alarm(0)  # of the fixture, because there is only one timer
    before = signal.getsignal(signal.SIGALRM)
    options = {"clients_per_round": 4, "devices": devices, "client_timeout": 1.5}
    with pytest.raises(
        ClientTimeoutError, match=r"^client 2, round 0, rank \d: not done after trainer.client_timeout=1.5"
    ):
        fit(blobs_module(), blobs(4), method(Hanging(steps=1)), tmp_path, **options)
    assert signal.getsignal(signal.SIGALRM) is before and signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_a_limit_that_nobody_exceeds_changes_nothing(tmp_path):
    limited, free = (
        fit(blobs_module(), blobs(4), fedavg(), tmp_path / str(limit), rounds=2, evaluate_every=1, client_timeout=limit)
        for limit in (600, None)
    )
    assert torch.equal(limited.state.global_model, free.state.global_model)


SCRIPT = """
import sys
from tests.distributed.test_client_deadline import Crashing, Deaf, method
from tests.helpers.builders import blobs, blobs_module, fit

what, devices = sys.argv[1:]
method = method({"deaf": Deaf, "crashing": Crashing}[what](steps=1))
fit(blobs_module(), blobs(4), method, "run", devices=int(devices), engine="sequential", client_timeout=1.0)
"""


def run_script(folder, *words):
    """Returns the status and the standard error of a run in another process, which the test must outlive."""
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", SCRIPT, *words]
    done = subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    return done.returncode, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("devices", ["1", "2"])
def test_code_that_cannot_be_interrupted_ends_the_process_with_a_sentence(tmp_path, devices):
    status, said = run_script(tmp_path, "deaf", devices)
    assert status == 1
    assert re.search(
        r"^lcfl: error: client 2, round 0.*, rank \d: not done after trainer\.client_timeout=1", said, re.M
    )


def test_a_client_that_crashes_is_named(tmp_path, deadline):
    with pytest.raises(LostRankError, match=r"rank \d ended with SIGSEGV during client 2, round 0\. The run can be"):
        fit(blobs_module(), blobs(4), method(Crashing(steps=1)), tmp_path, clients_per_round=4, devices=2)


def test_a_client_that_crashes_is_named_however_late_the_parent_looks(tmp_path, deadline, monkeypatch):
    """On a busy machine the other rank has noticed the loss by then, and the parent may see its end first."""
    wait, parent = multiprocessing.connection.wait, os.getpid()

    def late(*arguments, **options):
        if os.getpid() == parent:
            wait(*arguments, **options)
            time.sleep(2)
        return wait(*arguments, **options)[::-1]

    monkeypatch.setattr(multiprocessing.connection, "wait", late)
    test_a_client_that_crashes_is_named(tmp_path, None)


@pytest.mark.slow
def test_a_crash_of_the_only_process_shows_the_line(tmp_path):
    status, said = run_script(tmp_path, "crashing", "1")
    assert status == -signal.SIGSEGV and "Segmentation fault" in said and __file__ in said


def test_tasks_of_the_same_name_have_a_limit_each():
    deadline = ClientDeadline(60)
    with deadline.interruptible(), deadline.limit("scoring"):
        with deadline.limit("scoring"):
            assert 60 < signal.getitimer(signal.ITIMER_REAL)[0] <= 120
        assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 60


def test_a_task_that_ended_in_time_is_not_interrupted():
    deadline = ClientDeadline(60)
    with deadline.interruptible():
        with deadline.limit("one"), deadline.limit("two", 3):
            assert 200 < signal.getitimer(signal.ITIMER_REAL)[0] <= 240
            with pytest.raises(ClientTookTooLong, match="one and 1 others at once"):
                deadline._interrupt(signal.SIGALRM, None)
        assert signal.getitimer(signal.ITIMER_REAL)[0] == 0
        deadline._interrupt(signal.SIGALRM, None)


THREAD = """
import signal, threading, time
from lcfl.distributed.client_deadline import ClientDeadline

def work():
    deadline = ClientDeadline(0.2)
    with deadline.interruptible(), deadline.limit("client 2"):
        time.sleep(0.6)
    print("done", signal.getitimer(signal.ITIMER_REAL))

thread = threading.Thread(target=work)
thread.start()
thread.join()
"""


def test_a_limit_outside_of_the_main_thread_does_not_end_the_process_at_once():
    """Only the main thread can be interrupted. There, the timer alone ends a client that takes far too long."""
    done = subprocess.run([sys.executable, "-c", THREAD], capture_output=True, text=True, timeout=SECONDS)
    assert (done.returncode, done.stdout) == (0, "done (0.0, 0.0)\n"), done.stderr
