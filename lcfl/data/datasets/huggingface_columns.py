"""Columns of Hugging Face's data sets as arrays. Shapes: n samples of a split."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Items", "check_columns", "class_names", "column_values", "numbers", "tokens"]

WHERE = "HuggingFace"
NO_CLASS = -1  # stands for a missing value of type ClassLabel


class Items:
    """A split as a map-style data set of (input, target) pairs, with a transform of the inputs.

    Args:
        part: the split.
        columns: the columns that the transform gets: the value of a single one, or a dict of several.
        transform: makes an input of them.
        targets: [n, ...] the targets.
    """

    def __init__(
        self, part: Any, columns: Sequence[str], transform: Callable[[Any], Any], targets: NDArray[Any]
    ) -> None:
        self.targets = targets
        self._part, self._columns, self._transform = part.select_columns(list(columns)), columns, transform

    def __len__(self) -> int:
        """Returns n."""
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        """Reads one row and transforms it."""
        row = self._part[index]
        return self._transform(row[self._columns[0]] if len(self._columns) == 1 else row), self.targets[index]


def check_columns(part: Any, split: str, columns: Sequence[str]) -> None:
    """Raises a ``ValueError`` unless a split has all these columns and at least one sample."""
    for column in columns:
        if column not in part.column_names:
            raise ValueError(
                f"{WHERE}: {split} has no column {column!r}; its columns are {', '.join(part.column_names)}"
            )
    if len(part) == 0:
        raise ValueError(f"{WHERE}: {split} has no samples; name another split, or leave it out")


def class_names(part: Any, column: str) -> list[str] | None:
    """Returns the names of the classes of a ``ClassLabel`` column; None for any other column."""
    return getattr(part.features[column], "names", None)


def column_values(part: Any, split: str, column: str) -> list[Any]:
    """Returns a column of texts, whole numbers or names of classes [n], none of which is missing.

    Raises:
        ValueError: if there is no such column, or a value is null or something else. The message names the row.
    """
    check_columns(part, split, [column])
    values: list[Any] = part.select_columns([column]).with_format("arrow")[:][column].to_pylist()
    names = class_names(part, column)
    for row, value in enumerate(values):
        if not isinstance(value, str | int) or (names is not None and value == NO_CLASS):
            raise ValueError(
                f"{WHERE}: column {column!r} of {split} names owners, so each value must be a text, a whole "
                f"number or a class, got {value!r:.40} in row {row}"
            )
    return values if names is None else [names[value] for value in values]


def numbers(part: Any, split: str, columns: Sequence[str], is_input: bool) -> NDArray[Any]:
    """Reads columns as one array [n, ...].

    A single column keeps its type. Several columns are stacked along a new axis, the second one, as float32.

    Args:
        part: the split.
        split: its name, for messages.
        columns: columns of numbers, of arrays of one shape, or of images of one size.
        is_input: whether images [height, width, channels] become [channels, height, width], and true and false 1.0 and
            0.0, as networks take them.

    Raises:
        ValueError: if a column does not hold numbers, a value is missing, NaN or infinity, or shapes differ.
    """
    arrays = [_numbers(part, split, column, is_input) for column in columns]
    shapes = {each.shape for each in arrays}
    if len(shapes) > 1:
        found = ", ".join(f"{column}: {list(each.shape[1:])}" for column, each in zip(columns, arrays, strict=True))
        raise ValueError(f"{WHERE}: columns of {split} must have one shape to be stacked, got {found}; use a transform")
    return arrays[0] if len(arrays) == 1 else np.stack(arrays, axis=1, dtype=np.float32)


def tokens(
    part: Any, split: str, column: str, tokenizer: Callable[[str], Any], length: int, padding: int
) -> NDArray[np.int64]:
    """Returns the numbers of the tokens of a column of texts [n, length], cut or filled up at the end.

    Raises:
        ValueError: if a text is missing, or the tokenizer returns anything other than whole numbers.
    """
    found = np.full((len(part), length), padding, dtype=np.int64)
    for row, text in enumerate(part.select_columns([column]).with_format("arrow")[:][column].to_pylist()):
        where = f"{WHERE}: column {column!r} of {split}, row {row}:"
        if not isinstance(text, str):
            raise ValueError(f"{where} a tokenizer takes a text, got {text!r:.40}")
        made = tokenizer(text)
        made = np.asarray(made["input_ids"] if isinstance(made, Mapping) else made)
        if made.ndim != 1 or (made.size and made.dtype.kind not in "iu"):
            raise ValueError(
                f"{where} the tokenizer must return a list of whole numbers, or a dict with them as input_ids; got "
                f"{made.dtype} of shape {list(made.shape)}"
            )
        found[row, : min(length, len(made))] = made[:length]
    return found


def _numbers(part: Any, split: str, column: str, is_input: bool) -> NDArray[Any]:
    import datasets

    where = f"{WHERE}: column {column!r} of {split}"
    feature = part.features[column]
    chosen = part.select_columns([column])
    filled = chosen.with_format("arrow")[:][column].is_valid().to_numpy()
    if not filled.all():
        raise ValueError(f"{where} has no value in row {np.flatnonzero(~filled)[0]}; drop or replace the sample")
    values: NDArray[Any] = chosen.with_format("numpy")[:][column]
    if values.dtype.kind == "O":  # older versions of the library return NaN among Python's objects
        with suppress(TypeError, ValueError):
            values = np.array(values.tolist(), dtype=np.float32)
    if values.dtype.kind not in "biuf":
        raise ValueError(f"{where} ({type(feature).__name__}) {_why_not(values)}")
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        row = int(np.flatnonzero(~np.isfinite(values).reshape(len(values), -1).all(axis=1))[0])
        raise ValueError(f"{where} holds NaN, infinity or null in row {row}; drop or replace the sample")
    if isinstance(feature, datasets.Image):
        if values.dtype != np.uint8:
            raise ValueError(f"{where} has images of {values.dtype}, not of bytes; convert them in a transform")
        if is_input:
            return np.ascontiguousarray(np.moveaxis(values, -1, 1)) if values.ndim == 4 else values[:, None]
        return values
    if values.dtype.kind == "b":
        return values.astype(np.float32 if is_input else np.int64)
    # The reader makes int64 of every array of integers, also of bytes, which lcfl would scale to 0..1.
    if values.dtype.kind == "f":
        return values
    try:
        return values.astype(_declared_type(feature), copy=False)
    except TypeError:  # numpy gives whole numbers for durations
        kind = f"{type(feature).__name__} of {feature.dtype}"
        raise ValueError(f"{where} ({kind}) does not hold numbers; use a transform") from None


def _declared_type(feature: Any) -> np.dtype[Any]:
    """Returns the type of the numbers of a column, also if it has lists of them."""
    while hasattr(feature, "feature"):
        feature = feature.feature
    declared: np.dtype[Any] = np.dtype(feature.dtype)
    return declared


def _why_not(values: NDArray[Any]) -> str:
    """Returns the end of a sentence that says why values cannot become one array of numbers."""
    if values.dtype.kind in "US":
        return (
            "holds texts, not numbers; use a tokenizer or a transform, or for labels cast_column with one "
            "ClassLabel(names=[...]) for all splits"
        )
    if values.dtype.kind != "O":
        return f"holds {values.dtype}, not numbers; use a transform"
    first = np.shape(values[0])
    for row, value in enumerate(values):
        if np.shape(value) != first:
            return (
                f"has shape {list(np.shape(value))} in row {row}, but {list(first)} in row 0; all must be alike: use a "
                "transform that resizes, cuts or fills up"
            )
    return "does not hold numbers; use a transform"
