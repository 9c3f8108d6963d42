"""The limit on the seconds that a client's work may take (``trainer.client_timeout``)."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["ClientDeadline", "ClientTookTooLong"]

GRACE = 5.0  # seconds after which a rank that could not be interrupted is ended


class ClientTookTooLong(BaseException):
    """Interrupts a client's work. It is no `Exception`, so that no handler of the user's own code keeps it."""


class ClientDeadline:
    """Ends a client's work that takes too long.

    A signal interrupts the main thread, which then raises `ClientTookTooLong`. This stops code in Python and calls of
    the system. Code that never returns to Python cannot be interrupted: a thread then ends the whole process.

    Args:
        seconds: the limit for one client; None for no limit.
        rank: the number of this rank, for the message.
        note: is told the task that begins, and an empty text when it ends, so that it is known if the process dies.
    """

    def __init__(
        self, seconds: float | None = None, rank: int = 0, note: Callable[[str], None] = lambda task: None
    ) -> None:
        self.seconds, self.rank, self.note = seconds, rank, note
        self._running: dict[object, tuple[str, float]] = {}  # name and limit of each task that has begun and not ended
        self._last_resort: threading.Timer | None = None
        self._has_handler = False  # without one, the signal would end the process

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Lets the signal of the timer raise `ClientTookTooLong` inside. Only the main thread can receive it."""
        is_main = threading.current_thread() is threading.main_thread()
        if self.seconds is None or not is_main or not hasattr(signal, "setitimer"):  # missing on Windows
            yield
            return
        before = signal.signal(signal.SIGALRM, self._interrupt)
        self._has_handler = True
        try:
            yield
        finally:
            self._running.clear()
            self._arm()
            self._has_handler = False
            signal.signal(signal.SIGALRM, before)

    @contextmanager
    def limit(self, task: str, num_clients: int = 1) -> Iterator[None]:
        """Limits the time inside. If several tasks of a rank run at once, the beginning and end of each restart it."""
        self.note(task)
        token = object()  # tasks may have the same name
        try:
            if self.seconds is not None:
                self._running[token] = task, self.seconds * num_clients
                self._arm()
            yield
        finally:
            if self.seconds is not None:
                self._running.pop(token, None)
                self._arm()
            self.note("")

    def _arm(self) -> None:
        """Restarts the timers, or stops them if no task runs."""
        if self._last_resort is not None:
            self._last_resort.cancel()
            self._last_resort = None
        seconds = sum(limit for _, limit in self._running.values())
        if self._has_handler:
            signal.setitimer(signal.ITIMER_REAL, seconds)
        if seconds:
            self._last_resort = threading.Timer(seconds + GRACE, self._end)
            self._last_resort.daemon = True
            self._last_resort.start()

    def _message(self) -> str:
        names = [name for name, _ in self._running.values()]
        more = f" and {len(names) - 1} others at once" if len(names) > 1 else ""
        return (
            f"{names[0] if names else 'a client'}{more}, rank {self.rank}: not done after "
            f"trainer.client_timeout={self.seconds:g} seconds. Look for what it waits for, or raise client_timeout."
        )

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._running:  # it may have ended while the signal was on its way
            raise ClientTookTooLong(self._message())

    def _end(self) -> None:
        if self._running:
            print(f"lcfl: error: {self._message()}", file=sys.stderr, flush=True)
            os._exit(1)
