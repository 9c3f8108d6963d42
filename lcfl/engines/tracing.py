"""Translation of a network's forward pass into a list of the operations that the kernels know."""

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from lcfl.engines.forward_graph import Unsupported, forward_graph, is_size, size_of
from lcfl.engines.kernels import KIND, Op, Value
from lcfl.models.frozen import persistent_buffers
from lcfl.models.layout import Layout

__all__ = ["Program", "trace"]

Shape = tuple[int, int, int]  # channels, height, width
NOTHING = dict.fromkeys(("other", "mean", "var", "tracked"), -1)


@dataclass(frozen=True)
class Program:
    """Operations in order, and the shapes of the numbered values that they read and write.

    Attributes:
        ops: the operations in the order of the forward pass.
        values: the shapes of the values for one sample; number 0 is the input.
        output: the number of the value that the network returns.
        dropouts: the probability of each dropout and the size of its value, in the order of the forward pass.
    """

    ops: tuple[Op, ...]
    values: tuple[Value, ...]
    output: int
    dropouts: tuple[tuple[float, int], ...] = ()

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The program as the kernels take it."""
        ops, values = (Op * len(self.ops))(*self.ops), (Value * len(self.values))(*self.values)
        return ops, len(ops), values, len(values), 0, self.output

    @property
    def num_outputs(self) -> int:
        """C, the number of outputs for a sample, such as class scores."""
        return self.values[self.output].size

    @property
    def needs_two(self) -> bool:
        """Whether training needs two samples, because a batch normalisation would get one number per channel."""
        normed = [self.values[op.input] for op in self.ops if op.kind == KIND["batch_norm"]]
        return any(value.height * value.width == 1 for value in normed)


@dataclass(frozen=True)
class _Place:
    """A value in the shape that the network sees: flattened, or with height and width."""

    number: int
    is_flat: bool


@dataclass
class _Tracer:
    network: nn.Module
    layout: Layout
    ops: list[Op] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    used: set[int] = field(default_factory=set)  # ids of parameters that belong to an operation
    overwritten: list[int] = field(default_factory=list)  # values that a layer changes in place
    dropouts: list[tuple[float, int]] = field(default_factory=list)
    places: dict[fx.Node, _Place] = field(default_factory=dict)
    sizes: dict[fx.Node, Any] = field(default_factory=dict)  # of nodes for numbers, with None as the size of the batch

    def __post_init__(self) -> None:
        self.names = {id(module): name for name, module in self.network.named_modules()}
        parameters, buffers = dict(self.network.named_parameters()), persistent_buffers(self.network)
        self.parameters = _offsets(parameters[name] for name, _ in self.layout.parameters)
        self.buffers = _offsets(buffers.values())

    def run(self, graph: fx.Graph, shape: Sequence[int]) -> Program:
        """Returns the program of the network for inputs of this shape, which does not include the batch.

        Args:
            graph: the graph of the network's forward pass.
            shape: the shape of one input.
        """
        self.values.append(_value(shape))
        last: _Place | None = None
        for node in graph.nodes:
            if node.op == "placeholder":
                if self.places:
                    raise Unsupported("its forward pass takes more than one input")
                self.places[node] = _Place(0, len(shape) == 1)
            elif node.op == "output":
                last = self.places.get(node.args[0])
            elif is_size(node):
                self.sizes[node] = size_of(node, self.sizes_of, self.sizes)
            else:
                inputs = [self.places[each] for each in node.all_input_nodes if each in self.places]
                self.places[node] = self.visit(node, inputs)
        if last is None or not last.is_flat or last.number == 0:
            raise Unsupported("its output is not one tensor of class scores")
        unused = [name for name, each in self.network.named_parameters() if id(each) not in self.used]
        if unused:
            raise Unsupported(f"its parameter {unused[0]} belongs to no operation")
        readers = [number for op in self.ops for number in (op.input, op.other)] + [last.number]
        if any(readers.count(number) > 1 for number in self.overwritten):
            raise Unsupported("it changes in place what its forward pass reads again")
        if any(op.output not in readers for op in self.ops):  # torch gives the parameters before it no gradient
            raise Unsupported("its forward pass computes what its class scores do not depend on")
        self.share_values(last.number, readers)
        return Program(tuple(self.ops), tuple(self.values), last.number, tuple(self.dropouts))

    def visit(self, node: fx.Node, inputs: list[_Place]) -> _Place:
        """Adds the operation of a node and returns the place of its result."""
        if node.op == "call_module":
            return self.layer(self.network.get_submodule(str(node.target)), inputs[0])
        name = node.target if isinstance(node.target, str) else FUNCTIONS.get(node.target, "")
        args = fx.map_arg(node.args[1:], lambda each: self.sizes.get(each, each))
        options = fx.map_arg(node.kwargs, lambda each: self.sizes.get(each, each))
        options = {key: value for key, value in options.items() if key != "input"}
        if name == "relu":
            return self.relu(inputs[0], bool(args or options.get("inplace")))
        if name in ("add", "iadd") and len(inputs) == 2 and len(args) == 1 and not options:
            if name == "iadd":
                self.overwritten.append(inputs[0].number)
            return self.add(*inputs)
        if name == "flatten" and {**dict(zip(("start_dim", "end_dim"), args, strict=False)), **options} in FLATTENED:
            return _Place(inputs[0].number, True)
        size = self.values[inputs[0].number].size if inputs else 0
        if name in ("view", "reshape") and not options and args in ((None, -1), (None, size), (-1, size)):
            return _Place(inputs[0].number, True)
        if name in POOLS and not any(isinstance(each, fx.Node) for each in (*args, *options.values())):
            return self.layer(_pool(POOLS[name], args, options), inputs[0])
        raise Unsupported(f"its forward pass calls {getattr(node.target, '__name__', node.target)}")

    def layer(self, layer: nn.Module, at: _Place) -> _Place:
        """Adds the operation of a torch.nn module and returns the place of its result."""
        kind, shape = type(layer), self.values[at.number]
        rule = LAYERS.get(kind)
        name = f"{kind.__name__} {self.names.get(id(layer), '')}".strip()
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

    def emit(self, kind: str, at: _Place, shape: Shape, layer: nn.Module | None, **fields: float) -> _Place:
        """Adds an operation with a new value and returns the place of that value."""
        self.values.append(Value(*shape))
        op = Op(kind=KIND[kind], input=at.number, output=len(self.values) - 1, **{**NOTHING, **fields})
        op.weight, op.bias = (self.offset(layer, name) for name in ("weight", "bias"))
        self.ops.append(op)
        return _Place(op.output, at.is_flat)

    def offset(self, layer: nn.Module | None, name: str) -> int:
        """Returns where a layer's weight or bias is in a model; -1 if it has none."""
        if (held := getattr(layer, name, None)) is None:
            return -1
        if id(held) not in self.parameters:
            raise Unsupported(f"its {type(layer).__name__} has a {name} that is not a parameter")
        return self.parameters[id(held)]

    def sizes_of(self, node: fx.Node) -> tuple[int | None, ...]:
        """Returns the shape that the network sees, with None as the size of the batch."""
        place = self.places[node]
        value = self.values[place.number]
        return (None, value.size) if place.is_flat else (None, *_shape(value))

    def relu(self, at: _Place, in_place: bool) -> _Place:
        if in_place:
            self.overwritten.append(at.number)
        return self.emit("relu", at, _shape(self.values[at.number]), None)

    def add(self, at: _Place, other: _Place) -> _Place:
        shape = _shape(self.values[at.number])
        if shape != _shape(self.values[other.number]) or at.is_flat != other.is_flat:
            raise Unsupported("its forward pass adds tensors of different shapes")
        return self.emit("add", at, shape, None, other=other.number)

    def share_values(self, output: int, readers: list[int]) -> None:
        """Lets a ReLU write where it reads if no other operation reads there.

        Args:
            output: the number of the value that the network returns.
            readers: the number of the value that is read, once per read.
        """
        renamed: dict[int, int] = {}
        for op in self.ops:
            op.input, op.other = renamed.get(op.input, op.input), renamed.get(op.other, op.other)
            if op.kind == KIND["relu"] and op.input != 0 and readers.count(op.input) == 1 and op.output != output:
                renamed[op.output] = op.input
                readers = [op.input if number == op.output else number for number in readers if number != op.input]
                op.output = op.input


Rule = Callable[[_Tracer, Any, _Place, Value], _Place | None]  # None for settings that the kernels do not have


def _conv(tracer: _Tracer, layer: nn.Conv2d, at: _Place, value: Value) -> _Place | None:
    padding, kernel = layer.padding, layer.kernel_size
    if at.is_flat or isinstance(padding, str) or layer.groups != 1 or layer.dilation != (1, 1):
        return None
    if layer.padding_mode != "zeros" or any(pad >= side for pad, side in zip(padding, kernel, strict=True)):
        return None
    height, width = _windows(value, kernel, layer.stride, padding)
    fields = _window(kernel, layer.stride, padding)
    return tracer.emit("conv", at, (layer.out_channels, height, width), layer, **fields)


def _linear(tracer: _Tracer, layer: nn.Linear, at: _Place, value: Value) -> _Place | None:
    return tracer.emit("linear", at, (layer.out_features, 1, 1), layer) if at.is_flat else None


def _relu(tracer: _Tracer, layer: nn.ReLU, at: _Place, value: Value) -> _Place:
    return tracer.relu(at, layer.inplace)


def _dropout(tracer: _Tracer, layer: nn.Dropout, at: _Place, value: Value) -> _Place | None:
    """Adds a dropout of features. The mask of an image would depend on the order of its channels in memory."""
    if layer.p == 0:
        return at
    if not at.is_flat or layer.p == 1:
        return None
    if layer.inplace:
        tracer.overwritten.append(at.number)
    tracer.dropouts.append((layer.p, value.size))
    return tracer.emit("dropout", at, _shape(value), None, groups=len(tracer.dropouts) - 1)


def _identity(tracer: _Tracer, layer: nn.Identity, at: _Place, value: Value) -> _Place:
    return at


def _flatten(tracer: _Tracer, layer: nn.Flatten, at: _Place, value: Value) -> _Place | None:
    return _Place(at.number, True) if (layer.start_dim, layer.end_dim) == (1, -1) else None


def _max_pool(tracer: _Tracer, layer: nn.MaxPool2d, at: _Place, value: Value) -> _Place | None:
    kernel, stride, padding = map(_pair, (layer.kernel_size, layer.stride, layer.padding))
    if at.is_flat or _pair(layer.dilation) != (1, 1) or layer.ceil_mode or layer.return_indices:
        return None
    height, width = _windows(value, kernel, stride, padding)
    return tracer.emit("max_pool", at, (value.channels, height, width), layer, **_window(kernel, stride, padding))


def _avg_pool(tracer: _Tracer, layer: nn.AvgPool2d, at: _Place, value: Value) -> _Place | None:
    kernel, stride = _pair(layer.kernel_size), _pair(layer.stride)
    if at.is_flat or _pair(layer.padding) != (0, 0) or layer.ceil_mode or layer.divisor_override is not None:
        return None
    height, width = _windows(value, kernel, stride, (0, 0))
    return tracer.emit("avg_pool", at, (value.channels, height, width), layer, **_window(kernel, stride, (0, 0)))


def _adaptive_pool(tracer: _Tracer, layer: nn.AdaptiveAvgPool2d, at: _Place, value: Value) -> _Place | None:
    """Adds an average over equal windows that do not overlap. Sizes of other windows would depend on the place."""
    sides, size = (value.height, value.width), layer.output_size
    options = (size, size) if size is None or isinstance(size, int) else tuple(size)
    outs = tuple(side if out is None else out for side, out in zip(sides, options, strict=False))
    if at.is_flat or len(options) != 2 or any(side % out for side, out in zip(sides, outs, strict=True)):
        return None
    kernel = sides[0] // outs[0], sides[1] // outs[1]
    return tracer.emit("avg_pool", at, (value.channels, *outs), layer, **_window(kernel, kernel, (0, 0)))


def _group_norm(tracer: _Tracer, layer: nn.GroupNorm, at: _Place, value: Value) -> _Place | None:
    if _hides_pixels(at, value) or layer.eps <= 0:  # lanes without a sample have no variance
        return None
    return tracer.emit("group_norm", at, _shape(value), layer, groups=layer.num_groups, eps=layer.eps)


def _batch_norm(tracer: _Tracer, layer: nn.BatchNorm2d | nn.BatchNorm1d, at: _Place, value: Value) -> _Place | None:
    if layer.momentum is None or not layer.track_running_stats or at.is_flat != isinstance(layer, nn.BatchNorm1d):
        return None
    if _hides_pixels(at, value):
        return None
    statistics = layer.running_mean, layer.running_var, layer.num_batches_tracked
    places = dict(zip(("mean", "var", "tracked"), (tracer.buffers[id(each)] for each in statistics), strict=True))
    return tracer.emit("batch_norm", at, _shape(value), layer, eps=layer.eps, momentum=layer.momentum, **places)


LAYERS: dict[type[nn.Module], Rule] = {
    nn.Conv2d: _conv,
    nn.Linear: _linear,
    nn.ReLU: _relu,
    nn.Dropout: _dropout,
    nn.Identity: _identity,
    nn.Flatten: _flatten,
    nn.MaxPool2d: _max_pool,
    nn.AvgPool2d: _avg_pool,
    nn.AdaptiveAvgPool2d: _adaptive_pool,
    nn.GroupNorm: _group_norm,
    nn.BatchNorm1d: _batch_norm,
    nn.BatchNorm2d: _batch_norm,
}
FUNCTIONS: dict[Any, str] = {
    F.relu: "relu",
    torch.relu: "relu",
    torch.flatten: "flatten",
    torch.add: "add",
    operator.add: "add",
    operator.iadd: "iadd",
    F.max_pool2d: "max_pool",
    torch.max_pool2d: "max_pool",
    F.avg_pool2d: "avg_pool",
    F.adaptive_avg_pool2d: "adaptive_pool",
}
FLATTENED = ({"start_dim": 1}, {"start_dim": 1, "end_dim": -1})
POOLS: dict[str, type[nn.Module]] = {
    "max_pool": nn.MaxPool2d,
    "avg_pool": nn.AvgPool2d,
    "adaptive_pool": nn.AdaptiveAvgPool2d,
}


def trace(network: nn.Module, shape: Sequence[int], layout: Layout | None = None) -> Program:
    """Returns the program of a network for inputs of the shape ``[C, H, W]`` or ``[D]``.

    The program refers to parameters and buffers by their offsets in the flat vectors ``[P]`` and ``[Q]`` of a model.

    Args:
        network: the network.
        shape: the shape of one input.
        layout: the order of the parameters in a model; that of the network if not given.

    Raises:
        Unsupported: if the network has a part that the kernels do not support or that a trace does not show. The
            message names it.
    """
    if len(shape) not in (1, 3):
        raise Unsupported(f"its inputs have the shape {tuple(shape)}; only [C, H, W] and [D] are supported")
    if frozen := [name for name, each in network.named_parameters() if not each.requires_grad]:
        raise Unsupported(f"its parameter {frozen[0]} is frozen")
    graph = forward_graph(network)
    return _Tracer(network, layout or Layout.from_network(network, None)).run(graph, shape)


def _hides_pixels(at: _Place, value: Value) -> bool:
    """Returns whether an image was flattened. Its pixels are features then and no longer belong to a channel."""
    return at.is_flat and value.height * value.width > 1


def _pool(kind: type[nn.Module], args: Sequence[Any], options: dict[str, Any]) -> nn.Module:
    try:
        return kind(*args, **options)
    except TypeError:
        raise Unsupported(f"it calls the functional form of {kind.__name__} with unusual arguments") from None


def _offsets(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Returns the offset of each tensor in the vector of all tensors, by id."""
    offsets, offset = {}, 0
    for tensor in tensors:
        offsets[id(tensor)] = offset
        offset += tensor.numel()
    return offsets


def _value(shape: Sequence[int]) -> Value:
    return Value(*shape) if len(shape) == 3 else Value(shape[0], 1, 1)


def _shape(value: Value) -> Shape:
    return value.channels, value.height, value.width


def _pair(value: int | tuple[int, ...]) -> tuple[int, int]:
    sides = (value,) if isinstance(value, int) else value
    return sides[0], sides[-1]


def _window(kernel: tuple[int, ...], stride: tuple[int, ...], padding: tuple[int, ...]) -> dict[str, int]:
    """Returns the fields of `Op` for a window that moves over an image."""
    named = {"kernel": kernel, "stride": stride, "padding": padding}
    return {f"{name}_{axis}": side for name, sides in named.items() for axis, side in zip("hw", sides, strict=True)}


def _windows(
    value: Value, kernel: tuple[int, ...], stride: tuple[int, ...], padding: tuple[int, ...]
) -> tuple[int, int]:
    """Returns the number of positions of a window in height and width."""
    sides = zip((value.height, value.width), kernel, stride, padding, strict=True)
    height, width = ((side + 2 * pad - size) // step + 1 for side, size, step, pad in sides)
    return height, width
