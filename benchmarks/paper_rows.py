"""What ``papers.py`` measures, and the files that hold it."""

import csv
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

__all__ = ["Key", "Point", "Row", "read", "write"]

Key = tuple[str, str, str, str]  # column, method, point, reading
Record = TypeVar("Record", "Row", "Point")


@dataclass(frozen=True)
class Measured:
    """What was measured: of which cell, under which reading, and which kind of model under which test protocol."""

    column: str
    method: str
    point: str
    reading: str
    metric: str
    protocol: str
    model: str

    @property
    def key(self) -> Key:
        """The cell and the reading."""
        return self.column, self.method, self.point, self.reading


@dataclass(frozen=True)
class Row(Measured):
    """The result of a cell with one kind of model.

    Accuracies are in percent. `best` is that of the best evaluated round. `seeds` lists the seeds. Seconds are those of
    one run.
    """

    seeds: str
    mean: float
    std: float
    best: float
    best_std: float
    printed: float
    printed_std: float
    difference: float
    options: str
    rounds: int
    seconds: float
    command: str


@dataclass(frozen=True)
class Point(Measured):
    """What a cell measured after a round, with one seed."""

    seed: int
    round: int
    value: float


def read(path: Path, kind: type[Record]) -> list[Record]:
    """Returns the records of a file; none if there is no file."""
    if not path.is_file():
        return []
    types: dict[str, Any] = {each.name: each.type for each in fields(kind)}
    with path.open(newline="") as file:
        return [kind(**{name: types[name](value) for name, value in row.items()}) for row in csv.DictReader(file)]


def write(path: Path, records: Sequence[Record], kind: type[Record]) -> None:
    """Writes a complete file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", newline="") as file:
        writer = csv.DictWriter(file, [each.name for each in fields(kind)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(map(asdict, records))
    os.replace(temporary, path)
