"""A message on its way. This module imports nothing heavy, because it is imported anew for every message of a node."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["WIRE_VERSION", "MessageError", "Parcel", "refusal"]

WIRE_VERSION = 1


class MessageError(ValueError):
    """Raised if a message cannot be read, does not fit, or was refused by the other side."""


@dataclass(frozen=True)
class Parcel:
    """A message on its way.

    Attributes:
        text: everything but the arrays, as JSON.
        arrays: the entries of each array, row by row, in little-endian order.
    """

    text: str
    arrays: Sequence[bytes] = ()

    @property
    def num_bytes(self) -> int:
        """The size of text and arrays."""
        return len(self.text) + sum(map(len, self.arrays))


def refusal(request: Parcel, reason: str) -> Parcel:
    """Returns the answer that says why there is no other answer to a request."""
    try:
        nonce = json.loads(request.text)["fields"]["nonce"]
    except (ValueError, KeyError, TypeError, RecursionError):
        nonce = None
    fields = {"nonce": nonce, "reason": reason}
    return Parcel(json.dumps({"wire": WIRE_VERSION, "kind": "refused", "fields": fields, "arrays": []}))
