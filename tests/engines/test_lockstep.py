"""Functions in lockstep: their order, their answers, and their end after an exception."""

import signal

import pytest
import torch

from lcfl.core import rng
from lcfl.engines.lockstep import run_in_lockstep


def doubled(requests):
    return [2 * each for each in requests]


def test_all_requests_are_answered_at_once_and_in_order():
    submitted = []

    def answer(requests):
        submitted.append(list(requests))
        return doubled(requests)

    def task(number, submit):
        return [submit(10 * number + step) for step in range(number)]

    found = run_in_lockstep([lambda submit, number=number: task(number, submit) for number in (2, 0, 3)], answer)
    assert found == [[40, 42], [], [60, 62, 64]]
    assert submitted == [[20, 30], [21, 31], [32]]


def test_no_tasks_submit_no_requests():
    assert run_in_lockstep([], doubled) == []


def test_one_that_waits_without_autograd_does_not_switch_it_off_for_others():
    modes = []

    def answer(requests):
        modes.append(torch.is_grad_enabled())
        return requests

    def task(mode, submit):
        with torch.set_grad_enabled(mode):
            submit(1)
            return torch.is_grad_enabled()

    with torch.no_grad():
        found = run_in_lockstep([lambda submit, mode=mode: task(mode, submit) for mode in (False, True, False)], answer)
        assert not torch.is_grad_enabled()
    assert found == [False, True, False] and modes == [True]


def test_random_draws_after_a_request_do_not_depend_on_other_tasks():
    def task(number, submit):
        with rng.seeded(0, "work", number):
            first = torch.rand(2)
            submit(1)
            return torch.cat([first, torch.rand(2)])

    before = torch.get_rng_state()
    together = run_in_lockstep([lambda submit, number=number: task(number, submit) for number in range(3)], doubled)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(torch.stack(together), torch.stack([task(number, lambda _: None) for number in range(3)]))


def test_an_answer_that_is_an_exception_is_raised_where_it_was_requested():
    def task(submit):
        try:
            return submit(1)
        except KeyError as error:
            return error.args

    assert run_in_lockstep([task, task], lambda requests: [5, KeyError("why")]) == [5, ("why",)]


def waiting(ended):
    def task(submit):
        try:
            submit(1)
        finally:
            ended.append(True)

    return task


def failing(submit):
    submit(1)
    raise ZeroDivisionError("by hand")


@pytest.mark.parametrize("fails", ["task", "answer"])
def test_an_exception_ends_all_functions(fails):
    ended = []

    def answer(requests):
        if fails == "answer":
            raise ZeroDivisionError("by hand")
        return doubled(requests)

    def submits_twice(submit):
        submit(1)
        waiting(ended)(submit)

    tasks = [waiting(ended), failing, submits_twice] if fails == "answer" else [submits_twice, failing, waiting(ended)]
    with pytest.raises(ZeroDivisionError, match="by hand"):
        run_in_lockstep(tasks, answer)
    assert len(ended) == (1 if fails == "answer" else 2)


def test_one_that_catches_everything_ends_at_its_next_request():
    ended = []

    def stubborn(submit):
        for _ in range(3):
            try:
                submit(1)
            except BaseException:
                ended.append(True)
        raise KeyboardInterrupt

    with pytest.raises(ZeroDivisionError):
        run_in_lockstep([stubborn, failing, waiting(ended)], doubled)
    assert len(ended) == 3


def test_an_interrupt_ends_the_function_that_computes_and_all_others():
    """The handler is the test's own, because a process in the background of a shell ignores SIGINT from its start."""
    continued, ended = [], []

    def interrupt(number, frame):
        raise KeyboardInterrupt

    def task(submit):
        signal.raise_signal(signal.SIGINT)
        submit(1)
        continued.append(True)

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_in_lockstep([waiting(ended), task], doubled)
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended and not continued
