"""Translation of a network's forward pass into a list of the operations that the kernels know."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from lcfl.engines.forward_graph import Unsupported, forward_graph, is_size, size_of
from lcfl.engines.kernels import KIND, Op, Value
from lcfl.engines.layer_rules import add_layer
from lcfl.engines.operations import Builder, Dropout, Place
from lcfl.models.frozen import frozen_layers
from lcfl.models.layout import Layout

__all__ = ["Program", "trace"]

FUNCTIONS: dict[Any, str] = {
    F.log_softmax: "log_softmax",
    torch.log_softmax: "log_softmax",
    torch.flatten: "flatten",
    torch.mean: "mean",
    torch.add: "add",
    operator.add: "add",
    operator.iadd: "iadd",
    torch.mul: "mul",
    operator.mul: "mul",
    operator.imul: "imul",
    torch.cat: "cat",
    torch.concat: "cat",
}
PAIRS = {"add": Builder.add, "iadd": Builder.add, "mul": Builder.multiply, "imul": Builder.multiply}
KEPT = [KIND[name] for name in ("relu", "tanh", "sigmoid")]  # torch computes their gradients from their results
FLATTENED = ({"start_dim": 1}, {"start_dim": 1, "end_dim": -1})
LAYER_OF: dict[Any, type[nn.Module]] = {  # functions, and names of methods, that have the arguments of a layer
    F.relu: nn.ReLU,
    torch.relu: nn.ReLU,
    "relu": nn.ReLU,
    F.relu6: nn.ReLU6,
    F.leaky_relu: nn.LeakyReLU,
    F.elu: nn.ELU,
    F.tanh: nn.Tanh,
    torch.tanh: nn.Tanh,
    "tanh": nn.Tanh,
    F.sigmoid: nn.Sigmoid,
    torch.sigmoid: nn.Sigmoid,
    "sigmoid": nn.Sigmoid,
    F.dropout: nn.Dropout,
    F.dropout1d: nn.Dropout1d,
    F.dropout2d: nn.Dropout2d,
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
    F.max_pool2d: nn.MaxPool2d,
    torch.max_pool2d: nn.MaxPool2d,
    F.avg_pool2d: nn.AvgPool2d,
    F.adaptive_avg_pool2d: nn.AdaptiveAvgPool2d,
}


@dataclass(frozen=True)
class Program:
    """Operations in order, and the shapes of the numbered values that they read and write.

    Attributes:
        ops: the operations in the order of the forward pass.
        values: the shapes of the values for one sample; number 0 is the input.
        output: the number of the value that the network returns, or of which it returns the logarithms.
        dropouts: the dropouts in the order of the forward pass.
        log_softmax: whether the network ends with a log softmax, which is no operation: the cross-entropy of scores
            is the negative log-likelihood of their log softmax, and so is that of the log softmax itself.
    """

    ops: tuple[Op, ...]
    values: tuple[Value, ...]
    output: int
    dropouts: tuple[Dropout, ...] = ()
    log_softmax: bool = False

    def returned(self, outputs: Tensor) -> Tensor:
        """Returns what the network returns, from the last value ``[B, C]``."""
        return outputs.log_softmax(1) if self.log_softmax else outputs

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
        normed = [self.values[op.input] for op in self.ops if op.kind == KIND["batch_norm"] and not op.is_frozen]
        return any(value.height * value.width == 1 for value in normed)


@dataclass
class _Tracer:
    network: nn.Module
    to: Builder
    places: dict[fx.Node, Place] = field(default_factory=dict)
    sizes: dict[fx.Node, Any] = field(default_factory=dict)  # of nodes for numbers, with None as the size of the batch
    log_softmax: bool = False

    def run(self, graph: fx.Graph, is_flat: bool) -> Program:
        """Returns the program of the network.

        Args:
            graph: the graph of the network's forward pass.
            is_flat: whether an input is a vector.
        """
        last: Place | None = None
        for node in graph.nodes:
            if node.op == "placeholder":
                if self.places:
                    raise Unsupported("its forward pass takes more than one input")
                self.places[node] = Place(0, is_flat)
            elif node.op == "output":
                last = self.places.get(node.args[0])
            elif is_size(node):
                self.sizes[node] = size_of(node, lambda each: (None, *self.to.sizes_of(self.places[each])), self.sizes)
            else:
                inputs = [self.places[each] for each in node.all_input_nodes if each in self.places]
                self.places[node] = self.visit(node, inputs)
        if last is None or not last.is_flat or last.number == 0:
            raise Unsupported("its output is not one tensor [B, C]")
        made = self.to
        unused = [name for name, each in self.network.named_parameters() if id(each) not in made.used]
        if unused:
            raise Unsupported(f"its parameter {unused[0]} belongs to no operation")
        readers = [number for op in made.ops for number in (op.input, op.other)] + [last.number]
        if any(readers.count(number) > 1 for number in made.overwritten):
            raise Unsupported("it changes in place what its forward pass reads again")
        if any(op.kind in KEPT and op.output in made.overwritten for op in made.ops):
            raise Unsupported("it changes in place what torch keeps for the backward pass")
        if any(op.output not in readers for op in made.ops):  # torch gives the parameters before it no gradient
            raise Unsupported("its forward pass computes what its output does not depend on")
        made.share_values(last.number, readers)
        return Program(tuple(made.ops), tuple(made.values), last.number, tuple(made.dropouts), self.log_softmax)

    def visit(self, node: fx.Node, inputs: list[Place]) -> Place:
        """Adds the operation of a node and returns the place of its result."""
        if node.op == "call_module":
            layer = self.network.get_submodule(str(node.target))
            if type(layer) is nn.LogSoftmax and "forward" not in vars(layer):
                return self.end(node, inputs[0], layer.dim)
            return add_layer(self.to, layer, inputs[0])
        if node.op == "get_attr":
            raise Unsupported(f"its forward pass reads {node.target}")
        name = node.target if isinstance(node.target, str) else FUNCTIONS.get(node.target, "")
        args = fx.map_arg(node.args[1:], lambda each: self.sizes.get(each, each))
        options = fx.map_arg(node.kwargs, lambda each: self.sizes.get(each, each))
        options = {key: value for key, value in options.items() if key != "input"}
        pair = [self.places[each] for each in node.args if isinstance(each, fx.Node) and each in self.places]
        if name in PAIRS and len(pair) == len(node.args) == 2 and not options:
            if name in ("iadd", "imul"):
                self.to.overwritten.append(pair[0].number)
            return PAIRS[name](self.to, *pair)
        if name == "cat":
            return self.concatenate({**dict(zip(("tensors", "dim"), node.args, strict=False)), **node.kwargs})
        if name == "flatten" and {**dict(zip(("start_dim", "end_dim"), args, strict=False)), **options} in FLATTENED:
            return Place(inputs[0].number, True)
        size = self.to.values[inputs[0].number].size if inputs else 0
        if name in ("view", "reshape") and not options and args in ((None, -1), (None, size), (-1, size)):
            return Place(inputs[0].number, True)
        if name == "log_softmax" and options.pop("dtype", None) is None and len(args) <= 1:
            return self.end(node, inputs[0], args[0] if args else options.get("dim"))
        if name == "mean" and len(inputs) == 1:
            return self.mean(inputs[0], {**dict(zip(("dim", "keepdim"), args, strict=False)), **options})
        kind = LAYER_OF.get(node.target)
        if kind is not None and not any(isinstance(each, fx.Node) for each in (*args, *options.values())):
            return add_layer(self.to, _layer_of(kind, args, options), inputs[0])
        raise Unsupported(f"its forward pass calls {getattr(node.target, '__name__', node.target)}")

    def concatenate(self, options: dict[str, Any]) -> Place:
        """Adds a concatenation along the channels or features."""
        tensors = options.get("tensors")
        found = [self.places.get(each) for each in tensors] if isinstance(tensors, Sequence) else []
        places = [each for each in found if each is not None]
        if options.keys() != {"tensors", "dim"} or options["dim"] != 1 or not places or len(places) < len(found):
            raise Unsupported("its forward pass calls cat other than for tensors and dim 1")
        return self.to.concatenate(places)

    def end(self, node: fx.Node, at: Place, dim: Any) -> Place:
        """Ends the network with a log softmax."""
        if not at.is_flat or dim not in (1, -1) or [each.op for each in node.users] != ["output"]:
            raise Unsupported("its log softmax is not over the classes of its output")
        self.log_softmax = True
        return at

    def mean(self, at: Place, options: dict[str, Any]) -> Place:
        """Adds the mean over all pixels of an image, or all steps of a signal."""
        sides = {2} if self.to.is_signal else {2, 3}
        dims = options.get("dim")
        dims = dims if isinstance(dims, Sequence) else (dims,)
        found = {each % (len(sides) + 2) for each in dims if isinstance(each, int)}
        if at.is_flat or options.keys() - {"dim", "keepdim"} or len(dims) != len(sides) or found != sides:
            raise Unsupported("its forward pass calls mean")
        place = add_layer(self.to, nn.AdaptiveAvgPool1d(1) if self.to.is_signal else nn.AdaptiveAvgPool2d(1), at)
        return place if options.get("keepdim") else Place(place.number, True)


def trace(network: nn.Module, shape: Sequence[int], layout: Layout | None = None) -> Program:
    """Returns the program of a network for inputs of the shape ``[C, H, W]``, ``[C, L]`` or ``[D]``.

    The program refers to parameters and buffers by their offsets in the flat vectors ``[P]`` and ``[Q]`` of a model,
    and to those of frozen layers by their offsets in the vector ``[F]`` of all that is frozen.

    Args:
        network: the network.
        shape: the shape of one input.
        layout: the order of the parameters in a model; that of the network if not given.

    Raises:
        Unsupported: if the network has a part that the kernels do not support or that a trace does not show. The
            message names it.
    """
    if len(shape) not in (1, 2, 3):
        raise Unsupported(f"its inputs have the shape {tuple(shape)}; only [C, H, W], [C, L] and [D] are supported")
    layout = layout or Layout.from_network(network, None)
    trained = {name for name, _ in layout.parameters}
    for name, parameter in network.named_parameters():
        if parameter.requires_grad != (name in trained):
            raise Unsupported(
                f"its parameter {name} was {'un' * parameter.requires_grad}frozen after the module was made"
            )
    for name in frozen_layers(network):
        if not isinstance(network.get_submodule(name), (nn.BatchNorm1d, nn.BatchNorm2d)):
            raise Unsupported(f"its layer {name} is frozen and has buffers, so it stays in evaluation mode")
    graph = forward_graph(network)
    to = Builder(network, layout, shape)
    return _Tracer(network, to).run(graph, is_flat=len(shape) == 1)


def _layer_of(kind: type[nn.Module], args: Sequence[Any], options: dict[str, Any]) -> nn.Module:
    try:
        return kind(*args, **options)
    except (TypeError, ValueError):
        raise Unsupported(f"it calls the functional form of {kind.__name__} with unusual arguments") from None
