"""Bytes of tensors and plain values: what a checkpoint may hold, written and read without running any code."""

import io
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["deserialized", "plain_copy", "serialized"]

PLAIN = (type(None), bool, int, float, str)


def plain_copy(value: Any, owner: str) -> Any:
    """A copy that can be read back: numpy's scalars are Python's, tensors have memory of their own.

    A view would be saved with the whole memory it looks into.

    Raises:
        ValueError: naming `owner`, for anything but tensors and plain values.
    """
    if type(value) in (Tensor, torch.nn.Parameter):
        return value.clone()
    if isinstance(value, dict):
        return {plain_copy(key, owner): plain_copy(item, f"{owner}[{key!r}]") for key, item in value.items()}
    if isinstance(value, list):
        return [plain_copy(item, owner) for item in value]
    if type(value) in (tuple, set):
        return type(value)(plain_copy(item, owner) for item in value)
    plain = value.item() if isinstance(value, np.generic) else value
    if type(plain) not in PLAIN and not _is_readable(plain):
        raise ValueError(
            f"{owner} holds a {type(value).__module__}.{type(value).__qualname__}, which cannot be read back from a "
            "checkpoint. Keep tensors, numbers, text and None there, or dicts, lists, tuples and sets of them."
        )
    return plain


def _is_readable(value: Any) -> bool:
    try:
        deserialized(serialized(value))
    except Exception:  # whatever its pickling does
        return False
    return True


def serialized(content: Any) -> bytes:
    """The bytes of tensors and plain values."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def deserialized(content: bytes) -> Any:
    """Only tensors and plain values; no code is run."""
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
