"""The list of operations that a network becomes, for the kernels."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

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
    """A value in the shape that the network sees: flattened, or as an image or a signal."""

    number: int
    is_flat: bool


@dataclass(frozen=True)
class Dropout:
    """What the mask of a dropout depends on.

    Attributes:
        probability: p, that of a zero.
        shape: the shape of one sample's value: ``[D]``, ``[C, L]`` or ``[C, H, W]``.
        unit: what becomes zero together.
    """

    probability: float
    shape: tuple[int, ...]
    unit: Unit = "number"

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
        order = torch.channels_last if channels_last and len(self.shape) == 3 else torch.contiguous_format
        mask = torch.empty(number, *self.shape, memory_format=order).bernoulli_(kept).div_(kept)
        return mask.contiguous().flatten(1)


class Builder:
    """Adds operations to a list, in the order of a network's forward pass.

    Args:
        network: the network, whose parameters the operations refer to by their offsets in a model.
        layout: the order of the parameters in a model.
        shape: the shape of one input: ``[C, H, W]``, ``[C, L]`` or ``[D]``.

    Attributes:
        is_signal: whether values that are not flat are ``[C, L]``. Their height is 1 then. If the input is flat, the
            first value that is not flat decides.
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
        buffers: the offset of each buffer, by id.
        names: the name of each module, by id.
    """

    def __init__(self, network: nn.Module, layout: Layout, shape: Sequence[int]) -> None:
        channels, *sides = shape
        self.is_signal = len(sides) == 1
        self._is_open = not sides  # whether values may be images as well as signals
        self.ops: list[Op] = []
        self.values = [Value(channels, *[1] * (2 - len(sides)), *sides)]
        self.used: set[int] = set()
        self.overwritten: list[int] = []
        self.kept: set[int] = set()
        self.views: set[int] = set()
        self.dropouts: list[Dropout] = []
        self.keeps_order = True
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
        place = self._new(shape, at.is_flat)
        self._write(kind, at, place, layer, **fields)
        return place

    def emit_grouped(self, kind: str, at: Place, shape: Shape, layer: nn.Module, groups: int, **fields: float) -> Place:
        """Adds an operation for each group of channels, and joins their results."""
        channels, height, width = shape_of(self.values[at.number])
        of_group, made = channels // groups, []
        for group in range(groups):
            read = self.part(at, group * of_group * height * width, (of_group, height, width))
            made.append(self._new((shape[0] // groups, *shape[1:]), False))
            self._write(kind, read, made[-1], layer, (group, groups), **fields)
        return self._join(made, shape, False)

    def _new(self, shape: Shape, is_flat: bool) -> Place:
        if min(shape) < 1:
            raise Unsupported("it has an empty tensor, from a window larger than what it reads or a part of no channel")
        self.values.append(Value(*shape))
        return Place(len(self.values) - 1, is_flat)

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
        self.dropouts.append(Dropout(probability, self.sizes_of(at), unit))
        return self.emit("dropout", at, shape_of(self.values[at.number]), layer, place=len(self.dropouts) - 1)

    def add(self, at: Place, other: Place) -> Place:
        """Adds the sum of two values and returns its place."""
        shape = shape_of(self.values[at.number])
        if shape != shape_of(self.values[other.number]) or at.is_flat != other.is_flat:
            raise Unsupported("its forward pass adds tensors of different shapes")
        return self.emit("add", at, shape, None, other=other.number)

    def multiply(self, at: Place, other: Place) -> Place:
        """Adds the product of two values, of which one may have one number per channel, and returns its place."""
        if self.values[at.number].size < self.values[other.number].size:
            at, other = other, at
        shape, gate = (shape_of(self.values[each.number]) for each in (at, other))
        if at.is_flat != other.is_flat or gate not in (shape, (shape[0], 1, 1)):
            raise Unsupported("its forward pass multiplies tensors of different shapes")
        return self.emit("multiply", at, shape, None, other=other.number)

    def concatenate(self, places: Sequence[Place]) -> Place:
        """Adds copies of values into the channels, or features, of a new one and returns its place."""
        values, is_flat = [self.values[each.number] for each in places], places[0].is_flat
        shapes = [(value.size, 1, 1) if is_flat else shape_of(value) for value in values]
        if len({(each.is_flat, *shape[1:]) for each, shape in zip(places, shapes, strict=True)}) > 1:
            raise Unsupported("its forward pass concatenates tensors of different shapes")
        self.keeps_order &= not any(has_any_order(value) for value in values)
        return self._join(places, (sum(channels for channels, *_ in shapes), *shapes[0][1:]), is_flat)

    def _join(self, places: Sequence[Place], shape: Shape, is_flat: bool) -> Place:
        whole, begin = self._new(shape, is_flat), 0
        for each in places:
            self._write("concatenate", each, whole, place=begin)
            begin += self.values[each.number].size
        return whole

    def part(self, at: Place, begin: int, shape: Shape, is_flat: bool = False) -> Place:
        """Adds a copy of the numbers of a value from `begin` on and returns its place."""
        place = self._new(shape, is_flat)
        self._write("part", at, place, place=begin)
        return place

    def channels(self, at: Place, begin: int, end: int) -> Place:
        """Adds a copy of some channels, or features, of a value and returns its place."""
        _, height, width = (1, 1, 1) if at.is_flat else shape_of(self.values[at.number])
        place = self.part(at, begin * height * width, (end - begin, height, width), at.is_flat)
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
        sizes = self.filled(at, sizes)
        if len(sizes) == 1:
            return Place(at.number, True)
        if len(sizes) > 3:
            raise Unsupported(f"its forward pass gives a tensor the shape {sizes}")
        is_signal = len(sizes) == 2
        if self.is_signal != is_signal and not self._is_open:
            raise Unsupported("its forward pass has both images and signals")
        self.keeps_order &= self._is_open
        self.is_signal, self._is_open = is_signal, False
        place = self.part(at, 0, (sizes[0], 1 if is_signal else sizes[1], sizes[-1]))
        self.views.add(place.number)
        return place

    def affine(self, at: Place, factor: float, summand: float, layer: nn.Module | None = None) -> Place:
        """Adds a multiple of a value plus a number and returns its place."""
        if not all(abs(each) <= torch.finfo(torch.float32).max for each in (factor, summand)):
            raise Unsupported("its forward pass computes with a number beyond float32")
        return self.emit("affine", at, shape_of(self.values[at.number]), layer, eps=factor, momentum=summand)

    def sizes_of(self, place: Place) -> tuple[int, ...]:
        """Returns the shape of one sample's value as the network sees it."""
        value = self.values[place.number]
        if place.is_flat:
            return (value.size,)
        return (value.channels, value.width) if self.is_signal else shape_of(value)

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
