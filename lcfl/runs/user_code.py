"""The user's own code in a run, so that a change of it is noticed when the run is resumed, kept or compared."""

import hashlib
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

import lcfl

__all__ = ["changed_modules", "is_installed", "user_code"]

Code = Mapping[str, Mapping[str, str]]  # what `user_code` returns

PATHS = sysconfig.get_paths()
INSTALLED = [*(PATHS[kind] for kind in ("stdlib", "platstdlib", "purelib", "platlib")), str(Path(lcfl.__file__).parent)]


def user_code() -> dict[str, dict[str, str]]:
    """Returns the file and its SHA-256 of each imported module that belongs to no installed package, by name.

    The script that was started is left out, because a change of it may be another option.
    """
    found = {}
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, "__dict__", {}).get("__file__")  # getattr would import what a module imports late
        if (
            isinstance(file, str)
            and file.endswith(".py")
            and not name.startswith("__")
            and not _is_installed(Path(file))
        ):
            try:
                digest = hashlib.sha256(Path(file).read_bytes()).hexdigest()
            except OSError:  # the file is gone
                continue
            found[name] = {"file": str(Path(file).resolve()), "sha256": digest}
    return found


def _is_installed(file: Path) -> bool:
    is_inside = any(file.is_relative_to(folder) for folder in INSTALLED)
    return is_inside or "site-packages" in file.parts or "dist-packages" in file.parts


def is_installed(kind: type) -> bool:
    """Returns whether a class comes from an installed package and not from the user's own files."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return file is not None and _is_installed(Path(file))


def changed_modules(code: Code, other: Code) -> list[str]:
    """Returns the modules that are in both and differ."""
    return [name for name in code if name in other and code[name]["sha256"] != other[name]["sha256"]]
