"""What carries messages between the server and its nodes. One class of this kind is all that another network needs."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from lcfl.fleet.parcel import Parcel

__all__ = ["Link", "Undelivered"]


@dataclass(frozen=True)
class Undelivered:
    """Stands for the answer of a node that was lost on the way.

    Attributes:
        reason: why, in words.
    """

    reason: str


class Link(Protocol):
    """Carries parcels to nodes and their answers back. No call waits for a node."""

    def nodes(self) -> Collection[int]:
        """Returns the nodes that can be reached now. A node keeps its number when it, or the server, is restarted."""

    def send(self, parcels: Mapping[int, Parcel]) -> Mapping[int, str | None]:
        """Sends a parcel to each of these nodes; returns a ticket for each answer, or None if it could not be sent."""

    def receive(self, tickets: Collection[str]) -> Mapping[str, Parcel | Undelivered]:
        """Returns the answers that have arrived since the last call, by their tickets."""
