"""What the server of a fleet knows of its clients' data: the form of a sample, and how many samples each client has."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lcfl.core.files import write_json
from lcfl.core.schema import Number, check_form
from lcfl.data.datamodule import FederatedDataModule
from lcfl.data.datasets import FederatedDataset
from lcfl.data.partition import IID
from lcfl.data.partition.base import Indices
from lcfl.data.population import Population
from lcfl.data.samples import Samples
from lcfl.fleet.messages import DTYPES

__all__ = ["FleetData", "RemoteDataset", "described_spec", "differing", "sets_of", "spec_digest"]

MOST_NUMBERS = 2**27  # of one sample
SPEC = {
    "shape": [Number(int, 1)],
    "dtype": str,
    "num_classes": (Number(int, 1), None),
    "target_shape": [Number(int, 1)],
    "target_dtype": str,
    "classes": ([str], None),
    "columns": ([str], None),
    "normalisation": ({"mean": [float], "std": [float]}, None),
}
UNKNOWN = {"normalisation": None}  # of earlier versions


def described_spec(dataset: FederatedDataset, samples: Samples) -> dict[str, Any]:
    """Returns what one sample looks like, and the names of classes and columns, as plain values."""
    spec, classes, columns = dataset.spec, dataset.classes, dataset.columns
    return {
        "shape": list(spec.shape),
        "dtype": str(spec.dtype).removeprefix("torch."),
        "num_classes": spec.num_classes,
        "target_shape": list(spec.target_shape),
        "target_dtype": str(spec.target_dtype).removeprefix("torch."),
        "classes": None if classes is None else list(classes),
        "columns": None if columns is None else list(columns),
        "normalisation": samples.normalisation,
    }


def spec_digest(described: Mapping[str, Any]) -> str:
    """Returns the SHA-256 of what `described_spec` returns, the same before and after it has crossed."""
    return hashlib.sha256(json.dumps({**UNKNOWN, **described}, sort_keys=True).encode()).hexdigest()


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Returns in what two descriptions differ. A normalisation that nobody knows differs from none."""
    names = [name for name in SPEC if one.get(name) != other.get(name)]
    return [name for name in names if name not in UNKNOWN or None not in (one.get(name), other.get(name))]


class RemoteDataset(FederatedDataset):
    """A data set that lies on other machines.

    Args:
        described: what `described_spec` returns on each of them.

    Raises:
        ValueError: if it is not of that form.
    """

    def __init__(self, described: Mapping[str, Any]) -> None:
        check_form("spec", {**UNKNOWN, **described}, SPEC, {})
        size = math.prod(described["shape"]) + math.prod(described["target_shape"])
        if size > MOST_NUMBERS or (described["num_classes"] or 0) > MOST_NUMBERS:
            raise ValueError(f"spec: got a sample of {size} numbers; at most {MOST_NUMBERS} are accepted")
        for name in ("dtype", "target_dtype"):
            if described[name] not in DTYPES:
                raise ValueError(f"spec.{name}: got {described[name]!r:.20}; it must be one of {', '.join(DTYPES)}")
        classes, columns = described["classes"], described["columns"]
        self.shape, self.dtype = tuple(described["shape"]), DTYPES[described["dtype"]]
        self.target_shape = tuple(described["target_shape"])
        self.target_dtype = DTYPES[described["target_dtype"]]
        self.num_classes = described["num_classes"]
        self.classes = None if classes is None else tuple(classes)
        self.columns = None if columns is None else tuple(columns)
        identity = sorted((name, each) for name, each in described.items() if name not in UNKNOWN)
        self.digest = hashlib.sha256(repr(identity).encode()).hexdigest()

    def load(self) -> Samples:
        """Returns samples that nobody can read."""
        return _RemoteSamples(self.digest)


class _RemoteSamples(Samples):
    """Samples on other machines. Their content may grow between two runs, so it is not part of the fingerprint."""

    def __init__(self, digest: str) -> None:
        super().__init__(None, 1, None, 1)
        self._digest = digest

    def batch(self, indices: NDArray[np.int64] | Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """Refuses."""
        raise RuntimeError("the samples of a fleet lie on its nodes; the server cannot read them.")

    def fingerprint(self) -> str:
        """Returns the SHA-256 of what one sample looks like."""
        return self._digest


class _FleetPopulation(Population):
    """The clients of a fleet. A resumed run may meet data that have grown, and newcomers."""

    @cached_property
    def fingerprint(self) -> str:
        """The SHA-256 of what must stay the same: how many clients there are, and which numbers are newcomers'."""
        return hashlib.sha256(f"fleet:{self.num_clients};newcomers:{self.newcomers}".encode()).hexdigest()


class FleetData(FederatedDataModule):
    """The data module of the server, which holds no sample of a client.

    Args:
        dataset: what the samples look like.
        sizes: the number of samples of each client, by ``train`` and by the name of each test or validation set.
        names: the name of each client.
        num_proxy: the number of samples in the server's proxy set.
        options: ``newcomers``, ``leavers``, ``batch_size``, ``drop_last``, ``protocols`` and ``seed`` of the run.
    """

    def __init__(
        self,
        dataset: RemoteDataset,
        sizes: Sequence[Mapping[str, int]],
        names: Sequence[str],
        num_proxy: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(dataset, IID(), len(sizes), **options)
        counted: dict[str, list[Indices]] = {
            name: [_counted(size, name) for size in sizes] for name in ("train", *sets_of(self.protocols))
        }
        tests: dict[str, list[Indices]] = {name: counted[f"test/{name}"] for name in self.protocols}
        population = _FleetPopulation(
            counted["train"],
            counted["val/own_split"],
            tests,
            None,
            None,
            newcomers=self.newcomer_clients,
            proxy=np.arange(num_proxy),
            names=tuple(names),
        )
        self._loaded = dataset.load(), population

    def enter(self, client: int, name: str, sizes: Mapping[str, int]) -> None:
        """Makes a newcomer known, which had no samples until now."""
        samples, population = self._after_setup()
        train, test = list(population.train), {kind: list(lists) for kind, lists in population.test.items()}
        val, names = list(population.val), list(population.names or ())
        train[client], val[client] = _counted(sizes, "train"), _counted(sizes, "val/own_split")
        for protocol, lists in test.items():
            lists[client] = _counted(sizes, f"test/{protocol}")
        names[client] = name
        self._loaded = samples, replace(population, train=train, val=val, test=test, names=tuple(names))

    def write(self, path: str | Path) -> None:
        """Writes the names of the clients and how many samples each one has."""
        population = self.population
        sizes = {name: list(map(len, lists)) for name, lists in population.sets(self.protocols).items()}
        train = population.sizes.tolist()
        write_json(path, {"names": list(population.names or ()), "num_samples": {"train": train, **sizes}})


def _counted(sizes: Mapping[str, int], name: str) -> Indices:
    """Returns as many indices as a client has samples in a set; the server knows no more of them than their number."""
    return np.broadcast_to(np.int64(0), sizes.get(name, 0))  # takes no memory


def sets_of(protocols: Sequence[str]) -> list[str]:
    """Returns the names of the sets that a client is measured on, see `lcfl.data.population.Population.sets`."""
    return ["val/own_split", *(f"test/{protocol}" for protocol in protocols)]
