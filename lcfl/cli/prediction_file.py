"""Writes what networks predict as lines of a CSV file. Shapes: B samples in a batch, C classes."""

import argparse
import csv
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor, nn

from lcfl.core.files import atomic_file, check_new
from lcfl.core.validation import abbreviated, shortened
from lcfl.data.datasets import FederatedDataset
from lcfl.data.spec import SampleSpec
from lcfl.fleet.data import described_spec

__all__ = ["BATCH", "Cells", "add_options", "check_out", "rows_of_new_samples", "write_rows"]

BATCH = 512


def add_options(options: argparse.ArgumentParser, needs_data: bool = False) -> None:
    """Adds the options ``--data``, ``--scores`` and ``--out`` to a command's parser."""
    options.add_argument(
        "--data",
        dest="new",
        type=Path,
        required=needs_data,
        metavar="PATH",
        help="a file or a folder of new samples, with or without targets",
    )
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
                f"predict: targets of shape {shape} have no place in a line; write a model with lcfl export, or lcfl "
                "fleet export on a node, and use it in Python."
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

    def titles(self, outputs: Tensor) -> list[str]:
        """Returns the titles of the cells of the outputs [B, ...] of a network.

        They may be more numbers than a target has, such as a mean and a variance, and more scores than there are
        classes.
        """
        if not self._has_labels:
            return _numbered("output", outputs.shape[1:])
        numbers = range(outputs.shape[1]) if self.has_scores else ()
        return ["prediction", "score", *(f"score_{self._name(number)}" for number in numbers)]

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
    network: nn.Module, dataset: FederatedDataset, path: Path, has_scores: bool, then: Mapping[str, Any]
) -> Iterator[list[object]]:
    """Yields the header, then a row for each sample that is not part of the data set: its place and its prediction.

    Args:
        network: the network, in evaluation mode.
        dataset: the data set that the network was trained on, which knows how to read such samples.
        path: a file or a folder of samples.
        has_scores: whether there is a column for the score of each class.
        then: what samples looked like in training: some entries of `lcfl.fleet.data.described_spec`.

    Raises:
        ValueError: if the samples are unlike those of the training, or if the network refuses them.
    """
    cells = Cells(dataset.spec, dataset.classes, has_scores)
    samples, places = dataset.new_samples(str(path))
    now = described_spec(dataset, samples)
    if changed := [name for name in then if name in now and now[name] != then[name]]:
        pairs = "; ".join(f"{name}: {_told(now[name])}, and {_told(then[name])} in the run" for name in changed)
        raise ValueError(
            f"predict: the model was trained with other data than now ({pairs}), so its predictions would mean "
            "something else. Restore the data and their configuration, and bring the new samples into their form."
        )
    for start in range(0, len(places), BATCH):
        of_batch = places[start : start + BATCH]
        inputs, _ = samples.batch(np.arange(start, start + len(of_batch)), torch.device("cpu"))
        try:
            outputs = network(inputs)
        except Exception as error:  # of any kind, because the network may be the user's own
            first, last = (f"{file} row {row}" for file, row in (of_batch[0], of_batch[-1]))
            raise ValueError(
                f"predict: the network cannot compute with the samples from {first} to {last} "
                f"({type(error).__name__}: {shortened(str(error), 300)}). Correct them."
            ) from error
        if start == 0:
            yield ["file", "row", *cells.titles(outputs)]
        yield from ([*place, *row] for place, row in zip(of_batch, cells.of_outputs(outputs), strict=True))


def _told(value: Any) -> str:
    return f"[{abbreviated(value, 20)}]" if isinstance(value, list) else str(value)


def check_out(out: Path | None, new: Path | None) -> None:
    """Refuses a file of predictions that exists already, or that would be in the folder of new samples.

    Raises:
        FileExistsError: if it exists.
        ValueError: if it would be read as samples the next time.
    """
    if out is None:
        return
    check_new(out)
    if new is not None and new.is_dir() and out.resolve().is_relative_to(new.resolve()):
        raise ValueError(f"--out: got {out}, in the folder of --data, where it would be read as samples; move it.")


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
