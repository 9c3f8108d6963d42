"""Which clients belong to a federation, and in which rounds.

Legend: N clients.
"""

import functools
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral

import torch
from torch import Tensor

from lcfl.core import rng

__all__ = ["Membership"]


@dataclass(frozen=True)
class Membership:
    """Newcomers are kept out of the federation, and leavers belong to it until a round.

    Args:
        num_clients: number of clients N, including newcomers.
        newcomers: number or fraction of clients that are kept out, drawn from the stream (seed, "newcomers"), or the
            numbers of these clients.
        leavers: the first round without a client, by the number of the client.
        seed: ``data.seed``.
    """

    num_clients: int
    newcomers: int | float | Sequence[int]
    leavers: Mapping[int, int]
    seed: int

    @property
    def newcomer_clients(self) -> tuple[int, ...]:
        """The newcomers, in ascending order."""
        number = self.newcomers
        if isinstance(number, Sequence):
            return tuple(sorted(number))
        if not isinstance(number, Integral):
            number = int(number * self.num_clients + 1e-9)
        return _drawn(self.seed, self.num_clients, int(number))

    def in_round(self, number: int) -> Tensor:
        """Returns the mask ``[N]`` of the clients in round `number`: all without newcomers and those who left."""
        remaining = torch.ones(self.num_clients, dtype=torch.bool)
        remaining[list(self.newcomer_clients)] = False
        remaining[[client for client, first in self.leavers.items() if first <= number]] = False
        return remaining

    def check(self) -> None:
        """Raises a ValueError for newcomers and leavers that are not allowed; warns if there are no newcomers."""
        given = self.newcomers
        if isinstance(given, Sequence):
            if len(set(given)) < len(given) or len(given) >= self.num_clients:
                raise ValueError(
                    f"data.newcomers: got {len(given)} of {self.num_clients} clients; name each one once, and leave at "
                    "least one for the federation."
                )
        elif not 0 <= given < (self.num_clients if isinstance(given, Integral) else 1.0):
            raise ValueError(
                f"data.newcomers: got {given} of {self.num_clients} clients; allowed are counts from 0 to "
                f"{self.num_clients - 1}, fractions in [0, 1), and lists of clients."
            )
        newcomers = set(self.newcomer_clients)
        if self.newcomers and not newcomers:
            warnings.warn(
                f"data.newcomers: got {self.newcomers}, which is none of {self.num_clients} clients, so it has no "
                "effect.",
                stacklevel=3,
            )
        for client, number in self.leavers.items():
            are_numbers = isinstance(client, Integral) and isinstance(number, Integral)
            if not are_numbers or not 0 <= client < self.num_clients or client in newcomers or number < 0:
                raise ValueError(
                    f"data.leavers: got client {client!r}, round {number!r}; allowed are client numbers from 0 to "
                    f"{self.num_clients - 1}, except newcomers, and round numbers from 0."
                )
        if len(self.leavers) == self.num_clients - len(newcomers):
            raise ValueError(f"data.leavers: all {len(self.leavers)} clients leave; at least one must stay.")


@functools.lru_cache(maxsize=8)
def _drawn(seed: int, num_clients: int, number: int) -> tuple[int, ...]:
    """Returns so many newcomers. They are drawn once: every round asks, and drawing from a million clients is slow."""
    drawn = rng.generator(seed, "newcomers").choice(num_clients, number, replace=False)
    return tuple(sorted(drawn.tolist()))
