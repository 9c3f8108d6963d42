"""Texts of a user's parts, which distinguish two configurations."""

import hashlib
from dataclasses import fields
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor

__all__ = ["attributes_beyond_fields", "beyond_repr"]


def attributes_beyond_fields(part: Any) -> dict[str, Any]:
    """Returns the public attributes that a plain subclass of a dataclass adds, by name; a dataclass has only fields."""
    kind = type(part)
    if "__dataclass_fields__" in vars(kind):
        return {}
    known = {field.name for field in fields(part)}
    return {
        name: value
        for name, value in sorted(vars(part).items())
        if name[0] != "_" and name not in known and not isinstance(getattr(kind, name, None), cached_property)
    }


def beyond_repr(part: Any) -> str:
    """Returns what the ``repr`` of a dataclass leaves out; empty for most.

    These are the `attributes_beyond_fields`, and digests of tensors and arrays, whose own text is rounded and short.
    """
    arrays = {name: each for name, each in vars(part).items() if isinstance(each, Tensor | np.ndarray)}
    digests = {name: hashlib.sha256(np.ascontiguousarray(each).tobytes()).hexdigest() for name, each in arrays.items()}
    return "".join(f" {name}={value!r}" for name, value in (attributes_beyond_fields(part) | digests).items())
