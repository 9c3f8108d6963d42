"""The layout of a network's parameters and buffers in one flat vector.

Legend: P parameters, of which P_phi belong to the embedding; Q buffer entries.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor, nn

from lcfl.models.frozen import frozen_layers, persistent_buffers
from lcfl.models.patterns import layers_of, matching

__all__ = ["Layout", "Part"]

Part = Literal["all", "embedding", "head"]  # of a model's parameters


@dataclass(frozen=True)
class Layout:
    """The positions of a network's trained tensors in its flat vector ``[phi | h | buffers]``.

    phi is ``vector[:num_embedding]``, and the whole model w is ``vector[:num_parameters]``. Within phi and within h,
    parameters come in the order in which the network registers them. Buffers follow. Integer buffers (BatchNorm's
    counters) travel as floats, which are exact up to 2**24. If buffers are not exchanged, Q = 0, and `split_buffers`
    gives them a separate vector. Frozen parameters, and the buffers of frozen layers, are not part of it: they have a
    layout of their own (`of_frozen`), because they are equal in all models.

    Attributes:
        parameters: name and shape of each parameter.
        buffers: name and shape of each buffer, and whether it holds integers.
        num_embedding: P_phi.
        layers: the layers that hold these parameters directly, in the order in which the network registers them.
    """

    parameters: tuple[tuple[str, torch.Size], ...]
    buffers: tuple[tuple[str, torch.Size, bool], ...]
    num_embedding: int
    layers: tuple[str, ...]

    @classmethod
    def from_network(cls, network: nn.Module, cut: str | Sequence[str] | None = "decision") -> "Layout":
        """Returns the layout of a network's trained part.

        Args:
            network: the network.
            cut: the layer at which the decision head begins, or patterns of the parameters in the decision head
                (`lcfl.models.patterns`). None: all is embedding.

        Raises:
            ValueError: if there is no such layer with parameters, or if a trained parameter is not float32.
        """
        head, trained = _head(network, cut), []
        for name, parameter in network.named_parameters():
            if parameter.requires_grad and parameter.dtype != torch.float32:
                raise ValueError(
                    f"model.network: parameter {name!r} is {parameter.dtype}; parameters must be torch.float32 "
                    "(choose the arithmetic with trainer.precision). Remove torch.set_default_dtype, or a call such as "
                    ".double()."
                )
            if parameter.requires_grad:
                trained.append((name, parameter.shape))
        return cls(
            tuple(sorted(trained, key=lambda each: each[0] in head)),
            _buffers(network, frozen=False),
            sum(shape.numel() for name, shape in trained if name not in head),
            tuple(layers_of(name for name, _ in trained)),
        )

    @classmethod
    def of_frozen(cls, network: nn.Module) -> "Layout | None":
        """Returns the layout of the frozen parameters and the buffers of frozen layers; None if nothing is frozen."""
        frozen = [(name, each.shape) for name, each in network.named_parameters() if not each.requires_grad]
        if not frozen:
            return None
        if complex_ones := [name for name, each in network.named_parameters() if each.is_complex()]:
            raise ValueError(f"model.network: parameter {complex_ones[0]!r} is complex; lcfl keeps float32 alone.")
        return cls(tuple(frozen), _buffers(network, frozen=True), 0, tuple(layers_of(name for name, _ in frozen)))

    def check_finite(self, network: nn.Module) -> None:
        """Refuses buffers in models whose first values are not finite, because such models are not averaged."""
        for name, *_ in self.buffers:
            if not network.get_buffer(name).is_meta and not network.get_buffer(name).float().isfinite().all():
                raise ValueError(
                    f"model.network: the buffer {name!r} cannot be part of a model: it has values that are not finite "
                    "in float32. Give it finite first values, set model.buffer_policy to local, or, if nothing in it "
                    "is learnt, register it with persistent=False."
                )

    @property
    def names(self) -> list[str]:
        """The names of parameters and buffers, in the order of the vector."""
        return [name for name, _ in self.parameters] + [name for name, *_ in self.buffers]

    @property
    def num_parameters(self) -> int:
        """P, the number of parameters."""
        return sum(shape.numel() for _, shape in self.parameters)

    @property
    def size(self) -> int:
        """P + Q, the length of the flat vector."""
        return self.num_parameters + sum(shape.numel() for _, shape, _ in self.buffers)

    def split_buffers(self) -> "tuple[Layout, Layout]":
        """Returns the layouts of the parameters alone, ``[phi | h]``, and of the buffers alone, ``[buffers]``."""
        return replace(self, buffers=()), replace(self, parameters=(), num_embedding=0, layers=())

    @cached_property
    def places(self) -> dict[str, slice]:
        """Where each parameter and buffer lies in the vector, by name and in its order."""
        sizes = [shape.numel() for _, shape in self.parameters] + [shape.numel() for _, shape, _ in self.buffers]
        places = zip(self.names, sizes, accumulate(sizes), strict=True)
        return {name: slice(end - size, end) for name, size, end in places}

    def integer_slices(self) -> list[slice]:
        """Returns the slices of the vector that hold integer buffers, whose mean would have no meaning."""
        return [self.places[name] for name, _, is_integer in self.buffers if is_integer]

    def pack(self, network: nn.Module) -> Tensor:
        """Returns a copy of the network's parameters and buffers as one flat vector ``[P + Q]`` on the CPU."""
        named: dict[str, Tensor] = {**dict(network.named_parameters()), **dict(network.named_buffers())}
        return torch.cat([named[name].detach().reshape(-1).to("cpu", torch.float32) for name in self.names])

    @torch.no_grad()
    def unpack(self, vector: Tensor, network: nn.Module) -> nn.Module:
        """Copies a flat vector ``[P + Q]`` into the network's parameters and buffers, and returns the network.

        Raises:
            ValueError: if the vector belongs to another network, so that its length does not fit.
        """
        if len(vector) != self.size:
            raise ValueError(
                f"got a model of {len(vector)} numbers, but this {type(network).__name__} has {self.size}; use the "
                "network that the model was trained with."
            )
        named: dict[str, Tensor] = {**dict(network.named_parameters()), **dict(network.named_buffers())}
        shapes = dict(self.parameters) | {name: shape for name, shape, _ in self.buffers}
        for name, place in self.places.items():
            named[name].copy_(vector[place].view(shapes[name]))
        return network

    def range_of(self, part: Part) -> slice:
        """Returns where the parameters of a part lie in the vector: phi, h or both."""
        begin, end = self.num_embedding if part == "head" else 0, self.num_parameters
        return slice(begin, self.num_embedding if part == "embedding" else end)

    def names_of(self, part: Part) -> set[str]:
        """Returns the names of the parameters in a part."""
        part_of_it = self.range_of(part)
        return {name for name, _ in self.parameters if part_of_it.start <= self.places[name].start < part_of_it.stop}

    def embedding_of(self, vector: Tensor) -> Tensor:
        """Returns the view phi = ``vector[:P_phi]``."""
        return vector[: self.num_embedding]


def _head(network: nn.Module, cut: str | Sequence[str] | None) -> set[str]:
    """Returns the names of the parameters in the decision head, trained or not."""
    names, kind = [name for name, _ in network.named_parameters()], type(network).__name__
    if cut is None:
        return set()
    if not isinstance(cut, str):
        return matching(cut, names, "model.cut", f"the network {kind}")
    begin = next((place for place, name in enumerate(names) if name == cut or name.startswith(f"{cut}.")), None)
    if begin is None:
        if not names:
            raise ValueError(f"model.network: {kind} has no parameters; name a network that has some.")
        all_names = [name for name, _ in network.named_parameters(remove_duplicate=False)]
        if any(name == cut or name.startswith(f"{cut}.") for name in all_names):
            raise ValueError(
                f"model.cut: the layer {cut!r} of {kind} shares its parameters with an earlier layer, and they count "
                f"there; the layers with parameters of their own are {', '.join(layers_of(names))}."
            )
        raise ValueError(
            f"model.cut: the network {kind} has no layer {cut!r} with parameters; "
            f"its layers are {', '.join(layers_of(names))}. Set it to the layer at which the decision head begins, "
            f"e.g. model.cut={layers_of(names)[-1]}, or to null for no head."
        )
    if begin == 0 and not names[-1].startswith(f"{cut}."):
        warnings.warn(
            f"model.cut: {kind} registers {cut!r} before all other layers, so everything becomes decision head and the "
            f"embedding is empty. If {cut!r} is its last layer, assign it last in __init__, or give patterns: [{cut}].",
            stacklevel=3,
        )
    return set(names[begin:])


def _buffers(network: nn.Module, frozen: bool) -> tuple[tuple[str, torch.Size, bool], ...]:
    """Returns the persistent buffers of the layers that are frozen, or of those that are not."""
    places = set(frozen_layers(network))
    buffers = {
        name: buffer
        for name, buffer in persistent_buffers(network).items()
        if (name.rpartition(".")[0] in places) is frozen
    }
    for name, buffer in buffers.items():
        _check_buffer(name, buffer)
    return tuple((name, buffer.shape, not buffer.is_floating_point()) for name, buffer in buffers.items())


def _check_buffer(name: str, buffer: Tensor) -> None:
    """Refuses a buffer that a vector in float32 cannot hold."""
    if buffer.is_meta:
        return
    if buffer.is_complex():
        why = "it is complex"
    elif not buffer.is_floating_point() and not torch.equal(buffer.float().to(buffer.dtype), buffer):
        why = "it has integers that float32 cannot hold"
    elif any(step == 0 and size > 1 for step, size in zip(buffer.stride(), buffer.shape, strict=True)):
        why = "its entries share memory (clone it after expand)"
    else:
        return
    raise ValueError(
        f"model.network: the buffer {name!r} cannot be part of a model: {why}. If nothing in it is learnt, register it "
        "with persistent=False."
    )
