"""How functions and methods of tensors become operations of the kernels. Those without a rule are refused."""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torchvision.ops import StochasticDepth, stochastic_depth  # type: ignore[import-untyped,unused-ignore]

from lcfl.engines.convolution_rules import Padded
from lcfl.engines.forward_graph import BATCH, Unsupported
from lcfl.engines.layer_rules import Scale, add_layer
from lcfl.engines.operations import Builder, Place

__all__ = ["add_call"]

Rule = Callable[..., Any]  # takes a builder and the arguments of the function; returns None if it does not know them


@dataclass(frozen=True)
class _Pieces:
    """Tensors that are parts of another: where the channels of each begin and end."""

    at: Place
    bounds: list[tuple[int, int]]


@dataclass(frozen=True)
class _Grouped:
    """A view of images as ``[B, groups, C / groups, H, W]``, or with groups and channels swapped."""

    at: Place
    groups: int
    is_swapped: bool = False


def _layer(kind: type[nn.Module]) -> Rule:
    """Returns the rule of a function that has the arguments of a layer."""

    def rule(to: Builder, input: Place, *args: Any, **options: Any) -> Any:
        try:
            layer = kind(*args, **options)
        except (TypeError, ValueError):
            reason = f"it calls the functional form of {kind.__name__} with unusual arguments"
            raise Unsupported(reason) from None
        return add_layer(to, layer, input)

    return rule


def _linear(to: Builder, input: Place, weight: nn.Parameter, bias: nn.Parameter | None = None) -> Any:
    outputs, inputs = weight.shape
    return _with_parameters(to, nn.Linear(inputs, outputs, device="meta"), input, weight, bias)


def _convolution(kind: Any) -> Rule:
    """Returns the rule of the functional form of a convolution, which layers with a `forward` of their own call."""

    def rule(
        to: Builder,
        input: Place | Padded,
        weight: nn.Parameter,
        bias: nn.Parameter | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Any:
        outputs, inputs, *kernel = weight.shape
        layer = kind(inputs * groups, outputs, tuple(kernel), stride, padding, dilation, groups, device="meta")
        return _with_parameters(to, layer, input, weight, bias)

    return rule


def _layer_norm(
    to: Builder,
    input: Place,
    normalized_shape: Sequence[int],
    weight: nn.Parameter | None = None,
    bias: nn.Parameter | None = None,
    eps: float = 1e-5,
) -> Any:
    return _with_parameters(to, nn.LayerNorm(normalized_shape, eps, device="meta"), input, weight, bias)


def _with_parameters(
    to: Builder, layer: Any, at: Place | Padded, weight: nn.Parameter | None, bias: nn.Parameter | None
) -> Any:
    """Adds a layer with the parameters that its functional form gets."""
    layer.weight, layer.bias = weight, bias
    return add_layer(to, layer, at)


def _add(to: Builder, input: Any, other: Any) -> Place:
    at, summand = _tensor_first(input, other)
    return to.add(at, summand) if isinstance(summand, Place) else to.affine(at, 1, summand)


def _subtract(to: Builder, input: Any, other: Any) -> Place:
    return _add(to, input, to.affine(other, -1, 0) if isinstance(other, Place) else -other)


def _multiply(to: Builder, input: Any, other: Any) -> Place | None:
    at, factor = _tensor_first(input, other)
    if isinstance(factor, nn.Parameter):
        return _scale(to, at, factor)
    return to.multiply(at, factor) if isinstance(factor, Place) else to.affine(at, factor, 0)


def _scale(to: Builder, at: Place, factor: nn.Parameter) -> Place | None:
    """Adds a product with a parameter ``[C, 1, 1]``, or ``[C]`` if the channels are the last dimension."""
    shape, size = [1] * (at.rank + 1), to.sizes_of(at)[at.channel_dim - 1]
    shape[at.channel_dim] = size
    is_of_channels = factor.numel() == size and shape[len(shape) - factor.dim() :] == [*factor.shape]
    return add_layer(to, Scale(factor), at) if is_of_channels else None


def _tensor_first(one: Any, other: Any) -> tuple[Any, Any]:
    return (one, other) if isinstance(one, Place) else (other, one)


def _divide(to: Builder, input: Place, other: float) -> Place:
    return to.affine(input, 1 / other, 0)


def _negate(to: Builder, input: Place) -> Place:
    return to.affine(input, -1, 0)


def _concatenate(to: Builder, tensors: Sequence[Place], dim: int = 0) -> Place:
    return to.concatenate([to.with_channels(each, dim) for each in tensors])


def _chunk(to: Builder, input: Place, chunks: int, dim: int = 0) -> _Pieces | None:
    return _split(to, input, -(-to.sizes_of(input)[dim - (dim > 0)] // chunks), dim)


def _split(to: Builder, input: Place, split_size: int | Sequence[int], dim: int = 0) -> _Pieces | None:
    at = to.with_channels(input, dim)
    channels = to.sizes_of(at)[at.channel_dim - 1]
    if isinstance(split_size, int):
        whole, rest = divmod(channels, split_size)
        split_size = [split_size] * whole + [rest] * (rest > 0)
    bounds = list(pairwise(accumulate(split_size, initial=0)))
    return _Pieces(at, bounds) if bounds[-1][1] == channels else None


def _get_item(to: Builder, of: Place | _Pieces, index: Any) -> Place | None:
    """Adds a piece, a range of one dimension such as ``x[:, a:b]``, or one of its places, ``x[:, :, -1]``."""
    if isinstance(of, _Pieces):
        return to.channels(of.at, *of.bounds[index])
    index = [*index]
    if Ellipsis in index:
        index[(here := index.index(Ellipsis)) : here + 1] = [slice(None)] * (of.rank + 2 - len(index))
    (dim,) = (dim for dim, each in enumerate(index) if each != slice(None))  # the only one
    size, chosen = to.sizes_of(of)[dim - 1], index[dim]
    begin, end, step = chosen.indices(size) if isinstance(chosen, slice) else (range(size)[chosen], None, 1)
    if dim == 0 or step != 1 or len(index) > of.rank + 1:
        return None
    is_in_order = of in to.in_order or (of.rank == 2 and not of.is_turned and to.keeps_dims)
    part = to.channels(to.with_channels(of, dim), begin, begin + 1 if end is None else end)
    if is_in_order:  # so is a part of it
        to.in_order.add(part)
    return part if end is not None else _squeeze(to, part, dim)


def _flatten(to: Builder, input: Place, start_dim: int = 0, end_dim: int = -1) -> Any:
    return add_layer(to, nn.Flatten(start_dim, end_dim), input)


def _unsqueeze(to: Builder, input: Place, dim: int) -> Place | None:
    sizes, dim = [*to.sizes_of(input)], range(input.rank + 2)[dim]
    sizes.insert(dim - 1, 1)
    return to.reshape(input, sizes) if dim > 0 else None


def _squeeze(to: Builder, input: Place, dim: int) -> Place | None:
    """Adds a value without a dimension of size 1. The batch may have any size."""
    sizes, dim = [*to.sizes_of(input)], range(input.rank + 1)[dim]
    return to.reshape(input, sizes) if dim > 0 and sizes.pop(dim - 1) == 1 and sizes else None


def _permute(to: Builder, input: Place, *dims: Any) -> Place:
    return to.permute(input, dims[0] if isinstance(dims[0], Sequence) else dims)


def _reshape(to: Builder, input: Place | _Grouped, *shape: Any) -> Place | _Grouped | None:
    """Adds a value in another shape, which begins with the size of the batch, or -1 for what remains."""
    first, *sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], Sequence) else shape
    if first is not BATCH and (first != -1 or -1 in sizes):
        return None
    if isinstance(input, _Grouped):
        return _shuffle(to, input, sizes)
    return _group(to, input, sizes) if len(sizes) == 4 else to.reshape(input, sizes)


def _group(to: Builder, at: Place, sizes: Sequence[int]) -> _Grouped | None:
    """Returns a view of an image as ``[B, groups, C / groups, H, W]``."""
    at = to.plain(at)
    groups, of_group, *sides = to.filled(at, sizes)
    return _Grouped(at, groups) if (groups * of_group, *sides) == to.sizes_of(at) else None


def _shuffle(to: Builder, seen: _Grouped, sizes: Sequence[int]) -> Place | None:
    """Adds the shuffle that a view as groups, a swap and a view as channels are together."""
    is_shuffle = seen.is_swapped and to.filled(seen.at, sizes) == to.sizes_of(seen.at)
    return add_layer(to, nn.ChannelShuffle(seen.groups), seen.at) if is_shuffle else None


def _transpose(to: Builder, input: Place | _Grouped, dim0: int, dim1: int) -> Place | _Grouped | None:
    """Returns a view of groups and channels with the two swapped, or that of another order of dimensions."""
    if isinstance(input, _Grouped):
        return replace(input, is_swapped=not input.is_swapped) if {dim0, dim1} == {1, 2} else None
    order = [*range(input.rank + 1)]
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return to.permute(input, order)


def _contiguous(to: Builder, input: Place | _Grouped) -> Place | _Grouped:
    """Returns what it gets. An image then has its channels outermost in torch."""
    to.keeps_order &= isinstance(input, Place) and input.is_flat
    return input


def _pad(to: Builder, input: Place, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Any:
    """Returns a value with zeros around it."""
    kind: Any = nn.ConstantPad1d if input.rank == 2 else nn.ConstantPad2d
    num_sides = 2 * (input.rank - 1)
    if mode != "constant" or value or min(pad) < 0 or len(pad) > num_sides:
        return None
    return add_layer(to, kind((*pad, 0, 0)[:num_sides], 0), input)


def _mean(to: Builder, input: Place, dim: Any = None, keepdim: bool = False) -> Place | None:
    """Adds the mean over all pixels of an image, or all steps of a signal."""
    dims = sorted(range(input.rank + 1)[each] for each in (dim if isinstance(dim, Sequence) else (dim,)))
    if input.is_flat or dims not in ([*range(2, input.rank + 1)], [*range(1, input.rank)]):
        return None
    at = to.plain(input) if dims[0] == 2 else to.turned(input)
    pool = nn.AdaptiveAvgPool1d(1) if at.rank == 2 else nn.AdaptiveAvgPool2d(1)
    place = add_layer(to, pool, replace(at, is_turned=False))
    return replace(place, is_turned=at.is_turned) if keepdim else Place(place.number, 1)


RULES: dict[Any, Rule] = {  # of functions, and of methods by name
    torch.add: _add,
    operator.add: _add,
    operator.iadd: _add,
    "add": _add,
    torch.sub: _subtract,
    "sub": _subtract,
    operator.sub: _subtract,
    operator.isub: _subtract,
    torch.mul: _multiply,
    "mul": _multiply,
    operator.mul: _multiply,
    operator.imul: _multiply,
    torch.div: _divide,
    "div": _divide,
    operator.truediv: _divide,
    operator.itruediv: _divide,
    torch.neg: _negate,
    operator.neg: _negate,
    torch.cat: _concatenate,
    torch.concat: _concatenate,
    torch.chunk: _chunk,
    "chunk": _chunk,
    torch.split: _split,
    "split": _split,
    operator.getitem: _get_item,
    torch.flatten: _flatten,
    "flatten": _flatten,
    "view": _reshape,
    torch.reshape: _reshape,
    "reshape": _reshape,
    torch.unsqueeze: _unsqueeze,
    "unsqueeze": _unsqueeze,
    torch.squeeze: _squeeze,
    "squeeze": _squeeze,
    torch.transpose: _transpose,
    "transpose": _transpose,
    torch.swapaxes: _transpose,
    "swapaxes": _transpose,
    torch.permute: _permute,
    "permute": _permute,
    "contiguous": _contiguous,
    F.linear: _linear,
    F.layer_norm: _layer_norm,
    F.pad: _pad,
    F.conv1d: _convolution(nn.Conv1d),
    F.conv2d: _convolution(nn.Conv2d),
    torch.mean: _mean,
    "mean": _mean,
}
LAYERS: dict[Any, type[nn.Module]] = {  # of functions, and of methods by name, that have the arguments of a layer
    F.relu: nn.ReLU,
    torch.relu: nn.ReLU,
    "relu": nn.ReLU,
    F.relu6: nn.ReLU6,
    F.leaky_relu: nn.LeakyReLU,
    F.elu: nn.ELU,
    F.selu: nn.SELU,
    torch.selu: nn.SELU,
    F.celu: nn.CELU,
    torch.celu: nn.CELU,
    F.tanh: nn.Tanh,
    torch.tanh: nn.Tanh,
    "tanh": nn.Tanh,
    F.sigmoid: nn.Sigmoid,
    torch.sigmoid: nn.Sigmoid,
    "sigmoid": nn.Sigmoid,
    F.dropout: nn.Dropout,
    F.dropout1d: nn.Dropout1d,
    F.dropout2d: nn.Dropout2d,
    stochastic_depth: StochasticDepth,
    F.hardsigmoid: nn.Hardsigmoid,
    F.hardswish: nn.Hardswish,
    F.gelu: nn.GELU,
    F.silu: nn.SiLU,
    F.max_pool1d: nn.MaxPool1d,
    torch.max_pool1d: nn.MaxPool1d,
    F.avg_pool1d: nn.AvgPool1d,
    torch.avg_pool1d: nn.AvgPool1d,
    F.adaptive_avg_pool1d: nn.AdaptiveAvgPool1d,
    torch.adaptive_avg_pool1d: nn.AdaptiveAvgPool1d,
    F.adaptive_max_pool1d: nn.AdaptiveMaxPool1d,
    F.max_pool2d: nn.MaxPool2d,
    torch.max_pool2d: nn.MaxPool2d,
    F.avg_pool2d: nn.AvgPool2d,
    F.adaptive_avg_pool2d: nn.AdaptiveAvgPool2d,
    F.adaptive_max_pool2d: nn.AdaptiveMaxPool2d,
    F.channel_shuffle: nn.ChannelShuffle,
    torch.unflatten: nn.Unflatten,
    "unflatten": nn.Unflatten,
}
RULES |= {function: _layer(kind) for function, kind in LAYERS.items()}


def add_call(to: Builder, function: Any, args: Sequence[Any], options: dict[str, Any]) -> Any:
    """Adds the operations of a function, or of a method by its name, and returns what stands for its result.

    Args:
        to: the list of operations.
        function: the function, or the name of the method.
        args: its arguments: places, what other calls returned, numbers, and `BATCH`.
        options: those with a name.

    Raises:
        Unsupported: for a function that has no rule, and for arguments that its rule does not know.
    """
    rule = RULES.get(function)
    try:
        found = None if rule is None else rule(to, *args, **options)
    except Unsupported:
        raise
    except (AttributeError, TypeError, ValueError, LookupError, ArithmeticError):  # arguments that it does not know
        found = None
    if found is None:
        how = "" if rule is None else " in a way that has no operation"
        raise Unsupported(f"its forward pass calls {getattr(function, '__name__', function)}{how}")
    return found
