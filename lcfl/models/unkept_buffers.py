"""Buffers that are not persistent, or None at first. No model holds them, so every client begins with these values."""

import torch
from torch import Tensor, nn

__all__ = ["renew", "unkept_buffers"]


def unkept_buffers(network: nn.Module) -> list[tuple[str, str, Tensor | None]]:
    """Returns the buffers that no model holds: the path of the layer, the name, and a copy of the first value."""
    return [
        (path, name, None if buffer is None else buffer.clone())
        for path, layer in network.named_modules()
        for name, buffer in sorted(layer._buffers.items())
        if buffer is None or name in layer._non_persistent_buffers_set
    ]


@torch.no_grad()
def renew(layer: nn.Module, name: str, first: Tensor | None) -> None:
    """Resets a buffer to its first value, in place if possible, because other layers and views may refer to it."""
    now = layer._buffers.get(name)
    if first is None or now is None:
        layer._buffers[name] = None if first is None else first.to(next(layer.parameters(), first).device, copy=True)
    elif now.requires_grad or (now.shape, now.dtype) != (first.shape, first.dtype):
        layer._buffers[name] = first.to(now.device, copy=True)
    else:
        now.copy_(first)
