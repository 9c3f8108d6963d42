"""The run directory ``<root>/<name>/version_<n>/``: claimed once, locked while it is written."""

import errno
import re
import warnings
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # Windows has no flock: there, two writers are not noticed
    fcntl = None  # type: ignore[assignment]

__all__ = ["RunDirectory", "run_versions"]

VERSION = re.compile(r"version_(\d+)")
IS_LOCKED = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
HAS_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)  # some network file systems


def run_versions(root: Path, name: str) -> list[Path]:
    """The run directories of that name, the highest version first."""
    found = [path for path in (root / name).glob("version_*") if VERSION.fullmatch(path.name)]
    return sorted(found, key=lambda path: -int(path.name.removeprefix("version_")))


class RunDirectory:
    """One run's files. The lock is the operating system's: it ends with the process, however that ends.

    On a file system without locks there is a warning and no lock.

    Raises:
        ValueError: if another process is writing there.
        OSError: if the lock fails in any other way.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        file = path / ".lock"
        self._lock: IO[str] | None = open(file, "w")  # noqa: SIM115 - held open for the run
        if fcntl is None:
            return
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.close()
            if error.errno in IS_LOCKED:
                raise ValueError(
                    f"{path}: another process is writing this run. Wait for it or stop it; for a run beside it, "
                    "start without --ckpt_path or with another --trainer.name."
                ) from None
            if error.errno not in HAS_NO_LOCKS:
                raise OSError(error.errno, f"cannot be locked: {error.strerror}", str(file)) from None
            warnings.warn(
                f"{path}: this file system has no locks ({error.strerror}), so a second process that writes this run "
                "is not noticed: resume it in one process at a time.",
                stacklevel=2,
            )

    @classmethod
    def claim(cls, root: Path, name: str) -> "RunDirectory":
        """The next free version of that name; two processes never get the same one."""
        (root / name).mkdir(parents=True, exist_ok=True)
        taken = run_versions(root, name)
        number = int(taken[0].name.removeprefix("version_")) + 1 if taken else 0
        while True:
            path = root / name / f"version_{number}"
            try:
                path.mkdir()
                return cls(path)
            except FileExistsError:
                number += 1

    @property
    def checkpoints(self) -> Path:
        """The folder of its checkpoints."""
        return self.path / "checkpoints"

    def close(self) -> None:
        """Gives the lock back."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None
