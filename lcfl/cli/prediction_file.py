"""Writes what networks predict as lines of a CSV file. Shapes: B samples in a batch, C classes."""

import argparse
import csv
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from pathlib import Path
from typing import IO

import torch
from torch import Tensor, nn

from lcfl.core.files import atomic_file
from lcfl.data.datasets import FederatedDataset
from lcfl.data.spec import SampleSpec

__all__ = ["BATCH", "Cells", "add_options", "rows_of_new_samples", "write_rows"]

BATCH = 512


def add_options(options: argparse.ArgumentParser) -> None:
    """Adds the options ``--scores`` and ``--out`` to a command's parser."""
    options.add_argument("--scores", action="store_true", help="add a column for each class with its softmax score")
    options.add_argument("--out", type=Path, help="a CSV file, which must not exist yet (default: print)")


@dataclass(frozen=True)
class Cells:
    """The cells of a line for a sample: its target, and what a network predicts.

    Args:
        spec: what a sample looks like.
        classes: the names of the classes; None if they have none.
        has_scores: whether the score of each class has a cell, too.

    Raises:
        ValueError: if targets are masks or tokens, which have no place in a line, or if scores are asked for and
            targets are no classes.
    """

    spec: SampleSpec
    classes: Sequence[str] | None
    has_scores: bool

    def __post_init__(self) -> None:
        shape, is_whole = self.spec.target_shape, self.spec.target_dtype == torch.int64
        if not self._has_labels and len(shape) + is_whole > 1:
            raise ValueError(
                f"predict: targets of shape {shape} have no place in a line; use lcfl.load(RUN).model(...) in Python, "
                "which is the network."
            )
        if self.has_scores and not self._has_labels:
            raise ValueError("predict: got --scores; the targets of this run are numbers, not classes. Leave it out.")

    @property
    def _has_labels(self) -> bool:
        return self.spec.num_classes is not None

    @property
    def target_titles(self) -> list[str]:
        """The titles of the cells of a target."""
        return ["label"] if self._has_labels else _numbered("target", self.spec.target_shape)

    def titles(self, network: nn.Module) -> list[str]:
        """Returns the titles of the cells of a prediction.

        The network says how many there are. It may return more numbers than a target has, such as a mean and a
        variance, and more scores than there are classes.
        """
        if self._has_labels and not self.has_scores:
            return ["prediction", "score"]
        shape = network(self.spec.blank(1)[0]).shape[1:]
        if not self._has_labels:
            return _numbered("output", shape)
        return ["prediction", "score", *(f"score_{self._name(number)}" for number in range(shape[0]))]

    def of_targets(self, targets: Tensor) -> list[list[object]]:
        """Returns the cells of each target of a batch [B, ...]."""
        return [[self._name(label)] for label in targets.tolist()] if self._has_labels else _numbers(targets)

    def of_outputs(self, outputs: Tensor) -> list[list[object]]:
        """Returns the cells of each output [B, ...] of a network.

        For classes, these are prediction and softmax score, and if asked for the score of each class.
        """
        if not self._has_labels:
            return _numbers(outputs)
        scores = outputs.softmax(dim=1)
        values, predictions = scores.max(dim=1)
        rows = zip(predictions.tolist(), values.tolist(), scores.tolist(), strict=True)
        return [
            [self._name(prediction), *(f"{number:.6f}" for number in (value, *(each if self.has_scores else ())))]
            for prediction, value, each in rows
        ]

    def _name(self, number: int) -> object:
        """Returns the name of a class, or its number if it has none: a network may have scores beyond the last one."""
        return number if self.classes is None or number >= len(self.classes) else self.classes[number]


def _numbers(values: Tensor) -> list[list[object]]:
    """Returns the numbers of each sample, with all digits that their type holds."""
    values = values.float() if values.dtype in (torch.bool, torch.bfloat16) else values
    rows: list[list[object]] = values.reshape(len(values), -1).numpy().astype(str).tolist()
    return rows


def _numbered(name: str, shape: Sequence[int]) -> list[str]:
    """Returns the names of columns: ``target`` for one number, or ``target_0``, ``target_1``, ... for several."""
    return [name] if prod(shape) == 1 else [f"{name}_{number}" for number in range(prod(shape))]


@torch.no_grad()
def rows_of_new_samples(
    network: nn.Module, dataset: FederatedDataset, path: str, has_scores: bool
) -> Iterator[list[object]]:
    """Yields the header, then a row for each sample that is not part of the data set: its place and its prediction.

    Args:
        network: the network, in evaluation mode.
        dataset: the data set that the network was trained on, which knows how to read such samples.
        path: a file or a folder of samples.
        has_scores: whether there is a column for the score of each class.
    """
    cells = Cells(dataset.spec, dataset.classes, has_scores)
    inputs, places = dataset.new_inputs(path)
    yield ["file", "row", *cells.titles(network)]
    for start in range(0, len(inputs), BATCH):
        rows = cells.of_outputs(network(inputs[start : start + BATCH]))
        yield from ([*place, *row] for place, row in zip(places[start : start + BATCH], rows, strict=True))


def write_rows(rows: Iterator[list[object]], out: Path | None) -> None:
    """Writes a header and rows to a CSV file and says so, or prints them."""
    rows = chain([next(rows), next(rows)], rows)  # errors occur before the file is created
    if out is None:
        _write(sys.stdout, rows)
        return
    with atomic_file(out) as path, path.open("w", newline="", encoding="utf-8") as file:
        _write(file, rows)
    print(f"written to {out}")


def _write(file: IO[str], rows: Iterable[Sequence[object]]) -> None:
    csv.writer(file, lineterminator="\n").writerows(rows)
