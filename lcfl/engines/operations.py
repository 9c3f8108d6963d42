"""The list of operations that a network becomes, for the kernels."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from lcfl.engines.forward_graph import Unsupported
from lcfl.engines.kernels import KIND, Op, Value
from lcfl.models.frozen import frozen_layers, persistent_buffers
from lcfl.models.layout import Layout

__all__ = ["Builder", "Dropout", "Place", "has_any_order", "shape_of"]

Shape = tuple[int, int, int]  # channels, height, width
Unit = Literal["number", "channel", "sample", "batch"]
OVERWRITING = KIND["relu"], KIND["relu6"]  # what can write where it reads
NOTHING = dict.fromkeys(("other", "mean", "var", "tracked"), -1)


@dataclass(frozen=True)
class Place:
    """A value in the shape that the network sees.

    Attributes:
        number: that of the value.
        rank: 1 for features ``[D]``, 2 for a signal ``[C, L]``, 3 for an image ``[C, H, W]``.
        is_turned: whether the network sees the channels last: ``[L, C]`` or ``[H, W, C]``.
    """

    number: int
    rank: int
    is_turned: bool = False

    @property
    def is_flat(self) -> bool:
        """Whether the network sees features."""
        return self.rank == 1

    @property
    def channel_dim(self) -> int:
        """The dimension of a batch in which the network sees the channels."""
        return self.rank if self.is_turned else 1


@dataclass(frozen=True)
class Dropout:
    """What the mask of a dropout depends on.

    Attributes:
        probability: p, that of a zero.
        shape: the shape of one sample's value as the network sees it.
        unit: what becomes zero together.
        is_turned: whether the network sees the channels last.
    """

    probability: float
    shape: tuple[int, ...]
    unit: Unit = "number"
    is_turned: bool = False

    def mask(self, number: int, channels_last: bool) -> Tensor:
        """Draws a mask as torch does: 1 / (1 - p) or 0.

        Args:
            number: B, of samples.
            channels_last: whether the network would have images in this order in memory, in which torch draws.

        Returns:
            The factors of a value ``[B, size]``.
        """
        kept = 1 - self.probability
        if self.unit != "number":
            units = {"channel": (number, self.shape[0]), "sample": (number, 1), "batch": (1, 1)}[self.unit]
            drawn = torch.empty(units).bernoulli_(kept).div_(kept)
            return drawn.expand(number, -1).repeat_interleave(math.prod(self.shape) // units[1], 1)
        is_image = len(self.shape) == 3 and not self.is_turned
        order = torch.channels_last if channels_last and is_image else torch.contiguous_format
        mask = torch.empty(number, *self.shape, memory_format=order).bernoulli_(kept).div_(kept)
        return (mask.movedim(-1, 1) if self.is_turned else mask).flatten(1).contiguous()


class Builder:
    """Adds operations to a list, in the order of a network's forward pass.

    Args:
        network: the network, whose parameters the operations refer to by their offsets in a model.
        layout: the order of the parameters in a model.
        shape: the shape of one input: ``[C, H, W]``, ``[C, L]`` or ``[D]``.

    Attributes:
        ops: the operations.
        values: the shapes of the numbered values that they read and write; number 0 is the input.
        used: the ids of the parameters that belong to an operation.
        overwritten: the numbers of the values that a layer changes in place.
        kept: the numbers of the values that torch keeps for the backward pass of the layers that return them.
        views: the numbers of the values that share memory with others in torch.
        dropouts: the dropouts.
        keeps_order: whether images that have channels innermost in memory still have them. torch has them outermost
            after some layers that read images of one channel or one pixel, whose order is not defined, and we do not
            know it after others.
        keeps_dims: whether no layer has yet changed the order of dimensions, which torch's dropouts of signals follow.
        token_layers: the widths of the linear layers of the last dimension of signals and images.
        in_order: the places of values whose order in memory is that of the dimensions, whatever was before them.
        buffers: the offset of each buffer, by id.
        names: the name of each module, by id.
    """

    def __init__(self, network: nn.Module, layout: Layout, shape: Sequence[int]) -> None:
        channels, *sides = shape
        self._reads_images = len(sides) == 2
        self.ops: list[Op] = []
        self.values = [Value(channels, *[1] * (2 - len(sides)), *sides)]
        self.used: set[int] = set()
        self.overwritten: list[int] = []
        self.kept: set[int] = set()
        self.views: set[int] = set()
        self.dropouts: list[Dropout] = []
        self.keeps_order = self.keeps_dims = True
        self.in_order: set[Place] = set()
        self.token_layers: list[int] = []
        self.names = {id(module): name for name, module in network.named_modules()}
        parameters, buffers = dict(network.named_parameters()), persistent_buffers(network)
        frozen = {} if (whole := Layout.of_frozen(network)) is None else whole.places
        self._frozen: dict[int, int] = {
            id(each): frozen[name].start for name, each in (parameters | buffers).items() if name in frozen
        }
        self._parameters = self._frozen | _offsets(parameters[name] for name, _ in layout.parameters)
        self._in_evaluation = set(frozen_layers(network))
        self.buffers = self._frozen | _offsets(each for name, each in buffers.items() if name not in frozen)

    def emit(self, kind: str, at: Place, shape: Shape, layer: nn.Module | None, **fields: float) -> Place:
        """Adds an operation with a new value and returns the place of that value."""
        if getattr(layer, "inplace", False):
            self.overwritten.append(at.number)
        place = self._new(shape, at.rank, at.is_turned)
        self._write(kind, at, place, layer, **fields)
        if at in self.in_order and KIND[kind] >= KIND["dropout"]:  # functions of single numbers keep it
            self.in_order.add(place)
        return place

    def emit_grouped(self, kind: str, at: Place, shape: Shape, layer: nn.Module, groups: int, **fields: float) -> Place:
        """Adds an operation for each group of channels, and joins their results."""
        channels, height, width = shape_of(self.values[at.number])
        of_group, made = channels // groups, []
        for group in range(groups):
            read = self.part(at, group * of_group * height * width, (of_group, height, width))
            made.append(self._new((shape[0] // groups, *shape[1:]), at.rank))
            self._write(kind, read, made[-1], layer, (group, groups), **fields)
        return self._join(made, shape)

    def _new(self, shape: Shape, rank: int, is_turned: bool = False) -> Place:
        if min(shape) < 1:
            raise Unsupported("it has an empty tensor, from a window larger than what it reads or a part of no channel")
        self.values.append(Value(*shape))
        return Place(len(self.values) - 1, rank, is_turned)

    def _write(
        self,
        kind: str,
        at: Place,
        to: Place,
        layer: nn.Module | None = None,
        group: tuple[int, int] = (0, 1),
        /,
        **fields: float,
    ) -> None:
        """Adds an operation that writes a value, or a part of it.

        Args:
            kind: what it computes.
            at: what it reads.
            to: what it writes.
            layer: the layer that has its parameters.
            group: the number of the group of output channels whose parameters it has, and the number of groups.
            fields: those of `Op`.
        """
        op = Op(kind=KIND[kind], input=at.number, output=to.number, **{**NOTHING, **fields})
        op.weight = self._offset(layer, "weight", self._num_weights(op), *group)
        op.bias = self._offset(layer, "bias", self.values[op.output].channels, *group)
        op.is_frozen = self._is_frozen(layer)
        self.ops.append(op)

    def _num_weights(self, op: Op) -> int:
        """Returns how many weights the kernels read for an operation."""
        read, written = self.values[op.input], self.values[op.output]
        if op.kind == KIND["linear"]:
            return int(read.size * written.size)
        of_channel = op.kernel_h * op.kernel_w if op.kind in (KIND["conv"], KIND["depthwise"]) else 1
        return int(of_channel * written.channels * (read.channels if op.kind == KIND["conv"] else 1))

    def _offset(self, layer: nn.Module | None, name: str, size: int, group: int, groups: int) -> int:
        """Returns where a group's part, of so many numbers, of a layer's weight or bias is in a model; -1 for none."""
        if (held := getattr(layer, name, None)) is None:
            return -1
        if not isinstance(held, nn.Parameter):
            raise Unsupported(f"its {type(layer).__name__} has a {name} that is not a parameter")
        if held.numel() != size * groups:
            raise Unsupported(f"its {type(layer).__name__} has a {name} of another size than its settings say")
        return self._parameters[id(held)] + group * size

    def _is_frozen(self, layer: nn.Module | None) -> bool:
        """Returns whether a layer is frozen. One that has neither parameters nor buffers is not."""
        if layer is None:
            return False
        buffers = [each for each in layer.buffers() if id(each) in self.buffers]
        frozen = {id(each) in self._frozen for each in (*layer.parameters(), *buffers)}
        stays = self.names.get(id(layer)) in self._in_evaluation
        if len(frozen) > 1 or (buffers and {stays} != frozen):
            raise Unsupported(f"its {type(layer).__name__} is frozen in part, or shares its buffers")
        return frozen == {True}

    def drop(self, at: Place, probability: float, unit: Unit, layer: nn.Module) -> Place:
        """Adds a dropout and returns the place of its result."""
        self.dropouts.append(Dropout(probability, self.sizes_of(at), unit, at.is_turned))
        return self.emit("dropout", at, shape_of(self.values[at.number]), layer, place=len(self.dropouts) - 1)

    def add(self, at: Place, other: Place) -> Place:
        """Adds the sum of two values and returns its place."""
        at, other = self._alike(at, other)
        shape = shape_of(self.values[at.number])
        if shape != shape_of(self.values[other.number]) or at.rank != other.rank:
            raise Unsupported("its forward pass adds tensors of different shapes")
        return self.emit("add", at, shape, None, other=other.number)

    def multiply(self, at: Place, other: Place) -> Place:
        """Adds the product of two values, of which one may have one number per channel, and returns its place."""
        if self.values[at.number].size < self.values[other.number].size:
            at, other = other, at
        at, other = self._alike(at, other)
        shape, gate = (shape_of(self.values[each.number]) for each in (at, other))
        if at.rank != other.rank or gate not in (shape, (shape[0], 1, 1)):
            raise Unsupported("its forward pass multiplies tensors of different shapes")
        return self.emit("multiply", at, shape, None, other=other.number)

    def _alike(self, at: Place, other: Place) -> tuple[Place, Place]:
        """Returns the places of two values, of which the other one has its channels where the first one has them."""
        return at, self.turned(other) if at.is_turned else self.plain(other)

    def concatenate(self, places: Sequence[Place]) -> Place:
        """Adds copies of values into the channels, or features, of a new one and returns its place."""
        values, first = [self.values[each.number] for each in places], places[0]
        shapes = [(value.size, 1, 1) if first.is_flat else shape_of(value) for value in values]
        if len({(each.rank, each.is_turned, *shape[1:]) for each, shape in zip(places, shapes, strict=True)}) > 1:
            raise Unsupported("its forward pass concatenates tensors of different shapes")
        self.keeps_order &= not any(has_any_order(value) for value in values)
        whole = sum(channels for channels, *_ in shapes), *shapes[0][1:]
        return self._join(places, whole)

    def _join(self, places: Sequence[Place], shape: Shape) -> Place:
        whole, begin = self._new(shape, places[0].rank, places[0].is_turned), 0
        for each in places:
            self._write("concatenate", each, whole, place=begin)
            begin += self.values[each.number].size
        return whole

    def part(self, at: Place, begin: int, shape: Shape) -> Place:
        """Adds a copy of the numbers of a value from `begin` on and returns its place."""
        place = self._new(shape, at.rank, at.is_turned)
        self._write("part", at, place, place=begin)
        return place

    def channels(self, at: Place, begin: int, end: int) -> Place:
        """Adds a copy of some channels, or features, of a value and returns its place."""
        _, height, width = (1, 1, 1) if at.is_flat else shape_of(self.values[at.number])
        place = self.part(at, begin * height * width, (end - begin, height, width))
        self.views.add(place.number)
        self.keeps_order = False
        return place

    def filled(self, at: Place, sizes: Sequence[int]) -> tuple[int, ...]:
        """Returns the sizes of a value's new shape, of which one may be -1 for what remains."""
        size, known = self.values[at.number].size, math.prod(each for each in sizes if each != -1)
        found = tuple(size // known if each == -1 else each for each in sizes)
        if min(found) < 1 or math.prod(found) != size:
            raise Unsupported(f"its forward pass gives a tensor of {size} numbers the shape {tuple(sizes)}")
        return found

    def reshape(self, at: Place, sizes: Sequence[int]) -> Place:
        """Returns the place of a value as features, or adds a copy as a signal or an image and returns its place."""
        at, sizes = self.plain(at), self.filled(at, sizes)
        rank = len(sizes)
        if rank == 1:
            return Place(at.number, 1)
        if rank > 3:
            raise Unsupported(f"its forward pass gives a tensor the shape {sizes}")
        self.keeps_order &= not self._reads_images
        self.keeps_dims &= not (self._reads_images and at.rank > rank)
        place = self.part(replace(at, rank=rank), 0, (sizes[0], 1 if rank == 2 else sizes[1], sizes[-1]))
        self.views.add(place.number)
        return place

    def plain(self, at: Place) -> Place:
        """Returns the place of a value whose first dimension is the channels; adds a copy if that is not so yet."""
        if not at.is_turned:
            return at
        channels, height, width = shape_of(self.values[at.number])
        shape = (width, 1, channels) if at.rank == 2 else (height, width, channels)
        return self._transposed(at, channels, shape)

    def turned(self, at: Place) -> Place:
        """Returns the place of a value whose last dimension is the channels; adds a copy if that is not so yet."""
        if at.is_turned or at.is_flat:
            return at
        channels, height, width = shape_of(self.values[at.number])
        shape = (width, 1, channels) if at.rank == 2 else (width, channels, height)
        return self._transposed(at, channels * height, shape)

    def _transposed(self, at: Place, groups: int, shape: Shape) -> Place:
        """Adds a copy in which the first numbers of all groups come first, then the second ones, and so on."""
        place = self._new(shape, at.rank, not at.is_turned)
        self._write("shuffle", at, place, groups=groups, place=1)
        self.views.add(place.number)
        return place

    def with_channels(self, at: Place, dim: int) -> Place:
        """Returns the place of a value whose channels are dimension `dim` of a batch; adds a copy if it is another one.

        Raises:
            LookupError: if this is neither the first nor the last dimension of a sample.
        """
        dim = range(at.rank + 1)[dim]
        if dim not in (1, at.rank):
            raise LookupError("only the first and the last dimension can be channels")
        return self.plain(at) if dim == 1 else self.turned(at)

    def permute(self, at: Place, order: Sequence[int]) -> Place:
        """Returns the place of a value with its dimensions in another order.

        Args:
            at: the place of the value.
            order: those of a batch: its channels, or first dimension, become the last one, or the last one the first.
        """
        forth, back = (0, *range(2, at.rank + 1), 1), (0, at.rank, *range(1, at.rank))
        found = tuple(range(at.rank + 1)[each] for each in order)
        if found == (0, *range(1, at.rank + 1)):
            return at
        if found not in (forth, back):
            raise Unsupported(f"its forward pass permutes the dimensions of a tensor as {tuple(order)}")
        self.keeps_order = self.keeps_dims = False
        if found == forth and not (found == back and at.is_turned):
            return replace(self.plain(at), is_turned=True)
        return replace(self.turned(at), is_turned=False)

    def affine(self, at: Place, factor: float, summand: float, layer: nn.Module | None = None) -> Place:
        """Adds a multiple of a value plus a number and returns its place."""
        if not all(isinstance(each, int | float) for each in (factor, summand)):
            raise TypeError("a tensor is no number")
        if not all(abs(each) <= torch.finfo(torch.float32).max for each in (factor, summand)):
            raise Unsupported("its forward pass computes with a number beyond float32")
        return self.emit("affine", at, shape_of(self.values[at.number]), layer, eps=factor, momentum=summand)

    def sizes_of(self, place: Place) -> tuple[int, ...]:
        """Returns the shape of one sample's value as the network sees it."""
        value = self.values[place.number]
        if place.is_flat:
            return (value.size,)
        pixels = (value.width,) if place.rank == 2 else (value.height, value.width)
        return (*pixels, value.channels) if place.is_turned else (value.channels, *pixels)

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


def shape_of(value: Value) -> Shape:
    """Returns the channels, height and width of a value."""
    return value.channels, value.height, value.width


def has_any_order(value: Value) -> bool:
    """Returns whether channels innermost and outermost are the same in memory."""
    return bool(value.channels == 1 or value.height * value.width == 1)


def _offsets(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Returns the offset of each tensor in the vector of all tensors, by id."""
    offsets, offset = {}, 0
    for tensor in tensors:
        offsets[id(tensor)] = offset
        offset += tensor.numel()
    return offsets
