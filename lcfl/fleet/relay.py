"""Hands a message to the process that keeps a node, and starts that process if there is none.

Flower starts a new process for every message. To import torch and read the data each time would take longer than most
local runs. This module imports nothing heavy.
"""

import fcntl
import hashlib
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path

from lcfl.fleet.parcel import MessageError, Parcel

__all__ = ["keep", "relayed"]

IDLE = 300.0  # seconds without a message after which the process ends
STARTING = 600.0  # seconds after which one that has not read its data yet counts as hung
LOOK = 2.0  # seconds between two looks whether it is still needed
WAIT = 0.05


def relayed(parcel: Parcel, command: Sequence[str], key: str) -> Parcel:
    """Returns the answer to a parcel.

    Args:
        parcel: the request.
        command: starts the process; the path of its socket and the process that needs it are added to it.
        key: all that the process depends on. Another key is another process.

    Raises:
        MessageError: if the process ends before it answers, with what it printed last.
    """
    folder = _folder()
    place = folder / hashlib.sha256(key.encode()).hexdigest()[:16]
    with suppress(OSError, EOFError):  # there is none, or it has just ended
        return _ask(place, parcel)
    with ExitStack() as files:
        lock = files.enter_context(place.with_suffix(".lock").open("w"))
        fcntl.flock(lock, fcntl.LOCK_EX)  # two messages at once start one process
        with suppress(OSError, EOFError):
            return _ask(place, parcel)
        log = files.enter_context(place.with_suffix(".log").open("w+b"))
        process = subprocess.Popen(
            [*command, str(place), str(os.getppid())], stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
        end = time.monotonic() + STARTING
        while process.poll() is None and time.monotonic() < end:
            with suppress(OSError, EOFError):  # it does not listen yet, or it has ended
                return _ask(place, parcel)
            time.sleep(WAIT)
        process.kill()
        log.seek(0)
        said = log.read().decode(errors="replace").strip().splitlines()
    raise MessageError(said[-1] if said else "the process that keeps the node ended without a word")


def keep(place: str, needed_by: int, answer: Callable[[Parcel], Parcel]) -> None:
    """Answers parcels until there have been none for a while, or the process that needs the answers has ended.

    Args:
        place: the path of the socket.
        needed_by: the number of that process.
        answer: answers a parcel.
    """
    Path(place).unlink(missing_ok=True)
    with Listener(place, "AF_UNIX") as listener:
        socket = listener._listener._socket  # type: ignore[attr-defined]
        socket.settimeout(LOOK)  # multiprocessing has no option for it
        quiet_since = time.monotonic()
        while time.monotonic() - quiet_since < IDLE and _is_alive(needed_by):
            with suppress(TimeoutError, EOFError, OSError):
                with listener.accept() as connection:
                    _send(connection, answer(_receive(connection)))
                quiet_since = time.monotonic()


def _folder() -> Path:
    """Returns a folder that only this user can enter. The path of a socket must be short."""
    folder = Path(tempfile.gettempdir()) / f"lcfl-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077 or folder.is_symlink():
        raise MessageError(f"{folder} belongs to somebody else or is open to others; remove it.")
    return folder


def _ask(place: Path, parcel: Parcel) -> Parcel:
    with Client(str(place), "AF_UNIX") as connection:
        _send(connection, parcel)
        return _receive(connection)


def _send(connection: Connection, parcel: Parcel) -> None:
    connection.send_bytes(str(len(parcel.arrays)).encode())
    for content in (parcel.text.encode(), *parcel.arrays):
        connection.send_bytes(content)


def _receive(connection: Connection) -> Parcel:
    number = int(connection.recv_bytes())
    text = connection.recv_bytes().decode()
    return Parcel(text, [connection.recv_bytes() for _ in range(number)])


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
