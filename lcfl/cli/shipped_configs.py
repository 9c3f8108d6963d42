"""The configurations that come with lcfl: beside the package in a checkout, inside it when installed from a wheel."""

from pathlib import Path

import lcfl

__all__ = ["configurations", "find"]


def configurations() -> Path:
    """The folder with ``quickstart.yaml``, ``data/``, ``methods/`` and ``papers/``.

    Raises:
        FileNotFoundError: if the installation has none.
    """
    package = Path(lcfl.__file__).parent
    for folder in (package / "configs", package.parent / "configs"):
        if (folder / "methods").is_dir():
            return folder
    raise FileNotFoundError(f"{package}: this installation of lcfl came without its configurations; install the wheel.")


def find(kind: str, name: str) -> Path:
    """A configuration by path, or by its name among those of lcfl.

    Args:
        kind: ``methods`` or ``data``.
        name: a path, or a file's name without ``.yaml``.

    Raises:
        FileNotFoundError: if there is neither; says which names there are.
    """
    if Path(name).is_file():
        return Path(name)
    folder = configurations() / kind
    path = folder / f"{name}.yaml"
    if not path.is_file():
        names = ", ".join(sorted(each.stem for each in folder.glob("*.yaml")))
        raise FileNotFoundError(f"there is no file {name} and no configuration of that name in lcfl; it has {names}.")
    return path
