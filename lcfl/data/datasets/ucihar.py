"""UCI HAR: activities that the sensors of a smartphone have recorded. Shapes: S samples in all."""

from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from lcfl.data.datasets.base import FederatedDataset
from lcfl.data.owners import Owners
from lcfl.data.samples import Samples, TensorSamples

__all__ = ["UCIHAR"]

PARTS = ("train", "test")
# Acceleration of the body, its angular velocity, and acceleration with gravity, each along three axes.
CHANNELS = [f"{sensor}_{axis}" for sensor in ("body_acc", "body_gyro", "total_acc") for axis in "xyz"]


class UCIHAR(FederatedDataset):
    """UCI HAR: 7,352 + 2,947 windows of 2.56 s of 30 people with a smartphone at the waist, of 6 activities.

    Classes 0 to 5 are walking, walking upstairs, walking downstairs, sitting, standing and lying. `ByOwner` makes each
    person a client. The official test samples are those of nine other people, so the 21 people with training samples
    become clients with ``data.pool: train`` and all 30 with ``data.pool: all``.

    Args:
        root: the folder ``UCI HAR Dataset`` of the official archive, or the folder that it lies in.
        signals: ``features`` for the 561 features of each window, which the authors scaled to -1..1, or ``inertial``
            for the raw signals: nine channels of 128 values, in the order of the sensors' files.

    Raises:
        ValueError: if `signals` is something else, files do not fit together, or a value is unusable. The message
            names the file.
    """

    num_classes = 6

    def __init__(self, root: str = "data", signals: Literal["features", "inertial"] = "features") -> None:
        self.root, self.signals = root, signals
        self.shape = (561,) if signals == "features" else (len(CHANNELS), 128)

    def prepare(self) -> None:
        """Verifies that all files exist."""
        for part in PARTS:
            for path in [self._file(f"y_{part}"), self._file(f"subject_{part}"), *self._inputs_of(part)]:
                if not path.is_file():
                    self._missing(path)

    def owners(self, by: str | None = None) -> Owners:
        """Returns the people, whose names are their numbers."""
        if by is not None:
            raise ValueError(f"UCIHAR: there is no column {by!r}; leave column out, because people are the owners")
        train, test = map(self._people, PARTS)
        return Owners.of_column(np.concatenate([train, test]), len(train))

    def load(self) -> Samples:
        """Returns the training samples, then the test samples, in the order of the files."""
        inputs, labels, sizes = [], [], []
        for part in PARTS:
            people = self._people(part)
            channels = [_rows(path, self.shape[-1], people) for path in self._inputs_of(part)]
            inputs.append(channels[0] if self.signals == "features" else np.stack(channels, axis=1))
            labels.append(self._column(f"y_{part}", "an activity's number, 1 to 6", 6, people) - 1)
            sizes.append(len(people))
        values = torch.from_numpy(np.concatenate(inputs))
        return TensorSamples(values, np.concatenate(labels), sizes[0], self.num_classes)

    def _inputs_of(self, part: str) -> list[Path]:
        if self.signals == "features":
            return [self._file(f"X_{part}")]
        return [self._file(f"{channel}_{part}", "Inertial Signals") for channel in CHANNELS]

    def _file(self, name: str, *folders: str) -> Path:
        inner = Path(self.root, "UCI HAR Dataset")
        home = inner if inner.is_dir() else Path(self.root)
        return home.joinpath(name.rpartition("_")[2], *folders, f"{name}.txt")

    def _missing(self, path: Path) -> None:
        raise FileNotFoundError(
            f"UCIHAR: there is no file {str(path)!r}. Download 'Human Activity Recognition Using Smartphones' from the "
            "UCI Machine Learning Repository, unpack it (the archive may hold another one), and set "
            "data.dataset.init_args.root to the folder 'UCI HAR Dataset'."
        )

    def _people(self, part: str) -> NDArray[np.int64]:
        return self._column(f"subject_{part}", "a person's number, at least 1")

    def _column(
        self, name: str, what: str, most: int | None = None, people: NDArray[np.int64] | None = None
    ) -> NDArray[np.int64]:
        """Returns the whole numbers of a file with one of them per line."""
        path = self._file(name)
        if not path.is_file():
            self._missing(path)
        values = _rows(path, 1, people)[:, 0]
        wrong = (values != np.rint(values)) | (values < 1) | (values > (most or np.inf))
        if wrong.any():
            line = int(np.flatnonzero(wrong)[0])
            raise ValueError(f"UCIHAR: line {line + 1} of {str(path)!r} has {values[line]:g}; it must be {what}")
        return values.astype(np.int64)


def _rows(path: Path, length: int, people: NDArray[np.int64] | None) -> NDArray[np.float32]:
    """Returns the numbers of a file, one row of `length` per sample.

    Numbers are separated by any white space, because some copies end their lines with a bare carriage return.

    Args:
        path: the file.
        length: the length of a row.
        people: the person of each sample; None for as many samples as there are.
    """
    where = f"UCIHAR: {str(path)!r}"
    try:
        values = np.array(path.read_text(encoding="ascii", errors="replace").split(), dtype=np.float32)
    except ValueError as error:
        raise ValueError(f"{where} must hold numbers: {error}") from None
    number = len(values) // length
    if len(values) == 0 or len(values) % length or (people is not None and number != len(people)):
        samples = "" if people is None else f", and {len(people)} samples as the file of subjects"
        raise ValueError(
            f"{where} has {len(values)} numbers; it must have {length} per sample{samples}: it is cut off, or belongs "
            "to other files"
        )
    rows = values.reshape(-1, length)
    broken = np.flatnonzero(~np.isfinite(rows).all(axis=1))
    if broken.size:
        owner = "" if people is None else f", which is of person {people[broken[0]]}"
        raise ValueError(f"{where} holds NaN or infinity in line {broken[0] + 1}{owner}; replace the value")
    return rows
