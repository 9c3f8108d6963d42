"""Which checkpoint is meant by ``last``, ``best``, a name or a path; and removing those that are not needed."""

import json
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path

from lcfl.runs.checkpoint import NAME, CheckpointError, checked_parts, read_manifest
from lcfl.runs.directory import run_versions

__all__ = ["drop_after", "find", "newest", "of_run", "remove"]


def find(ckpt_path: str, root: Path, name: str) -> Path:
    """The checkpoint that ``--ckpt_path`` means.

    Args:
        ckpt_path: a checkpoint's directory; a run's, for its newest; ``last``, the newest whole one among
            the versions of that name; or ``best``, the one that the newest run's monitor chose.
        root: ``trainer.default_root_dir``.
        name: ``trainer.name``.

    Raises:
        CheckpointError: if there is none; says where it looked. Of a path only the manifest is read.
    """
    if ckpt_path not in ("last", "best"):
        path = Path(ckpt_path)
        found = newest([path]) if (path / "checkpoints").is_dir() else path
    else:
        runs = run_versions(root, name)
        if not runs:
            raise CheckpointError(
                f"--ckpt_path {ckpt_path}: there is no run of that name: no {root / name}/version_<n>."
            )
        found = newest(runs) if ckpt_path == "last" else _best(runs)
    read_manifest(found)
    return found


def of_run(run: Path, ckpt_path: str | Path) -> Path:
    """The checkpoint of a run directory that is meant: ``last``, the newest; ``best``; its name; or its path.

    Raises:
        CheckpointError: if there is none, or it is another run's.
    """
    if ckpt_path == "last":
        return newest([run])
    if ckpt_path == "best":
        return _best([run])
    folder, path = run / "checkpoints", Path(ckpt_path)
    if path.name == str(path):
        path = folder / path
    if path.resolve().parent != folder.resolve():
        raise CheckpointError(f"{path} is no checkpoint of {run}: give the name of one in {folder}, last or best.")
    return path


def newest(runs: Sequence[Path]) -> Path:
    """The checkpoint of these run directories that was written last and is whole.

    Raises:
        CheckpointError: if there is none.
    """
    candidates = []
    for path in (path for run in runs for path in (run / "checkpoints").glob("round-*.ckpt")):
        try:
            candidates.append((read_manifest(path)["created"], path))
        except CheckpointError as error:
            warnings.warn(f"passed over: {error}", stacklevel=2)
    for _, path in sorted(candidates, reverse=True):
        if _is_whole(path):
            return path
    looked = ", ".join(str(run / "checkpoints") for run in runs)
    raise CheckpointError(f"there is no whole checkpoint; looked in {looked}.")


def drop_after(folder: Path, number: int) -> None:
    """Removes the checkpoints of rounds after `number`: a run that goes on from there has abandoned them."""
    if not folder.is_dir():
        return
    for path in list(folder.iterdir()):
        match = NAME.fullmatch(path.name)
        if match and int(match[1]) > number:
            remove(path)
    best = folder / "best.json"
    if best.is_file() and not (folder / str(json.loads(best.read_text())["checkpoint"])).is_dir():
        best.unlink()


def remove(path: Path) -> None:
    """Removes a checkpoint; killed at any moment, there is none left under its name or a whole one."""
    doomed = path.rename(path.with_name(f".{path.name}.old"))
    shutil.rmtree(doomed)


def _best(runs: Sequence[Path]) -> Path:
    for run in runs:
        choice = run / "checkpoints" / "best.json"
        if choice.is_file():
            return choice.parent / str(json.loads(choice.read_text())["checkpoint"])
    looked = ", ".join(str(run) for run in runs)
    raise CheckpointError(
        f"there is no best checkpoint: no Checkpoint callback with a monitor has chosen one in {looked}."
    )


def _is_whole(path: Path) -> bool:
    try:
        for _ in checked_parts(path, read_manifest(path)):
            pass
    except CheckpointError as error:
        warnings.warn(f"passed over: {error}", stacklevel=2)
        return False
    return True
