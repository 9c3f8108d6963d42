"""Functions that run side by side and whose requests are answered together.

A client's local run need not know about the others. Only one function runs at a time: they take turns in the order of
the list, and each runs until it submits its next request.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Generic, TypeVar

import torch
from greenlet import getcurrent, greenlet

from lcfl.core import rng

__all__ = ["Submit", "run_in_lockstep"]

Submit = Callable[[Any], Any]
Result = TypeVar("Result")


def run_in_lockstep(
    tasks: Sequence[Callable[[Submit], Result]], answer: Callable[[Sequence[Any]], Sequence[Any]]
) -> list[Result]:
    """Runs functions that submit requests. Once every function waits or has ended, all requests are answered at once.

    The global random generators and the mode of autograd belong to each function: after a request they are as they were
    before it.

    Args:
        tasks: functions that get a `Submit`. It submits a request, waits and returns the answer. If the answer is an
            exception, it raises the answer instead.
        answer: returns the answers to a list of requests, in their order.

    Returns:
        What the functions returned, in their order.

    Raises:
        BaseException: what one of the functions, or `answer`, raised. No function continues after that.
    """
    runners = [_Runner(task) for task in tasks]
    with rng.isolated(), torch.enable_grad():
        try:
            waiting = [runner for runner in runners if runner.resume()]
            while waiting:
                answers = answer([runner.request for runner in waiting])
                waiting = [runner for runner, each in zip(waiting, answers, strict=True) if runner.resume(each)]
        finally:
            for runner in runners:
                runner.end()
    return [runner.result for runner in runners]


class _Runner(Generic[Result]):
    """One of the functions, in a greenlet that only runs between `resume` and the function's next request."""

    result: Result

    def __init__(self, task: Callable[[Submit], Result]) -> None:
        self.request: Any = None
        self._task = task
        self._main, self._greenlet = getcurrent(), greenlet(self._run)

    def resume(self, answer: Any = None) -> bool:
        """Continues the function with the answer to its request; returns whether it has submitted another one."""
        self._greenlet.switch(answer)
        return not self._greenlet.dead

    def end(self) -> None:
        """Unwinds the function where it waits, or at its next request."""
        while self._greenlet:
            with suppress(BaseException):  # that of the run is raised
                self._greenlet.throw()

    def _run(self, _: None) -> None:
        self.result = self._task(self._submit)
        self.request = None  # it knows this runner; the models in such a circle would stay until the next collection

    def _submit(self, request: Any) -> Any:
        self.request = request
        with rng.isolated(), torch.enable_grad():
            answer = self._main.switch()
        if isinstance(answer, BaseException):
            raise answer
        return answer
