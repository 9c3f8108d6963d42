"""The messages between server and clients, and their sizes in bytes."""

import cmath
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from torch import Tensor

__all__ = ["Downlink", "Uplink", "all_finite", "unchanged", "uploads_unchanged"]


def _num_bytes(payload: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in payload.values())


@dataclass(frozen=True)
class Downlink:
    """A message from the server to one client.

    The names in a payload are the usual terms of the field: ``model`` (the model to start from), ``centre`` (Omega,
    the model of the client's cluster), ``embedding`` (Phi).

    Raises:
        ValueError: if the payload holds anything other than tensors.
    """

    payload: Mapping[str, Tensor]

    def __post_init__(self) -> None:
        for name, value in self.payload.items():
            if not isinstance(value, Tensor):
                raise ValueError(f"Downlink: got {type(value).__name__} as {name!r}; a payload maps names to tensors.")

    @property
    def num_bytes(self) -> int:
        """The bytes on the wire: the payload's tensors and nothing else."""
        return _num_bytes(self.payload)

    def model_for(self, answer: Mapping[str, Tensor]) -> Tensor | None:
        """Returns the model ``[P + Q]`` that an answer starts from or is pulled to; None if there is none.

        Of several centres it is the one whose number is the ``cluster`` in the answer.
        """
        if "centres" in self.payload and "cluster" in answer:
            return self.payload["centres"][int(answer["cluster"])]
        return self.payload.get("model", self.payload.get("centre"))


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


def all_finite(tensor: Tensor) -> bool:
    """Returns whether a tensor holds no NaN and no infinity. A finite sum proves it and is cheap to compute."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    return cmath.isfinite(tensor.sum().item()) or bool(tensor.isfinite().all())


@contextmanager
def unchanged(held: Mapping[str, Iterable[Mapping[str, Tensor]]], error: type[ValueError], by: str) -> Iterator[None]:
    """Checks that the block changes no tensor of some payloads in place.

    Args:
        held: payloads, which are tensors by name, by what they are, for the error message.
        error: raised otherwise.
        by: who the block is, for the error message.
    """
    versions = [
        (tensor, tensor._version, name, what)
        for what, payloads in held.items()
        for payload in payloads
        for name, tensor in payload.items()
        if not tensor.is_inference()  # torch does not count their changes
    ]
    yield
    for tensor, version, name, what in versions:
        if tensor._version != version:
            raise error(f"{by} changed {name!r} of {what}. Change a clone of it.")


def uploads_unchanged(uploads: Sequence[Uplink], by: str) -> AbstractContextManager[None]:
    """Checks that the block changes in place no upload, and no message that an upload answers; see `unchanged`."""
    sent = [each.answers.payload for each in uploads if each.answers is not None]
    held = {
        "an upload in place, which may be the model that the client keeps": [each.payload for each in uploads],
        "a message to a client in place, which is a part of state.global_model or state.centres": sent,
    }
    return unchanged(held, ValueError, by)
