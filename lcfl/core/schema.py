"""What the values in a checkpoint must look like, and the check that they do.

A form is one of these:

- a type; ``object`` allows anything
- None
- an `Array` or a `Number`
- a tuple of alternatives of different types
- ``[form]``, a list
- ``{form: form}``, a dict of any size
- a dict with text as keys, a dict that has just these keys
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import Tensor

__all__ = ["Array", "Forms", "Number", "check_form"]

Forms = Mapping[str, Any]  # by name


@dataclass(frozen=True)
class Array:
    """The form of a dense tensor on the CPU.

    Attributes:
        shape: the size of each dimension: a number, a range, None for any, or a letter for a size that is the same
            everywhere.
        dtype: its dtype.
        low: its smallest allowed entry.
        high: its largest allowed entry, a number or a letter; a letter stands for that size minus one.
    """

    shape: tuple[int | range | str | None, ...]
    dtype: torch.dtype = torch.float32
    low: float = -inf
    high: float | str = inf


@dataclass(frozen=True)
class Number:
    """The form of a number of Python in the range from `low` to `high`, which may be a letter as in `Array`."""

    kind: type
    low: float = -inf
    high: float | str = inf


def check_form(name: str, value: Any, form: Any, sizes: dict[str, int]) -> None:
    """Checks that a value has a form.

    Args:
        name: the name of the value in messages; empty for a whole file.
        value: any tensors and plain values.
        form: see above.
        sizes: the sizes by letter. The letters that are met for the first time are added.

    Raises:
        ValueError: if it has another form; names the part that differs, what it got and what is needed.
    """
    where = name or "the content"
    if isinstance(form, tuple):
        fitting = [each for each in form if _is_kind(value, each)]
        if not fitting:
            raise ValueError(f"{where}: got {_shown(value)}; it must be {' or '.join(_needed(each) for each in form)}")
        return check_form(name, value, fitting[0], sizes)
    if not _is_kind(value, form):
        raise ValueError(f"{where}: got {_shown(value)}; it must be {_needed(form)}")
    if isinstance(form, list):
        for number, item in enumerate(value):
            check_form(f"{name}[{number}]", item, form[0], sizes)
    elif isinstance(form, dict) and _is_record(form):
        if value.keys() != form.keys():
            differing = ", ".join(sorted(map(str, value.keys() ^ form.keys())))
            raise ValueError(f"{where}: {differing} is missing or unknown")
        for key, each in form.items():
            check_form(f"{name}.{key}" if name else key, value[key], each, sizes)
    elif isinstance(form, dict):
        ((of_key, of_item),) = form.items()
        for key, item in value.items():
            check_form(f"a key of {name}", key, of_key, sizes)
            check_form(f"{name}[{key!r}]", item, of_item, sizes)
    elif isinstance(form, Number) and not form.low <= value <= _high(form, sizes):
        raise ValueError(f"{name}: got {value}; it must lie from {form.low} to {_high(form, sizes)}")
    elif isinstance(form, Array):
        _check_array(name, value, form, sizes)


def _check_array(name: str, value: Tensor, form: Array, sizes: dict[str, int]) -> None:
    fits = value.dim() == len(form.shape) and value.dtype == form.dtype
    for got, wanted in zip(value.shape, form.shape, strict=False):
        needed = sizes.setdefault(wanted, got) if isinstance(wanted, str) else wanted
        fits &= got in needed if isinstance(needed, range) else needed in (None, got)
    if not fits:
        known = [_size(each, sizes) for each in form.shape]
        raise ValueError(f"{name}: got {_shown(value)}; it must be {form.dtype} of shape [{', '.join(known)}]")
    high = _high(form, sizes)
    is_bounded = form.low > -inf or high < inf
    if is_bounded and value.numel() and (value.min() < form.low or value.max() > high):
        raise ValueError(f"{name}: got {value.min()} to {value.max()}; its entries must lie from {form.low} to {high}")


def _high(form: Array | Number, sizes: dict[str, int]) -> float:
    return sizes.get(form.high, inf) - 1 if isinstance(form.high, str) else form.high


def _size(wanted: int | range | str | None, sizes: dict[str, int]) -> str:
    if isinstance(wanted, range):
        return f"{wanted[0]} to {wanted[-1]}"
    return "any" if wanted is None else str(sizes.get(wanted, wanted) if isinstance(wanted, str) else wanted)


def _is_record(form: dict[Any, Any]) -> bool:
    return all(isinstance(key, str) for key in form)


def _is_kind(value: Any, form: Any) -> bool:
    """Returns whether a value is of the Python type that a form asks for."""
    if form is None:
        return value is None
    if form is object:
        return True
    if isinstance(form, Array):
        return type(value) is Tensor
    return type(value) is (form.kind if isinstance(form, Number) else form if isinstance(form, type) else type(form))


def _needed(form: Any) -> str:
    if isinstance(form, Array):
        return "a tensor"
    kind = form.kind if isinstance(form, Number) else form
    return "None" if kind is None else kind.__name__ if isinstance(kind, type) else f"a {type(kind).__name__}"


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} of shape {list(value.shape)}"
    return repr(value)[:40] if isinstance(value, bool | int | float | str | None) else f"a {type(value).__name__}"
