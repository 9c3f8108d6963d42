"""What a client tells of its data: the first left singular vectors of its images, label by label (PACFL).

Legend: n samples of a client, D values of an image, p vectors per label. Images are columns, as in the paper.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lcfl.core.clients import ClientState
from lcfl.core.messages import Downlink
from lcfl.methods.local.training import Engine, LocalData, LocalOutput, LocalUpdate

__all__ = ["PixelSignature", "left_singular_vectors"]

FLOOR = 1e-6  # of the largest singular value: below that a direction is rounding


def left_singular_vectors(image_Dn: Tensor, number: int) -> Tensor:
    """The first left singular vectors ``[D, p]`` in float64; fewer where the images span fewer directions."""
    image_Dn = image_Dn.double()
    if image_Dn.shape[1] < image_Dn.shape[0]:  # the smaller Gram matrix
        square_n, right_nn = torch.linalg.eigh(image_Dn.T @ image_Dn)
        value_p = square_n.clamp(min=0).sqrt().flip(0)[:number]
        kept = value_p > FLOOR * value_p[:1]
        left_Dp: Tensor = image_Dn @ right_nn.flip(1)[:, :number][:, kept] / value_p[kept]
        return left_Dp
    square_D, left_DD = torch.linalg.eigh(image_Dn @ image_Dn.T)
    value_p = square_D.clamp(min=0).sqrt().flip(0)[:number]
    left_Dp = left_DD.flip(1)[:, :number][:, value_p > FLOOR * value_p[:1]]
    return left_Dp


@dataclass(frozen=True)
class PixelSignature(LocalUpdate):
    """U_i ``[D, p x labels]``: p left singular vectors of the raw, uncentred images of each own label, side by side.

    Trains nothing. The vectors are images that tell what a client's data look like: this is information about raw
    data that leaves the client. A label with fewer than p samples gives fewer vectors.

    Args:
        num_vectors: p.
    """

    num_vectors: int = 3

    def __call__(self, state: ClientState, downlink: Downlink, data: LocalData, engine: Engine) -> LocalOutput:
        """The signature in ``extras["signature"]``; no model."""
        image_nD, label_n = engine.pixels(data.indices)
        parts = [left_singular_vectors(image_nD[label_n == label].T, self.num_vectors) for label in label_n.unique()]
        signature = torch.cat(parts, dim=1).float()
        return LocalOutput(torch.empty(0), state.consumed, None, extras={"signature": signature})

    def cost(self, num_samples: int, batch_size: int) -> int:
        """Every sample once."""
        return num_samples
