"""Reads tables with named columns. Shapes: n rows of a table, p features, t targets, S rows in all."""

import os
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from math import isfinite
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lcfl.core.memory import check_memory
from lcfl.core.validation import abbreviated
from lcfl.data.datasets.client_files import PartFiles, refuse
from lcfl.data.datasets.readers import Contents, Reader, number_classes, refuse_non_finite, refuse_unreadable
from lcfl.data.datasets.table_files import Columns, Unusable, names_in, read_columns
from lcfl.data.names import composed

__all__ = ["Table"]

ROW_NAMES = re.compile(r"__index_level_\d+__")  # pandas' name in Parquet for an index that has none, as after a filter
MISSING_CLASS = ("", "na", "n/a", "null", "?")  # how people write that a class is not known


@dataclass(frozen=True)
class Table(Reader):
    """Tables with named columns in ``.csv`` and ``.parquet`` files, one sample per row.

    Features are numbers; an input is the row of its features as float32. A target is a class, written as text or as
    a whole number: the sorted distinct values over all clients become 0, ..., C - 1. With ``regression`` it is the
    row of its target columns as float32, and has the shape (t,).

    Args:
        target: the column of the target; with ``regression`` also several columns.
        features: the columns of the features, in this order; None for all other columns, in the order of the first
            file, without an index of pandas that has no name.
        regression: whether targets are numbers to predict and not classes.
        delimiter: the sign between two cells of a ``.csv`` file.
    """

    suffixes: ClassVar[tuple[str, ...]] = (".csv", ".parquet")

    target: str | Sequence[str]
    features: Sequence[str] | None = None
    regression: bool = False
    delimiter: str = ","

    def __post_init__(self) -> None:
        targets = self._targets
        if not targets or (self.features is not None and not self.features):
            raise ValueError(
                "Table: target and features need at least one column; features may be null, for all others"
            )
        if len(targets) > 1 and not self.regression:
            raise ValueError(
                f"Table: got {len(targets)} target columns, {abbreviated(targets)}; a class has one. Set regression: "
                "true for several numbers, also for several labels of 0 and 1"
            )
        named = [*targets, *self._features]
        twice = [name for name in dict.fromkeys(named) if named.count(name) > 1]
        if twice:
            raise ValueError(f"Table: target and features name {abbreviated(twice)} more than once; name a column once")
        if len(self.delimiter) != 1:
            raise ValueError(f"Table: delimiter must be one sign, got {self.delimiter!r}")

    @property
    def _targets(self) -> list[str]:
        return [composed(name) for name in ([self.target] if isinstance(self.target, str) else self.target)]

    @property
    def _features(self) -> list[str]:
        return [composed(name) for name in self.features or ()]

    def open(self, parts: Sequence[PartFiles]) -> Contents:
        """Reads all files."""
        size = sum(os.path.getsize(path) for part in parts for path in part.paths if os.path.exists(path))
        first = parts[0].paths[0]
        known = self._names(parts[0], first)
        features = self._chosen_features(parts[0], known)
        counts, inputs, targets = [], [], []
        rounded: dict[str, str] = {}
        for part in parts:
            counts.append(0)
            for path in part.paths:
                there = known if path == first else self._names(part, path)
                self._check_names(part, path, there, [*features, *self._targets], known, first)
                self._check_more(part, path, there, known, first)
                columns = self._read(part, path, features)
                rounded = columns.rounded_in(path) | rounded
                numbers = columns.numbers[:, : len(features)]
                if path == first:
                    self._check_memory(size, numbers.nbytes / max(1, os.path.getsize(path)))
                counts[-1] += len(numbers)
                inputs.append(np.ascontiguousarray(numbers))
                targets.append(columns.numbers[:, len(features) :] if self.regression else columns.texts)
        _warn_of_rounded(rounded)
        all_targets: NDArray[Any]
        classes = None
        if self.regression:
            all_targets = np.concatenate(targets)
        else:
            classes, all_targets = number_classes(value for column in targets for value in column)
        in_files = [len(each) for each in inputs]
        shape, rows = (len(features),), partial(_joined, inputs, sum(counts))
        names = (*features, *(self._targets if self.regression else ()))
        return Contents(counts, shape, torch.float32, all_targets, classes, rows, columns=names, in_files=in_files)

    def new_inputs(self, part: PartFiles, first: PartFiles) -> tuple[Tensor, list[int]]:
        """Reads the features of each row. Other columns, such as the target, may be there or not."""
        like = first.paths[0]
        known = self._names(first, like)
        features = self._chosen_features(first, known)
        rows = []
        rounded: dict[str, str] = {}
        for path in part.paths:
            self._check_names(part, path, self._names(part, path), features, known, like)
            columns = self._read(part, path, features, has_targets=False)
            rows.append(columns.numbers)
            rounded = columns.rounded_in(path) | rounded
        _warn_of_rounded(rounded)
        return torch.from_numpy(np.concatenate(rows)), [len(each) for each in rows]

    def _names(self, part: PartFiles, path: str) -> list[str]:
        """Returns the names of a file's columns."""
        try:
            return names_in(path, self.delimiter)
        except Unusable as error:
            refuse(part.client, path, str(error))
        except Exception as error:
            refuse_unreadable(part, path, error)

    def _chosen_features(self, part: PartFiles, known: list[str]) -> list[str]:
        """Returns the columns of the input: those that are named, or all of the first file's that are no target."""
        if self.features:
            return self._features
        features = [name for name in known if name not in self._targets and not ROW_NAMES.fullmatch(name)]
        if not features:
            refuse(part.client, part.paths[0], f"it has only the column {known[0]!r}; a table needs features, too")
        if "" in features:
            refuse(
                part.client,
                part.paths[0],
                f"column {known.index('') + 1} has no name, as the row numbers that pandas writes. Remove it, name it, "
                "or name the columns to use in data.dataset.init_args.reader.init_args.features",
            )
        return features

    def _check_names(
        self, part: PartFiles, path: str, names: list[str], needed: list[str], known: list[str], first: str
    ) -> None:
        """Refuses a file in which a column that is needed is missing, or is there twice."""
        if missing := [name for name in needed if name not in names]:
            more = f" and {len(missing) - 5} others" * (len(missing) > 5)
            problem = f"it has no column {' and '.join(map(repr, missing[:5]))}{more}, but {abbreviated(names, 20)}"
            if path != first:
                problem += f"; the first file, {first}, has {abbreviated(known, 20)}"
            if len(names) == 1:
                problem += f". {self.delimiter!r} must stand between cells"
                refuse(part.client, path, problem, ". If another sign does, set delimiter")
            others = names if path == first else [name for name in names if name not in needed]
            close = get_close_matches(missing[0], others, n=1)
            meant = f"Did you mean {close[0]!r}? " if close else ""
            option = "target" if missing[0] in self._targets else "features"
            advice = f", or data.dataset.init_args.reader.init_args.{option}"
            refuse(part.client, path, f"{problem}. {meant}Change the file", advice)
        if twice := [name for name in needed if names.count(name) > 1]:
            refuse(part.client, path, f"it has several columns {twice[0]!r}; give each its own name")

    def _check_more(self, part: PartFiles, path: str, names: list[str], known: list[str], first: str) -> None:
        """Refuses a file with columns that the first one lacks, if all columns are features."""
        more = [name for name in names if name not in known and not ROW_NAMES.fullmatch(name)]
        if more and self.features is None:
            refuse(
                part.client,
                path,
                f"it has more columns, {abbreviated(map(repr, more))}; the first file, {first}, has "
                f"{abbreviated(known, 20)}; remove them, or name the columns to use in "
                "data.dataset.init_args.reader.init_args.features",
            )

    def _read(self, part: PartFiles, path: str, features: list[str], has_targets: bool = True) -> Columns:
        """Reads the columns of a file: features, then numbers to predict, and classes as text."""
        targets = self._targets if has_targets else []
        numbers = [*features, *(targets if self.regression else ())]
        texts = [] if self.regression else targets
        try:
            columns = read_columns(path, numbers, texts, self.delimiter)
        except Unusable as error:
            refuse(part.client, path, str(error), error.advice)
        except Exception as error:
            refuse_unreadable(part, path, error)
        refuse_non_finite(part, path, columns.numbers, lambda row, column: f"row {row + 1}: column {numbers[column]!r}")
        if not self.regression:
            self._check_classes(part, path, columns.texts)
        return columns

    def _check_classes(self, part: PartFiles, path: str, values: list[str]) -> None:
        """Refuses missing classes, and real numbers."""
        for value in dict.fromkeys(values):
            try:
                number = float("nan") if value.lower() in MISSING_CLASS else float(value)
            except ValueError:
                continue
            if number.is_integer():
                continue
            place = f"row {values.index(value) + 1}: column {self._targets[0]!r}"
            if isfinite(number):
                refuse(
                    part.client,
                    path,
                    f"{place} is {value}, which is no class; set data.dataset.init_args.reader.init_args.regression="
                    "true to predict numbers",
                )
            refuse(part.client, path, f"{place} is {value or 'empty'}; drop samples without a class")

    def _check_memory(self, size: int, ratio: float) -> None:
        """Checks that the features fit into memory, judged by the first file. Halved, because files differ."""
        check_memory("Folders: the tables need", int(size * ratio / 2), "Name fewer features, or use smaller files.")


def _warn_of_rounded(rounded: Mapping[str, str]) -> None:
    """Warns of whole numbers that float32 cannot hold, by the name of their column."""
    if rounded:
        warnings.warn(
            f"Table: numbers are float32, which rounds whole numbers in {abbreviated(rounded.values())}. Leave "
            "numbers that mean nothing out (features), and make others smaller, such as days since a date.",
            stacklevel=6,
        )


def _joined(inputs: list[NDArray[np.float32]], number: int) -> Tensor:
    """Moves the rows of all files [n, p] into one tensor [S, p]."""
    rows = torch.empty(number, inputs[0].shape[1])
    at = 0
    for position, own in enumerate(inputs):
        rows[at : at + len(own)] = torch.from_numpy(own)
        at += len(own)
        inputs[position] = own[:0]  # so that two copies are never in memory
    return rows
