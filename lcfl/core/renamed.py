"""Where the classes of earlier versions are now.

Class paths of lcfl 0.1.0 are no longer valid; an error names the new one. Checkpoints and summaries of that version are
read: a class of lcfl is told from another by its name alone, wherever it lives.
"""

import re
from collections.abc import Callable
from typing import Any

__all__ = ["current_path", "public_name", "with_current_names"]

MOVED = {  # package of lcfl 0.1.0: from where its classes are imported now
    "lcfl.aggregation": "lcfl",
    "lcfl.clustering": "lcfl",
    "lcfl.exchange": "lcfl",
    "lcfl.local": "lcfl",
    "lcfl.upload": "lcfl",
    "lcfl.networks": "lcfl.models",
}
RENAMED = {"Choice": "ClusterChoice", "Reference": "GlobalReference"}
OWN = re.compile(r"lcfl(?:\.\w+)*\.(\w+)")


def current_path(path: str) -> str:
    """The class path that stands for one of an earlier version; any other text as it is."""
    for package, now in MOVED.items():
        if path.startswith(f"{package}."):
            name = path.rpartition(".")[2]
            return f"{now}.{RENAMED.get(name, name)}"
    return path


def public_name(path: str) -> str:
    """The name of a class of lcfl without its module, which may change; any other text as it is."""
    found = OWN.fullmatch(path)
    return RENAMED.get(found[1], found[1]) if found else path


def with_current_names(content: Any, rename: Callable[[str], str] = public_name) -> Any:
    """What an earlier version wrote as this version would write it.

    Args:
        content: a description (`lcfl.runs.identity.describe`), or a configuration.
        rename: of each text in it: `public_name` for a description, `current_path` for a configuration.
    """
    if isinstance(content, dict):
        return {key: with_current_names(value, rename) for key, value in content.items()}
    if isinstance(content, list):
        return [with_current_names(value, rename) for value in content]
    return rename(content) if isinstance(content, str) else content
