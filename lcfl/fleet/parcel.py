"""A message on its way. This module imports nothing heavy, because it is imported anew for every message of a node."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["WIRE_VERSION", "MessageError", "Parcel", "in_words", "refusal"]

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


def in_words(request: Parcel, reply: Parcel) -> str:
    """Returns a line for the log of a node: what it was asked for, and how it answered."""
    try:
        asked, told = (json.loads(parcel.text) for parcel in (request, reply))
        fields, answer = asked["fields"], told["fields"]
        kind = "trivial baseline" if asked["kind"] == "trivial" else str(asked["kind"])
        text = f"round {fields['round']}, {kind}" if "round" in fields else kind
        if told["kind"] == "refused":
            text += f": refused, because {answer['reason']}"
        elif asked["kind"] == "join":
            text += f" as {answer['name']} with {answer['sizes']['train']} training samples"
            if fields["refused"]:
                text += f"; the server has not let it in: {fields['refused']}"
        elif answer.get("loss") is not None:
            text += f": loss {answer['loss']:.4f}"
    except (ValueError, KeyError, TypeError, RecursionError):
        text = "a message that cannot be read"
    return "lcfl: " + "".join(sign if sign.isprintable() else " " for sign in text)[:500]
