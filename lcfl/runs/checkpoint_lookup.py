"""Finds the checkpoint that ``last``, ``best``, a name or a path stands for, and removes checkpoints."""

import json
import shutil
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from lcfl.core.files import read_regular
from lcfl.runs.checkpoint import NAME, CheckpointError, DamagedError, check_files, read_manifest, saved_in
from lcfl.runs.directory import run_versions

__all__ = ["drop_after", "find", "find_if_any", "newest", "of_run", "read_newest", "remove"]

Result = TypeVar("Result")


def find(ckpt_path: str, root: Path, name: str) -> Path:
    """Returns the path of the checkpoint that ``--ckpt_path`` stands for.

    Of a checkpoint that is given by its path, only the manifest is read.

    Args:
        ckpt_path: the directory of a checkpoint; a run directory, which stands for its newest checkpoint; ``last``, the
            newest complete checkpoint among all versions of that name; or ``best``, the checkpoint that the monitor of
            the newest run chose.
        root: the option ``trainer.default_root_dir``.
        name: the option ``trainer.name``.

    Raises:
        CheckpointError: if there is no such checkpoint. The message lists the places that were searched.
    """
    if ckpt_path not in ("last", "best"):
        path = Path(ckpt_path)
        checkpoint = newest([path]) if (path / "checkpoints").is_dir() else path
    else:
        runs = run_versions(root, name)
        if not runs:
            raise CheckpointError(
                f"ckpt_path={ckpt_path}: there is no run of that name, as no {root / name}/version_<n> exists."
            )
        checkpoint = newest(runs) if ckpt_path == "last" else _best(runs)
    read_manifest(checkpoint)
    return checkpoint


def find_if_any(ckpt_path: str | None, root: Path, name: str) -> Path | None:
    """Returns the checkpoint that a run of ``fit`` resumes, or None if it starts anew.

    Args:
        ckpt_path: as for `find`; None for a new run; or ``auto``, which is ``last`` if any run of that name has
            checkpoints, and a new run otherwise.
        root: the option ``trainer.default_root_dir``.
        name: the option ``trainer.name``.

    Raises:
        CheckpointError: as `find`; also with ``auto`` if every checkpoint is damaged, because a new run would hide it.
    """
    if ckpt_path is None:
        return None
    if ckpt_path != "auto":
        return find(ckpt_path, root, name)
    if not any(path for run in run_versions(root, name) for path in (run / "checkpoints").glob("round-*.ckpt")):
        return None
    try:
        return find("last", root, name)
    except CheckpointError as error:
        raise CheckpointError(f"ckpt_path=auto: {error} To start a new run, give no checkpoint.") from None


def of_run(run: Path, ckpt_path: str | Path) -> Path:
    """Returns the path of a checkpoint of a run.

    Args:
        run: the run directory.
        ckpt_path: ``last``, the newest checkpoint; ``best``, the one that the run's monitor chose; the name of a
            checkpoint; or its path.

    Raises:
        CheckpointError: if there is no such checkpoint, or if it belongs to another run.
    """
    if ckpt_path == "last":
        return newest([run])
    if ckpt_path == "best":
        return _best([run])
    folder, path = run / "checkpoints", Path(ckpt_path)
    if path.name == str(path):
        path = folder / path
    if path.resolve().parent != folder.resolve():
        raise CheckpointError(
            f"{path} is not a checkpoint of {run}. Give the name of a checkpoint in {folder}, last or best."
        )
    if not path.is_dir():
        raise CheckpointError(
            f"{path}: there is no checkpoint, or no longer: a run keeps its newest ones (keep_last of Checkpoint) and "
            "the best one. Give last for the newest one, which lcfl.load opens if none is named."
        )
    return path


def newest(runs: Sequence[Path]) -> Path:
    """Returns the newest checkpoint of these run directories that has all its files.

    Raises:
        CheckpointError: if there is none.
    """

    def found(path: Path) -> Path:
        check_files(path)
        return path

    return read_newest(runs, found)


def read_newest(runs: Sequence[Path], read: Callable[[Path], Result]) -> Result:
    """Returns what `read` returns for the newest checkpoint of these run directories that is not damaged.

    A damaged one is skipped with a warning. The folders are listed again if a process that writes a run has replaced
    its checkpoints in the meantime.

    Args:
        runs: the run directories.
        read: a function of a checkpoint's path. It raises a `DamagedError` for a damaged one.

    Raises:
        CheckpointError: if there is none.
    """
    listed: set[Path] = set()
    while True:
        paths = {path for run in runs for path in (run / "checkpoints").glob("round-*.ckpt")}
        if paths <= listed:
            break
        candidates: list[tuple[int, Path]] = []
        time_of: dict[Path, float] = {}  # by folder
        for path in sorted(paths):
            try:
                manifest = read_manifest(path)
            except CheckpointError as error:
                _warn_of(path, error)
                continue
            # In a run, the clock may have been set back, but a later round is newer.
            candidates.append((manifest["round"], path))
            time_of[path.parent] = max(manifest["created"], time_of.get(path.parent, manifest["created"]))
        for _, path in sorted(candidates, key=lambda each: (time_of[each[1].parent], *each), reverse=True):
            try:
                return read(path)
            except DamagedError as error:
                _warn_of(path, error)
        listed |= paths
    folders = ", ".join(str(run / "checkpoints") for run in runs)
    why = "" if listed else " A run writes none if trainer.enable_checkpointing is false."
    raise CheckpointError(f"there is no complete checkpoint in {folders}.{why}")


def drop_after(folder: Path, number: int) -> None:
    """Removes the checkpoints of rounds after `number`, which a run that resumes from there has abandoned."""
    if not folder.is_dir():
        return
    for saved, path in saved_in(folder):
        if saved > number:
            remove(path)
    best = folder / "best.json"
    if best.is_file() and not _chosen(best).is_dir():
        best.unlink()


def remove(path: Path) -> None:
    """Removes a checkpoint.

    Its name refers to a complete checkpoint or to nothing, even if the process is killed at any moment.
    """
    doomed = path.rename(path.with_name(f".{path.name}.old"))
    shutil.rmtree(doomed)


def _best(runs: Sequence[Path]) -> Path:
    for run in runs:
        choice = run / "checkpoints" / "best.json"
        if choice.is_file():
            path = _chosen(choice)
            if not path.is_dir():
                raise CheckpointError(
                    f"{choice} names {path.name}, which is gone. In place of best, give last or the name of a "
                    "checkpoint."
                )
            return path
    folders = ", ".join(str(run) for run in runs)
    raise CheckpointError(
        f"there is no best checkpoint, as no Checkpoint callback with a monitor has chosen one in {folders}."
    )


def _chosen(choice: Path) -> Path:
    """Returns the path of the checkpoint that a file ``best.json`` names."""
    try:
        name = json.loads(read_regular(choice))["checkpoint"]
        if not NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not the name of a checkpoint")
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(
            f"{choice}: damaged ({error}). Remove it, and name a checkpoint in that folder in place of best."
        ) from None
    return choice.parent / str(name)


def _warn_of(path: Path, error: CheckpointError) -> None:
    """Warns of a damaged checkpoint, but not of one that its writer has removed in the meantime."""
    if path.exists():
        warnings.warn(f"skipped: {error}", stacklevel=3)
