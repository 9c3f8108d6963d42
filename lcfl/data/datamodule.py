"""The data of a federation as a LightningDataModule."""

import copy
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from numbers import Real
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader

from lcfl.core import rng
from lcfl.core.client_names import client_number
from lcfl.core.files import write_json
from lcfl.core.validation import check_instance, check_values, errors_of
from lcfl.data.datasets import FederatedDataset, RandomLike
from lcfl.data.faults import Backdoor, ClientFault, find_faulty
from lcfl.data.membership import Membership
from lcfl.data.owners import TEST, Owners
from lcfl.data.partition.base import ClientShares, Indices, Partition, Pool
from lcfl.data.partition.uniform import IID
from lcfl.data.pooled import pooled_loader
from lcfl.data.population import Population, label_counts
from lcfl.data.protocols import BACKDOOR, PROTOCOLS, UNTRANSFORMED, tests_by_protocol
from lcfl.data.proxy import without_proxy
from lcfl.data.samples import Samples
from lcfl.data.train_test_split import split_shares
from lcfl.data.transforms import ClientTransform, groups_and_views
from lcfl.data.views import View, ViewedSamples

__all__ = ["FederatedDataModule"]

MOST_CLIENTS = 10**7  # the server keeps numbers for each
NUM_CLIENTS = 100  # of a partition that does not know its clients
Protocol = Literal["own_split", "label_view", "label_proportional", "global", "global_plain"]


class FederatedDataModule(LightningDataModule):
    """Deals a data set out to clients and gives each one training, validation and test samples.

    The result depends only on the arguments. The partition draws from the stream (seed, "partition") and the split of
    client i from (seed, "split", i), independently of the run's seed.

    Args:
        dataset: the data set that provides the samples.
        partition: the rule that deals samples out to clients.
        num_clients: number of clients N, including newcomers. None for the number that the partition knows (`ByOwner`,
            `FromFile`), and 100 for any other partition.
        newcomers: number (20) or fraction (0.2) of clients that are kept out of the federation for ``lcfl onboard``,
            drawn from the stream (seed, "newcomers"); or a list of names or numbers of these clients. They have
            samples, but are never sampled, trained with, clustered or evaluated.
        leavers: clients that leave, as name or number of the client -> first round without it. From that round on the
            client is excluded from sampling, means, clusterings and evaluations.
        batch_size: number of samples per training step of a client.
        drop_last: whether to drop the last batch of a pass over a client's samples if it is shorter than
            ``batch_size``. A client with fewer samples keeps its only batch.
        protocols: test protocols to make test sets for. ``own_split`` holds out a part of each client's share. The
            others take official test samples: ``label_view`` those of the client's labels, ``label_proportional`` a
            part with the client's label proportions, ``global`` all, and ``global_plain`` all without client
            transforms. ``test_dataloader`` uses the first protocol.
        proxy: number of official test samples, drawn at random, that the server keeps as its proxy set. Methods may
            test models on it (AS-CFL's D_test). No client trains on, validates on or is tested on these samples, and
            the server sees them unchanged.
        pool: the samples that are dealt out: ``train`` for the official training samples, or ``all`` for training and
            test samples merged, as in PFLlib.
        test_fraction: part of each share that is held out for ``own_split``; unused without that protocol.
        val_fraction: part of the remaining share that is held out for validation; 0 for none.
        client_transforms: transforms of each client's samples and labels, applied in this order to training, validation
            and test samples alike.
        faults: what clients do wrong, for tests of robust methods: `LabelFlip`, `ScaledUpdate` and others. No
            evaluation measures these clients. With a `Backdoor`, ``backdoor`` is one more test protocol.
        seed: seed of partition, split, client transforms and faults.

    Raises:
        TypeError: if data set or partition are of another class.
        ValueError: if an argument is outside its range.
    """

    def __init__(
        self,
        dataset: FederatedDataset,
        partition: Partition,
        num_clients: int | None = None,
        newcomers: int | float | list[int | str] = 0,
        leavers: Mapping[int | str, int] | None = None,
        batch_size: int = 32,
        drop_last: bool = False,
        protocols: Sequence[Protocol] = ("own_split",),
        proxy: int = 0,
        pool: Literal["train", "all"] = "train",
        test_fraction: float = 0.25,
        val_fraction: float = 0.1,
        client_transforms: Sequence[ClientTransform] = (),
        faults: Sequence[ClientFault] = (),
        seed: int = 0,
    ) -> None:
        values, parameters = locals().copy(), inspect.signature(FederatedDataModule.__init__).parameters
        for name, each in parameters.items():
            check_values(f"data.{name}", {name: (each.annotation, values[name])})
        super().__init__()
        self.dataset, self.partition = dataset, partition
        self.batch_size, self.drop_last = batch_size, drop_last
        if not isinstance(newcomers, list):
            check_instance("data.newcomers", newcomers, Real, " That many clients are drawn at random.")
        check_instance("data.leavers", leavers or {}, Mapping)
        if isinstance(protocols, str):
            raise ValueError(f"data.protocols: got the text {protocols!r}; it must be a list, such as [{protocols!r}].")
        self.protocols: list[str] = list(protocols)
        self.proxy = proxy
        self.pool = pool
        self.test_fraction, self.val_fraction = test_fraction, val_fraction
        self.client_transforms = list(client_transforms)
        self.faults = list(faults)
        self.seed = seed
        check_instance("data.dataset", dataset, FederatedDataset, " Datasets makes one of your own data sets.")
        check_instance("data.partition", partition, Partition)
        self.num_clients = self._known_clients() if num_clients is None else num_clients
        self.newcomers: int | float | list[int] = (
            [self._number_of("newcomers", each) for each in newcomers] if isinstance(newcomers, list) else newcomers
        )
        self.leavers = {self._number_of("leavers", client): first for client, first in (leavers or {}).items()}
        if len(self.leavers) < len(leavers or {}):
            raise ValueError(f"data.leavers: got {leavers}, in which one client is given twice; give it once.")
        self._check_arguments()
        backdoors = [fault for fault in self.faults if isinstance(fault, Backdoor)]
        if len(backdoors) > 1:
            raise ValueError("data.faults: got several Backdoors, but the protocol backdoor measures one; leave one.")
        self._backdoor = backdoors[0] if backdoors else None
        self.protocols += [BACKDOOR] * (self._backdoor is not None)
        self._loaded: tuple[Samples, Population] | None = None
        self._seen: dict[tuple[View, ...], Samples] = {}

    @property
    def samples(self) -> Samples:
        """All samples by index, available after ``setup``.

        Possibly only those of ``population.samples_in_use`` are in memory.
        """
        return self._after_setup()[0]

    @property
    def population(self) -> Population:
        """The clients and their samples, available after ``setup``."""
        return self._after_setup()[1]

    @property
    def newcomer_clients(self) -> tuple[int, ...]:
        """The clients that are kept out of the federation, in ascending order."""
        return self._membership.newcomer_clients

    @property
    def num_initial_clients(self) -> int:
        """The number of clients at the start of the federation: N without the newcomers."""
        return self.num_clients - len(self.newcomer_clients)

    def remaining_clients(self, number: int) -> Tensor:
        """Returns the mask ``[N]`` of the clients in round `number`: all without newcomers and those who left."""
        return self._membership.in_round(number)

    @property
    def _membership(self) -> Membership:
        return Membership(self.num_clients, self.newcomers, self.leavers, self.seed)

    def seen_by(self, client: int, protocol: str = "own_split") -> Samples:
        """Returns all samples as a client sees them under a test protocol.

        Clients that see them alike get the same object.
        """
        _, population = self._after_setup()
        seen_as = self.protocols[0] if protocol == BACKDOOR else protocol
        views = () if population.views is None or seen_as in UNTRANSFORMED else population.views[client]
        if protocol == BACKDOOR:
            assert self._backdoor is not None, "only a backdoor has this protocol"
            views = (*views, self._backdoor.stamp())
        return self._through(views)

    def trained_on(self, client: int, number: int) -> Samples:
        """Returns all samples as a client sees them when it trains in a round: perhaps with a fault."""
        samples, population = self._after_setup()
        faults = population.faults_of(client, number)
        views: tuple[View, ...] = () if population.views is None else population.views[client]
        for fault in faults:
            views += fault.views(samples.num_classes)
        return self._through(views)

    def _through(self, views: tuple[View, ...]) -> Samples:
        samples, _ = self._after_setup()
        if not views:
            return samples
        if views not in self._seen:
            self._seen[views] = ViewedSamples(samples, views)
        return self._seen[views]

    def prepare_data(self) -> None:
        """Downloads or verifies the files, unless they are loaded already. Lightning calls it on one process."""
        if self._loaded is None:
            self.dataset.prepare()

    def setup(self, stage: str | None = None) -> None:
        """Reads the data, partitions it and splits the shares. This is done only once, whatever the stage."""
        if self._loaded is not None:
            return
        with errors_of("data.client_transforms"):
            for transform in self.client_transforms:
                transform.check(self.dataset.spec)
        with errors_of("data.faults"):
            for fault in self.faults:
                fault.check(self.dataset.spec)
        with errors_of("data.dataset"):
            samples = self.dataset.load()
            owners = self.dataset.owners(self.partition.owner_column)
        population = self._deal(samples, owners)
        if population.names is not None:  # of clients that were dealt out, everybody knows which labels they have
            population.warn_of_lonely_labels(self.dataset.classes)
        self._loaded = samples.subset(population.samples_in_use), population

    def _deal(self, samples: Samples, owners: Owners | None) -> Population:
        """Partitions the samples and splits the clients' shares."""
        official = [name for name in self.protocols if name not in ("own_split", BACKDOOR)]
        if official and samples.num_train == len(samples):
            raise ValueError(
                f"the protocol {official[0]} tests on official test samples, but {type(self.dataset).__name__} has "
                "none; use data.protocols: [own_split]"
            )
        size = len(samples) if self.pool == "all" else samples.num_train
        pool = Pool.of_owners(size, samples.labels, owners, keeps_parts=self.pool == "train")
        with errors_of("data.partition"):
            shares = self.partition(pool, self.num_clients, rng.generator(self.seed, "partition"))
        test_fraction = self.test_fraction if "own_split" in self.protocols else 0.0
        split = split_shares(shares, samples, test_fraction, self.val_fraction, self.seed)
        split, proxy = without_proxy(split, self.proxy)
        with errors_of("data.client_transforms"):
            groups, views = groups_and_views(
                self.client_transforms, shares.groups, self.num_clients, samples.num_classes, self.seed
            )
        target = None if self._backdoor is None else self._backdoor.target
        tests = tests_by_protocol(split, self.protocols, views, self.pool, target)
        members = torch.nonzero(self.remaining_clients(-1)).flatten().tolist()
        with errors_of("data.faults"):
            faulty = find_faulty(self.faults, members, shares.names, self.seed)
        return Population(
            train=split.train,
            val=split.val,
            test=tests,
            groups=groups,
            label_counts=label_counts(samples, split.train, views or [()] * self.num_clients),
            overlapping=shares.overlapping,
            views=views,
            partition_groups=shares.groups,
            newcomers=self.newcomer_clients,
            proxy=proxy,
            names=shares.names,
            own_val=shares.val,
            own_test=shares.test,
            faulty=faulty,
        )

    def alone(self, client: int, number: int, num_clients: int) -> "FederatedDataModule":
        """Returns the data as the machine of one client sees them, after ``setup``; see `Population.alone`."""
        samples, population = self._after_setup()
        own = population.alone(client, number, num_clients)
        data = copy.copy(self)
        data.num_clients, data._loaded, data._seen = num_clients, (samples.subset(own.samples_in_use), own), {}
        return data

    def behind(self, number: int) -> "FederatedDataModule":
        """Returns the data of clients that come after others, after ``setup``; see `Population.behind`."""
        samples, population = self._after_setup()
        data = copy.copy(self)
        data.num_clients, data._loaded = number + self.num_clients, (samples, population.behind(number))
        return data

    def random_like(self, per_client: int = 8) -> "FederatedDataModule":
        """Returns a data module with the same clients and a few random inputs for each, for a trial run.

        The inputs have the same shape and classes and are dealt out IID.
        """
        members = torch.nonzero(self.remaining_clients(-1)).flatten().tolist()
        dataset = RandomLike(self.dataset, max(self.num_clients * per_client, self.dataset.num_classes or 1))
        return FederatedDataModule(
            dataset,
            _OneGroup() if self.client_transforms else IID(),
            self.num_clients,
            cast(int | float | list[int | str], self.newcomers),
            cast(Mapping[int | str, int], self.leavers),
            self.batch_size,
            drop_last=True,  # a few inputs cannot show how long the last batches of the real data are
            protocols=[name for name in self.protocols if name != BACKDOOR],  # type: ignore[misc]
            proxy=min(self.proxy, 1),  # the protocols need the few random test inputs, so the proxy set takes only one
            pool=self.pool,
            test_fraction=self.test_fraction,
            # Of so few inputs, a small part would be none. A partition may bring validation samples of its own.
            val_fraction=max(self.val_fraction, 0.2),
            client_transforms=self.client_transforms,
            # Whoever is drawn for the trial then has every fault; one client is left for the evaluation.
            faults=[replace(fault, clients=members[1:], rounds=None) for fault in self.faults],
            seed=self.seed,
        )

    def train_dataloader(self) -> DataLoader[Any]:
        """Returns all clients' training samples, pooled and shuffled.

        With ``lightning.Trainer`` they give the centralised reference.
        """
        return self._loader(self.population.train, is_train=True)

    def val_dataloader(self) -> DataLoader[Any]:
        """Returns all clients' validation samples, pooled."""
        return self._loader(self.population.val)

    def test_dataloader(self) -> DataLoader[Any]:
        """Returns the test samples of the first protocol, pooled.

        A sample occurs once for each way in which clients see it.
        """
        protocol = self.protocols[0]
        return self._loader(self.population.test[protocol], protocol=protocol)

    def write(self, path: str | Path) -> None:
        """Writes ``partition.json``: index lists, groups, label counts and the fingerprints of data and partition.

        An existing file is replaced as a whole. `lcfl.data.partition.FromFile` can read the file.
        """
        names = {"classes": self.dataset.classes, "columns": self.dataset.columns}
        known = {name: list(each) for name, each in names.items() if each is not None}
        about = {"data_fingerprint": self.samples.fingerprint(), "normalisation": self.samples.normalisation}
        write_json(path, {**about, **known, **self.population.to_dict()})

    def _known_clients(self) -> int:
        """Returns the number of clients that the partition knows, before samples are read."""
        pool = self._known_pool()
        with errors_of("data.partition"):
            known = self.partition.num_clients(pool)
        return NUM_CLIENTS if known is None else known

    def _known_pool(self) -> Pool:
        """Returns what is known of the pool before samples are read: their owners."""
        with errors_of("data.dataset"):
            owners = self.dataset.owners(self.partition.owner_column)
        if owners is None:
            return Pool(0)
        size = len(owners.part) if self.pool == "all" else int((owners.part != TEST).sum())
        return Pool.of_owners(size, None, owners, keeps_parts=self.pool == "train")

    def _number_of(self, option: str, client: int | str) -> int:
        """Returns the number of a client, which may be given by its name."""
        with errors_of(f"data.{option}"):
            return client_number(client, self._names if isinstance(client, str) else None, self.num_clients)

    @cached_property
    def _names(self) -> tuple[str, ...] | None:
        """The names of the clients, before samples are read; None if the partition knows no clients."""
        pool, generator = self._known_pool(), rng.generator(self.seed, "partition")
        with errors_of("data.partition"):
            is_known = self.partition.num_clients(pool) is not None
            return self.partition.split(pool, self.num_clients, generator).names if is_known else None

    def _check_arguments(self) -> None:
        for name, value in {"num_clients": self.num_clients, "batch_size": self.batch_size}.items():
            if value < 1:
                raise ValueError(f"data.{name} must be at least 1, got {value}")
        if self.num_clients > MOST_CLIENTS:
            raise ValueError(f"data.num_clients: got {self.num_clients}; at most {MOST_CLIENTS} are allowed.")
        self._membership.check()
        for name, fraction in {"test_fraction": self.test_fraction, "val_fraction": self.val_fraction}.items():
            if not 0 <= fraction < 1:
                raise ValueError(f"data.{name} must lie in [0, 1), got {fraction}")
        if self.proxy < 0:
            raise ValueError(f"data.proxy must be 0 or a number of samples, got {self.proxy}")
        unknown = [name for name in self.protocols if name not in PROTOCOLS]
        if unknown or not self.protocols or len(set(self.protocols)) < len(self.protocols):
            raise ValueError(
                f"data.protocols must name each protocol once, at least one of {list(PROTOCOLS)}; got {self.protocols}"
            )
        if "own_split" in self.protocols and self.test_fraction == 0:
            raise ValueError("data.test_fraction must be > 0 for the protocol own_split, got 0")

    def _loader(self, lists: list[Indices], is_train: bool = False, protocol: str = "own_split") -> DataLoader[Any]:
        seen = [self.seen_by(client, protocol) for client in range(self.num_clients)]
        drop_last = is_train and self.drop_last
        return pooled_loader(seen, lists, self.batch_size, is_train, drop_last)

    def _after_setup(self) -> tuple[Samples, Population]:
        if self._loaded is None:
            raise RuntimeError("the data is not loaded yet; call prepare_data() and setup() first")
        return self._loaded


class _OneGroup(Partition):
    """IID with one known group, for client transforms that need groups."""

    def split(self, pool: Pool, num_clients: int, generator: np.random.Generator) -> ClientShares:
        """Cuts one permutation of the pool into N pieces."""
        return ClientShares(IID().split(pool, num_clients, generator).indices, np.zeros(num_clients, dtype=np.int64))
