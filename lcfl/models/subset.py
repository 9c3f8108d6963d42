"""The positions of some layers in the flat vector of a network's trained part.

Legend: P parameters and Q buffer entries in a model's flat vector, S numbers in a subset.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lcfl.models.layout import Layout
from lcfl.models.patterns import layer_of, matching

__all__ = ["ParameterSubset", "embedding_subset", "layer_subset", "other_layers"]


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


def embedding_subset(layout: Layout) -> ParameterSubset:
    """Returns the embedding phi: its parameters, and the buffers of layers that have parameters in it."""
    names = layout.names_of("embedding")
    layers = {layer_of(name) for name in names}
    everything = layout.num_embedding == layout.num_parameters
    buffers = {name for name, *_ in layout.buffers if everything or layer_of(name) in layers}
    return _subset(layout, (names | buffers).__contains__)


def layer_subset(layout: Layout, layers: int | Sequence[str], with_buffers: bool = True) -> ParameterSubset:
    """Returns the last layers with trained parameters, or what patterns cover (`lcfl.models.patterns`).

    Names of layers are patterns: each stands for everything inside the layer. A layer without parameters is included
    if a pattern covers it or if all layers are requested.

    Args:
        layout: the layout of the network's trained part.
        layers: the number of last layers, or patterns.
        with_buffers: whether to include the layers' buffers.

    Raises:
        ValueError: for a text, a pattern that covers nothing that is trained, or more layers than the network has.
    """
    if not with_buffers:
        layout = layout.split_buffers()[0]
    known = layout.layers
    if isinstance(layers, int):
        if layers > len(known):
            raise ValueError(f"got {layers} layers; the network has {len(known)} with parameters: {', '.join(known)}.")
        chosen = set(known[-layers:])
        return _subset(layout, lambda name: len(chosen) == len(known) or layer_of(name) in chosen)
    covered = _covered(layout, layers)
    return _subset(layout, covered.__contains__)


def other_layers(layout: Layout, layers: Sequence[str] | None) -> ParameterSubset:
    """Returns all parameters and buffers but those of some layers.

    Args:
        layout: the layout of the network's trained part.
        layers: patterns of what is left out; None for the layers with running statistics, as batch normalisation has.

    Raises:
        ValueError: for a text, a pattern that covers nothing that is trained, or a network without running statistics.
    """
    if layers is None:
        layers = [layer_of(name) for name, *_ in layout.buffers if name.rpartition(".")[2] == "running_mean"]
        if not layers:
            raise ValueError(
                "the models have no layer with running statistics, which batch normalisation has. Set "
                "model.network.init_args.batch_norm=true for lcfl's MLP or CNN, or use another network with BatchNorm, "
                "and set model.buffer_policy=average. Or give the layers that stay with a client."
            )
    covered = _covered(layout, layers)
    return _subset(layout, lambda name: name not in covered)


def _covered(layout: Layout, patterns: Sequence[str]) -> set[str]:
    """Returns the names of the parameters and buffers that patterns cover."""
    return matching(patterns, layout.names, "", "the trained part of the network")


def _subset(layout: Layout, holds: Callable[[str], bool]) -> ParameterSubset:
    slices: list[slice] = []
    for name, place in layout.places.items():
        if holds(name) and slices and slices[-1].stop == place.start:
            slices[-1] = slice(slices[-1].start, place.stop)
        elif holds(name):
            slices.append(place)
    return ParameterSubset(tuple(slices))
