"""Claims and locks the run directory ``<root>/<name>/version_<n>/``."""

import errno
import re
import warnings
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # Windows has no flock, so two writers are not detected there
    fcntl = None  # type: ignore[assignment]

__all__ = ["MEMBERS", "RunDirectory", "how_to_resume", "run_versions"]

MEMBERS = "fleet.json"  # who the clients are, in the directory of a run whose clients are machines of their own
VERSION = re.compile(r"version_(\d+)")
IS_LOCKED = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
HAS_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)  # some network file systems


def run_versions(root: Path, name: str) -> list[Path]:
    """Returns the run directories of that name, the highest version first."""
    paths = [path for path in (root / name).glob("version_*") if VERSION.fullmatch(path.name)]
    return sorted(paths, key=lambda path: -int(path.name.removeprefix("version_")))


def how_to_resume(run: Path) -> str:
    """Returns the option that resumes the newest run, in the form in which a run like this one takes it."""
    return "with ckpt-path='last'" if (run / MEMBERS).is_file() else "with --ckpt_path last"


class RunDirectory:
    """The directory of one run, which is locked as long as this object is open.

    The operating system holds the lock and releases it when the process ends, however it ends. On a file system without
    locks, a warning is issued and the directory is not locked.

    Args:
        path: the directory, which must exist.

    Raises:
        ValueError: if another process writes to it.
        OSError: if locking fails for any other reason.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        file = path / ".lock"
        self._lock: IO[str] | None = open(file, "a")  # noqa: SIM115 - stays open during the run
        if fcntl is None:
            return
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.close()
            if error.errno in IS_LOCKED:
                raise ValueError(
                    f"{path}: another process is writing this run. Wait for it or stop it. To start a separate run, "
                    "leave out --ckpt_path or give another --trainer.name."
                ) from None
            if error.errno not in HAS_NO_LOCKS:
                raise OSError(error.errno, f"cannot be locked: {error.strerror}", str(file)) from None
            warnings.warn(
                f"{path}: this file system has no locks ({error.strerror}), so a second process that writes this run "
                "is not detected. Resume the run in one process at a time.",
                stacklevel=2,
            )

    @classmethod
    def claim(cls, root: Path, name: str) -> "RunDirectory":
        """Creates and locks the next free version of that name. Two processes never get the same version."""
        (root / name).mkdir(parents=True, exist_ok=True)
        versions = run_versions(root, name)
        number = int(versions[0].name.removeprefix("version_")) + 1 if versions else 0
        while True:
            path = root / name / f"version_{number}"
            try:
                path.mkdir()
                return cls(path)
            except FileExistsError:
                number += 1

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The file descriptor that holds the lock, if there is one: a child that inherits it holds the lock, too."""
        return () if self._lock is None or fcntl is None else (self._lock.fileno(),)

    @property
    def checkpoints(self) -> Path:
        """The folder of the run's checkpoints."""
        return self.path / "checkpoints"

    def close(self) -> None:
        """Releases the lock."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None
