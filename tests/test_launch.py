"""Ranks are started as asked, fail with one clean error, and leave nothing behind."""

import multiprocessing
import os
import pickle
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lcfl import launch as module
from lcfl.launch import PIPE_BYTES, Placement, StopFlag, place, usable_cores

TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "2"}
SLURM = {"SLURM_NTASKS": "6", "SLURM_PROCID": "0", "SLURM_NNODES": "2", "SLURM_JOB_NAME": "train"}


@pytest.fixture
def started(monkeypatch):
    """``started(environment)``: as if torchrun or SLURM, or neither, had started this process."""

    def call(environment):
        for name in [name for name in os.environ if name.startswith(("TORCHELASTIC", "SLURM", "LOCAL_", "GROUP_"))]:
            monkeypatch.delenv(name)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)

    call({})
    return call


# place


@pytest.mark.parametrize(("cores", "most", "expected"), [(8, 100, 8), (8, 3, 3), (1, 100, 1), (8, 1, 1)])
def test_auto_is_one_rank_a_core_and_never_more_than_clients_per_round(started, monkeypatch, cores, most, expected):
    monkeypatch.setattr(module, "usable_cores", lambda: cores)
    strategy = "ddp_fork" if expected > 1 else "auto"
    assert place("cpu", "auto", 1, "auto", most) == Placement(expected, 1, strategy)


@pytest.mark.parametrize(("gpus", "expected"), [(0, 1), (1, 1), (4, 4), (9, 5)])
def test_auto_on_cuda_is_one_rank_a_gpu(started, monkeypatch, gpus, expected):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert place("cuda", "auto", 1, "auto", 5).devices == expected


@pytest.mark.parametrize(("strategy", "expected"), [("auto", 1), ("ddp_fork", 1), ("ddp_spawn", 8), ("ddp", 8)])
def test_auto_is_one_rank_where_forking_is_not_safe(started, monkeypatch, strategy, expected):
    monkeypatch.setattr(module, "usable_cores", lambda: 8)
    monkeypatch.setattr(module.sys, "platform", "darwin")
    assert place("cpu", "auto", 1, strategy, 100).devices == expected


@pytest.mark.parametrize(
    ("devices", "num_nodes", "strategy", "expected"),
    [
        (1, 1, "auto", Placement(1, 1, "auto")),
        (1, 1, "ddp_spawn", Placement(1, 1, "auto")),
        (3, 1, "auto", Placement(3, 1, "ddp_fork")),
        (3, 1, "ddp_spawn", Placement(3, 1, "ddp_spawn")),
        (2, 2, "ddp", Placement(2, 2, "ddp")),
        ([5], 1, "auto", Placement([5], 1, "auto")),
        ([5, 7], 1, "auto", Placement([5, 7], 1, "ddp_fork")),
    ],
)
def test_numbers_and_lists_are_taken_as_they_are(started, devices, num_nodes, strategy, expected):
    assert place("cuda", devices, num_nodes, strategy, most=2) == expected


@pytest.mark.parametrize(("devices", "num_nodes"), [("two", 1), ("2", 1), (0, 1), (-1, 1), ([], 1), (2, 0)])
def test_a_number_of_ranks_that_is_none_is_an_error(started, devices, num_nodes):
    with pytest.raises(ValueError, match=f"got .*{devices!r}".replace("[", r"\[")):
        place("cpu", devices, num_nodes, "auto", most=5)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (TORCHRUN, Placement(4, 2, "ddp")),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "1"}, Placement(1, 1, "auto")),
        (SLURM, Placement(3, 2, "ddp")),
        (SLURM | {"SLURM_NTASKS": "1", "SLURM_NNODES": "1"}, Placement(1, 1, "auto")),
    ],
)
@pytest.mark.parametrize("strategy", ["auto", "ddp"])
def test_under_torchrun_and_slurm_auto_is_what_was_started(started, environment, expected, strategy):
    started(environment)
    assert place("cpu", "auto", 1, strategy, most=1) == expected
    assert place("cpu", expected.devices, expected.num_nodes, strategy, most=1) == expected


@pytest.mark.parametrize("environment", [TORCHRUN, SLURM])
@pytest.mark.parametrize(
    ("devices", "num_nodes", "strategy", "message"),
    [
        (7, 1, "auto", r"trainer\.devices: got 7, but this job was started with [34]: use auto"),
        ([0, 1], 1, "auto", r"trainer\.devices: got \[0, 1\]"),
        ("auto", 5, "auto", r"trainer\.num_nodes: got 5, but this job was started with 2"),
        ("auto", 1, "ddp_fork", r"trainer\.strategy: got ddp_fork, but the ranks are already started"),
        ("auto", 1, "ddp_spawn", r"trainer\.strategy: got ddp_spawn"),
    ],
)
def test_what_disagrees_with_torchrun_or_slurm_is_an_error(started, environment, devices, num_nodes, strategy, message):
    started(environment)
    with pytest.raises(ValueError, match=message):
        place("cpu", devices, num_nodes, strategy, most=100)


@pytest.mark.parametrize("name", ["bash", "interactive"])
def test_a_shell_inside_slurm_has_started_nothing(started, name):
    started(SLURM | {"SLURM_JOB_NAME": name})
    assert place("cpu", 2, 1, "auto", most=100) == Placement(2, 1, "ddp_fork")


@pytest.mark.parametrize(
    ("quota", "expected"), [("max 100000", 6), ("250000 100000", 2), ("50000 100000", 1), ("900000 100000", 6)]
)
def test_usable_cores_are_the_affinity_cut_by_the_quota(monkeypatch, tmp_path, quota, expected):
    (tmp_path / "cpu.max").write_text(quota)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)))
    monkeypatch.setattr(module, "Path", lambda path: tmp_path / Path(path).name)
    assert usable_cores() == expected


# StopFlag


def test_the_first_signal_is_noted_and_the_second_ends_everything():
    flag = StopFlag()
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with flag.installed():
        assert flag.signal == 0
        os.kill(os.getpid(), signal.SIGTERM)
        assert flag.signal == signal.SIGTERM
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_handlers_are_put_back_after_an_error():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ValueError, match="inside"), StopFlag().installed():
        raise ValueError("inside")
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_second_signal_kills_the_children(deadline):
    process = multiprocessing.get_context("fork").Process(target=signal.pause)
    process.start()
    flag = StopFlag()
    flag(signal.SIGINT, None)
    assert process.is_alive()
    with pytest.raises(KeyboardInterrupt):
        flag(signal.SIGINT, None)
    process.join()
    assert process.exitcode == -signal.SIGKILL


def test_outside_the_main_thread_no_handler_is_set():
    before, inside = signal.getsignal(signal.SIGTERM), []

    def work():
        with StopFlag().installed() as flag:
            inside.append((signal.getsignal(signal.SIGTERM), flag.signal))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert inside == [(before, 0)]


def test_a_lost_rank_is_no_signal():
    flag = StopFlag()
    flag.mark_lost()
    assert flag.signal == 0


# launch


def rank_0(fabric, flag, *args):
    fabric.barrier()
    return {"rank": fabric.global_rank, "size": fabric.world_size, "args": args, "pid": os.getpid()}


@pytest.mark.parametrize("number", [1, 2, 3])
def test_what_rank_0_returns_comes_back_also_the_second_time(on_ranks, number):
    for _ in range(2):
        got = on_ranks(number, rank_0, "a", 2)
        assert (got["pid"] == os.getpid()) == (number == 1)
        assert (got["rank"], got["size"], got["args"]) == (0, number, ("a", 2))


@pytest.mark.parametrize("fails", [False, True])
def test_environment_threads_and_handlers_are_left_alone(on_ranks, fails):
    def work(fabric, flag):
        fabric.barrier()
        assert torch.get_num_threads() == 1
        assert not fails, "on purpose"

    torch.set_num_threads(2)
    environ, handlers = dict(os.environ), (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))
    for number in (1, 2):
        try:
            on_ranks(number, work)
        except AssertionError as error:
            assert fails and "on purpose" in str(error)
        assert dict(os.environ) == environ
        assert torch.get_num_threads() == 2
        assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers


def test_an_address_of_the_users_own_is_kept(on_ranks, monkeypatch):
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


@pytest.mark.parametrize("number", [2, 3])
@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_error_is_raised_with_its_type_and_rank(on_ranks, number, rank):
    def work(fabric, flag):
        if fabric.global_rank == rank:
            raise Special("the cause")
        fabric.barrier()  # fails because of the other

    with pytest.raises(Special) as caught:
        on_ranks(number, work)
    assert str(caught.value) == "the cause"
    assert caught.value.__notes__ == [f"(raised on rank {rank})"]


def test_an_error_in_one_process_is_raised_as_it_is(on_ranks):
    def work(fabric, flag):
        raise Unportable(1, 2)

    with pytest.raises(Unportable):
        on_ranks(1, work)


def test_an_error_that_cannot_be_pickled_is_told_in_words(on_ranks):
    def work(fabric, flag):
        if fabric.global_rank == 1:
            raise Unportable("this", "that")
        fabric.barrier()

    with pytest.raises(RuntimeError, match="Unportable: this and that") as caught:
        on_ranks(2, work)
    assert caught.value.__notes__ == ["(raised on rank 1)"]


def test_an_error_larger_than_a_pipe_does_not_hang(on_ranks):
    def work(fabric, flag):
        raise ValueError(f"rank {fabric.global_rank} " + "x" * 200_000)

    with pytest.raises(RuntimeError, match=r"ValueError: rank \d xxx"):
        on_ranks(3, work)


def test_only_the_first_error_is_put_into_the_pipe(monkeypatch):
    def work(fabric, flag):
        raise Special

    errors = multiprocessing.get_context("fork").SimpleQueue()
    errors.put("first")
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: "as in a child")
    monkeypatch.setattr(module, "_die_with", lambda parent: None)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(Special):
        module._Guarded(work, StopFlag(), errors, parent=-1)(SimpleNamespace(global_rank=1))
    signal.signal(signal.SIGINT, before)
    assert errors.get() == "first" and errors.empty()


@pytest.mark.parametrize("error", [Special("x"), Special("x" * PIPE_BYTES), Unportable(1, "y" * PIPE_BYTES)], ids=type)
def test_what_goes_through_the_pipe_always_fits(error):
    portable = module._portable(error)
    assert len(pickle.dumps(portable)) <= PIPE_BYTES
    assert str(portable)[-50:-10] in f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_is_lost(on_ranks, rank):
    def work(fabric, flag):
        if fabric.global_rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        fabric.barrier()

    with pytest.raises(RuntimeError, match="a rank was lost"):
        on_ranks(2, work)


def test_all_ranks_killed_is_lost_too(on_ranks):
    with pytest.raises(RuntimeError, match="a rank was lost"):
        on_ranks(2, lambda fabric, flag: os.kill(os.getpid(), signal.SIGKILL))


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


def test_an_interrupt_of_the_whole_terminal_is_left_to_the_parent(on_ranks):
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
        signal.alarm(90)  # ends them where this test fails
        signal.pause()

    parent = os.fork()
    if parent == 0:
        try:
            signal.alarm(0)
            on_ranks(2, work)
        finally:
            os._exit(1)
    os.close(writing)
    assert os.read(reading, 1) + os.read(reading, 1) == b".."  # both ranks are at work
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    assert os.read(reading, 1) == b"", "the pipe's end comes when nobody who could write is left"
    os.close(reading)


def test_a_rank_whose_parent_is_gone_already_ends_at_once():
    child = os.fork()
    if child == 0:
        try:
            module._die_with(os.getppid() + 1)
            os._exit(0)
        finally:
            os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
