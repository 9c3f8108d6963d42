"""Functions that run side by side and are answered together: a client's local run need not know of the others.

Only one of them runs at a time, in the order in which they are given, up to its next question.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from lcfl.core import rng

__all__ = ["Ask", "run_in_lockstep"]

Ask = Callable[[Any], Any]
Result = TypeVar("Result")


def run_in_lockstep(
    works: Sequence[Callable[[Ask], Result]], answer: Callable[[Sequence[Any]], Sequence[Any]]
) -> list[Result]:
    """Runs functions that ask questions; when each of them waits or has ended, all questions are answered at once.

    The global random generators are each function's own: they go on after a question as they were before it.

    Args:
        works: each is given what asks a question, waits, and gives the answer, or raises the answer if that is
            an exception.
        answer: gives the answers to a list of questions, in their order.

    Returns:
        What the functions returned, in their order.

    Raises:
        BaseException: what one of them, or `answer`, raised; none of them goes on after that.
    """
    parts = [_Part(work) for work in works]
    with rng.preserved():
        try:
            waiting = [part for part in parts if part.go_on()]
            while waiting:
                answers = answer([part.question for part in waiting])
                waiting = [part for part, each in zip(waiting, answers, strict=True) if part.go_on(each)]
        finally:
            for part in parts:
                part.end()
    return [part.result for part in parts]


class _Ended(BaseException):
    """Unwinds a function that waits for an answer which will not come."""


class _Part(Generic[Result]):
    """One of the functions, in a thread that stands still but for the time between `go_on` and its next question."""

    result: Result

    def __init__(self, work: Callable[[Ask], Result]) -> None:
        self.question: Any = None
        self._work = work
        self._answer: Any = None
        self._error: BaseException | None = None
        self._waits = False
        self._turn, self._pause = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, daemon=True)

    def go_on(self, answer: Any = None) -> bool:
        """Lets it run with the answer to its question; whether it has asked another one."""
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
        """Unwinds it where it waits, or will ask its next question, and lets its thread end."""
        self._answer = _Ended()
        self._turn.release()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            self.result = self._work(self._ask)
        except BaseException as error:
            self._error = error
        finally:
            self._pause.release()

    def _ask(self, question: Any) -> Any:
        self.question, self._waits = question, True
        with rng.preserved():
            self._pause.release()
            self._turn.acquire()
        if isinstance(self._answer, BaseException):
            raise self._answer
        return self._answer
