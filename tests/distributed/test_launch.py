"""Launched ranks return their result or raise one clean error, and leave nothing behind."""

import gc
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from lightning.fabric.strategies.ddp import DDPStrategy

from lcfl.distributed import launch as module
from lcfl.distributed.launch import PIPE_BYTES
from lcfl.distributed.stop_flag import StopFlag


def rank_0(fabric, flag, *args):
    fabric.barrier()
    return {"rank": fabric.global_rank, "size": fabric.world_size, "args": args, "pid": os.getpid()}


@pytest.mark.parametrize("number", [1, 3])
def test_launch_returns_the_result_of_rank_0_also_the_second_time(on_ranks, number):
    for _ in range(2):
        result = on_ranks(number, rank_0, "a", 2)
        assert (result["pid"] == os.getpid()) == (number == 1)
        assert (result["rank"], result["size"], result["args"]) == (0, number, ("a", 2))


@pytest.mark.parametrize("fails", [False, True])
def test_environment_threads_and_handlers_are_restored(on_ranks, fails):
    def work(fabric, flag):
        fabric.barrier()
        assert torch.get_num_threads() == 1
        assert not fails, "on purpose"

    torch.set_num_threads(2)
    environ, handlers = dict(os.environ), (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))
    for number in (1, 2):
        with pytest.raises(AssertionError, match="on purpose") if fails else nullcontext():
            on_ranks(number, work)
        assert dict(os.environ) == environ
        assert torch.get_num_threads() == 2
        assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers


def test_forked_ranks_do_not_garbage_collect_shared_objects(on_ranks):
    def frozen(fabric=None, flag=None):
        return gc.get_freeze_count()

    before = frozen()
    assert on_ranks(2, frozen) > 10_000
    assert frozen() == before


def test_no_signal_handler_is_installed_for_ranks_that_were_started_elsewhere():
    def handlers(fabric=None, flag=None):
        return signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)

    fabric = SimpleNamespace(strategy=SimpleNamespace(launcher="torchrun's"))
    fabric.launch = lambda function: function(fabric)
    assert module.launch(fabric, handlers) == handlers()
    fabric.strategy.launcher = None
    assert module.launch(fabric, handlers) != handlers()


def test_a_user_defined_address_is_kept(on_ranks, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    on_ranks(2, rank_0)
    assert os.environ["MASTER_ADDR"] == "127.0.0.1" and "MASTER_PORT" not in os.environ


def test_a_parent_that_computed_with_two_threads_does_not_make_its_ranks_hang(on_ranks):
    def compute(fabric=None, flag=None):
        return (torch.ones(300, 300) @ torch.ones(300, 300)).exp().log().sum().item() > 0

    torch.set_num_threads(2)
    assert compute()
    assert on_ranks(2, compute)
    assert compute()
    assert on_ranks(2, compute)


class Special(Exception):
    pass


class Unportable(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


@pytest.mark.parametrize(("number", "rank"), [(2, 0), (3, 1)])
def test_the_first_error_is_raised_with_its_type_and_rank(on_ranks, number, rank):
    def work(fabric, flag):
        if fabric.global_rank == rank:
            raise Special("the cause")
        fabric.barrier()  # fails because of the other rank

    with pytest.raises(Special) as caught:
        on_ranks(number, work)
    assert str(caught.value) == "the cause"
    where, which = caught.value.__notes__
    assert f'File "{__file__}", line ' in where and where.endswith('raise Special("the cause")')
    assert which == f"(raised on rank {rank})"


def test_an_error_leaves_no_file(on_ranks, monkeypatch, tmp_path):
    def work(fabric, flag):
        raise Special

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(Special):
        on_ranks(2, work)
    assert list(tmp_path.iterdir()) == []


def test_an_error_in_a_single_process_is_raised_unchanged(on_ranks):
    def work(fabric, flag):
        raise Unportable(1, 2)

    with pytest.raises(Unportable):
        on_ranks(1, work)


def test_an_error_that_cannot_be_pickled_is_raised_as_text(on_ranks):
    def work(fabric, flag):
        if fabric.global_rank == 1:
            raise Unportable("this", "that")
        fabric.barrier()

    with pytest.raises(RuntimeError, match="Unportable: this and that") as caught:
        on_ranks(2, work)
    frames, rank = caught.value.__notes__
    assert "test_launch.py" in frames and rank == "(raised on rank 1)"


def test_an_error_larger_than_a_pipe_does_not_hang(on_ranks):
    def work(fabric, flag):
        raise ValueError(f"rank {fabric.global_rank} " + "x" * 200_000)

    with pytest.raises(ValueError, match=r"^rank \d xxx") as caught:
        on_ranks(3, work)
    assert len(str(caught.value)) <= 1000 and "test_launch.py" in caught.value.__notes__[0]


@pytest.mark.slow
def test_starting_and_failing_ranks_print_nothing():
    script = """
import lightning.pytorch  # whose logger then reports the ranks
from lightning.fabric import Fabric
from lcfl.distributed.launch import launch

def work(fabric, flag):
    fabric.barrier()
    raise ArithmeticError("on purpose")

try:
    launch(Fabric(accelerator="cpu", devices=3, strategy="ddp_fork"), work)
except ArithmeticError as error:
    print(error)
"""
    environ = {name: value for name, value in os.environ.items() if name != "LCFL_DEBUG"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environ)
    assert (done.stdout, done.stderr) == ("on purpose\n", "")


def test_only_the_first_error_is_put_into_the_pipe(monkeypatch):
    def work(fabric, flag):
        raise Special

    errors = multiprocessing.get_context("fork").SimpleQueue()
    errors.put("first")
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: "as in a child")
    monkeypatch.setattr(module, "_die_with", lambda parent: None)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit):
        module._Guarded(work, StopFlag(), errors, parent=-1)(SimpleNamespace(global_rank=1))
    signal.signal(signal.SIGINT, before)
    assert errors.get() == "first" and errors.empty()


class Doubled(ValueError):
    """Its constructor adds to what it is given, so that a pickled one has another text."""

    def __init__(self, item):
        super().__init__(f"item {item} is broken")


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (Special("x"), Special, "x"),
        (Special("x" * PIPE_BYTES), Special, "xxx"),
        (Unportable(1, "y" * PIPE_BYTES), RuntimeError, "Unportable: 1 and yyy"),
        (Doubled(3), ValueError, "Doubled: item 3 is broken"),
        (KeyError("z" * PIPE_BYTES), LookupError, "KeyError: 'zzz"),
    ],
    ids=["small", "large", "unportable", "doubled", "quoted"],
)
def test_an_error_for_the_pipe_is_small_and_says_the_same(error, kind, said):
    error.add_note("a" * PIPE_BYTES + "place")
    portable = module._portable(error)
    assert type(portable) is kind and str(portable).startswith(said)
    assert len(pickle.dumps(portable)) <= PIPE_BYTES
    assert str(pickle.loads(pickle.dumps(portable))) == str(portable) and portable.__notes__[0].endswith("place")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_is_reported_as_lost(on_ranks, rank):
    def work(fabric, flag):
        if fabric.global_rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        fabric.barrier()

    with pytest.raises(RuntimeError, match="a rank was lost"):
        on_ranks(2, work)


def test_an_error_is_raised_if_all_ranks_are_killed(on_ranks):
    with pytest.raises(RuntimeError, match="a rank was lost"):
        on_ranks(2, lambda fabric, flag: os.kill(os.getpid(), signal.SIGKILL))


def test_an_error_before_the_work_begins_is_reported_without_the_lines_of_advice_below_it(on_ranks, monkeypatch):
    """So does CUDA fail in a forked process if its parent has used it."""

    def setup(strategy):
        raise RuntimeError("CUDA error: initialization error\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1")

    monkeypatch.setattr(DDPStrategy, "setup_environment", setup)
    with pytest.raises(
        RuntimeError, match=r"a rank was lost: RuntimeError: CUDA error: initialization error\. The run"
    ):
        on_ranks(2, lambda fabric, flag: None)


def test_a_signal_to_the_parent_reaches_all_ranks(on_ranks):
    def work(fabric, flag):
        fabric.barrier()
        if fabric.global_rank == 1:
            os.kill(os.getppid(), signal.SIGTERM)
        while not flag.signal:
            time.sleep(0.001)
        fabric.barrier()
        return flag.signal

    assert on_ranks(2, work) == signal.SIGTERM


def test_ranks_leave_an_interrupt_of_the_terminal_to_the_parent(on_ranks):
    def work(fabric, flag):
        os.kill(os.getpid(), signal.SIGINT)
        fabric.barrier()
        return flag.signal

    assert on_ranks(2, work) == 0


def test_ranks_die_with_their_parent(on_ranks):
    reading, writing = os.pipe()

    def work(fabric, flag):
        os.write(writing, b".")
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(400)  # ends the ranks if this test fails
        signal.pause()

    parent = os.fork()
    if parent == 0:
        try:
            signal.alarm(0)
            on_ranks(2, work)
        finally:
            os._exit(1)
    os.close(writing)
    assert os.read(reading, 1) + os.read(reading, 1) == b".."  # both ranks are running
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    assert os.read(reading, 1) == b"", "the pipe ends when no process that could write is left"
    os.close(reading)


def test_a_rank_whose_parent_has_died_ends_at_once():
    child = os.fork()
    if child == 0:
        try:
            module._die_with(os.getppid() + 1)
            os._exit(0)
        finally:
            os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
