"""Several labels: 2,417 yeast genes, each with some of 14 functional classes.

The data come with the package river: ``pip install --no-deps river``.
"""

import csv
import gzip
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

NUM_FEATURES = 103


class Genes(Dataset[tuple[Tensor, Tensor]]):
    """Pairs of expression levels [103] and labels [14], 0 or 1."""

    def __init__(self) -> None:
        found = find_spec("river")
        if found is None or found.origin is None:
            raise ModuleNotFoundError("the genes come with a package: pip install --no-deps river")
        with gzip.open(Path(found.origin).parent / "datasets" / "yeast.csv.gz", "rt") as file:
            rows = list(csv.reader(file))[1:]
        numbers = torch.tensor([[float(cell) for cell in row] for row in rows])
        levels = numbers[:, :NUM_FEATURES]
        self.levels, self.labels = levels / levels.std(dim=0), numbers[:, NUM_FEATURES:]

    def __len__(self) -> int:
        return len(self.levels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.levels[index], self.labels[index]
