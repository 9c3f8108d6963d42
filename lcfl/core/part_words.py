"""Texts of a user's parts, which distinguish two configurations."""

import hashlib
import inspect
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import numpy as np
from torch import Tensor

__all__ = ["beyond_repr", "is_setting", "kept_arguments", "settings_beyond_fields"]


def is_setting(value: Any) -> bool:
    """Returns whether a value is a number or text, or a list of them."""
    if isinstance(value, list | tuple):
        return all(is_setting(each) for each in value)
    return isinstance(value, bool | int | float | str | Enum | np.generic)


def kept_arguments(part: Any) -> dict[str, Any]:
    """Returns the arguments that an object keeps in attributes of their names, or private ones, except for fields.

    A private attribute that is named in `remembers` changes during a run, and is no argument.
    """
    known = {item.name for item in fields(part)} if is_dataclass(part) else set()
    arguments = [each for each in inspect.signature(type(part).__init__).parameters if each not in known]
    private = [f"_{each}" for each in arguments if each not in getattr(part, "remembers", ())]
    kept = getattr(part, "__dict__", {})
    return {name: kept[name] for name in sorted(arguments + private) if is_setting(kept.get(name))}


def settings_beyond_fields(part: Any) -> dict[str, Any]:
    """Returns the `kept_arguments` of a plain subclass of a dataclass; a dataclass itself has only fields."""
    return {} if "__dataclass_fields__" in vars(type(part)) else kept_arguments(part)


def beyond_repr(part: Any) -> str:
    """Returns what the ``repr`` of a dataclass leaves out; empty for most.

    These are the `settings_beyond_fields`, and digests of tensors and arrays, whose own text is rounded and short.
    """
    own = {item.name: getattr(part, item.name) for item in fields(part)}
    digests = {name: _digest(each) for name, each in own.items() if isinstance(each, Tensor | np.ndarray)}
    return "".join(f" {name}={value!r}" for name, value in (settings_beyond_fields(part) | digests).items())


def _digest(values: Tensor | np.ndarray[Any, Any]) -> str:
    """Returns the SHA-256 (hex) of type, shape and numbers."""
    numbers = (values.detach() if isinstance(values, Tensor) else values).tolist()
    return hashlib.sha256(f"{values.dtype} {tuple(values.shape)} {numbers!r}".encode()).hexdigest()
