"""How convolutions, and zeros around what they read, become operations of the kernels."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from lcfl.engines.forward_graph import Unsupported
from lcfl.engines.kernels import Value
from lcfl.engines.operations import Builder, Place
from lcfl.engines.windows import fields_of, sides_of

__all__ = ["Padded", "add_convolution", "pad"]

Zeros = tuple[tuple[int, int], tuple[int, int]]  # how many are before and after a value, in height and in width


@dataclass(frozen=True)
class Padded:
    """A value with zeros around it, which only a convolution can read."""

    at: Place
    zeros: Zeros


def pad(to: Builder, layer: Any, at: Place, value: Value) -> Padded | None:
    """Returns a value with zeros around it; None for other numbers than zeros, and for a padding that cuts off."""
    left, right, *of_rows = layer.padding  # torch begins with the last dimension
    top, bottom = of_rows or (0, 0)
    if min(left, right, top, bottom) < 0 or getattr(layer, "value", 0) != 0:
        return None
    to.keeps_order &= at.rank != 3
    return Padded(at, ((top, bottom), (left, right)))


def add_convolution(
    to: Builder, layer: nn.Conv1d | nn.Conv2d, at: Place, value: Value, more: Zeros = ((0, 0), (0, 0))
) -> Place | None:
    """Adds a convolution.

    Args:
        to: the list of operations.
        layer: the convolution.
        at: the place of what it reads.
        value: what it reads.
        more: the zeros around the value, beside those of the layer itself.

    Returns:
        The place of its result; None for settings that the kernels do not have.
    """
    if at.is_flat or layer.padding_mode != "zeros":
        return None
    kernel, stride, dilation = (sides_of(at, each, 1) for each in (layer.kernel_size, layer.stride, layer.dilation))
    to.keeps_order &= layer.in_channels > 1 or kernel != (1, 1)
    sides, reach = (value.height, value.width), [step * (size - 1) for step, size in zip(dilation, kernel, strict=True)]
    own = _zeros_of(to, layer, at, reach)
    zeros = (own[0][0] + more[0][0], own[0][1] + more[0][1]), (own[1][0] + more[1][0], own[1][1] + more[1][1])
    outs = []
    for side, far, step, (before, after) in zip(sides, reach, stride, zeros, strict=True):
        last = (side + before + after - far - 1) // step  # the number of the last window
        if before > far or last * step - before >= side:
            raise Unsupported(f"its convolution {layer} has windows that meet only zeros")
        outs.append(last + 1)
    shape, fields = (layer.out_channels, outs[0], outs[1]), fields_of(kernel, stride, (zeros[0][0], zeros[1][0]))
    if any(step > 1 and far > 0 for step, far in zip(dilation, reach, strict=True)):
        if at.rank == 3 or stride != (1, 1):
            return None
        fields = _in_columns(kernel[1], dilation[1], value.width, zeros[1])
    if 1 < layer.groups == layer.in_channels == layer.out_channels:
        return to.emit("depthwise", at, shape, layer, **fields)
    is_whole = kernel == sides and not any(map(any, zeros))  # then it is a matrix product of features
    kind, fields = ("linear", {}) if is_whole else ("conv", fields)
    if layer.groups > 1:
        return to.emit_grouped(kind, at, shape, layer, layer.groups, **fields)
    return to.emit(kind, at, shape, layer, **fields)


def _in_columns(kernel: int, dilation: int, length: int, zeros: tuple[int, int]) -> dict[str, int]:
    """Returns the fields of a dilated convolution, whose taps are a column of an image (cpp/program.h)."""
    if any(each % dilation for each in (length, *zeros)):
        raise Unsupported(
            f"its convolution with dilation {dilation} reads {length} steps with {zeros[0]} zeros before and "
            f"{zeros[1]} after them, and the dilation does not divide all three"
        )
    return {**fields_of((kernel, 1), (1, 1), (zeros[0] // dilation, 0)), "dilation": dilation}


def _zeros_of(to: Builder, layer: Any, at: Place, reach: list[int]) -> list[tuple[int, int]]:
    """Returns the zeros that a convolution itself adds, whose taps reach so far in height and in width."""
    if layer.padding == "same":  # the last of an odd number comes after the value, and torch then copies an image
        to.keeps_order &= at.rank != 3 or not any(far % 2 for far in reach)
        return [(far // 2, far - far // 2) for far in reach]
    return [(each, each) for each in sides_of(at, 0 if layer.padding == "valid" else layer.padding, 0)]
