"""Reads columns of CSV and Parquet files. Shapes: n rows, m columns of numbers."""

import csv
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from lcfl.data.names import composed

__all__ = ["Columns", "Unusable", "names_in", "read_columns"]

BLOCK = 250_000  # cells that are held as text at a time, about 25 MB


class Unusable(ValueError):
    """Says what is wrong with a file.

    Args:
        problem: what is wrong.
        advice: how else to configure the data set, see `lcfl.data.datasets.client_files.refuse`.
    """

    def __init__(self, problem: str, advice: str = "") -> None:
        super().__init__(problem)
        self.advice = advice


@dataclass(frozen=True, eq=False)
class Columns:
    """Some columns of a file.

    Attributes:
        numbers: [n, m] the columns of numbers.
        texts: [n] the cells of the column of text, without spaces around them; empty if there is none.
        rounded: for each column with whole numbers that float32 cannot hold, the first one, in words.
    """

    numbers: NDArray[np.float32]
    texts: list[str]
    rounded: dict[str, str]

    def rounded_in(self, path: str) -> dict[str, str]:
        """Returns `rounded` with the names of column and file in words."""
        return {name: f"{name!r} ({path}, {words})" for name, words in self.rounded.items()}


def names_in(path: str, delimiter: str) -> list[str]:
    """Returns the names of the columns of a file."""
    if path.lower().endswith(".parquet"):
        return [composed(name) for name in _parquet(path).schema_arrow.names]
    with open(path, newline="", encoding="utf-8-sig") as file:
        names = [composed(name).strip() for name in next(_rows_of(file, delimiter), [])]
    if not any(names):
        raise Unusable("it is empty; the first line must hold the names of the columns")
    return names


def read_columns(path: str, numbers: Sequence[str], texts: Sequence[str], delimiter: str) -> Columns:
    """Reads columns of a file.

    Args:
        path: the file.
        numbers: the m columns of numbers, in the order of the result.
        texts: the column of text, or none.
        delimiter: the sign between two cells of a ``.csv`` file.

    Raises:
        Unusable: If a column of numbers holds something else, or a row has another length than the first line.
    """
    if path.lower().endswith(".parquet"):
        return _read_parquet(path, numbers, texts)
    return _read_csv(path, numbers, texts, delimiter)


def _read_csv(path: str, numbers: Sequence[str], texts: Sequence[str], delimiter: str) -> Columns:
    with open(path, newline="", encoding="utf-8-sig") as file:
        reader = _rows_of(file, delimiter)
        names = [composed(name).strip() for name in next(reader)]
        places = [names.index(name) for name in numbers]
        text = [names.index(name) for name in texts]
        blocks, cells, start = [np.empty((0, len(places)), dtype=np.float32)], [], 0
        rounded: dict[str, str] = {}
        for rows in _blocks(reader, max(1, BLOCK // len(names))):
            for row in rows:
                if len(row) != len(names):
                    raise Unusable(
                        f"row {start + rows.index(row) + 1} has {len(row)} cells, but the first line has {len(names)}"
                    )
            wide = _numbers(rows, places, names, start)

            def is_whole(row: int, place: int, rows: list[list[str]] = rows) -> bool:
                return rows[row][places[place]].strip().lstrip("+-").isdecimal()

            blocks.append(_narrow(wide, [names[place] for place in places], start, rounded, is_whole))
            cells += [row[text[0]].strip() for row in rows] if text else []
            start += len(rows)
    return Columns(np.concatenate(blocks), cells, rounded)


def _rows_of(file: TextIO, delimiter: str) -> Iterator[list[str]]:
    """Yields the rows. A quote that is never closed would make the rest of the file one cell."""
    # A quote may follow the space after a delimiter, as numbers may.
    reader = csv.reader(file, delimiter=delimiter, skipinitialspace=delimiter != " ", strict=True)
    try:
        yield from reader
    except csv.Error as error:
        advice = ", or remove a column with texts this long" if "limit" in str(error) else ""
        raise Unusable(f"line {reader.line_num}: {error}; look for a quote that is not closed{advice}") from None


def _blocks(reader: Iterator[list[str]], size: int) -> Iterator[list[list[str]]]:
    rows = filter(None, reader)  # blank lines are empty rows
    while block := list(islice(rows, size)):
        yield block


def _numbers(rows: list[list[str]], places: list[int], names: list[str], start: int) -> NDArray[np.float64]:
    """Converts columns of text to numbers.

    Args:
        rows: the rows.
        places: the columns.
        names: the names of all columns, for messages.
        start: the number of rows before these, for messages.
    """
    chosen = itemgetter(*places)
    try:
        values = [list(map(_number, chosen(row) if len(places) > 1 else (chosen(row),))) for row in rows]
    except ValueError:
        for number, row in enumerate(rows, start + 1):
            for place in places:
                _check_cell(row[place], f"row {number}: column {names[place]!r}")
        raise
    return np.array(values, dtype=np.float64)


def _narrow(
    wide: NDArray[Any],
    names: Sequence[str],
    start: int,
    rounded: dict[str, str],
    is_whole: Callable[[int, int], bool],
) -> NDArray[np.float32]:
    """Returns numbers [n, m] as float32, and adds the first whole number of each column that it rounds to `rounded`.

    Args:
        wide: the numbers.
        names: the names of the columns.
        start: the number of rows before these, for messages.
        rounded: what has been found by column.
        is_whole: whether a number, by row and column, is written as a whole one. All float64 from 2^53 on are.
    """
    with np.errstate(over="ignore"):
        narrow: NDArray[np.float32] = wide.astype(np.float32)
    too_large = np.argwhere(np.isfinite(wide) & ~np.isfinite(narrow))
    if len(too_large):
        row, place = too_large[0]
        raise Unusable(f"row {start + row + 1}: column {names[place]!r} is {wide[row, place]}, too large for float32")
    size = np.abs(wide)
    if size.max(initial=0) > 2**24:  # up to which float32 holds every whole number
        is_rounded = (narrow != wide) & (wide == np.rint(wide))
        for place in np.flatnonzero(is_rounded.any(axis=0)).tolist():
            row = int(is_rounded[:, place].argmax())
            if size[row, place] >= 2**53 and not is_whole(row, place):
                continue
            value, becomes = int(wide[row, place]), int(narrow[row, place])
            rounded.setdefault(names[place], f"row {start + row + 1}: {value} becomes {becomes}")
    return narrow


def _number(cell: str) -> float:
    """Returns the number in a cell, also of True and False; Python alone would read 1_0 as 10."""
    if "_" in cell:
        raise ValueError(cell)
    try:
        return float(cell)
    except ValueError:
        if (word := cell.strip()) in ("True", "False"):  # as pandas writes columns of bool
            return float(word == "True")
        raise


def _check_cell(cell: str, where: str) -> None:
    try:
        _number(cell)
    except ValueError:
        if cell.strip().lower() in MISSING:
            raise Unusable(f"{where} is {repr(cell) if cell.strip() else 'empty'}; fill it, or drop the row") from None
        raise Unusable(f"{where} is {cell[:40]!r}, which is no number", ADVICE) from None


MISSING = ("", "na", "n/a", "null", "none", "?", "-")  # how people write that a value is not known
ADVICE = (
    "; write a category as columns of 0 and 1, one for each of its values, or name other columns in "
    "data.dataset.init_args.reader.init_args.features; a target that is a class needs regression=false"
)


def _read_parquet(path: str, numbers: Sequence[str], texts: Sequence[str]) -> Columns:
    file = _parquet(path)
    columns = [name for name in file.schema_arrow.names if composed(name) in (*numbers, *texts)]
    table = file.read(columns=columns, use_threads=False)  # ranks may be forked
    table = table.rename_columns([composed(name) for name in table.column_names])
    values = np.empty((table.num_rows, len(numbers)), dtype=np.float32)
    rounded: dict[str, str] = {}
    for place, name in enumerate(numbers):
        column = table.column(name)
        column = (column.cast("float64") if "decimal" in str(column.type) else column).to_numpy()
        if column.dtype.kind not in "biuf":
            if table.column(name).null_count:
                row = table.column(name).is_null().to_pylist().index(True)
                raise Unusable(f"row {row + 1}: column {name!r} is empty; fill it, or drop the row")
            raise Unusable(f"column {name!r} holds {table.column(name).type}, which is no number", ADVICE)
        if column.dtype == np.float16:  # in which 2^24 is infinite
            column = column.astype(np.float32)

        def is_whole(row: int, place: int, kind: str = column.dtype.kind) -> bool:
            return kind in "iu"

        values[:, place] = _narrow(column[:, None], [name], 0, rounded, is_whole)[:, 0]
    cells = table.column(texts[0]).to_pylist() if texts else []
    return Columns(values, [_text(cell, texts[0]) for cell in cells], rounded)


def _text(cell: Any, name: str) -> str:
    """Returns a cell of Parquet as text. Some programs write texts as bytes."""
    if isinstance(cell, bytes):
        try:
            cell = cell.decode()
        except UnicodeDecodeError:
            raise Unusable(f"column {name!r} holds bytes that are no text in UTF-8; write it as text") from None
    return "" if cell is None else str(cell).strip()


def _parquet(path: str) -> Any:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise Unusable('Parquet files need pyarrow: pip install "lcfl[parquet]", or save the table as .csv') from error
    return parquet.ParquetFile(path)
