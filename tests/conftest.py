"""Fixtures for every test: what is restored afterwards, what is switched off, and how ranks are started."""

import functools
import gc
import multiprocessing
import os
import signal

import pytest
import torch
from lightning.fabric.utilities import registry
from lightning_utilities.core.rank_zero import rank_zero_only
from threadpoolctl import threadpool_limits

from lcfl.callbacks import Monitor
from lcfl.runs import user_code
from tests.helpers.commandline import built, here, parts  # noqa: F401 - fixtures
from tests.helpers.fits import reference, started  # noqa: F401 - fixtures

# Autograd looks for devices at the first backward pass of a process. If torch.export has registered some by then,
# autograd starts threads for them, and forked ranks can no longer compute gradients.
torch.zeros(1, requires_grad=True).sum().backward()

# One thread, as in every rank. With several, processes on a busy machine wait for each other's threads.
torch.set_num_threads(1)
threadpool_limits(1)

gc.freeze()  # otherwise every full collection looks at all that torch and Lightning have made
# Lightning looks for callbacks in the metadata of all installed packages whenever a Fabric is made.
registry.entry_points = functools.cache(registry.entry_points)

SECONDS = 180  # a test that starts processes and takes longer hangs, even on a busy machine
WRITES = Monitor._figure


@pytest.fixture(autouse=True)
def restored():
    """Restores environment, process group, Lightning's rank and torch's number of threads, as Lightning's tests do."""
    environ, threads, missing = dict(os.environ), torch.get_num_threads(), object()
    rank = getattr(rank_zero_only, "rank", missing)
    yield
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    if rank is not missing:
        rank_zero_only.rank = rank
    elif hasattr(rank_zero_only, "rank"):
        del rank_zero_only.rank
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    for name in {*os.environ} - {*environ} - {"PYTEST_CURRENT_TEST"}:
        del os.environ[name]
    os.environ.update({name: value for name, value in environ.items() if name != "PYTEST_CURRENT_TEST"})


@pytest.fixture(autouse=True)
def ranks_may_be_forked_from_a_fork(monkeypatch):
    """Lets forked processes fork ranks. With a CUDA build of torch, Lightning believes that their parent used a GPU."""
    from lightning.fabric.strategies.launchers import multiprocessing as launchers

    monkeypatch.setattr(launchers, "_check_bad_cuda_fork", lambda: None)


@pytest.fixture(scope="session", autouse=True)
def nothing_waits_for_the_disk():
    """Leaves out `os.fsync`, which small runs call often. Only a machine that loses power needs it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def tests_are_not_the_users_code():
    """Leaves modules of tests out of the user's code. Otherwise every run would read and list hundreds of them."""
    files, tests = user_code._own_files, os.path.join(os.path.dirname(__file__), "")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(user_code, "_own_files", lambda: (each for each in files() if not each[1].startswith(tests)))
        yield


@pytest.fixture(scope="session", autouse=True)
def no_pictures():
    """Makes `Monitor` build its pictures without rendering them, which would take longer than a small run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Monitor, "_figure", lambda self, *args: None)
        yield


@pytest.fixture(scope="module")
def pictures():
    """Makes `Monitor` write its pictures, for a module whose tests look at them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Monitor, "_figure", WRITES)
        yield


@pytest.fixture(autouse=True)
def handlers_of_signals_stay():
    """Refuses a test after which Ctrl-C would do something else."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    after = {number: signal.signal(number, handler) for number, handler in before.items()}
    assert after == before


@pytest.fixture
def deadline():
    """Turns a hang into a failure by killing all children and raising a TimeoutError in the test."""

    def expired(number, frame):
        for child in multiprocessing.active_children():
            child.kill()
        raise TimeoutError(f"the test hung for {SECONDS} s")

    before = signal.signal(signal.SIGALRM, expired)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def on_ranks(request):
    """Provides ``on_ranks(number, function, *args)``, which is lcfl's `launch` on `number` forked ranks of a CPU.

    The ranks meet before they call the function, as they do in a run. Otherwise rank 0, which all others need to
    connect, might end first.
    """
    from lightning.fabric import Fabric

    from lcfl.distributed.launch import launch

    request.getfixturevalue("deadline")  # its time starts when the imports are done

    def call(number, function, *args):
        def met(fabric, flag, *args):
            fabric.barrier()
            return function(fabric, flag, *args)

        strategy = "ddp_fork" if number > 1 else "auto"
        return launch(Fabric(accelerator="cpu", devices=number, strategy=strategy), met, *args)

    return call
