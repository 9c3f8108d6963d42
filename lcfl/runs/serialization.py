"""Converts tensors and plain values, the content of a checkpoint, to bytes and back without running any code."""

import hashlib
import io
import os
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

__all__ = ["deserialized", "plain_copy", "serialized", "write_serialized"]

PLAIN = (type(None), bool, int, float, str)


def plain_copy(value: Any, owner: str) -> Any:
    """Returns a copy that can be read back.

    Scalars of numpy become numbers of Python. Tensors are copied, because a view would be saved together with the whole
    memory that it refers to.

    Args:
        value: tensors and plain values, also in dicts, lists, tuples and sets.
        owner: the name of the value in the error message.

    Raises:
        ValueError: if `value` holds anything else.
    """
    if type(value) in (Tensor, torch.nn.Parameter):
        if value.layout != torch.strided:
            raise ValueError(f"{owner} holds a tensor with the layout {value.layout}; store value.to_dense() instead.")
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
            "checkpoint. It may hold tensors, numbers, text and None, and dicts, lists, tuples and sets of these."
        )
    return plain


def _is_readable(value: Any) -> bool:
    try:
        deserialized(serialized(value))
    except Exception:  # pickling an unknown class may raise anything
        return False
    return True


def serialized(content: Any) -> bytes:
    """Returns the bytes of tensors and plain values."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def write_serialized(path: Path, content: Any) -> str:
    """Writes the bytes that `serialized` returns into a file and returns their SHA-256. They are then on the disk.

    It holds no copy of them, which would be as large as the tensors.
    """
    with path.open("wb") as file:
        hashed = _HashedFile(file)
        try:
            torch.save(content, hashed)  # type: ignore[arg-type]  # torch needs only write and flush
        except RuntimeError as error:  # while torch closes the archive, it replaces a full disk or Ctrl-C by its own
            raise error.__context__ or error from None
        file.flush()
        os.fsync(file.fileno())
    return hashed.sha256.hexdigest()


class _HashedFile:
    """A file that hashes what is written into it."""

    def __init__(self, file: BinaryIO) -> None:
        self.sha256, self._file = hashlib.sha256(), file

    def write(self, content: Any) -> int:
        self.sha256.update(content)
        return self._file.write(content)

    def flush(self) -> None:
        """Does nothing, because `write_serialized` flushes the file."""


def deserialized(content: bytes) -> Any:
    """Returns the tensors and plain values that the bytes hold. No code is run.

    The result takes no more memory than the bytes themselves, and no tensor is larger than its memory.

    Raises:
        ValueError: if a part is compressed, or if a tensor repeats its memory, as an expanded tensor does. A copy of
            either could fill the whole memory.
        Exception: whatever torch raises for other content.
    """
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        if sum(part.file_size for part in archive.infolist()) > len(content):
            raise ValueError("a part is larger than the file")
    loaded = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    _check_memory(loaded, set())
    return loaded


def _check_memory(value: Any, seen: set[int]) -> None:
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        if value.layout != torch.strided or value.numel() * value.itemsize > value.untyped_storage().nbytes():
            raise ValueError("a tensor is larger than its memory")
    elif isinstance(value, dict):
        for item in value.values():
            _check_memory(item, seen)
    elif isinstance(value, list | tuple | set):
        for item in value:
            _check_memory(item, seen)
