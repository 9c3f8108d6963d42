"""Standard output that loses what nobody takes."""

import io
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any, cast

__all__ = ["lossy_output"]

# The jobs of a sweep are threads, and another's descriptor must not be kept for the stream's.
_DROPPING = threading.Lock()


def lossy_output() -> IO[str]:
    """Returns the current standard output for a command that must go on, whatever becomes of its lines.

    If the reader is gone (``| head``) or the disk is full (``>file``), text is lost without an error. It is also
    dropped from the stream's buffer, so that no later flush fails, such as that at the end of a process. The stream
    itself stays as it is, because it is also that of the program around lcfl.
    """
    return cast(IO[str], _LossyOutput())


class _LossyOutput:
    def __init__(self) -> None:
        self._stream: Any = sys.stdout or io.StringIO()  # a process without a console has none

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Writes a text or loses it; returns its length."""
        self._or_lose(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        """Writes what is in the buffer or loses it."""
        self._or_lose(self._stream.flush)

    def _or_lose(self, action: Callable[[], object]) -> None:
        try:
            action()
        except OSError:
            with _DROPPING, suppress(OSError):  # a stream without a file
                self._drop_buffer()

    def _drop_buffer(self) -> None:
        """Flushes the buffer to nowhere, the only way to empty it after an error."""
        number = self._stream.fileno()
        is_inherited = os.get_inheritable(number)
        kept, nowhere = os.dup(number), os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, number)
            self._stream.flush()
        finally:
            os.dup2(kept, number, is_inherited)
            os.close(kept)
            os.close(nowhere)
