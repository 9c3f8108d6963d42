"""The graph of a network's forward pass. Networks that do more than a graph shows are refused."""

import copy
import inspect
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torchvision.ops import stochastic_depth  # type: ignore[import-untyped,unused-ignore]

from lcfl.models.hooks import has_hooks, has_parameter_hooks

__all__ = ["BATCH", "Unsupported", "forward_graph", "is_size", "size_of"]

DROPOUTS = (F.dropout, F.dropout1d, F.dropout2d, stochastic_depth)
OF_SIZES: dict[Any, Callable[[int, int], int]] = {  # what networks compute with sizes
    operator.mul: operator.mul,
    operator.imul: operator.mul,
    operator.floordiv: operator.floordiv,
}


class _BatchSize:
    """The size of a batch, on which no operation may depend."""

    def __repr__(self) -> str:
        return "the size of the batch"


BATCH = _BatchSize()


class Unsupported(ValueError):
    """Raised for a network that the kernels cannot run; the message names the part."""


def forward_graph(network: nn.Module) -> fx.Graph:
    """Returns the graph of a copy's forward pass, which must be the same in training and in evaluation.

    A function such as ``F.dropout(x, 0.5, self.training)`` loses its argument `training`, as a layer has none.

    Raises:
        Unsupported: if the forward pass cannot be traced, or if the graph would not show all that it does.
    """
    for name, each in network.named_modules():
        if has_hooks(each):
            raise Unsupported(f"its {type(each).__name__} {name} has hooks" if name else "it has hooks")
    if any(has_parameter_hooks(each) for each in network.parameters()):
        raise Unsupported("its parameters have hooks")
    try:
        copied = copy.deepcopy(network)
        graphs = []
        for training in (False, True):
            copied.train(training)
            if any(each.training != training for each in copied.modules()):
                raise Unsupported("its train() leaves a layer in another mode")
            # A forward pass that switches autocast on is found in the first graph, and one that switches it off in the
            # second.
            with torch.enable_grad(), torch.autocast("cpu", enabled=training):
                recorder = _Recorder()
                graphs.append(_graph_of_layer() if recorder.is_leaf_module(copied, "") else recorder.trace(copied))
            _drop_in_training(graphs[-1], training)
    except Unsupported:
        raise
    except Exception as error:  # a network's code may raise anything when it meets a placeholder
        raise Unsupported(f"its forward pass cannot be traced ({type(error).__name__}: {error})") from None
    if str(graphs[0]) != str(graphs[1]):
        raise Unsupported("its forward pass differs between training and evaluation")
    return graphs[0]


def _drop_in_training(graph: fx.Graph, training: bool) -> None:
    """Takes the argument `training` from the dropouts of a graph that was recorded in this mode."""
    for node in graph.nodes:
        if node.target in DROPOUTS:
            bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)
            bound.apply_defaults()
            if bound.arguments.pop("training") is not training:
                raise Unsupported(f"its forward pass calls {node.target.__name__} without training=self.training")
            node.args, node.kwargs = (bound.arguments.pop("input"),), dict(bound.arguments)


def _graph_of_layer() -> fx.Graph:
    """Returns the graph of a network that is a layer of torch, into which a trace would look."""
    graph = fx.Graph()
    graph.output(graph.create_node("call_module", "", (graph.placeholder("inputs"),)))  # get_submodule("") is it
    return graph


class _Recorder(fx.Tracer):
    """Records a forward pass and refuses what computes in a mode that the graph does not show."""

    def __init__(self) -> None:
        super().__init__()
        self.is_cast = torch.is_autocast_enabled("cpu")

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Recorded(node, self)

    def create_node(self, *args: Any, **options: Any) -> fx.Node:
        if not torch.is_grad_enabled():
            raise Unsupported("its forward pass computes a part without gradients")
        if torch.is_autocast_enabled("cpu") != self.is_cast:
            raise Unsupported("its forward pass chooses a precision with torch.autocast")
        return super().create_node(*args, **options)


class _Recorded(fx.Proxy):
    """What stands for a tensor. Its ``x += y`` is recorded as such, because other names of x then hold the sum, too."""

    def __iadd__(self, other: Any) -> fx.Proxy:
        return self._in_place(operator.iadd, other)

    def __isub__(self, other: Any) -> fx.Proxy:
        return self._in_place(operator.isub, other)

    def __imul__(self, other: Any) -> fx.Proxy:
        return self._in_place(operator.imul, other)

    def __itruediv__(self, other: Any) -> fx.Proxy:
        return self._in_place(operator.itruediv, other)

    def _in_place(self, function: Callable[..., Any], other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", function, (self, other), {})


def is_size(node: fx.Node) -> bool:
    """Returns whether a node is ``x.size(0)``, ``x.shape``, ``x.shape[0]``, or computed from such numbers.

    Networks write ``x.view(x.size(0), -1)`` and ``x.view(-1, x.shape[1] * x.shape[2] * x.shape[3])``.
    """
    if node.target in OF_SIZES:
        return all(isinstance(each, int) or (isinstance(each, fx.Node) and is_size(each)) for each in node.args)
    if node.op == "call_function" and node.target is operator.getitem:
        return isinstance(node.args[0], fx.Node) and is_size(node.args[0])
    if node.op == "call_function" and node.target is getattr:
        return bool(node.args[1] == "shape")
    return node.op == "call_method" and node.target == "size"


def size_of(node: fx.Node, shape_of: Callable[[fx.Node], tuple[Any, ...]], sizes: Mapping[fx.Node, Any]) -> Any:
    """Returns the value of a node that `is_size`.

    Args:
        node: the node.
        shape_of: returns the shape of a tensor's node.
        sizes: the values of the nodes before it.
    """
    if node.target in OF_SIZES:
        one, other = (sizes[each] if isinstance(each, fx.Node) else each for each in node.args)
        if not (isinstance(one, int) and isinstance(other, int)):
            raise Unsupported("its forward pass computes with the size of a batch")
        return OF_SIZES[node.target](one, other)
    of = node.args[0]
    index: list[Any] = [*node.args[1:], *node.kwargs.values()]
    assert isinstance(of, fx.Node), "only a node has a size"
    if node.target is operator.getitem:
        return sizes[of][index[0]]
    shape = shape_of(of)
    return shape[index[0]] if node.target == "size" and index else shape
