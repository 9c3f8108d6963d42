"""The layout of a network's parameters and buffers in one flat vector.

Legend: P parameters, of which P_phi belong to the embedding; Q buffer entries.
"""

import warnings
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

__all__ = ["Layout"]


@dataclass(frozen=True)
class Layout:
    """The positions of a network's tensors in its flat vector ``[phi | h | buffers]``.

    Parameters come in the order in which the network registers them, so a cut of the network at a layer is a cut of the
    vector at an offset. phi is ``vector[:num_embedding]``, and the whole model w is ``vector[:num_parameters]``.
    Buffers follow. Integer buffers (BatchNorm's counters) travel as floats, which are exact up to 2**24. If buffers are
    not exchanged, Q = 0, and `split_buffers` gives them a separate vector.
    """

    parameters: tuple[tuple[str, torch.Size], ...]
    buffers: tuple[tuple[str, torch.Size, bool], ...]  # name, shape, whether it is an integer buffer
    num_embedding: int

    @classmethod
    def from_network(cls, network: nn.Module, cut: str | None = "decision") -> "Layout":
        """Returns the layout of a network whose decision head begins at the layer `cut` (None: all is embedding).

        Raises:
            ValueError: if there is no layer of that name with parameters, or if a parameter is not float32.
        """
        parameters = []
        num_embedding, in_decision = 0, False
        for name, parameter in network.named_parameters():
            if parameter.dtype != torch.float32:
                raise ValueError(
                    f"model.network: parameter {name!r} is {parameter.dtype}; parameters must be torch.float32 "
                    "(choose the arithmetic with trainer.precision)."
                )
            in_decision = in_decision or (cut is not None and (name == cut or name.startswith(f"{cut}.")))
            num_embedding += 0 if in_decision else parameter.numel()
            parameters.append((name, parameter.shape))
        if cut is not None and not in_decision:
            layers = dict.fromkeys(name.rpartition(".")[0] or name for name, _ in parameters)
            raise ValueError(
                f"model.cut: the network {type(network).__name__} has no layer {cut!r} with parameters; "
                f"its layers are {', '.join(layers)}."
            )
        last = parameters[-1][0] if parameters else ""
        if in_decision and num_embedding == 0 and not last.startswith(f"{cut}."):
            warnings.warn(
                f"model.cut: {type(network).__name__} registers {cut!r} before all other layers, so everything "
                f"becomes decision head and the embedding is empty. If {cut!r} is its last layer, assign it last in "
                "__init__.",
                stacklevel=2,
            )
        persistent = network.state_dict(keep_vars=True)
        buffers = tuple(
            (name, buffer.shape, not buffer.is_floating_point())
            for name, buffer in network.named_buffers()
            if name in persistent
        )
        return cls(tuple(parameters), buffers, num_embedding)

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
        return replace(self, buffers=()), replace(self, parameters=(), num_embedding=0)

    def integer_slices(self) -> list[slice]:
        """Returns the slices of the vector that hold integer buffers, whose mean would have no meaning."""
        slices, offset = [], self.num_parameters
        for _, shape, is_integer in self.buffers:
            if is_integer:
                slices.append(slice(offset, offset + shape.numel()))
            offset += shape.numel()
        return slices

    def pack(self, network: nn.Module) -> Tensor:
        """Returns a copy of the network's parameters and buffers as one flat vector ``[P + Q]`` on the CPU."""
        named: dict[str, Tensor] = {**dict(network.named_parameters()), **dict(network.named_buffers())}
        names = [name for name, _ in self.parameters] + [name for name, _, _ in self.buffers]
        return torch.cat([named[name].detach().reshape(-1).to("cpu", torch.float32) for name in names])

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
        sizes = [(name, shape) for name, shape in self.parameters]
        sizes += [(name, shape) for name, shape, _ in self.buffers]
        offset = 0
        for name, shape in sizes:
            named[name].copy_(vector[offset : offset + shape.numel()].view(shape))
            offset += shape.numel()
        return network

    def embedding_of(self, vector: Tensor) -> Tensor:
        """Returns the view phi = ``vector[:P_phi]``."""
        return vector[: self.num_embedding]
