"""Functions in lockstep: who runs when, what they are answered, and what an exception leaves behind."""

import signal
import threading
import time

import pytest
import torch

from lcfl.core import rng
from lcfl.engines.lockstep import run_in_lockstep


def doubled(questions):
    return [2 * each for each in questions]


def test_all_questions_are_answered_at_once_and_in_order():
    asked = []

    def answer(questions):
        asked.append(list(questions))
        return doubled(questions)

    def work(number, ask):
        return [ask(10 * number + step) for step in range(number)]

    found = run_in_lockstep([lambda ask, number=number: work(number, ask) for number in (2, 0, 3)], answer)
    assert found == [[40, 42], [], [60, 62, 64]]
    assert asked == [[20, 30], [21, 31], [32]]


def test_no_work_asks_nothing():
    assert run_in_lockstep([], doubled) == []


def test_only_one_runs_at_a_time():
    running, most = set(), []

    def work(ask):
        for _ in range(20):
            running.add(threading.get_ident())
            most.append(len(running))
            sum(range(2000))
            running.remove(threading.get_ident())
            ask(1)

    run_in_lockstep([work] * 5, doubled)
    assert max(most) == 1


def test_draws_go_on_after_a_question_as_if_nobody_else_drew():
    def work(number, ask):
        with rng.scope(0, "work", number):
            first = torch.rand(2)
            ask(1)
            return torch.cat([first, torch.rand(2)])

    before = torch.get_rng_state()
    together = run_in_lockstep([lambda ask, number=number: work(number, ask) for number in range(3)], doubled)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(torch.stack(together), torch.stack([work(number, lambda _: None) for number in range(3)]))


def test_an_answer_that_is_an_exception_is_raised_where_it_was_asked_for():
    def work(ask):
        try:
            return ask(1)
        except KeyError as error:
            return error.args

    assert run_in_lockstep([work, work], lambda questions: [5, KeyError("why")]) == [5, ("why",)]


def waiting(ended):
    def work(ask):
        try:
            ask(1)
        finally:
            ended.append(True)

    return work


def failing(ask):
    ask(1)
    raise ZeroDivisionError("by hand")


@pytest.mark.parametrize("fails", ["work", "answer"])
def test_after_an_exception_nothing_is_left_running(fails):
    ended, threads = [], threading.active_count()

    def answer(questions):
        if fails == "answer":
            raise ZeroDivisionError("by hand")
        return doubled(questions)

    def asks_twice(ask):
        ask(1)
        waiting(ended)(ask)

    works = [waiting(ended), failing, asks_twice] if fails == "answer" else [asks_twice, failing, waiting(ended)]
    with pytest.raises(ZeroDivisionError, match="by hand"):
        run_in_lockstep(works, answer)
    assert threading.active_count() == threads
    assert len(ended) == (1 if fails == "answer" else 2)


def test_an_interrupt_while_one_computes_ends_it_at_its_next_question():
    went_on = []

    def work(ask):
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        time.sleep(0.2)  # the main thread has left by now
        ask(1)
        went_on.append(True)

    with pytest.raises(KeyboardInterrupt):
        run_in_lockstep([work], doubled)
    assert not went_on
