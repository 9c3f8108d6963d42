"""The partition that a data set has by nature: each writer, hospital or device is a client."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lcfl.core.validation import abbreviated
from lcfl.data.names import spelling
from lcfl.data.partition.base import ClientShares, Indices, Partition
from lcfl.data.partition.pool import Pool, PoolOwners, places_of

__all__ = ["ByOwner", "OneClient"]


@dataclass(frozen=True)
class ByOwner(Partition):
    """Makes each owner of samples a client of the same name: a writer, a user, a hospital, a device.

    A client keeps the validation and test samples that its owner has, and is evaluated on them. Where an owner has
    none, a random part of its training samples is held out, as for any partition. With ``data.pool: all`` these parts
    are merged first. Clients are in the order of the owners' names. With ``data.num_clients: null`` all owners become
    clients.

    Args:
        column: the column or attribute of the data set that names the owner of each sample. None for the owners that
            the data set has by itself, such as those of `Folders`.
        min_samples: an owner with fewer samples, all parts together, is left out.
        choose: which owners become clients if there are more than ``data.num_clients``: those with most samples
            (``largest``) or some that are drawn (``random``).
    """

    column: str | None = None
    min_samples: int = 1
    choose: Literal["largest", "random"] = "largest"

    def __post_init__(self) -> None:
        if self.min_samples < 1:
            raise ValueError(f"ByOwner: min_samples must be at least 1, got {self.min_samples}")

    def split(self, pool: Pool, num_clients: int, generator: np.random.Generator) -> ClientShares:
        """Chooses the owners, and draws only if ``choose`` is ``random``."""
        owners = self._known(pool)
        sizes, candidates = self._candidates(owners)
        if len(candidates) < num_clients:
            raise ValueError(
                f"ByOwner: {len(candidates)} of {len(owners.names)} owners have training samples and at least "
                f"{self.min_samples} samples, but num_clients is {num_clients}; lower num_clients or min_samples, or "
                "set num_clients to null, which takes all owners"
            )
        if self.choose == "random":
            chosen = np.sort(generator.choice(candidates, num_clients, replace=False))
        else:
            chosen = np.sort(candidates[np.argsort(-sizes[candidates], kind="stable")[:num_clients]])
        by_owner = places_of(owners.number, len(owners.names))
        indices = [by_owner[owner] for owner in chosen]
        names = tuple(owners.names[owner] for owner in chosen)
        _warn_of_spellings(names)
        return ClientShares(
            indices,
            names=names,
            val=[own[owners.is_val[own]] for own in indices],
            test=[owners.test[owner] for owner in chosen],
        )

    def num_clients(self, pool: Pool) -> int:
        """Returns the number of owners with training samples and at least ``min_samples`` samples."""
        owners = self._known(pool)
        number = len(self._candidates(owners)[1])
        if number == 0:
            raise ValueError(
                f"ByOwner: none of {len(owners.names)} owners has training samples and at least {self.min_samples} "
                "samples; lower min_samples"
            )
        return number

    @property
    def owner_column(self) -> str | None:
        """The option ``column``."""
        return self.column

    def _known(self, pool: Pool) -> PoolOwners:
        if pool.owners is None:
            raise ValueError(
                "ByOwner: this data set does not know who its samples belong to; name the column or attribute of the "
                "data set with the owners as column, or use a data set of clients, such as Folders"
            )
        return pool.owners

    def _candidates(self, owners: PoolOwners) -> tuple[Indices, Indices]:
        """Returns the number of samples of each owner, and the owners that may become clients, in ascending order."""
        num_owners = len(owners.names)
        trains = np.bincount(owners.number[~owners.is_val], minlength=num_owners) > 0
        sizes = np.bincount(owners.number, minlength=num_owners) + np.array([len(own) for own in owners.test])
        return sizes, np.flatnonzero(trains & (sizes >= self.min_samples))


@dataclass(frozen=True)
class OneClient(Partition):
    """Makes all samples one client's, such as those of one machine.

    Validation and test samples of owners keep their parts. If there is one owner, the client has its name.
    """

    def split(self, pool: Pool, num_clients: int, generator: np.random.Generator) -> ClientShares:
        """Draws nothing."""
        if num_clients != 1:
            raise ValueError(f"OneClient: num_clients must be 1, got {num_clients}")
        owners, everything = pool.owners, [np.arange(len(pool))]
        if owners is None:
            return ClientShares(everything)
        names = owners.names if len(owners.names) == 1 else None
        return ClientShares(
            everything, names=names, val=[np.flatnonzero(owners.is_val)], test=[np.concatenate(owners.test)]
        )

    def num_clients(self, pool: Pool) -> int:
        """Returns 1."""
        return 1


def _warn_of_spellings(names: Sequence[str]) -> None:
    """Warns of names that differ only in case or spaces, because they may mean one owner."""
    spellings: dict[str, list[str]] = {}
    for name in names:
        spellings.setdefault(spelling(name), []).append(name)
    if alike := [" and ".join(map(repr, each)) for each in spellings.values() if len(each) > 1]:
        warnings.warn(
            f"ByOwner: {abbreviated(alike)} differ only in case or spaces, and are separate clients. If they are one, "
            "give them one name in the data.",
            stacklevel=4,
        )
