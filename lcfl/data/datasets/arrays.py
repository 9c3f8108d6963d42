"""Reads numpy's ``.npz`` files. Shapes: n samples in a file, S in all."""

import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from numpy.lib import format as npy
from numpy.typing import NDArray
from torch import Tensor

from lcfl.core.memory import check_memory
from lcfl.core.validation import abbreviated
from lcfl.data.datasets.client_files import PartFiles, refuse
from lcfl.data.datasets.readers import Contents, Reader, number_classes, refuse_non_finite, refuse_unreadable

__all__ = ["Arrays"]

Value = TypeVar("Value")

CLASSES, TRUTHS, REALS, WHOLES = "classes", "truth values", "real numbers", "arrays of whole numbers"


@dataclass(frozen=True)
class Arrays(Reader):
    """Two arrays in each ``.npz`` file: inputs [n, ...] and targets [n, ...].

    Targets of one whole number or one text each are classes: their sorted distinct values over all clients become
    0, ..., C - 1. Other targets reach the loss as they are: real numbers as float32, whole numbers as int64. uint8
    inputs are scaled to 0..1, real numbers become float32, and other whole numbers int64.

    Args:
        inputs: the name of the array of inputs.
        targets: the name of the array of targets.
    """

    suffixes: ClassVar[tuple[str, ...]] = (".npz",)

    inputs: str = "x"
    targets: str = "y"

    def open(self, parts: Sequence[PartFiles]) -> Contents:
        """Reads the targets, and the shapes and types of the inputs."""
        counts, columns = [], []
        first: tuple[str, tuple[int, ...], torch.dtype, tuple[int, ...], str] | None = None
        for part in parts:
            counts.append(0)
            for path in part.paths:
                shape, dtype, targets = self._described(part, path)
                kind = _kind(targets)
                first = first or (path, shape[1:], dtype, targets.shape[1:], kind)
                _check_like(part, path, "inputs", (shape[1:], dtype), (first[1], first[2]), first[0])
                _check_like(part, path, "targets", (targets.shape[1:], kind), (first[3], first[4]), first[0])
                counts[-1] += len(targets)
                columns.append(targets)
        assert first is not None, "a part has files"
        _, inner, dtype, _, kind = first
        classes = None
        if kind in (CLASSES, TRUTHS):
            classes, all_targets = number_classes(str(value) for column in columns for value in column.tolist())
        else:
            all_targets = np.concatenate(columns).astype(np.float32 if kind == REALS else np.int64)
        network_dtype = torch.float32 if dtype == torch.uint8 else dtype
        read = partial(self._inputs, parts, (sum(counts), *inner), dtype)
        in_files = [len(each) for each in columns]
        return Contents(counts, inner, network_dtype, all_targets, classes, read, in_files=in_files)

    def new_inputs(self, part: PartFiles, first: PartFiles) -> tuple[Tensor, list[int]]:
        """Reads the array of inputs of each file."""
        wanted, dtype = self._inputs_in(first, first.paths[0])
        counts = []
        for path in part.paths:
            shape, own = self._inputs_in(part, path)
            _check_like(part, path, "inputs", (shape[1:], own), (wanted[1:], dtype), first.paths[0])
            counts.append(shape[0])
        return self._inputs([part], (sum(counts), *wanted[1:]), dtype), counts

    def _described(self, part: PartFiles, path: str) -> tuple[tuple[int, ...], torch.dtype, NDArray[Any]]:
        """Returns shape and type of the inputs of a file, and its targets."""
        shape, dtype = self._inputs_in(part, path)
        targets = self._read(part, path, "targets", _array)
        if targets.dtype.kind not in "biufU":
            refuse(part.client, path, f"the array {self.targets!r} holds {targets.dtype}; use numbers or text")
        if targets.ndim == 0 or shape[:1] != targets.shape[:1]:
            refuse(
                part.client,
                path,
                f"{self.inputs!r} has the shape {shape} and {self.targets!r} {targets.shape}; the first number must be "
                "the number of samples of both",
            )
        if targets.dtype.kind == "U" and (empty := np.flatnonzero(targets == "")).size:
            refuse(part.client, path, f"{_place(self.targets, empty[0])} is empty; drop samples without a class")
        if _kind(targets) == WHOLES:  # numbers of classes may be of any size
            _refuse_large(part, path, targets, self.targets)
        if targets.dtype.kind == "f":
            targets = _as_float32(targets)
            refuse_non_finite(part, path, targets, partial(_place, self.targets))
        return shape, dtype, targets

    def _inputs_in(self, part: PartFiles, path: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Returns shape and type of the inputs of a file, without reading them."""
        shape, dtype = self._read(part, path, "inputs", _header)
        if dtype.kind not in "iuf":
            refuse(part.client, path, f"the array {self.inputs!r} holds {dtype}; inputs must be numbers")
        if not shape:
            refuse(part.client, path, f"the array {self.inputs!r} is one number; it must have one entry per sample")
        return shape, _tensor_dtype(dtype)

    def _read(self, part: PartFiles, path: str, option: str, read: Callable[[str, str], Value]) -> Value:
        """Returns what `read` finds in the array that an option names."""
        name = getattr(self, option)
        try:
            with np.load(path, allow_pickle=False) as file:
                found = list(file.files)
            if name in found:
                return read(path, name)
        except Exception as error:  # zipfile and numpy raise many kinds for damaged files
            refuse_unreadable(part, path, error)
        advice = f"; name the array in data.dataset.init_args.reader.init_args.{option}"
        refuse(part.client, path, f"it has no array {name!r}, but {abbreviated(found)}", advice)

    def _inputs(self, parts: Sequence[PartFiles], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Reads all inputs [S, ...] into one tensor."""
        size = int(np.prod(shape, dtype=np.float64)) * dtype.itemsize
        check_memory(f"Folders: {shape[0]} inputs need", size, "Use smaller files, or Datasets, which reads items.")
        inputs = torch.empty(shape, dtype=dtype)
        rows = inputs.numpy()
        at = 0
        for part in parts:
            for path in part.paths:
                values = self._read(part, path, "inputs", _array)
                _refuse_large(part, path, values, self.inputs)
                own = rows[at : at + len(values)]
                own[...] = _as_float32(values) if dtype == torch.float32 else values
                refuse_non_finite(part, path, own, partial(_place, self.inputs))
                at += len(values)
        return inputs


def _refuse_large(part: PartFiles, path: str, values: NDArray[Any], name: str) -> None:
    """Refuses whole numbers beyond int64, which would become negative."""
    if values.dtype == np.uint64 and values.max(initial=0) > np.iinfo(np.int64).max:
        refuse(part.client, path, f"the array {name!r} holds {values.max()}, which is too large for int64; renumber it")


def _header(path: str, name: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Returns shape and type of an array of a file, without reading the array."""
    with zipfile.ZipFile(path) as archive, archive.open(f"{name}.npy") as file:
        version = npy.read_magic(file)
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, _, dtype = read(file)
    return shape, dtype


def _array(path: str, name: str) -> NDArray[Any]:
    """Reads an array of a file."""
    with np.load(path, allow_pickle=False) as file:
        array: NDArray[Any] = file[name]
        return array


def _kind(targets: NDArray[Any]) -> str:
    if targets.dtype.kind == "f":
        return REALS
    if targets.ndim > 1:
        return WHOLES
    return TRUTHS if targets.dtype.kind == "b" else CLASSES


def _tensor_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    """Returns the type in which inputs are kept. Systems differ in the type of a whole number, so all become int64."""
    if dtype.kind == "f":
        return torch.float32
    return torch.uint8 if dtype == np.uint8 else torch.int64


def _as_float32(values: NDArray[Any]) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):  # infinity is refused afterwards
        return values.astype(np.float32)


def _check_like(part: PartFiles, path: str, what: str, got: Any, wanted: Any, first: str) -> None:
    if got != wanted:
        words = [f"the shape {shape} of {str(kind).removeprefix('torch.')}" for shape, kind in (got, wanted)]
        refuse(
            part.client,
            path,
            f"each of its {what} has {words[0]}, but in the first file, {first}, {words[1]}; make all files alike",
        )


def _place(name: str, *place: int) -> str:
    return f"{name}[{', '.join(map(str, place))}]"
