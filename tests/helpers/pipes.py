"""A pipe that nobody reads."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO


@contextmanager
def closed_pipe() -> Iterator[TextIO]:
    """Yields the end to write to, whose other end is closed, as behind ``| head`` once it has read enough."""
    reader, writer = os.pipe()
    os.close(reader)
    stream = open(writer, "w")  # noqa: SIM115 - closing it fails with what a test leaves in its buffer
    try:
        yield stream
    finally:
        with suppress(BrokenPipeError):
            stream.close()
