"""The memory of a tensor as bytes, for digests and comparisons to the last bit."""

import torch
from torch import Tensor

__all__ = ["raw_bytes"]


def raw_bytes(tensor: Tensor) -> Tensor:
    """Returns the entries of a dense tensor, in their order, as uint8 ``[bytes]``."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    return flat.as_strided(flat.shape, [1]).view(torch.uint8)  # a tensor with one entry keeps a stride of 0
