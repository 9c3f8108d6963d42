"""Order, results and errors do not depend on which rank carries out a task."""

import os
import signal

import pytest
import torch

from lcfl.distributed.connections import NetworkConnection, SharedMemoryConnection
from lcfl.distributed.ranks import Ranks
from lcfl.distributed.stop_flag import StopFlag
from lcfl.distributed.tasks import Failure

WORLDS = [1, 2, 3]


def session(fabric, flag, run, lead):
    """Runs a session as lcfl.federation.session does: rank 0 leads, the others serve."""
    ranks = Ranks(fabric, lambda tasks: [run(fabric, task) for task in tasks], flag)
    if not fabric.is_global_zero:
        ranks.serve()
        return None
    with ranks:
        return lead(ranks)


def compute(fabric, task):
    """Returns a result whose last bits depend on the number of threads and on the input."""
    number, tensor = task
    return number, os.getpid(), (tensor.sin() @ tensor.cos()).sum()


def tasks_of(count):
    return [(number, torch.rand(40, 40, generator=torch.Generator().manual_seed(number))) for number in range(count)]


def lead(ranks):
    results = []
    for count in (7, 1, 0, 12):  # fewer tasks than ranks, none, and more than before
        tasks = tasks_of(count)
        results.append(ranks.map(tasks, [1 + number % 3 for number in range(count)]))
    workers = {pid for answers in results for _, pid, _ in answers}
    return len(workers), [[(number, value.item()) for number, _, value in answers] for answers in results]


def test_results_come_in_the_order_of_the_tasks_and_are_equal_on_any_number_of_ranks(on_ranks):
    by_world = {world: on_ranks(world, session, compute, lead) for world in WORLDS}
    assert [by_world[world][0] for world in WORLDS] == WORLDS, "every rank has a task"
    results = by_world[1][1]
    assert [[number for number, _ in answers] for answers in results] == [list(range(n)) for n in (7, 1, 0, 12)]
    assert by_world[2][1] == results and by_world[3][1] == results


def test_results_are_valid_after_the_next_map(on_ranks):
    def lead(ranks):
        first = ranks.map([torch.zeros(500)] * 4, [1] * 4)
        ranks.map([torch.ones(500)] * 4, [1] * 4)
        return [tensor.sum().item() for tensor in first]

    assert on_ranks(2, session, lambda fabric, task: task + 1, lead) == [500.0] * 4


def test_the_heaviest_tasks_are_spread(on_ranks):
    def lead(ranks):
        pids = ranks.map([None] * 4, [10, 10, 1, 1])
        return pids[0] != pids[1], pids[2] != pids[3]

    assert on_ranks(2, session, lambda fabric, task: os.getpid(), lead) == (True, True)


@pytest.mark.parametrize("world", WORLDS)
def test_an_exception_ends_ranks_that_wait(on_ranks, world):
    def lead(ranks):
        ranks.map(tasks_of(3), [1] * 3)
        raise KeyError("server")

    with pytest.raises(KeyError, match="server"):
        on_ranks(world, session, compute, lead)


@pytest.mark.parametrize("world", WORLDS)
def test_an_exception_ends_ranks_that_are_busy(on_ranks, world):
    def run(fabric, task):
        if fabric.is_global_zero:
            raise KeyError("server")
        return task

    with pytest.raises(KeyError, match="server"):
        on_ranks(world, session, run, lambda ranks: ranks.map(tasks_of(6), [1] * 6))


def test_a_task_that_cannot_be_sent_ends_the_other_ranks(on_ranks):
    with pytest.raises((AttributeError, TypeError, RuntimeError), match="pickle"):
        on_ranks(3, session, compute, lambda ranks: ranks.map([(0, lambda: 1)] * 3, [3, 2, 1]))


def test_an_exception_on_another_rank_is_raised_with_its_rank(on_ranks):
    def run(fabric, task):
        if fabric.global_rank == 1:
            raise ZeroDivisionError("client 4")
        return task

    with pytest.raises(ZeroDivisionError, match="client 4") as caught:
        on_ranks(2, session, run, lambda ranks: ranks.map(tasks_of(4), [1] * 4))
    assert caught.value.__notes__[-1] == "(raised on rank 1)"


def test_failures_travel_like_results(on_ranks):
    def run(fabric, task):
        return Failure(f"client {task}", "details " * 20_000) if task % 2 else task

    def lead(ranks):
        return [
            (result.message, len(result.details)) if isinstance(result, Failure) else result
            for result in ranks.map(range(4), [1] * 4)
        ]

    assert on_ranks(2, session, run, lead) == [0, ("client 1", 160_000), 2, ("client 3", 160_000)]


def test_a_signal_on_any_rank_reaches_the_server(on_ranks):
    def work(fabric, flag):
        own = StopFlag()  # ranks that were not forked do not share their flags
        if fabric.global_rank == 1:
            own._shared.fill_(15)
        return session(fabric, own, compute, lambda ranks: (ranks.stop_signal, ranks.map([], []), ranks.stop_signal))

    assert on_ranks(2, work) == (0, [], 15)


def test_the_servers_own_signal_counts(on_ranks):
    def work(fabric, flag):
        ranks = Ranks(fabric, None, flag)
        before = ranks.stop_signal
        signal.raise_signal(signal.SIGINT)
        return before, ranks.stop_signal

    assert on_ranks(1, work) == (0, signal.SIGINT)


@pytest.mark.parametrize(
    "apart", ["", "platform.node", "lcfl.distributed.ranks._boot", "lcfl.distributed.ranks._processes"]
)
def test_only_ranks_that_see_each_other_are_on_one_host_and_share_memory(on_ranks, monkeypatch, apart):
    """They are not on two machines, with different names or the same, or in containers on one machine."""
    if apart:
        monkeypatch.setattr(apart, lambda: f"{os.getpid()}")

    def work(fabric, flag):
        ranks = Ranks(fabric, lambda tasks: [task * 2 for task in tasks], flag)
        others = 0 if apart else 2 if fabric.is_global_zero else 1
        assert [type(link) for link in ranks._links] == [SharedMemoryConnection] * others
        assert ranks.is_first == (fabric.is_global_zero or bool(apart))
        if not ranks.is_first:
            return ranks.serve()
        with ranks:
            return ranks.hosts, [
                tensor.tolist() for tensor in ranks.map([torch.tensor([n]) for n in range(5)], [1] * 5)
            ]

    hosts = [[0], [1], [2]] if apart else [[0, 1, 2]]
    assert on_ranks(3, work) == (hosts, [[0], [2], [4], [6], [8]])


def test_the_network_is_used_if_memory_cannot_be_shared(on_ranks, monkeypatch):
    monkeypatch.setattr("lcfl.distributed.ranks.can_share_memory", lambda: False)

    def work(fabric, flag):
        ranks = Ranks(fabric, lambda tasks: tasks, flag)
        assert [type(link) for link in ranks._links] == [NetworkConnection]
        if fabric.is_global_zero:
            with ranks:
                return ranks.map([1, 2, 3], [1] * 3)
        ranks.serve()

    assert on_ranks(2, work) == [1, 2, 3]
