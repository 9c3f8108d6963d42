"""The base class of upload transforms.

Legend: P + Q length of a model's flat vector.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Self

import numpy as np
from torch import Tensor

from lcfl.core.validation import CheckedFields
from lcfl.models.layout import Layout

__all__ = ["TRANSFORMABLE", "UploadTransform"]

# The names of the vectors that transforms accept: flat vectors that begin like the model's.
TRANSFORMABLE = ("model", "update", "embedding")


class UploadTransform(CheckedFields, ABC):
    """Transforms what a client sends, as a pure function, and reads it at the server.

    A transform works on updates, i.e. on the difference between every uploaded vector and what the server sent, which
    both sides know. A vector holds a model's parameters followed by its buffers (``[P + Q]``), or only the first
    entries (an embedding).
    """

    @abstractmethod
    def encode(self, update: Mapping[str, Tensor], layout: Layout, draw: np.random.Generator) -> Mapping[str, Tensor]:
        """Returns what the client sends instead of `update`.

        Args:
            update: vectors by name.
            layout: the layout of the model.
            draw: a random stream for this upload alone.
        """

    def decode(self, payload: Mapping[str, Tensor], layout: Layout) -> Mapping[str, Tensor]:
        """Returns the vectors that the server reads from what was sent."""
        return payload

    def calibrated(self, num_uploads: int) -> Self:
        """Returns the same transform with the settings that follow from the most uploads of any client in the run."""
        return self
