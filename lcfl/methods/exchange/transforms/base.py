"""The base class of upload transforms.

Legend: P + Q length of a model's flat vector.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from torch import Tensor

from lcfl.models.layout import Layout

__all__ = ["NAMES", "Releases", "UploadTransform"]

NAMES = ("model", "update", "embedding")  # of flat vectors that begin like the model's, which is what transforms take

Self = TypeVar("Self", bound="UploadTransform")


@dataclass(frozen=True)
class Releases:
    """How often clients upload in a run, for what depends on it.

    Attributes:
        rounds: training rounds.
        clients_per_round: how many of them upload in each, drawn uniformly without replacement.
        num_clients: of whom they are drawn: no more than belong to the federation in any of these rounds.
        warmup_rounds: rounds before these in which any client may upload.
    """

    rounds: int
    clients_per_round: int
    num_clients: int
    warmup_rounds: int = 0


class UploadTransform(ABC):
    """A pure function of what a client sends, and how the server reads it.

    Works on updates: on the difference of every uploaded vector to what the server sent, which both sides know. A
    vector holds a model's parameters, then its buffers (``[P + Q]``), or the first of them (an embedding).
    """

    @abstractmethod
    def encode(self, update: Mapping[str, Tensor], layout: Layout, draw: np.random.Generator) -> Mapping[str, Tensor]:
        """What the client sends instead of `update`, vectors by name; `draw` is a stream of this upload's own."""

    def decode(self, payload: Mapping[str, Tensor], layout: Layout) -> Mapping[str, Tensor]:
        """The vectors that the server makes out of what was sent."""
        return payload

    def calibrated(self: Self, releases: Releases) -> Self:
        """The same transform with the settings that follow from the length of the run."""
        return self
