"""``lcfl partition -c data.yaml``: shows which client gets which data, without training."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch.cli import LightningArgumentParser

from lcfl import figures
from lcfl.callbacks.monitor import partition_figure
from lcfl.cli.layered_config import LayeredConfig, names_class
from lcfl.cli.parser import Parser, check_given
from lcfl.core.validation import abbreviated
from lcfl.data.datamodule import FederatedDataModule
from lcfl.data.population import Population
from lcfl.data.protocols import BACKDOOR

__all__ = ["main", "parser"]

MOST_NAMED = 40  # clients in the table


class DataOnly(LayeredConfig):
    """The action of ``-c`` for files that also have other groups."""

    def taken(self, layer: dict[str, Any]) -> dict[str, Any]:
        """Returns the group ``data``."""
        return {"data": layer.get("data", {})}


def parser(words: Sequence[str] = ()) -> LightningArgumentParser:
    """Returns the parser of the command's options, which are those of the group ``data`` and the folder to write to.

    Args:
        words: the words of the command line, which may name a subclass of the data module.
    """
    options = Parser(prog="lcfl partition", description="Prints and draws which client gets which data.")
    options.add_argument(
        "-c", "--config", action=DataOnly, help="a YAML file, which overrides the files given before it"
    )
    options.add_argument("--out", type=str, default=None, help="The folder for partition.json and partition.png.")
    options.add_group("data", FederatedDataModule, names_class(words, "data"))
    return options


def named_clients(population: Population) -> Iterator[str]:
    """Yields a table of the clients that have names: how many samples each has for what. It ends after `MOST_NAMED`."""
    if population.names is None:
        return
    sets = {"train": population.train, "val": population.val}
    sets |= {f"test/{name}": lists for name, lists in population.test.items()}
    width = max(len("client"), *map(len, population.names))
    yield "  ".join([f"{'client':<{width}}", *(f"{name:>8}" for name in sets)])
    for client, name in enumerate(population.names[:MOST_NAMED]):
        counts = (f"{len(lists[client]):>{max(8, len(kind))}}" for kind, lists in sets.items())
        yield "  ".join([f"{name:<{width}}", *counts])
    if len(population.names) > MOST_NAMED:
        yield f"... and {len(population.names) - MOST_NAMED} more"


def main(args: Sequence[str]) -> None:
    """Prints the table of a partition. With ``--out``, writes the index lists and a picture.

    Raises:
        FileNotFoundError: if the data set is missing.
        ValueError: if the partition cannot be made.
    """
    options = parser(args)
    config = options.parse_args(list(args))
    check_given(config.data, "data", FederatedDataModule)
    data: FederatedDataModule = options.instantiate(config).data
    data.prepare_data()
    data.setup()
    population = data.population
    print(population.summary())
    for line in named_clients(population):
        print(line)
    names = data.dataset.classes or ()
    if list(names) != list(map(str, range(len(names)))):
        print(f"classes: {abbreviated([f'{number} {name}' for number, name in enumerate(names)], 20)}")
    labels = data.samples.labels
    if labels is not None:
        for protocol in (name for name in data.protocols if name != BACKDOOR):
            accuracy = population.majority_accuracy(protocol, labels)
            print(f"majority baseline, test/{protocol}: {100 * float(np.nanmean(accuracy)):.2f} %")
    if config.out is not None:
        out = Path(config.out)
        out.mkdir(parents=True, exist_ok=True)
        data.write(out / "partition.json")
        figures.save(partition_figure(population), out / "partition.png")
        print(f"written to {out}")
