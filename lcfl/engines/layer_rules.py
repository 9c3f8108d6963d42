"""How torch's layers become operations of the kernels. Layers whose settings no operation has are refused."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torchvision.ops import StochasticDepth  # type: ignore[import-untyped,unused-ignore]

from lcfl.engines.convolution_rules import Padded, add_convolution, pad
from lcfl.engines.forward_graph import Unsupported
from lcfl.engines.kernels import Value
from lcfl.engines.operations import Builder, Place, has_any_order, shape_of
from lcfl.engines.windows import fields_of, positions, sides_of, window_of

__all__ = ["Scale", "add_layer"]

# Takes a builder, a layer, and place and value of what it reads. Returns what stands for the result, or None for
# settings that the kernels do not have.
Rule = Callable[..., Any]


class Scale(nn.Module):
    """What stands for a product with one parameter per channel, which no layer of torch computes."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight


def _linear(to: Builder, layer: nn.Linear, at: Place, value: Value) -> Place | None:
    """Adds a matrix product of features, or of the channels of each pixel, which is a convolution of one pixel."""
    if at.is_flat:
        return to.emit("linear", at, (layer.out_features, 1, 1), layer)
    if layer.in_features != value.channels:
        return None
    shape = (layer.out_features, value.height, value.width)
    if value.height * value.width == 1:
        place = to.emit("linear", at, shape, layer)
    else:
        place = to.emit("conv", at, shape, layer, **fields_of((1, 1), (1, 1), (0, 0)))
        to.token_layers.append(min(layer.in_features, layer.out_features))
    to.keeps_order &= at.rank != 3
    to.in_order.add(place)
    return place


def _scale(to: Builder, layer: Scale, at: Place, value: Value) -> Place | None:
    """Adds a product with one factor per channel, which is a depthwise convolution of one pixel."""
    if _hides_pixels(at, value):
        at = to.part(at, 0, (value.size, 1, 1))
    return to.emit("depthwise", at, shape_of(to.values[at.number]), layer, **fields_of((1, 1), (1, 1), (0, 0)))


def _pointwise(kind: str) -> Rule:
    """Returns the rule of a layer that has no settings."""
    return lambda to, layer, at, value: to.emit(kind, at, shape_of(value), layer)


def _leaky_relu(to: Builder, layer: nn.LeakyReLU, at: Place, value: Value) -> Place | None:
    if layer.negative_slope <= 0:  # the sign of an output would not be that of the input
        return None
    return to.emit("leaky_relu", at, shape_of(value), layer, eps=layer.negative_slope)


def _elu(to: Builder, layer: nn.ELU, at: Place, value: Value) -> Place:
    return to.emit("elu", at, shape_of(value), layer, eps=layer.alpha)


def _selu(to: Builder, layer: nn.SELU, at: Place, value: Value) -> Place:
    """Adds scale * ELU(x), with the numbers of Klambauer et al. (2017)."""
    return to.affine(to.emit("elu", at, shape_of(value), layer, eps=1.6732632423543772), 1.0507009873554805, 0)


def _celu(to: Builder, layer: nn.CELU, at: Place, value: Value) -> Place | None:
    """Adds alpha * ELU(x / alpha)."""
    if layer.alpha <= 0:  # the sign of x / alpha would not be that of x
        return None
    inner = to.affine(at, 1 / layer.alpha, 0, layer)
    return to.affine(to.emit("elu", inner, shape_of(value), None, eps=1), layer.alpha, 0)


def _gelu(to: Builder, layer: nn.GELU, at: Place, value: Value) -> Place | None:
    return to.emit("gelu", at, shape_of(value), layer) if layer.approximate == "none" else None


def _dropout(to: Builder, layer: nn.Dropout | nn.Dropout1d | nn.Dropout2d, at: Place, value: Value) -> Place | None:
    of_channels = not isinstance(layer, nn.Dropout)
    if layer.p == 0:
        return at
    if layer.p == 1 or (of_channels and at.is_flat):
        return None
    if not (of_channels or at.is_flat or at in to.in_order or _is_drawn_in_order(to, at, value)):
        raise Unsupported("it has dropout of tensors whose order in memory is not known")
    return to.drop(at, layer.p, "channel" if of_channels else "number", layer)


def _is_drawn_in_order(to: Builder, at: Place, value: Value) -> bool:
    """Returns whether torch's dropout draws for a signal or an image in the order of `Dropout.mask`."""
    return to.keeps_dims and not at.is_turned and (at.rank == 2 or to.keeps_order or has_any_order(value))


def _stochastic_depth(to: Builder, layer: StochasticDepth, at: Place, value: Value) -> Place | None:
    if layer.p == 0:
        return at
    return to.drop(at, layer.p, "sample" if layer.mode == "row" else "batch", layer) if layer.p < 1 else None


def _identity(to: Builder, layer: nn.Identity, at: Place, value: Value) -> Place:
    return at


def _unflatten(to: Builder, layer: nn.Unflatten, at: Place, value: Value) -> Place | None:
    return to.reshape(at, layer.unflattened_size) if at.is_flat and layer.dim in (1, -1) else None


def _flatten(to: Builder, layer: nn.Flatten, at: Place, value: Value) -> Place | None:
    sizes = to.sizes_of(at)
    start, end = (range(at.rank + 1)[each] for each in (layer.start_dim, layer.end_dim))
    if start == 0:
        return None
    return to.reshape(at, (*sizes[: start - 1], math.prod(sizes[start - 1 : end]), *sizes[end:]))


def _max_pool(to: Builder, layer: nn.MaxPool1d | nn.MaxPool2d, at: Place, value: Value) -> Place | None:
    if at.is_flat or sides_of(at, layer.dilation, 1) != (1, 1) or layer.return_indices:
        return None
    window = window_of(at, layer)
    sides = positions(value, *window, with_rest=layer.ceil_mode)
    return to.emit("max_pool", at, (value.channels, *sides), layer, **fields_of(*window))


def _avg_pool(to: Builder, layer: nn.AvgPool1d | nn.AvgPool2d, at: Place, value: Value) -> Place | None:
    window = kernel, _, padding = window_of(at, layer)
    divisor = getattr(layer, "divisor_override", None)
    if divisor is None and layer.count_include_pad and padding != (0, 0):
        divisor = kernel[0] * kernel[1]
    if at.is_flat or layer.ceil_mode or (divisor is not None and divisor < 1):
        return None
    shape, factor = (value.channels, *positions(value, *window)), 1 / divisor if divisor else 0
    return to.emit("avg_pool", at, shape, layer, eps=factor, **fields_of(*window))


def _adaptive_pool(kind: str) -> Rule:
    """Returns the rule of a pooling to a given size.

    If the size does not divide the image, the windows of an average depend on the place, and those of a maximum are
    refused.
    """

    def rule(to: Builder, layer: Any, at: Place, value: Value) -> Place | None:
        size, sides = layer.output_size, (value.height, value.width)
        if at.is_flat or (isinstance(size, Sequence) and len(size) != at.rank - 1):
            return None
        outs = tuple(side if out is None else out for side, out in zip(sides, sides_of(at, size, 1), strict=True))
        to.keeps_order &= not has_any_order(value) or outs == (1, 1)
        is_divided = not any(side % out for side, out in zip(sides, outs, strict=True))
        if kind == "max_pool" and (layer.return_indices or not is_divided):
            return None
        kernel = (sides[0] // outs[0], sides[1] // outs[1]) if is_divided else (0, 0)
        return to.emit(kind, at, (value.channels, outs[0], outs[1]), layer, **fields_of(kernel, kernel, (0, 0)))

    return rule


def _group_norm(to: Builder, layer: nn.GroupNorm, at: Place, value: Value) -> Place | None:
    if _hides_pixels(at, value) or layer.eps <= 0:  # lanes without a sample have no variance
        return None
    return to.emit("group_norm", at, shape_of(value), layer, groups=layer.num_groups, eps=layer.eps)


def _instance_norm(to: Builder, layer: nn.InstanceNorm1d | nn.InstanceNorm2d, at: Place, value: Value) -> Place | None:
    """Adds a normalisation of each channel, which is a group normalisation with a group per channel."""
    if at.is_flat or layer.track_running_stats or layer.eps <= 0 or layer.num_features != value.channels:
        return None
    if value.height * value.width == 1:  # torch raises an error in training
        return None
    return to.emit("group_norm", at, shape_of(value), layer, groups=value.channels, eps=layer.eps)


def _channel_shuffle(to: Builder, layer: nn.ChannelShuffle, at: Place, value: Value) -> Place | None:
    if at.is_flat or value.channels % layer.groups:
        return None
    to.keeps_order = False
    return to.emit("shuffle", at, shape_of(value), layer, groups=layer.groups, place=value.height * value.width)


def _layer_norm(to: Builder, layer: nn.LayerNorm, at: Place, value: Value) -> Place | None:
    """Adds a normalisation of features, or of the channels of each pixel."""
    if _hides_pixels(at, value) or layer.normalized_shape != (value.channels,) or layer.eps <= 0:
        return None
    to.keeps_order &= at.rank != 3
    return to.emit("layer_norm", at, shape_of(value), layer, eps=layer.eps)


def _batch_norm(to: Builder, layer: nn.BatchNorm2d | nn.BatchNorm1d, at: Place, value: Value) -> Place | None:
    if layer.momentum is None or not layer.track_running_stats or _hides_pixels(at, value):
        return None
    if isinstance(layer, nn.BatchNorm1d) != (at.rank < 3):
        return None
    statistics = layer.running_mean, layer.running_var, layer.num_batches_tracked
    if [0 if each is None else each.numel() for each in statistics] != [value.channels, value.channels, 1]:
        return None
    places = dict(zip(("mean", "var", "tracked"), (to.buffers[id(each)] for each in statistics), strict=True))
    return to.emit("batch_norm", at, shape_of(value), layer, eps=layer.eps, momentum=layer.momentum, **places)


OF_NUMBERS: dict[type[nn.Module], Rule] = {  # these do not mind which dimension the channels are
    nn.ReLU: _pointwise("relu"),
    nn.ReLU6: _pointwise("relu6"),
    nn.LeakyReLU: _leaky_relu,
    nn.ELU: _elu,
    nn.SELU: _selu,
    nn.CELU: _celu,
    nn.Tanh: _pointwise("tanh"),
    nn.Sigmoid: _pointwise("sigmoid"),
    nn.Hardsigmoid: _pointwise("hardsigmoid"),
    nn.Hardswish: _pointwise("hardswish"),
    nn.GELU: _gelu,
    nn.SiLU: _pointwise("silu"),
    nn.Dropout: _dropout,
    StochasticDepth: _stochastic_depth,
    nn.Identity: _identity,
    Scale: _scale,
}
OF_LAST_DIM: dict[type[nn.Module], Rule] = {nn.Linear: _linear, nn.LayerNorm: _layer_norm}  # which is the channels
OF_FIRST_DIM: dict[type[nn.Module], Rule] = {
    nn.Flatten: _flatten,
    nn.Unflatten: _unflatten,
    nn.ChannelShuffle: _channel_shuffle,
    nn.GroupNorm: _group_norm,
    nn.BatchNorm1d: _batch_norm,
}
OF_SIGNALS: dict[type[nn.Module], Rule] = {
    nn.Conv1d: add_convolution,
    nn.ZeroPad1d: pad,
    nn.ConstantPad1d: pad,
    nn.Dropout1d: _dropout,
    nn.MaxPool1d: _max_pool,
    nn.AvgPool1d: _avg_pool,
    nn.AdaptiveAvgPool1d: _adaptive_pool("avg_pool"),
    nn.AdaptiveMaxPool1d: _adaptive_pool("max_pool"),
    nn.InstanceNorm1d: _instance_norm,
}
OF_IMAGES: dict[type[nn.Module], Rule] = {
    nn.Conv2d: add_convolution,
    nn.ZeroPad2d: pad,
    nn.ConstantPad2d: pad,
    nn.Dropout2d: _dropout,
    nn.MaxPool2d: _max_pool,
    nn.AvgPool2d: _avg_pool,
    nn.AdaptiveAvgPool2d: _adaptive_pool("avg_pool"),
    nn.AdaptiveMaxPool2d: _adaptive_pool("max_pool"),
    nn.InstanceNorm2d: _instance_norm,
    nn.BatchNorm2d: _batch_norm,
}
KEEPS_RESULT = (nn.ReLU, nn.Tanh, nn.Sigmoid)  # torch computes the gradient from the result
KEEPS_RESULT_IN_PLACE = (nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU)  # so it does here if the result replaces the input


def add_layer(to: Builder, layer: nn.Module, read: Place | Padded) -> Any:
    """Adds the operation of a torch.nn module and returns the place of its result, or what else stands for it.

    Raises:
        Unsupported: for a layer, or settings of it, that the kernels do not have, and for a layer that is used twice.
    """
    kind = type(layer)
    at, zeros = (read.at, (read.zeros,)) if isinstance(read, Padded) else (read, ())
    if zeros and kind not in (nn.Conv1d, nn.Conv2d):
        raise Unsupported(f"it pads what its {kind.__name__} reads, which is no convolution")
    if kind not in OF_NUMBERS:
        at = to.turned(at) if kind in OF_LAST_DIM else to.plain(at)
    value = to.values[at.number]
    of_rank = OF_SIGNALS if at.rank == 2 else OF_IMAGES
    rule = next((rules[kind] for rules in (OF_NUMBERS, OF_LAST_DIM, OF_FIRST_DIM, of_rank) if kind in rules), None)
    name = f"{kind.__name__} {to.names.get(id(layer), '')}".strip()
    if rule is None:
        raise Unsupported(f"it has the layer {name}")
    if "forward" in vars(layer):
        raise Unsupported(f"it has the layer {name} with its own forward")
    held = dict(layer.named_parameters(remove_duplicate=False))
    if held.keys() - {"weight", "bias"} or (len(held) == 2 and held["weight"] is held["bias"]):
        raise Unsupported(f"it has the layer {name} with other parameters than a weight and a bias")
    if any(id(each) in to.used for each in layer.parameters()):
        raise Unsupported(f"it uses the layer {name} twice")
    to.used |= {id(each) for each in layer.parameters()}
    try:
        place = rule(to, layer, at, value, *zeros)
    except Unsupported:
        raise
    except Exception:  # settings may have any type and value
        place = None
    if place is None:
        raise Unsupported(f"it has {name} with unusual settings: {layer}")
    if isinstance(layer, KEEPS_RESULT) or (isinstance(layer, KEEPS_RESULT_IN_PLACE) and layer.inplace):
        to.kept.add(place.number)
    return place


def _hides_pixels(at: Place, value: Value) -> bool:
    """Returns whether an image was flattened. Its pixels are features then and no longer belong to a channel."""
    return at.is_flat and value.height * value.width > 1
