"""The operations of the kernels that torch's layers become. Layers whose settings no operation has are refused."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lcfl.engines.forward_graph import Unsupported
from lcfl.engines.kernels import KIND, Op, Value
from lcfl.models.frozen import persistent_buffers
from lcfl.models.layout import Layout

__all__ = ["Builder", "Dropout", "Place"]

Shape = tuple[int, int, int]  # channels, height, width
OVERWRITING = KIND["relu"], KIND["relu6"]  # what can write where it reads
NOTHING = dict.fromkeys(("other", "mean", "var", "tracked"), -1)


@dataclass(frozen=True)
class Place:
    """A value in the shape that the network sees: flattened, or as an image or a signal."""

    number: int
    is_flat: bool


@dataclass(frozen=True)
class Dropout:
    """What the mask of a dropout depends on.

    Attributes:
        probability: p, that of a zero.
        shape: the shape of one sample's value: ``[D]``, ``[C, L]`` or ``[C, H, W]``.
        of_channels: whether whole channels become zeros.
    """

    probability: float
    shape: tuple[int, ...]
    of_channels: bool

    def mask(self, number: int, channels_last: bool) -> Tensor:
        """Draws a mask as torch does: 1 / (1 - p) or 0.

        Args:
            number: B, of samples.
            channels_last: whether the network would have images in this order in memory, in which torch draws.

        Returns:
            The factors of a value ``[B, size]``.
        """
        kept = 1 - self.probability
        if self.of_channels:
            channels, *sides = self.shape
            return torch.empty(number, channels).bernoulli_(kept).div_(kept).repeat_interleave(math.prod(sides), 1)
        order = torch.channels_last if channels_last and len(self.shape) == 3 else torch.contiguous_format
        mask = torch.empty(number, *self.shape, memory_format=order).bernoulli_(kept).div_(kept)
        return mask.contiguous().flatten(1)


class Builder:
    """Adds an operation for each layer of a network, in the order of its forward pass.

    Args:
        network: the network, whose parameters the operations refer to by their offsets in a model.
        layout: the order of the parameters in a model.
        shape: the shape of one input: ``[C, H, W]``, ``[C, L]`` or ``[D]``.

    Attributes:
        is_signal: whether values that are not flat are ``[C, L]``. Their height is 1 then.
        ops: the operations.
        values: the shapes of the numbered values that they read and write; number 0 is the input.
        used: the ids of the parameters that belong to an operation.
        overwritten: the numbers of the values that a layer changes in place.
        dropouts: the dropouts.
        keeps_order: whether images that have channels innermost in memory still have them. After a convolution of 1 x 1
            with one input channel, torch has them outermost.
        buffers: the offset of each buffer, by id.
    """

    def __init__(self, network: nn.Module, layout: Layout, shape: Sequence[int]) -> None:
        channels, *sides = shape
        self.is_signal = len(sides) == 1
        self.ops: list[Op] = []
        self.values = [Value(channels, *[1] * (2 - len(sides)), *sides)]
        self.used: set[int] = set()
        self.overwritten: list[int] = []
        self.dropouts: list[Dropout] = []
        self.keeps_order = True
        self._names = {id(module): name for name, module in network.named_modules()}
        parameters, buffers = dict(network.named_parameters()), persistent_buffers(network)
        frozen = {} if (whole := Layout.of_frozen(network)) is None else whole.places
        self._frozen: dict[int, int] = {
            id(each): frozen[name].start for name, each in (parameters | buffers).items() if name in frozen
        }
        self._parameters = self._frozen | _offsets(parameters[name] for name, _ in layout.parameters)
        self.buffers = self._frozen | _offsets(each for name, each in buffers.items() if name not in frozen)

    def layer(self, layer: nn.Module, at: Place) -> Place:
        """Adds the operation of a torch.nn module and returns the place of its result."""
        kind, shape = type(layer), self.values[at.number]
        rule = LAYERS.get(kind) or (OF_SIGNALS if self.is_signal else OF_IMAGES).get(kind)
        name = f"{kind.__name__} {self._names.get(id(layer), '')}".strip()
        if rule is None:
            raise Unsupported(f"it has the layer {name}")
        if "forward" in vars(layer):
            raise Unsupported(f"it has the layer {name} with its own forward")
        if any(id(each) in self.used for each in layer.parameters()):
            raise Unsupported(f"it uses the layer {name} twice")
        self.used |= {id(each) for each in layer.parameters()}
        try:
            place = rule(self, layer, at, shape)
        except Unsupported:
            raise
        except Exception:  # settings may have any type and value
            place = None
        if place is None:
            raise Unsupported(f"it has {name} with unusual settings: {layer}")
        return place

    def emit(self, kind: str, at: Place, shape: Shape, layer: nn.Module | None, **fields: float) -> Place:
        """Adds an operation with a new value and returns the place of that value."""
        if min(shape) < 1:
            raise Unsupported(f"its layer {layer} has a window that is larger than what it reads")
        if getattr(layer, "inplace", False):
            self.overwritten.append(at.number)
        self.values.append(Value(*shape))
        op = Op(kind=KIND[kind], input=at.number, output=len(self.values) - 1, **{**NOTHING, **fields})
        op.weight, op.bias = (self._offset(layer, name) for name in ("weight", "bias"))
        op.is_frozen = self._is_frozen(layer)
        self.ops.append(op)
        return Place(op.output, at.is_flat)

    def _offset(self, layer: nn.Module | None, name: str) -> int:
        """Returns where a layer's weight or bias is in a model; -1 if it has none."""
        if (held := getattr(layer, name, None)) is None:
            return -1
        if not isinstance(held, nn.Parameter):
            raise Unsupported(f"its {type(layer).__name__} has a {name} that is not a parameter")
        return self._parameters[id(held)]

    def _is_frozen(self, layer: nn.Module | None) -> bool:
        """Returns whether a layer is frozen. One that has neither parameters nor buffers is not."""
        if layer is None:
            return False
        held = [*layer.parameters(), *layer.buffers()]
        frozen = {id(each) in self._frozen for each in held}
        if len(frozen) > 1:
            raise Unsupported(f"its {type(layer).__name__} is frozen in part")
        return frozen == {True}

    def add(self, at: Place, other: Place) -> Place:
        """Adds the sum of two values and returns its place."""
        shape = _shape_of(self.values[at.number])
        if shape != _shape_of(self.values[other.number]) or at.is_flat != other.is_flat:
            raise Unsupported("its forward pass adds tensors of different shapes")
        return self.emit("add", at, shape, None, other=other.number)

    def sizes_of(self, place: Place) -> tuple[int, ...]:
        """Returns the shape of one sample's value as the network sees it."""
        value = self.values[place.number]
        if place.is_flat:
            return (value.size,)
        return (value.channels, value.width) if self.is_signal else _shape_of(value)

    def sides(self, setting: int | Sequence[int | None] | None, of_signal: int) -> tuple[Any, Any]:
        """Returns a setting of a layer for height and width. `of_signal` is that for the height of a signal."""
        sides = setting if isinstance(setting, Sequence) else (setting,)
        return (of_signal if self.is_signal else sides[0]), sides[-1]

    def window(self, layer: Any, padding: int | tuple[int, ...]) -> tuple[tuple[int, int], ...]:
        """Returns kernel, stride and padding of a window that moves over an image or a signal."""
        return self.sides(layer.kernel_size, 1), self.sides(layer.stride, 1), self.sides(padding, 0)

    def share_values(self, output: int, readers: list[int]) -> None:
        """Lets a ReLU or ReLU6 write where it reads if no other operation reads there.

        Args:
            output: the number of the value that the network returns.
            readers: the number of the value that is read, once per read.
        """
        renamed: dict[int, int] = {}
        for op in self.ops:
            op.input, op.other = renamed.get(op.input, op.input), renamed.get(op.other, op.other)
            if op.kind in OVERWRITING and op.input != 0 and readers.count(op.input) == 1 and op.output != output:
                renamed[op.output] = op.input
                readers = [op.input if number == op.output else number for number in readers if number != op.input]
                op.output = op.input


Rule = Callable[[Builder, Any, Place, Value], Place | None]  # None for settings that the kernels do not have


def _conv(to: Builder, layer: nn.Conv1d | nn.Conv2d, at: Place, value: Value) -> Place | None:
    sides = layer.kernel_size
    if layer.padding == "same" and any(side % 2 == 0 for side in sides):  # more on one side than on the other
        return None
    named = {"valid": (0, 0), "same": tuple(side // 2 for side in sides)}
    padding = named[layer.padding] if isinstance(layer.padding, str) else layer.padding
    is_depthwise = 1 < layer.groups == layer.in_channels == layer.out_channels
    if at.is_flat or (layer.groups != 1 and not is_depthwise) or any(each != 1 for each in layer.dilation):
        return None
    window = to.window(layer, padding)
    to.keeps_order &= layer.in_channels > 1 or window[0] != (1, 1)
    if layer.padding_mode != "zeros" or any(pad >= side for side, _, pad in zip(*window, strict=True)):
        return None
    kind = "depthwise" if is_depthwise else "conv"
    return to.emit(kind, at, (layer.out_channels, *_windows(value, *window)), layer, **_fields(*window))


def _linear(to: Builder, layer: nn.Linear, at: Place, value: Value) -> Place | None:
    return to.emit("linear", at, (layer.out_features, 1, 1), layer) if at.is_flat else None


def _pointwise(kind: str) -> Rule:
    """Returns the rule of a layer that has no settings."""
    return lambda to, layer, at, value: to.emit(kind, at, _shape_of(value), layer)


def _leaky_relu(to: Builder, layer: nn.LeakyReLU, at: Place, value: Value) -> Place | None:
    if layer.negative_slope <= 0:  # the sign of an output would not be that of the input
        return None
    return to.emit("leaky_relu", at, _shape_of(value), layer, eps=layer.negative_slope)


def _elu(to: Builder, layer: nn.ELU, at: Place, value: Value) -> Place | None:
    if layer.alpha <= 0:  # the sign of an output would not be that of the input
        return None
    return to.emit("elu", at, _shape_of(value), layer, eps=layer.alpha)


def _gelu(to: Builder, layer: nn.GELU, at: Place, value: Value) -> Place | None:
    return to.emit("gelu", at, _shape_of(value), layer) if layer.approximate == "none" else None


def _dropout(to: Builder, layer: nn.Dropout | nn.Dropout1d | nn.Dropout2d, at: Place, value: Value) -> Place | None:
    of_channels = not isinstance(layer, nn.Dropout)
    if layer.p == 0:
        return at
    if layer.p == 1 or (of_channels and at.is_flat):
        return None
    if not (of_channels or at.is_flat or to.is_signal or to.keeps_order):
        return None
    to.dropouts.append(Dropout(layer.p, to.sizes_of(at), of_channels))
    return to.emit("dropout", at, _shape_of(value), layer, groups=len(to.dropouts) - 1)


def _identity(to: Builder, layer: nn.Identity, at: Place, value: Value) -> Place:
    return at


def _flatten(to: Builder, layer: nn.Flatten, at: Place, value: Value) -> Place | None:
    return Place(at.number, True) if (layer.start_dim, layer.end_dim) == (1, -1) else None


def _max_pool(to: Builder, layer: nn.MaxPool1d | nn.MaxPool2d, at: Place, value: Value) -> Place | None:
    if at.is_flat or to.sides(layer.dilation, 1) != (1, 1) or layer.ceil_mode or layer.return_indices:
        return None
    window = to.window(layer, layer.padding)
    return to.emit("max_pool", at, (value.channels, *_windows(value, *window)), layer, **_fields(*window))


def _avg_pool(to: Builder, layer: nn.AvgPool1d | nn.AvgPool2d, at: Place, value: Value) -> Place | None:
    window = to.window(layer, layer.padding)
    if at.is_flat or window[2] != (0, 0) or layer.ceil_mode or getattr(layer, "divisor_override", None) is not None:
        return None
    return to.emit("avg_pool", at, (value.channels, *_windows(value, *window)), layer, **_fields(*window))


def _adaptive_pool(
    to: Builder, layer: nn.AdaptiveAvgPool1d | nn.AdaptiveAvgPool2d, at: Place, value: Value
) -> Place | None:
    """Adds an average over equal windows that do not overlap. Sizes of other windows would depend on the place."""
    sides = value.height, value.width
    outs = [side if out is None else out for side, out in zip(sides, to.sides(layer.output_size, 1), strict=True)]
    if at.is_flat or any(side % out for side, out in zip(sides, outs, strict=True)):
        return None
    kernel = sides[0] // outs[0], sides[1] // outs[1]
    return to.emit("avg_pool", at, (value.channels, *outs), layer, **_fields(kernel, kernel, (0, 0)))


def _group_norm(to: Builder, layer: nn.GroupNorm, at: Place, value: Value) -> Place | None:
    if _hides_pixels(at, value) or layer.eps <= 0:  # lanes without a sample have no variance
        return None
    return to.emit("group_norm", at, _shape_of(value), layer, groups=layer.num_groups, eps=layer.eps)


def _layer_norm(to: Builder, layer: nn.LayerNorm, at: Place, value: Value) -> Place | None:
    """Adds a normalisation of features, which is a group normalisation with one group."""
    if not at.is_flat or _hides_pixels(at, value) or layer.normalized_shape != (value.channels,) or layer.eps <= 0:
        return None
    return to.emit("group_norm", at, _shape_of(value), layer, groups=1, eps=layer.eps)


def _batch_norm(to: Builder, layer: nn.BatchNorm2d | nn.BatchNorm1d, at: Place, value: Value) -> Place | None:
    if layer.momentum is None or not layer.track_running_stats or _hides_pixels(at, value):
        return None
    if isinstance(layer, nn.BatchNorm1d) != (at.is_flat or to.is_signal):
        return None
    statistics = layer.running_mean, layer.running_var, layer.num_batches_tracked
    places = dict(zip(("mean", "var", "tracked"), (to.buffers[id(each)] for each in statistics), strict=True))
    return to.emit("batch_norm", at, _shape_of(value), layer, eps=layer.eps, momentum=layer.momentum, **places)


LAYERS: dict[type[nn.Module], Rule] = {
    nn.Linear: _linear,
    nn.ReLU: _pointwise("relu"),
    nn.ReLU6: _pointwise("relu6"),
    nn.LeakyReLU: _leaky_relu,
    nn.ELU: _elu,
    nn.Tanh: _pointwise("tanh"),
    nn.Sigmoid: _pointwise("sigmoid"),
    nn.GELU: _gelu,
    nn.SiLU: _pointwise("silu"),
    nn.Dropout: _dropout,
    nn.Identity: _identity,
    nn.Flatten: _flatten,
    nn.GroupNorm: _group_norm,
    nn.LayerNorm: _layer_norm,
    nn.BatchNorm1d: _batch_norm,
}
OF_SIGNALS: dict[type[nn.Module], Rule] = {
    nn.Conv1d: _conv,
    nn.Dropout1d: _dropout,
    nn.MaxPool1d: _max_pool,
    nn.AvgPool1d: _avg_pool,
    nn.AdaptiveAvgPool1d: _adaptive_pool,
}
OF_IMAGES: dict[type[nn.Module], Rule] = {
    nn.Conv2d: _conv,
    nn.Dropout2d: _dropout,
    nn.MaxPool2d: _max_pool,
    nn.AvgPool2d: _avg_pool,
    nn.AdaptiveAvgPool2d: _adaptive_pool,
    nn.BatchNorm2d: _batch_norm,
}


def _hides_pixels(at: Place, value: Value) -> bool:
    """Returns whether an image was flattened. Its pixels are features then and no longer belong to a channel."""
    return at.is_flat and value.height * value.width > 1


def _fields(kernel: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int]) -> dict[str, int]:
    """Returns the fields of `Op` for a window that moves over an image."""
    named = {"kernel": kernel, "stride": stride, "padding": padding}
    return {f"{name}_{axis}": side for name, sides in named.items() for axis, side in zip("hw", sides, strict=True)}


def _windows(
    value: Value, kernel: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int]
) -> tuple[int, int]:
    """Returns the number of positions of a window in height and width."""
    sides = zip((value.height, value.width), kernel, stride, padding, strict=True)
    height, width = ((side + 2 * pad - size) // step + 1 for side, size, step, pad in sides)
    return height, width


def _shape_of(value: Value) -> Shape:
    return value.channels, value.height, value.width


def _offsets(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Returns the offset of each tensor in the vector of all tensors, by id."""
    offsets, offset = {}, 0
    for tensor in tensors:
        offsets[id(tensor)] = offset
        offset += tensor.numel()
    return offsets
