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

    AS-CFL section 3.5 lets clients "return low-rank compressed updates" and does not say how; this is the smallest
    rank r that keeps a share of the energy, the sum of the squared singular values. A tensor of more than two
    dimensions is a matrix with a row for each output. Vectors, buffers, and layers that would not get smaller are
    sent as they are.

    Args:
        energy: the share to keep, in (0, 1].
    """

    energy: float = 0.95

    def __post_init__(self) -> None:
        if not 0 < self.energy <= 1:
            raise ValueError(f"LowRankCompression: got energy={self.energy}; it must lie in (0, 1].")

    def encode(self, update: Mapping[str, Tensor], layout: Layout, draw: np.random.Generator) -> Mapping[str, Tensor]:
        """Per matrix ``<name>/<parameter>``: [r, rows + cols + 1], or [rows * cols] as it is; the rest in its name."""
        payload: dict[str, Tensor] = {}
        for name, vector in update.items():
            rest = torch.ones(len(vector), dtype=torch.bool)
            for parameter, place, rows in _matrices(layout, len(vector)):
                matrix = vector[place].view(rows, -1)
                # What is not finite has no decomposition; the server finds it and leaves the client out.
                small = factors(matrix, self.energy) if bool(matrix.isfinite().all()) else matrix
                payload[f"{name}/{parameter}"] = small if small.numel() < matrix.numel() else vector[place].clone()
                rest[place] = False
            payload[name] = vector[rest]
        return payload

    def decode(self, payload: Mapping[str, Tensor], layout: Layout) -> Mapping[str, Tensor]:
        """The vectors, with the products of the factors in their places."""
        vectors: dict[str, Tensor] = {}
        for name in (name for name in payload if "/" not in name):
            parts = {key: part for key, part in payload.items() if key.startswith(f"{name}/")}
            matrices = {f"{name}/{parameter}": (place, rows) for parameter, place, rows in _matrices(layout)}
            length = len(payload[name]) + sum(matrices[key][0].stop - matrices[key][0].start for key in parts)
            vector = torch.empty(length)
            rest = torch.ones(length, dtype=torch.bool)
            for key, part in parts.items():
                place, rows = matrices[key]
                vector[place] = part if part.dim() == 1 else product(part, rows).reshape(-1)
                rest[place] = False
            vector[rest] = payload[name]
            vectors[name] = vector
        return vectors


def factors(matrix: Tensor, energy: float) -> Tensor:
    """``[r, 1 + rows + cols]``: singular value, left and right singular vector of the r leading components.

    r is the smallest number whose squared singular values sum up to `energy` of the total; 0 for a matrix of zeros.
    """
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    share = values.square().cumsum(dim=0)
    rank = int((share < energy * share[-1]).sum()) + 1 if float(share[-1]) > 0 else 0
    kept = [values[:rank, None], left[:, :rank].T, right[:rank]]
    return torch.cat(kept, dim=1).float()


def product(small: Tensor, rows: int) -> Tensor:
    """The matrix ``[rows, cols]`` of its `factors`."""
    return (small[:, 1 : rows + 1] * small[:, :1]).T @ small[:, rows + 1 :]


def _matrices(layout: Layout, length: int | None = None) -> Iterator[tuple[str, slice, int]]:
    """Name, place and number of rows of the parameters with two dimensions or more, of a vector so long."""
    offset = 0
    for name, shape in layout.parameters:
        end = offset + shape.numel()
        if len(shape) > 1 and (length is None or end <= length):
            yield name, slice(offset, end), shape[0]
        offset = end
