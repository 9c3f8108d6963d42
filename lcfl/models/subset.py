"""The positions of some layers in a network's flat vector.

Legend: P parameters and Q buffer entries in a model's flat vector, S numbers in a subset.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lcfl.models.layout import Layout

__all__ = ["ParameterSubset", "embedding_subset", "layer_names", "layer_subset"]


@dataclass(frozen=True)
class ParameterSubset:
    """Slices of a flat vector ``[P + Q]``, in ascending order and without overlap."""

    slices: tuple[slice, ...]

    @property
    def size(self) -> int:
        """S, the number of entries that it covers."""
        return sum(place.stop - place.start for place in self.slices)

    def take(self, vector: Tensor) -> Tensor:
        """Returns a copy of the subset ``[S]`` of a vector ``[P + Q]``."""
        return torch.cat([vector[place] for place in self.slices]) if self.slices else vector.new_empty(0)

    def put(self, values: Tensor, vector: Tensor) -> Tensor:
        """Returns a copy of `vector` ``[P + Q]`` with `values` ``[S]`` in this subset.

        Raises:
            ValueError: if there are more or fewer values than the subset has entries.
        """
        if len(values) != self.size:
            raise ValueError(f"got {len(values)} values for a subset of {self.size} entries.")
        result, offset = vector.clone(), 0
        for place in self.slices:
            result[place] = values[offset : offset + place.stop - place.start]
            offset += place.stop - place.start
        return result


def layer_names(layout: Layout) -> list[str]:
    """Returns the names of the layers that hold parameters directly, in the network's order."""
    return list(dict.fromkeys(_layer(name) for name, _ in layout.parameters))


def embedding_subset(layout: Layout) -> ParameterSubset:
    """Returns the embedding phi: its parameters, and the buffers of layers that have parameters in it."""
    names, offset = set(), 0
    for name, shape in layout.parameters:
        if offset < layout.num_embedding:
            names.add(_layer(name))
        offset += shape.numel()
    everything = layout.num_embedding == layout.num_parameters
    return _subset(layout, lambda layer: everything or layer in names)


def layer_subset(layout: Layout, layers: int | Sequence[str], with_buffers: bool = True) -> ParameterSubset:
    """Returns the last layers with parameters, or the named layers, each with everything inside it.

    A layer without parameters is included if a name covers it or if all layers are requested.

    Args:
        layout: the layout of the network.
        layers: the number of last layers, or the names of layers.
        with_buffers: whether to include the layers' buffers.

    Raises:
        ValueError: for a name that no layer has, or for more layers than the network has.
    """
    if not with_buffers:
        layout = layout.split_buffers()[0]
    known = layer_names(layout)
    if isinstance(layers, int):
        if layers > len(known):
            raise ValueError(f"got {layers} layers; the network has {len(known)} with parameters: {', '.join(known)}.")
        chosen = set(known[-layers:])
        return _subset(layout, lambda layer: len(chosen) == len(known) or layer in chosen)
    all_layers = known + [_layer(name) for name, *_ in layout.buffers]
    missing = [name for name in layers if not any(_covers(name, layer) for layer in all_layers)]
    if missing:
        raise ValueError(
            f"the network has no layer {', '.join(map(repr, missing))}; its layers are {', '.join(known)}."
        )
    return _subset(layout, lambda layer: any(_covers(name, layer) for name in layers))


def _subset(layout: Layout, holds: Callable[[str], bool]) -> ParameterSubset:
    slices: list[slice] = []
    offset = 0
    shapes = [*layout.parameters, *((name, shape) for name, shape, _ in layout.buffers)]
    for name, shape in shapes:
        end = offset + shape.numel()
        if holds(_layer(name)):
            if slices and slices[-1].stop == offset:
                slices[-1] = slice(slices[-1].start, end)
            else:
                slices.append(slice(offset, end))
        offset = end
    return ParameterSubset(tuple(slices))


def _layer(name: str) -> str:
    return name.rpartition(".")[0] or name


def _covers(name: str, layer: str) -> bool:
    return layer == name or layer.startswith(f"{name}.")
