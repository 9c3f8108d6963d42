"""What every test leaves as it found it, what it does without, and how it starts ranks."""

import multiprocessing
import os
import signal

import pytest
import torch
from lightning_utilities.core.rank_zero import rank_zero_only

from lcfl.callbacks import Monitor
from tests.helpers.commandline import built, here, parts  # noqa: F401 - fixtures
from tests.helpers.fits import reference, started  # noqa: F401 - fixtures

# Autograd looks for devices at the first backward pass of a process. Once torch.export has made some known it would
# start threads for them, and forked ranks could not compute gradients any more.
torch.zeros(1, requires_grad=True).sum().backward()

SECONDS = 180  # a test that starts processes and takes longer hangs, also on a busy machine
WRITES = Monitor._figure


@pytest.fixture(autouse=True)
def restored():
    """Environment, process group, Lightning's idea of the rank and torch's threads, as Lightning's own tests do it."""
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
    """With a CUDA build of torch, Lightning takes every forked process for one whose parent has used a GPU."""
    from lightning.fabric.strategies.launchers import multiprocessing as launchers

    monkeypatch.setattr(launchers, "_check_bad_cuda_fork", lambda: None)


@pytest.fixture(scope="session", autouse=True)
def no_pictures():
    """`Monitor` builds its pictures and does not render them, which takes longer than a small run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Monitor, "_figure", lambda self, *args: None)
        yield


@pytest.fixture(scope="module")
def pictures():
    """`Monitor` writes its pictures, for a module whose tests look at them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Monitor, "_figure", WRITES)
        yield


@pytest.fixture
def not_compiled(monkeypatch):
    """Programs of the engine fused run as they were traced; compiling one takes seconds."""
    monkeypatch.setattr(torch, "compile", lambda program, **options: program)


@pytest.fixture
def deadline():
    """Turns a hang into a failure: all children are killed and the test gets a TimeoutError."""

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
    """``on_ranks(number, function, *args)``: lcfl's `launch` on so many forked ranks of a CPU."""
    from lightning.fabric import Fabric

    from lcfl.distributed.launch import launch

    request.getfixturevalue("deadline")  # its time begins when all is imported

    def call(number, function, *args):
        strategy = "ddp_fork" if number > 1 else "auto"
        return launch(Fabric(accelerator="cpu", devices=number, strategy=strategy), function, *args)

    return call
