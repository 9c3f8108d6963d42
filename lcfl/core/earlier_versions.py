"""What earlier versions wrote, in the form in which this version would write it.

Class paths of lcfl 0.1.0 are no longer valid on the command line, and an error names the new path. Checkpoints,
summaries and ``config.yaml`` of that version can still be read.
"""

import re
from collections.abc import Callable
from typing import Any

from lcfl.core.metric_names import TRIVIAL

__all__ = [
    "current_path",
    "current_state",
    "is_implied",
    "is_of_0_1",
    "public_name",
    "with_current_metrics",
    "with_current_names",
    "with_current_paths",
]

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
RENAMED_CLASSES = {"Choice": "ClusterChoice", "Reference": "GlobalReference"}
OWN = re.compile(r"lcfl(?:\.\w+)*\.(\w+)")

# Entries of a description that earlier versions lack.
LATER = ("network_settings", "network_functions", "numbers_kept", "other_groups")
# Options of later versions, with the value that an earlier description implies.
IMPLIED = {"similarity": "low_rank_cosine", "before": "upload", "secure": False, "weights": "uniform"}


def current_path(path: str) -> str:
    """Returns the current class path for one of an earlier version, and any other text unchanged."""
    if path in CLASSES:
        return CLASSES[path]
    for package, now in MOVED.items():
        if path.startswith(f"{package}."):
            name = path.rpartition(".")[2]
            return f"{now}.{RENAMED_CLASSES.get(name, name)}"
    return path


def public_name(path: str) -> str:
    """Returns the name of a class of lcfl without its module, which may change, and any other text unchanged."""
    match = OWN.fullmatch(path)
    return RENAMED_CLASSES.get(match[1], match[1]) if match else path


def with_current_names(description: Any) -> Any:
    """Returns a description (`lcfl.runs.identity.describe`) with the current names of classes.

    A class of lcfl is identified by its name alone, wherever it lives.
    """
    return _renamed(description, public_name)


def with_current_paths(configuration: Any) -> Any:
    """Returns the content of a ``config.yaml`` with the current paths of classes."""
    return _renamed(configuration, current_path)


def _renamed(content: Any, rename: Callable[[str], str]) -> Any:
    if isinstance(content, dict):
        return {key: _renamed(value, rename) for key, value in content.items()}
    if isinstance(content, list):
        return [_renamed(value, rename) for value in content]
    return rename(content) if isinstance(content, str) else content


def is_of_0_1(config: str) -> bool:
    """Returns whether lcfl 0.1 wrote this text of a ``config.yaml``."""
    return config.startswith("# lcfl 0.1.")


def is_implied(key: str, value: Any) -> bool:
    """Returns whether a description of an earlier version that lacks an entry means this value."""
    return key in LATER or (key in IMPLIED and bool(value == IMPLIED[key]))


def with_current_metrics(metrics: dict[str, Any]) -> dict[str, Any]:
    """Returns the metrics of a summary under their current names."""
    return {name.replace("/majority/", f"/{TRIVIAL}/"): value for name, value in metrics.items()}


def current_state(server: dict[str, Any], schema: int) -> dict[str, Any]:
    """Returns the content of the ``state.pt`` of a checkpoint in the current schema.

    Args:
        server: the content, which may be changed.
        schema: the schema of the checkpoint: 2 for lcfl 0.1.0.

    Raises:
        KeyError, AttributeError, TypeError: for content that this schema does not have.
    """
    if schema == 2:
        velocity = server.pop("velocity")
        server["aggregation"] = {} if velocity is None else {"velocity": velocity}
        if (split := server["callbacks"].get("RecursiveBipartition")) is not None:
            split["samples"] = dict.fromkeys(split["updates"], 1)  # which only weights by samples use
    return server
