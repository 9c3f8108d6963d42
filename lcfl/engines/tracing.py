"""Translation of a network's forward pass into a list of the operations that the kernels know."""

import operator
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from lcfl.engines.convolution_rules import Padded
from lcfl.engines.forward_graph import BATCH, Unsupported, forward_graph, is_size, size_of
from lcfl.engines.function_rules import add_call
from lcfl.engines.kernels import KIND, Op, Value
from lcfl.engines.layer_rules import add_layer
from lcfl.engines.operations import Builder, Dropout, Place
from lcfl.models.frozen import frozen_layers
from lcfl.models.layout import Layout

__all__ = ["Program", "trace"]

LOG_SOFTMAX = (F.log_softmax, torch.log_softmax, "log_softmax")
WIDE, MOST_TOKEN_LAYERS = 128, 4  # for a convolution; measured in docs/performance.md
IN_PLACE = (operator.iadd, operator.isub, operator.imul, operator.itruediv)


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
        token_layers: the widths of the linear layers of the last dimension of signals and images: of their inputs or
            outputs, whichever are fewer.
    """

    ops: tuple[Op, ...]
    values: tuple[Value, ...]
    output: int
    dropouts: tuple[Dropout, ...] = ()
    log_softmax: bool = False
    token_layers: tuple[int, ...] = ()

    def returned(self, outputs: Tensor) -> Tensor:
        """Returns what the network returns, from the last value ``[B, C]``."""
        return outputs.log_softmax(1) if self.log_softmax else outputs

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The program as the kernels take it."""
        ops, values = (Op * len(self.ops))(*self.ops), (Value * len(self.values))(*self.values)
        return ops, len(ops), values, len(values), 0, self.output

    @property
    def is_of_tokens(self) -> bool:
        """Whether wide linear layers of tokens prevail, which torch multiplies as fast as the kernels do."""
        convolutions = sum(op.kind in (KIND["conv"], KIND["depthwise"]) for op in self.ops) - len(self.token_layers)
        return sum(width >= WIDE for width in self.token_layers) > MOST_TOKEN_LAYERS * convolutions

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
    found: dict[fx.Node, Any] = field(default_factory=dict)  # what stands for the result of each
    log_softmax: bool = False

    def run(self, graph: fx.Graph, rank: int) -> Program:
        """Returns the program of the network.

        Args:
            graph: the graph of the network's forward pass.
            rank: the number of dimensions of an input.
        """
        last: Any = None
        for node in graph.nodes:
            if node.op == "placeholder":
                if self.found:
                    raise Unsupported("its forward pass takes more than one input")
                self.found[node] = Place(0, rank)
            elif node.op == "output":
                last = self.found.get(node.args[0]) if isinstance(node.args[0], fx.Node) else None
            elif is_size(node):
                self.found[node] = self.size_of(node)
            else:
                self.found[node] = self.visit(node)
        if not isinstance(last, Place) or not last.is_flat or last.number == 0:
            raise Unsupported("its output is not one tensor [B, C]")
        made = self.to
        unused = [name for name, each in self.network.named_parameters() if id(each) not in made.used]
        if unused:
            raise Unsupported(f"its parameter {unused[0]} belongs to no operation")
        readers = [number for op in made.ops for number in (op.input, op.other)] + [last.number]
        if any(readers.count(number) > 1 or number in made.views for number in made.overwritten):
            raise Unsupported("it changes in place what its forward pass reads again")
        if not made.kept.isdisjoint(made.overwritten):
            raise Unsupported("it changes in place what torch keeps for the backward pass")
        if any(op.output not in readers for op in made.ops):  # torch gives the parameters before it no gradient
            raise Unsupported("its forward pass computes what its output does not depend on")
        made.share_values(last.number, readers)
        ops, values, dropouts = tuple(made.ops), tuple(made.values), tuple(made.dropouts)
        return Program(ops, values, last.number, dropouts, self.log_softmax, tuple(made.token_layers))

    def size_of(self, node: fx.Node) -> Any:
        """Returns the number that a node for sizes stands for, or several."""
        try:
            return size_of(node, lambda each: (BATCH, *self.to.sizes_of(self.found[each])), self.found)
        except (AttributeError, TypeError, LookupError, ArithmeticError):  # also of the network itself
            raise Unsupported("its forward pass computes with sizes in an unusual way") from None

    def visit(self, node: fx.Node) -> Any:
        """Adds the operations of a node and returns the place of its result, or what else stands for it."""
        if node.op == "get_attr":
            return self.parameter(str(node.target))
        args: Sequence[Any] = fx.map_arg(node.args, self.found.__getitem__)
        options: dict[str, Any] = dict(fx.map_arg(node.kwargs, self.found.__getitem__))
        if node.op == "call_module":
            layer = self.network.get_submodule(str(node.target))
            read, *others = [*args, *options.values()]
            if others or not isinstance(read, Place | Padded):
                raise Unsupported(f"its layer {node.target} gets other than one tensor")
            if type(layer) is nn.LogSoftmax and "forward" not in vars(layer) and isinstance(read, Place):
                return self.end(node, read, layer.dim)
            return add_layer(self.to, layer, read)
        if node.target in LOG_SOFTMAX:
            call = {**dict(zip(("input", "dim", "dtype"), args, strict=False)), **options}
            if call.get("dtype") is None and isinstance(call.get("input"), Place):
                return self.end(node, call["input"], call.get("dim"))
        if node.target is operator.getitem and not node.users:  # a piece that is unpacked and not used
            return None
        if node.target in IN_PLACE and isinstance(args[0], Place):
            self.to.overwritten.append(args[0].number)
        return add_call(self.to, node.target, args, options)

    def parameter(self, name: str) -> nn.Parameter:
        """Returns a parameter that the forward pass reads."""
        with suppress(AttributeError):
            return self.network.get_parameter(name)
        raise Unsupported(f"its forward pass reads {name}")

    def end(self, node: fx.Node, at: Place, dim: Any) -> Place:
        """Ends the network with a log softmax."""
        if not at.is_flat or dim not in (1, -1) or [each.op for each in node.users] != ["output"]:
            raise Unsupported("its log softmax is not over the classes of its output")
        self.log_softmax = True
        return at


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
    return _Tracer(network, to).run(graph, len(shape))
