"""The current names of classes that earlier versions had under other paths.

Class paths of lcfl 0.1.0 are no longer valid, and an error names the new path. Checkpoints and summaries of that
version can still be read, because a class of lcfl is identified by its name alone, wherever it lives.
"""

import re
from collections.abc import Callable
from typing import Any

__all__ = ["current_path", "public_name", "with_current_names"]

MOVED = {  # package of lcfl 0.1.0: package from which its classes are imported now
    "lcfl.aggregation": "lcfl",
    "lcfl.clustering": "lcfl",
    "lcfl.exchange": "lcfl",
    "lcfl.local": "lcfl",
    "lcfl.upload": "lcfl",
    "lcfl.networks": "lcfl.models",
}
CLASSES = {  # classes of lcfl 0.1.0 that were named with their module
    "lcfl.federation.Federation": "lcfl.Federation",
    "lcfl.hooks.Callback": "lcfl.Callback",
    "lcfl.method.Method": "lcfl.Method",
    "lcfl.module.FederatedModule": "lcfl.FederatedModule",
}
RENAMED = {"Choice": "ClusterChoice", "Reference": "GlobalReference"}
OWN = re.compile(r"lcfl(?:\.\w+)*\.(\w+)")


def current_path(path: str) -> str:
    """Returns the current class path for one of an earlier version, and any other text unchanged."""
    if path in CLASSES:
        return CLASSES[path]
    for package, now in MOVED.items():
        if path.startswith(f"{package}."):
            name = path.rpartition(".")[2]
            return f"{now}.{RENAMED.get(name, name)}"
    return path


def public_name(path: str) -> str:
    """Returns the name of a class of lcfl without its module, which may change, and any other text unchanged."""
    match = OWN.fullmatch(path)
    return RENAMED.get(match[1], match[1]) if match else path


def with_current_names(content: Any, rename: Callable[[str], str] = public_name) -> Any:
    """Returns what an earlier version wrote in the form in which this version would write it.

    Args:
        content: a description (`lcfl.runs.identity.describe`) or a configuration.
        rename: the function applied to each text in `content`: `public_name` for a description, `current_path` for a
            configuration.
    """
    if isinstance(content, dict):
        return {key: with_current_names(value, rename) for key, value in content.items()}
    if isinstance(content, list):
        return [with_current_names(value, rename) for value in content]
    return rename(content) if isinstance(content, str) else content
