"""Functions that run side by side and whose requests are answered together.

A client's local run need not know about the others. Only one function runs at a time: they take turns in the order of
the list, and each runs until it submits its next request.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from lcfl.core import rng

__all__ = ["Submit", "run_in_lockstep"]

Submit = Callable[[Any], Any]
Result = TypeVar("Result")


def run_in_lockstep(
    tasks: Sequence[Callable[[Submit], Result]], answer: Callable[[Sequence[Any]], Sequence[Any]]
) -> list[Result]:
    """Runs functions that submit requests. Once every function waits or has ended, all requests are answered at once.

    The global random generators belong to each function: after a request they continue as they were before it.

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
    with rng.isolated():
        try:
            waiting = [runner for runner in runners if runner.resume()]
            while waiting:
                answers = answer([runner.request for runner in waiting])
                waiting = [runner for runner, each in zip(waiting, answers, strict=True) if runner.resume(each)]
        finally:
            for runner in runners:
                runner.end()
    return [runner.result for runner in runners]


class _Ended(BaseException):
    """Unwinds a function that waits for an answer which will not come."""


class _Runner(Generic[Result]):
    """One of the functions, in a thread that only runs between `resume` and the function's next request."""

    result: Result

    def __init__(self, task: Callable[[Submit], Result]) -> None:
        self.request: Any = None
        self._task = task
        self._answer: Any = None
        self._error: BaseException | None = None
        self._waits = False
        self._turn, self._pause = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, daemon=True)

    def resume(self, answer: Any = None) -> bool:
        """Continues the function with the answer to its request; returns whether it has submitted another one."""
        self._answer, self._waits = answer, False
        if self._thread.ident is None:
            self._thread.start()
        else:
            self._turn.release()
        self._pause.acquire()
        if self._error is not None:
            raise self._error
        return self._waits

    def end(self) -> None:
        """Unwinds the function where it waits or at its next request, and joins its thread."""
        self._answer = _Ended()
        self._turn.release()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            self.result = self._task(self._submit)
        except BaseException as error:
            self._error = error
        finally:
            self._pause.release()

    def _submit(self, request: Any) -> Any:
        self.request, self._waits = request, True
        with rng.isolated():
            self._pause.release()
            self._turn.acquire()
        if isinstance(self._answer, BaseException):
            raise self._answer
        return self._answer
