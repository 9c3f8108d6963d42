"""The messages between server and clients, and their sizes in bytes."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt

from torch import Tensor

__all__ = ["Downlink", "Uplink", "all_finite", "update_norm"]


def _num_bytes(payload: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in payload.values())


@dataclass(frozen=True)
class Downlink:
    """A message from the server to one client.

    The names in a payload are the usual terms of the field: ``model`` (the model to start from), ``centre`` (Omega,
    the model of the client's cluster), ``embedding`` (Phi).
    """

    payload: Mapping[str, Tensor]

    @property
    def num_bytes(self) -> int:
        """The bytes on the wire: the payload's tensors and nothing else."""
        return _num_bytes(self.payload)


@dataclass(frozen=True)
class Uplink:
    """A message from one client back to the server.

    Attributes:
        client: the number of the client.
        payload: tensors by name, e.g. ``model`` (w_i).
        num_samples: n_i, its number of training samples, which is its weight in weighted means.
        answers: the downlink that the server sent to it. The server adds it; it is not sent back.
    """

    client: int
    payload: Mapping[str, Tensor]
    num_samples: int
    answers: Downlink | None = None

    @property
    def num_bytes(self) -> int:
        """The bytes on the wire: the payload's tensors and nothing else."""
        return _num_bytes(self.payload)


def update_norm(uplink: Uplink) -> float:
    """Returns the L2 norm of the difference between what a client was sent and what it sends.

    A vector counts from the one of the same name in the downlink, a ``model`` otherwise from the ``centre``, and what
    has no counterpart from 0. Whole numbers do not count.
    """
    sent = uplink.answers.payload if uplink.answers is not None else {}
    square = 0.0
    for name, vector in uplink.payload.items():
        known = sent.get(name, sent.get("centre") if name == "model" else None)
        if vector.is_floating_point():
            apart = vector.double() if known is None else vector.double() - known
            square += float(apart.square().sum())
    return sqrt(square)


def all_finite(tensor: Tensor) -> bool:
    """Returns whether a tensor holds no NaN and no infinity. A finite sum proves it and is cheap to compute."""
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())
