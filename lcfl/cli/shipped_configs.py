"""Finds the configurations that come with lcfl.

They are next to the package in a checkout, and inside the package if it is installed from a wheel.
"""

from pathlib import Path

import lcfl

__all__ = ["configurations", "find", "names"]


def configurations() -> Path:
    """Returns the folder with ``quickstart.yaml``, ``data/``, ``methods/`` and ``papers/``.

    Raises:
        FileNotFoundError: if the installation has none.
    """
    package = Path(lcfl.__file__).parent
    for folder in (package / "configs", package.parent / "configs"):
        if (folder / "methods").is_dir():
            return folder
    raise FileNotFoundError(f"{package}: this installation of lcfl has no configurations; install lcfl from its wheel.")


def names(kind: str) -> list[str]:
    """Returns the names of lcfl's configurations of a kind, ``methods`` or ``data``, sorted."""
    return sorted(each.stem for each in (configurations() / kind).glob("*.yaml"))


def find(kind: str, name: str) -> Path:
    """Returns the path of a configuration, which is given by its path or by its name in lcfl.

    Args:
        kind: ``methods`` or ``data``.
        name: a path, or the name of a file without ``.yaml``.

    Raises:
        FileNotFoundError: if there is neither. The message lists the names in lcfl.
    """
    if Path(name).is_file():
        return Path(name)
    folder = configurations() / kind
    path = folder / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(names(kind))
        raise FileNotFoundError(f"there is no file {name}, and lcfl has no configuration of that name; it has {known}.")
    return path
