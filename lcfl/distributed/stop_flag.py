"""The signals that end a run, as a flag that the ranks share."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch

__all__ = ["StopFlag", "handlers_kept"]

SIGNALS = (signal.SIGINT, signal.SIGTERM)
NOTE_BYTES = 128  # of the task that a rank works on, in memory that the parent sees
LOST = -1  # a rank has failed, so ranks that wait for it need not finish the round


class StopFlag:
    """A signal handler. The first SIGINT or SIGTERM requests a stop after the round, a second one ends everything.

    The flag is made before the ranks are forked, so that they share its number. Forked and spawned ranks leave signals
    to the parent.

    It also holds, in memory that the ranks share, what every rank works on.

    Args:
        num_ranks: the number of ranks that this process starts.
    """

    def __init__(self, num_ranks: int = 0) -> None:
        self._shared = torch.zeros(1, dtype=torch.int32).share_memory_()
        self._notes = torch.zeros(num_ranks, NOTE_BYTES, dtype=torch.uint8).share_memory_()
        self._owner = os.getpid()
        self._asked = False
        self._outer: StopFlag | None = None  # that of a caller, which must hear of a signal as well

    @property
    def signal(self) -> int:
        """The number of the signal received, 0 for none."""
        return max(0, int(self._shared))

    def mark_lost(self) -> None:
        """Notes that a rank has failed."""
        self._shared.fill_(LOST)

    def note(self, rank: int, task: str) -> None:
        """Notes what a rank works on; an empty text for nothing."""
        if len(self._notes):
            text = task.encode()[:NOTE_BYTES].ljust(NOTE_BYTES)
            self._notes[rank] = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def noted(self, rank: int) -> str:
        """Returns what a rank worked on when it ended."""
        return bytes(self._notes[rank].tolist()).rstrip(b" \0").decode(errors="ignore")

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handles a signal."""
        if os.getpid() != self._owner:
            if int(self._shared) == LOST:  # torch ends the siblings of a failed rank with SIGTERM
                os._exit(128 + number)
            self._shared.fill_(number)
        elif self._asked:
            for child in multiprocessing.active_children():
                child.kill()
            raise KeyboardInterrupt(number)
        else:
            self._asked = True
            self._shared.fill_(number)
            if self._outer is not None and not self._outer._asked:
                self._outer(number, frame)

    def install(self) -> None:
        """Installs the flag as the handler of the two signals, in the process that made it.

        Python allows no handlers outside the main thread. There, none is set.
        """
        if os.getpid() == self._owner and threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                before = signal.signal(number, self)
                if isinstance(before, StopFlag) and before is not self:
                    self._outer = before


@contextmanager
def handlers_kept() -> Iterator[None]:
    """Restores the handlers of SIGINT and SIGTERM when the block ends."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)
