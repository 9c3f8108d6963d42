"""``lcfl partition -c data.yaml``: who would hold what, before any training."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch.cli import LightningArgumentParser

from lcfl import figures
from lcfl.cli.layered_config import LayeredConfig, names_class
from lcfl.cli.parser import Parser, check_given
from lcfl.data.datamodule import FederatedDataModule

__all__ = ["main", "parser"]


class DataOnly(LayeredConfig):
    """The action of ``-c`` for files that have other groups, too."""

    def taken(self, layer: dict[str, Any]) -> dict[str, Any]:
        """The group ``data``."""
        return {"data": layer.get("data", {})}


def parser(words: Sequence[str] = ()) -> LightningArgumentParser:
    """The command's options: those of the group ``data``, of the subclass if `words` name one, and where to write."""
    made = Parser(prog="lcfl partition", description="Prints and draws who would hold what.")
    made.add_argument("-c", "--config", action=DataOnly, help="A YAML file; several layer, later ones win.")
    made.add_argument("--out", type=str, default=None, help="Folder for partition.json and partition.png.")
    made.add_group("data", FederatedDataModule, names_class(words, "data"))
    return made


def main(args: Sequence[str]) -> None:
    """Prints the table of a partition; with ``--out`` writes the index lists and the picture.

    Raises:
        FileNotFoundError: if the data are not there.
        ValueError: if the partition cannot be made.
    """
    options = parser(args)
    config = options.parse_args(list(args))
    check_given(config.data, "data")
    data: FederatedDataModule = options.instantiate(config).data
    data.prepare_data()
    data.setup()
    population = data.population
    print(population.summary())
    for protocol in data.protocols:
        accuracy = population.majority_accuracy(protocol, data.samples.targets)
        print(f"majority baseline, test/{protocol}: {100 * float(np.nanmean(accuracy)):.2f} %")
    if config.out is not None:
        out = Path(config.out)
        out.mkdir(parents=True, exist_ok=True)
        data.write(out / "partition.json")
        clients = figures.shown(population.num_clients)
        groups = None if population.groups is None else population.groups[clients]
        picture = figures.label_counts(population.label_counts[clients], groups, clients, "Training images")
        figures.save(picture, out / "partition.png")
        print(f"written to {out}")
