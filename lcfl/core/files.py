"""Files and directories that are complete or absent, even if writing them fails, and files that serve as memory."""

import errno
import json
import mmap
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO

__all__ = [
    "check_new",
    "open_regular",
    "read_json",
    "read_regular",
    "atomic_file",
    "remove_leftovers",
    "replacing",
    "sync_directory",
    "atomic_directory",
    "unlinked_memory",
    "write_bytes",
    "write_json",
    "write_whole",
]

# The names of what was being written, replaced (.NAME.PID.old) or removed (.NAME.old).
LEFTOVER = re.compile(r"\.(.+)\.\d+(\.old)?|\..+\.(tmp|old)")


def write_bytes(path: Path, content: bytes) -> None:
    """Writes a file and waits until its content is on the disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file that is complete or, if that fails, as before."""
    with replacing(path) as temporary:
        write_bytes(temporary, content)


def write_json(path: str | Path, content: dict[str, Any], indent: int | None = None) -> None:
    """Does what `write_whole` does, with values as JSON."""
    write_whole(Path(path), json.dumps(content, indent=indent).encode() + b"\n")


def read_json(path: Path) -> Any:
    """Returns the content of a JSON file.

    Raises:
        ValueError: if it is damaged; names the file.
    """
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: damaged ({error}).") from None


def open_regular(path: Path, size: int | None = None) -> BinaryIO:
    """Opens a file for reading.

    Args:
        path: a regular file. A link, a pipe or a device could lead elsewhere or never end.
        size: its size in bytes, if that is known.

    Raises:
        OSError: if it cannot be read, is not a regular file, or has another size.
    """
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    file = os.fdopen(os.open(path, flags), "rb")
    status = os.fstat(file.fileno())
    if not stat.S_ISREG(status.st_mode):
        reason = "it is not a regular file"
    elif size not in (None, status.st_size):
        reason = f"it has {status.st_size} bytes instead of {size}"
    else:
        return file
    file.close()
    raise OSError(errno.EINVAL, reason)


def read_regular(path: Path, size: int | None = None) -> bytes:
    """Returns the content of a file. Takes and raises what `open_regular` does."""
    with open_regular(path, size) as file:
        return file.read()


def check_new(path: Path) -> None:
    """Raises a FileExistsError if a file or folder of that name exists."""
    if path.exists():
        raise FileExistsError(f"{path} exists already; name a new one. Nothing is overwritten.")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields the temporary name of a file to write, in the same folder, which is made if necessary.

    If the block succeeds, one rename turns the file into `path`, so no reader sees half of it. Otherwise it is removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Does what `replacing` does for a file that must be new.

    Raises:
        FileExistsError: if `path` exists already.
    """
    check_new(path)
    with replacing(path) as temporary:
        yield temporary


@contextmanager
def atomic_directory(final: Path, replaces: bool = False) -> Iterator[Path]:
    """Yields a temporary directory to fill.

    If the block succeeds, one rename turns the directory into `final`. Otherwise the directory is removed.

    Args:
        final: the directory.
        replaces: whether an existing one is replaced.

    Raises:
        FileExistsError: if the directory must be new and exists already, at the beginning or at the end.
    """
    if not replaces:
        check_new(final)
    temporary = final.with_name(f".{final.name}.{os.getpid()}")
    replaced = temporary.with_name(f"{temporary.name}.old")
    shutil.rmtree(temporary, ignore_errors=True)  # of a process that had this number before and was killed
    temporary.mkdir(parents=True)
    try:
        yield temporary
        sync_directory(temporary)
        if not replaces:
            check_new(final)
        elif final.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            final.rename(replaced)  # an interrupted removal must not leave half of it under its name
        temporary.rename(final)
        sync_directory(final.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def remove_leftovers(folder: Path) -> None:
    """Removes what killed processes have left of files and directories that they were writing, replacing or removing.

    What a process had put aside to replace it, and could not, gets its name back. It looks into all folders inside,
    too. No other process may write into any of them.
    """
    for path in list(folder.rglob(".*")):
        if not (name := LEFTOVER.fullmatch(path.name)):
            continue
        if name[2] and not (original := path.with_name(name[1])).exists():
            path.rename(original)
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def sync_directory(path: Path) -> None:
    """Makes the names in a directory survive a power failure. Windows cannot open a directory for it."""
    if os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def unlinked_memory(folders: Sequence[str | Path], num_bytes: int, what: str) -> tuple[IO[bytes], mmap.mmap]:
    """Creates a file without a name and maps it into memory. Nothing remains of the file, however the process ends.

    Args:
        folders: the candidates, of which the first one with enough room holds the file.
        num_bytes: the size of the file, at least 1.
        what: the name of the content in error messages.

    Returns:
        The file, and its bytes as memory.

    Raises:
        OSError: if no folder has enough room. Otherwise the process would be killed later, when it writes a page.
    """
    reasons = []
    for folder in folders:
        try:
            file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - its memory outlives this call
            try:
                if hasattr(os, "posix_fallocate"):  # missing on macOS and Windows
                    os.posix_fallocate(file.fileno(), 0, num_bytes)
                else:
                    file.truncate(num_bytes)
                return file, mmap.mmap(file.fileno(), num_bytes)
            except OSError:
                file.close()
                raise
        except OSError as error:
            reasons.append(f"{folder}: {error.strerror}")
    raise OSError(f"no room for {num_bytes / 2**20:.0f} MiB of {what} in {' or '.join(reasons)}")
