"""A network as a list of the operations that the kernels know, found by tracing its forward pass."""

import copy
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from lcfl.engines.kernels import KIND, Op, Value

__all__ = ["Program", "Unsupported", "trace"]

Shape = tuple[int, int, int]  # channels, height, width
NOTHING = dict.fromkeys(("other", "mean", "var", "tracked"), -1)


class Unsupported(ValueError):
    """A network that the kernels cannot run; says which part of it."""


@dataclass(frozen=True)
class Program:
    """Operations in order, and the shapes of the numbered values that they read and write.

    Attributes:
        ops: in the order of the forward pass.
        values: of one sample each; number 0 is the input.
        output: the number of the class scores.
    """

    ops: tuple[Op, ...]
    values: tuple[Value, ...]
    output: int

    @property
    def widest(self) -> int:
        """The most input channels of a convolution."""
        return max((self.values[op.input].channels for op in self.ops if op.kind == KIND["conv"]), default=0)

    @property
    def needs_two(self) -> bool:
        """Whether it cannot be trained on one sample: a batch normalisation would see one number per channel."""
        normed = [self.values[op.input] for op in self.ops if op.kind == KIND["batch_norm"]]
        return any(value.height * value.width == 1 for value in normed)


@dataclass(frozen=True)
class _Place:
    """A value under the shape that the network sees: flattened, or with height and width."""

    number: int
    is_flat: bool


@dataclass
class _Tracer:
    network: nn.Module
    ops: list[Op] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    used: set[int] = field(default_factory=set)  # parameters that an operation has, by id
    overwritten: list[int] = field(default_factory=list)  # values that a ReLU works on in place

    def __post_init__(self) -> None:
        self.names = {id(module): name for name, module in self.network.named_modules()}
        self.parameters = _offsets(self.network.named_parameters())
        kept = self.network.state_dict(keep_vars=True)  # others are in no model
        self.buffers = _offsets((name, each) for name, each in self.network.named_buffers() if name in kept)

    def run(self, shape: Sequence[int]) -> Program:
        """The program of the network for inputs of this shape, without the batch."""
        self.values.append(_value(shape))
        found: dict[fx.Node, _Place] = {}
        last: _Place | None = None
        for node in _graph(self.network).nodes:
            if node.op == "placeholder":
                if found:
                    raise Unsupported("its forward pass takes more than one input")
                found[node] = _Place(0, len(shape) == 1)
            elif node.op == "output":
                last = found.get(node.args[0])
            elif not _is_size(node):
                found[node] = self.visit(node, [found[each] for each in node.all_input_nodes if each in found])
        if last is None or not last.is_flat or last.number == 0:
            raise Unsupported("its output is not one tensor of class scores")
        unused = [name for name, each in self.network.named_parameters() if id(each) not in self.used]
        if unused:
            raise Unsupported(f"its parameter {unused[0]} belongs to no operation")
        readers = [number for op in self.ops for number in (op.input, op.other)] + [last.number]
        if any(readers.count(number) > 1 for number in self.overwritten):
            raise Unsupported("a ReLU works in place on what its forward pass reads again")
        self.share_values(last.number, readers)
        return Program(tuple(self.ops), tuple(self.values), last.number)

    def visit(self, node: fx.Node, inputs: list[_Place]) -> _Place:
        """Adds what a node computes; where its result lies."""
        if node.op == "call_module":
            return self.layer(self.network.get_submodule(str(node.target)), inputs[0])
        name = node.target if isinstance(node.target, str) else FUNCTIONS.get(node.target, "")
        if name == "relu":
            return self.relu(inputs[0], bool(node.args[1:] or node.kwargs.get("inplace")))
        if name == "add" and len(inputs) == 2 and not node.kwargs:
            return self.add(*inputs)
        if name == "flatten" and node.args[1:] == (1,) and not node.kwargs:
            return _Place(inputs[0].number, True)
        if name in ("view", "reshape") and len(node.args) == 3 and node.args[2] == -1:
            return _Place(inputs[0].number, True)
        if name in POOLS:
            return self.layer(_pool(POOLS[name], node), inputs[0])
        raise Unsupported(f"its forward pass calls {getattr(node.target, '__name__', node.target)}")

    def layer(self, layer: nn.Module, at: _Place) -> _Place:
        """Adds what a module of torch.nn computes."""
        kind, shape = type(layer), self.values[at.number]
        rule = LAYERS.get(kind)
        name = f"{kind.__name__} {self.names.get(id(layer), '')}".strip()
        if rule is None:
            raise Unsupported(f"it has the layer {name}")
        if _has_hooks(layer) or "forward" in vars(layer):
            raise Unsupported(f"it has the layer {name} with hooks or a forward of its own")
        if any(id(each) in self.used for each in layer.parameters()):
            raise Unsupported(f"it uses the layer {name} twice")
        self.used |= {id(each) for each in layer.parameters()}
        made = rule(self, layer, at, shape)
        if made is None:
            raise Unsupported(f"it has {name} with settings other than the usual: {layer}")
        return made

    def emit(self, kind: str, at: _Place, shape: Shape, layer: nn.Module | None, **fields: float) -> _Place:
        """Adds an operation with a value of its own."""
        self.values.append(Value(*shape))
        op = Op(kind=KIND[kind], input=at.number, output=len(self.values) - 1, **{**NOTHING, **fields})
        op.weight = self.parameters.get(id(getattr(layer, "weight", None)), -1)
        op.bias = self.parameters.get(id(getattr(layer, "bias", None)), -1)
        self.ops.append(op)
        return _Place(op.output, at.is_flat)

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
        """Lets a ReLU write where it reads, if nobody else reads there; `readers`: a value's number per reading."""
        renamed: dict[int, int] = {}
        for op in self.ops:
            op.input, op.other = renamed.get(op.input, op.input), renamed.get(op.other, op.other)
            if op.kind == KIND["relu"] and op.input != 0 and readers.count(op.input) == 1 and op.output != output:
                renamed[op.output] = op.input
                readers = [op.input if number == op.output else number for number in readers if number != op.input]
                op.output = op.input


Rule = Callable[[_Tracer, Any, _Place, Value], _Place | None]  # None: with settings that the kernels have not


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
    """An average over windows of one size that do not overlap; others depend on the place."""
    sides, given = (value.height, value.width), layer.output_size
    outs = given if isinstance(given, tuple) else (given, given)
    wanted = tuple(side if out is None else out for side, out in zip(sides, outs, strict=True))
    if at.is_flat or any(side % out for side, out in zip(sides, wanted, strict=True)):
        return None
    kernel = sides[0] // wanted[0], sides[1] // wanted[1]
    return tracer.emit("avg_pool", at, (value.channels, *wanted), layer, **_window(kernel, kernel, (0, 0)))


def _group_norm(tracer: _Tracer, layer: nn.GroupNorm, at: _Place, value: Value) -> _Place | None:
    if _hides_pixels(at, value):
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
    F.max_pool2d: "max_pool",
    torch.max_pool2d: "max_pool",
    F.avg_pool2d: "avg_pool",
    F.adaptive_avg_pool2d: "adaptive_pool",
}
POOLS: dict[str, type[nn.Module]] = {
    "max_pool": nn.MaxPool2d,
    "avg_pool": nn.AvgPool2d,
    "adaptive_pool": nn.AdaptiveAvgPool2d,
}


def trace(network: nn.Module, shape: Sequence[int]) -> Program:
    """The program of a network for inputs of the shape ``[C, H, W]`` or ``[D]``.

    Parameters and buffers are found at their places in the flat vectors ``[P]`` and ``[Q]`` of a model.

    Raises:
        Unsupported: if it has something that the kernels have not, or that a trace does not show; says what.
    """
    if len(shape) not in (1, 3):
        raise Unsupported(f"its inputs have the shape {tuple(shape)}; known are images [C, H, W] and vectors [D]")
    if frozen := [name for name, each in network.named_parameters() if not each.requires_grad]:
        raise Unsupported(f"its parameter {frozen[0]} is not trained")
    if _has_hooks(network) or any(each._backward_hooks for each in network.parameters()):
        raise Unsupported("it has hooks")
    return _Tracer(network).run(shape)


def _graph(network: nn.Module) -> fx.Graph:
    """What the forward pass of a copy calls, which must be the same in training and in evaluation."""
    try:
        copied = copy.deepcopy(network)
        graphs = []
        for training in (False, True):
            copied.train(training)
            if any(each.training != training for each in copied.modules()):
                raise Unsupported("its train() leaves a layer in another mode")
            graphs.append(fx.Tracer().trace(copied))
    except Unsupported:
        raise
    except Exception as error:  # whatever the network's own code raises when it meets a placeholder
        raise Unsupported(f"its forward pass cannot be traced ({type(error).__name__}: {error})") from None
    if str(graphs[0]) != str(graphs[1]):
        raise Unsupported("its forward pass is another one in training than in evaluation")
    return graphs[0]


def _has_hooks(module: nn.Module) -> bool:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, kind) for kind in kinds)


def _hides_pixels(at: _Place, value: Value) -> bool:
    """Whether an image was flattened there: its pixels are features, and no longer of a channel."""
    return at.is_flat and value.height * value.width > 1


def _is_size(node: fx.Node) -> bool:
    """``x.size(0)``, ``x.shape`` or ``x.shape[0]``: the batch size of ``x.view(x.size(0), -1)``."""
    if node.op == "call_function" and node.target is operator.getitem:
        return isinstance(node.args[0], fx.Node) and _is_size(node.args[0])
    if node.op == "call_function" and node.target is getattr:
        return bool(node.args[1] == "shape")
    return node.op == "call_method" and node.target == "size"


def _pool(kind: type[nn.Module], node: fx.Node) -> nn.Module:
    try:
        return kind(*node.args[1:], **{name: value for name, value in node.kwargs.items() if name != "input"})
    except TypeError:
        raise Unsupported(f"its forward pass calls {node.target} with unusual arguments") from None


def _offsets(named: Iterable[tuple[str, Tensor]]) -> dict[int, int]:
    """Where each tensor begins when they lie one after the other, by id."""
    places, offset = {}, 0
    for _, tensor in named:
        places[id(tensor)] = offset
        offset += tensor.numel()
    return places


def _value(shape: Sequence[int]) -> Value:
    return Value(*shape) if len(shape) == 3 else Value(shape[0], 1, 1)


def _shape(value: Value) -> Shape:
    return value.channels, value.height, value.width


def _pair(value: int | tuple[int, ...]) -> tuple[int, int]:
    first, second = (value, value) if isinstance(value, int) else value
    return first, second


def _window(kernel: tuple[int, ...], stride: tuple[int, ...], padding: tuple[int, ...]) -> dict[str, int]:
    """The fields of `Op` for a window that moves over an image."""
    named = {"kernel": kernel, "stride": stride, "padding": padding}
    return {f"{name}_{axis}": side for name, sides in named.items() for axis, side in zip("hw", sides, strict=True)}


def _windows(
    value: Value, kernel: tuple[int, ...], stride: tuple[int, ...], padding: tuple[int, ...]
) -> tuple[int, int]:
    """How many places such a window has in height and width."""
    sides = zip((value.height, value.width), kernel, stride, padding, strict=True)
    height, width = ((side + 2 * pad - size) // step + 1 for side, size, step, pad in sides)
    return height, width
