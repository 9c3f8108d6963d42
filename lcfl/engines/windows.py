"""Windows that move over images and signals: of convolutions and poolings."""

from collections.abc import Sequence
from typing import Any

from lcfl.engines.kernels import Value
from lcfl.engines.operations import Place

__all__ = ["fields_of", "positions", "sides_of", "window_of"]


def sides_of(at: Place, setting: int | Sequence[int | None] | None, of_signal: int) -> tuple[Any, Any]:
    """Returns a setting of a layer for height and width. `of_signal` is that for the height of a signal."""
    sides = setting if isinstance(setting, Sequence) else (setting,)
    return (of_signal if at.rank == 2 else sides[0]), sides[-1]


def window_of(at: Place, layer: Any) -> tuple[tuple[int, int], ...]:
    """Returns kernel, stride and padding of a pooling."""
    return sides_of(at, layer.kernel_size, 1), sides_of(at, layer.stride, 1), sides_of(at, layer.padding, 0)


def fields_of(kernel: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int]) -> dict[str, int]:
    """Returns the fields of `Op` for a window that moves over an image."""
    named = {"kernel": kernel, "stride": stride, "padding": padding}
    return {f"{name}_{axis}": side for name, sides in named.items() for axis, side in zip("hw", sides, strict=True)}


def positions(
    value: Value,
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    *,
    with_rest: bool = False,
) -> tuple[int, int]:
    """Returns the number of positions of a pooling's window in height and width.

    With `with_rest`, a last window may reach beyond the padding if it begins before the end of the image.
    """
    found = []
    for side, size, step, pad in zip((value.height, value.width), kernel, stride, padding, strict=True):
        whole, rest = divmod(side + 2 * pad - size, step)
        has_more = with_rest and rest > 0 and (whole + 1) * step < side + pad
        found.append(whole + 1 + has_more)
    return found[0], found[1]
