"""Writes ``metrics.csv``, the table with one row per round."""

import csv
import os
import re
from collections.abc import Mapping
from pathlib import Path

from lcfl.core.files import replacing

__all__ = ["MetricsTable"]

NUMBER = re.compile(r"-?\d+")


class MetricsTable:
    """A CSV file that gets one row per round. Its first column is ``round``.

    The file is complete after every round. If a metric appears in a later round, the table gets a new column. Values
    are written with enough digits to give the same numbers when they are read back.

    Args:
        path: the file; it is created with its first row.

    Raises:
        ValueError: if the file is not such a table.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[dict[str, str]] = []
        self.columns: list[str] = ["round"]
        if path.is_file():
            with open(path, newline="", encoding="utf-8") as file:
                reader = csv.DictReader(line for line in file if line.endswith("\n"))  # the last one may be incomplete
                self.columns = list(reader.fieldnames or self.columns)
                self.rows = list(reader)
        if any(not NUMBER.fullmatch(row.get("round") or "") or None in row for row in self.rows):
            raise ValueError(
                f"{path}: damaged: every row needs a round and one value per column. Mend it, or remove it to resume "
                "without the rows of the earlier rounds."
            )

    @property
    def numbers(self) -> list[int]:
        """The rounds of the rows."""
        return [int(row["round"]) for row in self.rows]

    def sync(self) -> None:
        """Waits until the rows are on the disk, because a checkpoint of a later round must not be there before them."""
        if self.path.is_file():
            with open(self.path, "ab") as file:
                os.fsync(file.fileno())

    def column(self, name: str) -> list[float]:
        """Returns the values of a metric, of the rounds that have one."""
        return [float(row[name]) for row in self.rows if row.get(name)]

    def cut(self, before: int) -> None:
        """Drops the rows of round `before` and later, which are newer than the checkpoint that the run resumes from."""
        self.rows = [row for row in self.rows if int(row["round"]) < before]
        used = {name for row in self.rows for name, value in row.items() if value != ""}
        self.columns = [name for name in self.columns if name == "round" or name in used]
        self._write_all()

    def append(self, number: int, row: Mapping[str, float]) -> None:
        """Adds the row of one round."""
        text = {"round": str(number)} | {name: repr(float(value)) for name, value in row.items()}
        self.rows.append(text)
        new = [name for name in text if name not in self.columns]
        self.columns += new
        if new or not self.path.is_file():
            self._write_all()
        else:
            with open(self.path, "a", newline="", encoding="utf-8") as file:
                csv.DictWriter(file, self.columns, restval="").writerow(text)

    def _write_all(self) -> None:
        with replacing(self.path) as temporary, open(temporary, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self.columns, restval="", extrasaction="ignore")
            writer.writeheader()
            writer.writerows(self.rows)
