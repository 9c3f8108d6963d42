"""Low-rank compression of uploads (AS-CFL section 3.5)."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lcfl.methods.exchange.transforms.base import UploadTransform
from lcfl.models.layout import Layout

__all__ = ["LowRankCompression", "factors", "product"]


@dataclass(frozen=True)
class LowRankCompression(UploadTransform):
    """Sends a truncated singular value decomposition of each layer's update: r (rows + cols + 1) floats.

    AS-CFL section 3.5 lets clients "return low-rank compressed updates" but does not describe how. Here r is the
    smallest rank that keeps a given share of the energy, which is the sum of the squared singular values. A tensor of
    more than two dimensions counts as a matrix with a row for each output. Vectors, buffers, and layers that would not
    get smaller are sent unchanged.

    Args:
        energy: the share of the energy to keep, in (0, 1].
    """

    energy: float = 0.95

    def __post_init__(self) -> None:
        if not 0 < self.energy <= 1:
            raise ValueError(f"LowRankCompression: got energy={self.energy}; it must lie in (0, 1].")

    def encode(self, update: Mapping[str, Tensor], layout: Layout, draw: np.random.Generator) -> Mapping[str, Tensor]:
        """Returns one entry ``<name>/<parameter>`` per matrix and one entry ``<name>`` for the rest of the vector.

        A matrix is ``[r, rows + cols + 1]``, or ``[rows * cols]`` if it is sent unchanged.
        """
        payload: dict[str, Tensor] = {}
        for name, vector in update.items():
            rest = torch.ones(len(vector), dtype=torch.bool)
            for parameter, entries, rows in _matrices(layout, len(vector)):
                matrix = vector[entries].view(rows, -1)
                # A matrix that is not finite has no decomposition. The server detects it and leaves the client out.
                small = factors(matrix, self.energy) if bool(matrix.isfinite().all()) else matrix
                payload[f"{name}/{parameter}"] = small if small.numel() < matrix.numel() else vector[entries].clone()
                rest[entries] = False
            payload[name] = vector[rest]
        return payload

    def decode(self, payload: Mapping[str, Tensor], layout: Layout) -> Mapping[str, Tensor]:
        """Returns the vectors, with the products of the factors in place of the factors."""
        vectors: dict[str, Tensor] = {}
        for name in (name for name in payload if "/" not in name):
            parts = {key: part for key, part in payload.items() if key.startswith(f"{name}/")}
            matrices = {f"{name}/{parameter}": (entries, rows) for parameter, entries, rows in _matrices(layout)}
            length = len(payload[name]) + sum(matrices[key][0].stop - matrices[key][0].start for key in parts)
            vector = torch.empty(length)
            rest = torch.ones(length, dtype=torch.bool)
            for key, part in parts.items():
                entries, rows = matrices[key]
                vector[entries] = part if part.dim() == 1 else product(part, rows).reshape(-1)
                rest[entries] = False
            vector[rest] = payload[name]
            vectors[name] = vector
        return vectors


def factors(matrix: Tensor, energy: float) -> Tensor:
    """Returns the singular value and the left and right singular vector of the r leading components.

    The shape is ``[r, 1 + rows + cols]``. r is the smallest number of components whose squared singular values sum up
    to the share `energy` of the total; it is 0 for a matrix of zeros.
    """
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    share = values.square().cumsum(dim=0)
    rank = int((share < energy * share[-1]).sum()) + 1 if float(share[-1]) > 0 else 0
    leading = [values[:rank, None], left[:, :rank].T, right[:rank]]
    return torch.cat(leading, dim=1).float()


def product(small: Tensor, rows: int) -> Tensor:
    """Returns the matrix ``[rows, cols]`` that belongs to these `factors`."""
    return (small[:, 1 : rows + 1] * small[:, :1]).T @ small[:, rows + 1 :]


def _matrices(layout: Layout, length: int | None = None) -> Iterator[tuple[str, slice, int]]:
    """Yields name, slice and number of rows of every parameter with at least two dimensions.

    With a `length`, only the parameters that lie within a vector of that length are yielded.
    """
    for name, shape in layout.parameters:
        place = layout.places[name]
        if len(shape) > 1 and (length is None or place.stop <= length):
            yield name, place, shape[0]
