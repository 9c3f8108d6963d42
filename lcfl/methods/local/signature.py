"""The signature of a client's data: the first left singular vectors of its samples, label by label (PACFL).

Legend: n samples of a client, D values of a sample, p vectors per label. Samples are columns, as in the paper.
"""

from dataclasses import dataclass
from math import nan
from typing import ClassVar

import torch
from torch import Tensor

from lcfl.core.clients import ClientState
from lcfl.core.messages import Downlink, all_finite
from lcfl.methods.local.training import Engine, LocalData, LocalOutput, LocalUpdate

__all__ = ["PixelSignature", "left_singular_vectors"]

FLOOR = 1e-6  # share of the largest singular value; smaller ones are rounding errors


def left_singular_vectors(image_Dn: Tensor, number: int) -> Tensor:
    """Returns the first left singular vectors ``[D, p]`` in float64; fewer if the samples span fewer directions."""
    image_Dn = image_Dn.double()
    if image_Dn.shape[1] < image_Dn.shape[0]:  # take the smaller Gram matrix
        square_n, right_nn = torch.linalg.eigh(image_Dn.T @ image_Dn)
        value_p = square_n.clamp(min=0).sqrt().flip(0)[:number]
        is_kept = value_p > FLOOR * value_p[:1]
        left_Dp: Tensor = image_Dn @ right_nn.flip(1)[:, :number][:, is_kept] / value_p[is_kept]
        return left_Dp
    square_D, left_DD = torch.linalg.eigh(image_Dn @ image_Dn.T)
    value_p = square_D.clamp(min=0).sqrt().flip(0)[:number]
    left_Dp = left_DD.flip(1)[:, :number][:, value_p > FLOOR * value_p[:1]]
    return left_Dp


@dataclass(frozen=True)
class PixelSignature(LocalUpdate):
    """Computes the signature U_i ``[D, p x labels]`` of the client's data and trains nothing.

    U_i holds, side by side, p left singular vectors of the raw, uncentred samples of each label that the client has.
    For image data, the vectors are images that show what the data look like. Information about raw data therefore
    leaves the client. A label with fewer than p samples gives fewer vectors. If the targets are not classes, all
    samples of the client count as one label.

    Args:
        num_vectors: p.

    Raises:
        ValueError: for fewer than one vector.
    """

    provides: ClassVar[tuple[str, ...]] = ("signature",)

    num_vectors: int = 3

    def __post_init__(self) -> None:
        if self.num_vectors < 1:
            raise ValueError(f"PixelSignature: got num_vectors={self.num_vectors}; it must be at least 1.")

    def __call__(self, state: ClientState, downlink: Downlink, data: LocalData, engine: Engine) -> LocalOutput:
        """Returns the signature in ``extras["signature"]``, and no model; a NaN for samples that are not finite."""
        image_nD, label_n = engine.pixels(data.indices)
        if not all_finite(image_nD):  # makes the server leave the client out, as one whose model is not finite
            return LocalOutput(torch.empty(0), state.consumed, nan, extras={"signature": torch.full((1, 1), nan)})
        if label_n.ndim > 1 or label_n.is_floating_point():  # no classes
            label_n = image_nD.new_zeros(len(image_nD))
        parts = [left_singular_vectors(image_nD[label_n == label].T, self.num_vectors) for label in label_n.unique()]
        signature = torch.cat(parts, dim=1).float()
        return LocalOutput(torch.empty(0), state.consumed, None, extras={"signature": signature})

    def cost(self, num_samples: int, batch_size: int) -> int:
        """Returns `num_samples`. Every sample counts once."""
        return num_samples
