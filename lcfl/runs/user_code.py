"""The user's own code in a run, so that a change of it is noticed when the run is resumed, kept or compared."""

import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import lcfl

__all__ = ["Code", "changed_modules", "is_installed", "user_code"]

Code = Mapping[str, Mapping[str, str]]  # what `user_code` returns

PATHS = sysconfig.get_paths()
FOLDERS = [*(PATHS[kind] for kind in ("stdlib", "platstdlib", "purelib", "platlib")), os.path.dirname(lcfl.__file__)]
# Paths are compared as strings: a run that asks pathlib of 4,000 modules waits 50 ms for it.
INSTALLED = tuple(os.path.join(folder, "") for folder in FOLDERS)
PACKAGES = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))


def user_code() -> dict[str, dict[str, str]]:
    """Returns the file and its SHA-256 of each imported module that belongs to no installed package, by name.

    The script that was started is left out, because a change of it may be another option.
    """
    found = {}
    for name, file in sorted(_own_files()):
        with suppress(OSError):  # the file is gone
            digest = hashlib.sha256(Path(file).read_bytes()).hexdigest()
            found[name] = {"file": str(Path(file).resolve()), "sha256": digest}
    return found


def _own_files() -> Iterator[tuple[str, str]]:
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__dict__", {}).get("__file__")  # getattr would import what a module imports late
        if isinstance(file, str) and not _is_installed(file) and file.endswith(".py") and not name.startswith("__"):
            yield name, file


def _is_installed(file: str) -> bool:
    return file.startswith(INSTALLED) or any(packages in file for packages in PACKAGES)


def is_installed(kind: type) -> bool:
    """Returns whether a class comes from an installed package and not from the user's own files."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return file is not None and _is_installed(file)


def changed_modules(code: Code, other: Code) -> list[str]:
    """Returns the modules that are in both and differ."""
    return [name for name in code if name in other and code[name]["sha256"] != other[name]["sha256"]]
