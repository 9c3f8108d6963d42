"""The data of a federation as a LightningDataModule."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lcfl import rng
from lcfl.data.datasets import FederatedDataset, RandomLike
from lcfl.data.examples import Examples
from lcfl.data.partition.base import Indices, Partition
from lcfl.data.partition.uniform import IID
from lcfl.data.population import Population, split_share
from lcfl.data.protocols import PROTOCOLS, Split
from lcfl.files import write_json

__all__ = ["FederatedDataModule", "errors_of"]


class FederatedDataModule(LightningDataModule):
    """A data set, dealt out to clients, each with its own training, validation and test images.

    A function of its arguments alone: the partition draws from the stream (seed, "partition"), the split of client
    i from (seed, "split", i), whatever the run's own seed is.

    Args:
        dataset: where images come from.
        partition: who gets which.
        num_clients: N.
        batch_size: images per training step of a client.
        drop_last: leave out the last batch of a pass over a client's images where it is shorter than `batch_size`; a
            client with fewer images keeps its one short batch.
        protocols: test sets to make; ``own_split`` holds out a part of each client's share, ``label_view`` takes the
            official test images of the client's labels. The first one is also ``test_dataloader``'s.
        pool: deal out the official training images, or ``all`` images (training and test merged, as PFLlib does).
        test_fraction: part of each share held out for ``own_split``; unused without that protocol.
        val_fraction: part of the remaining share held out for validation; 0 for none.
        seed: of partition and split.

    Raises:
        ValueError: an argument is outside its range.
    """

    def __init__(
        self,
        dataset: FederatedDataset,
        partition: Partition,
        num_clients: int = 100,
        batch_size: int = 32,
        drop_last: bool = False,
        protocols: Sequence[Literal["own_split", "label_view"]] = ("own_split",),
        pool: Literal["train", "all"] = "train",
        test_fraction: float = 0.25,
        val_fraction: float = 0.1,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.dataset, self.partition = dataset, partition
        self.num_clients, self.batch_size, self.drop_last = num_clients, batch_size, drop_last
        self.protocols = list(protocols)
        self.pool = pool
        self.test_fraction, self.val_fraction = test_fraction, val_fraction
        self.seed = seed
        self._check_arguments()
        self._loaded: tuple[Examples, Population] | None = None

    @property
    def examples(self) -> Examples:
        """All images; there after ``setup``."""
        return self._after_setup()[0]

    @property
    def population(self) -> Population:
        """Every client's images; there after ``setup``."""
        return self._after_setup()[1]

    def prepare_data(self) -> None:
        """Downloads or verifies the files; Lightning calls it on one process."""
        self.dataset.prepare()

    def setup(self, stage: str | None = None) -> None:
        """Reads the data, partitions and splits. The same for every stage, and done once."""
        if self._loaded is not None:
            return
        with errors_of("data.dataset"):
            examples = self.dataset.load()
        if "label_view" in self.protocols and examples.num_train == len(examples):
            raise ValueError(
                f"the protocol label_view tests on official test images, {type(self.dataset).__name__} has none; "
                "use data.protocols: [own_split]"
            )
        pool = examples.targets if self.pool == "all" else examples.targets[: examples.num_train]
        with errors_of("data.partition"):
            shares = self.partition(pool, self.num_clients, rng.generator(self.seed, "partition"))
        split = self._split(shares.indices, examples)
        label_counts = [np.bincount(examples.targets[each], minlength=examples.num_classes) for each in split.train]
        population = Population(
            split.train, split.val, self._tests(split), shares.groups, np.stack(label_counts).astype(np.int64)
        )
        self._loaded = examples, population

    def random_like(self, per_client: int = 8) -> "FederatedDataModule":
        """The same clients, each with a few random inputs of the same shape and classes, dealt out IID: for a trial."""
        dataset = RandomLike(self.dataset, max(self.num_clients * per_client, self.dataset.num_classes))
        return FederatedDataModule(
            dataset,
            IID(),
            self.num_clients,
            self.batch_size,
            drop_last=True,  # these few inputs say nothing about how the last batches of the real data end
            protocols=self.protocols,
            pool=self.pool,
            test_fraction=self.test_fraction,
            val_fraction=self.val_fraction,
            seed=self.seed,
        )

    def train_dataloader(self) -> DataLoader[Any]:
        """All clients' training images pooled and shuffled, for ``lightning.Trainer``: the centralised reference."""
        return self._loader(self.population.train, is_train=True)

    def val_dataloader(self) -> DataLoader[Any]:
        """All clients' validation images pooled."""
        return self._loader(self.population.val)

    def test_dataloader(self) -> DataLoader[Any]:
        """The test images of the first protocol pooled, each image once."""
        return self._loader(self.population.test[self.protocols[0]])

    def write(self, path: str | Path) -> None:
        """Writes ``partition.json``: every index list, groups, label counts and the fingerprints of data and partition.

        The file is replaced as a whole, and ``lcfl.data.partition.FromFile`` reads it.
        """
        write_json(path, {"data_fingerprint": self.examples.fingerprint(), **self.population.to_dict()})

    def _check_arguments(self) -> None:
        for name, value in {"num_clients": self.num_clients, "batch_size": self.batch_size}.items():
            if value < 1:
                raise ValueError(f"data.{name} must be at least 1, got {value}")
        for name, fraction in {"test_fraction": self.test_fraction, "val_fraction": self.val_fraction}.items():
            if not 0 <= fraction < 1:
                raise ValueError(f"data.{name} must lie in [0, 1), got {fraction}")
        if self.pool not in ("train", "all"):
            raise ValueError(f"data.pool must be 'train' or 'all', got {self.pool!r}")
        unknown = [name for name in self.protocols if name not in PROTOCOLS]
        if unknown or not self.protocols or len(set(self.protocols)) < len(self.protocols):
            raise ValueError(
                f"data.protocols must name each protocol once, at least one of {list(PROTOCOLS)}; got {self.protocols}"
            )
        if "own_split" in self.protocols and self.test_fraction == 0:
            raise ValueError("data.test_fraction must be > 0 for the protocol own_split, got 0")

    def _split(self, shares: list[Indices], examples: Examples) -> Split:
        train, val, held_out = [], [], []
        for client, share in enumerate(shares):
            generator = rng.generator(self.seed, "split", client)
            rest, test = share, share[:0]
            if "own_split" in self.protocols:
                # A client with two images or more is tested on at least one and keeps at least one.
                number = min(max(round(self.test_fraction * len(share)), 1), len(share) - 1)
                rest, test = split_share(share, examples.targets[share], number, generator)
            number = round(self.val_fraction * len(rest))
            rest, validation = split_share(rest, examples.targets[rest], number, generator)
            if len(rest) == 0:
                raise ValueError(
                    f"client {client} is left without training samples: {len(share)} in its share, {len(test)} for "
                    f"testing, {len(validation)} for validation; lower data.val_fraction or data.num_clients"
                )
            train.append(rest)
            val.append(validation)
            held_out.append(test)
        official = np.setdiff1d(np.arange(examples.num_train, len(examples)), np.concatenate(shares))
        return Split(train, val, held_out, official, examples.targets)

    def _tests(self, split: Split) -> dict[str, list[Indices]]:
        tests: dict[str, list[Indices]] = {name: PROTOCOLS[name](split) for name in self.protocols}
        for name, lists in tests.items():
            if not any(map(len, lists)):
                raise ValueError(
                    f"the protocol {name} leaves no client a test image with data.pool {self.pool}: own_split needs "
                    "shares of two images or more, label_view official test images that no client holds (data.pool: "
                    "train, or a partition that leaves images over)"
                )
        return tests

    def _after_setup(self) -> tuple[Examples, Population]:
        if self._loaded is None:
            raise RuntimeError("the data is not there yet; call prepare_data() and setup() first")
        return self._loaded

    def _loader(self, lists: list[Indices], is_train: bool = False) -> DataLoader[Any]:
        pooled = _Pooled(self.examples, np.unique(np.concatenate(lists)), is_train)
        drop_last = is_train and self.drop_last and len(pooled) >= self.batch_size
        return DataLoader(
            pooled, batch_size=self.batch_size, shuffle=is_train, drop_last=drop_last, collate_fn=_as_it_is
        )


@contextmanager
def errors_of(option: str) -> Iterator[None]:
    """Lets a ValueError that is raised inside begin with the option that it is about, once."""
    try:
        yield
    except ValueError as error:
        if str(error).startswith(f"{option}: "):
            raise
        raise ValueError(f"{option}: {error}") from error


class _Pooled(Dataset[Any]):
    """Some images as a data set that fetches whole batches, which torch's loader asks for by ``__getitems__``."""

    def __init__(self, examples: Examples, indices: Indices, is_train: bool) -> None:
        self.gather = examples.training_batch if is_train else examples.batch
        self.indices = indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.__getitems__([index])
        return inputs[0], targets[0]

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        return self.gather(self.indices[indices], torch.device("cpu"))


def _as_it_is(batch: Any) -> Any:
    return batch
