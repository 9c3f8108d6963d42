"""What crosses the border between server and clients, and how many bytes that is."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

__all__ = ["Downlink", "Uplink", "all_finite"]


def _num_bytes(payload: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in payload.values())


@dataclass(frozen=True)
class Downlink:
    """What the server sends to one client.

    The names in a payload are the field's words: ``model`` (start from it), ``centre`` (Omega, the
    model of the client's cluster), ``embedding`` (Phi).
    """

    payload: Mapping[str, Tensor]

    @property
    def num_bytes(self) -> int:
        """Bytes on the wire: the payload's tensors and nothing else."""
        return _num_bytes(self.payload)


@dataclass(frozen=True)
class Uplink:
    """What one client sends back.

    Attributes:
        client: its number.
        payload: tensors by name, e.g. ``model`` (w_i).
        num_samples: n_i, its number of training samples, the weight of weighted means.
        answers: what the server had sent to it; added by the server, and not on the wire.
    """

    client: int
    payload: Mapping[str, Tensor]
    num_samples: int
    answers: Downlink | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes on the wire: the payload's tensors and nothing else."""
        return _num_bytes(self.payload)


def all_finite(tensor: Tensor) -> bool:
    """Whether it holds no NaN and no infinity; a finite sum, which is cheap to find, tells so."""
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())
