"""Reads a method from its configuration file, for programs that use lcfl without its command line."""

import json
from collections.abc import Mapping
from typing import Any

from jsonargparse import ArgumentError

from lcfl.cli.layered_config import LayeredConfig
from lcfl.cli.parser import Parser, check_given, explained
from lcfl.cli.shipped_configs import find
from lcfl.methods.method import Method

__all__ = ["read_method"]

WEIGHTS = ("cluster_weight", "global_weight")


def read_method(name: str, options: Mapping[str, Any] | None = None) -> tuple[Method, dict[str, float]]:
    """Reads a method from its configuration file, as ``lcfl fit -c`` does, and the weights of its pulls.

    The weights belong to the module, so a module for the method is made with both::

        method, weights = lcfl.read_method("lcfed", {"method.clustering.0.num_clusters": 3})
        model = lcfl.FederatedModule(network, **weights)

    Other options of ``model`` are refused in the file, because they are arguments of `FederatedModule`.

    Args:
        name: the name of a file in ``configs/methods``, such as ``ifca``, or the path of a file.
        options: values that replace those in the file, by their names on the command line.

    Returns:
        The method, and ``cluster_weight`` and ``global_weight`` (mu and lambda) by name.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the file or an option is refused.
    """
    parser = Parser(exit_on_error=False)
    parser.add_argument("-c", "--config", action=LayeredConfig)
    parser.add_group("method", Method)
    for weight in WEIGHTS:
        parser.add_argument(f"--model.{weight}", type=float, default=0.0)
    words = ["-c", str(find("methods", name))]
    for option, value in (options or {}).items():
        words.append(f"--{option}={value if isinstance(value, str) else json.dumps(value, default=_plain)}")
    try:
        parsed = parser.parse_args(words)
    except ArgumentError as error:
        why = explained(str(error), parser)
        advice = " Of model, only cluster_weight and global_weight are read; give other options to FederatedModule."
        raise ValueError(why + advice * ("model." in why)) from None
    check_given(parsed["method"], "method", Method)
    return parser.instantiate(parsed)["method"], {weight: parsed[f"model.{weight}"] for weight in WEIGHTS}


def _plain(value: Any) -> Any:
    """Returns numbers and arrays of numpy as Python's."""
    return value.tolist()
