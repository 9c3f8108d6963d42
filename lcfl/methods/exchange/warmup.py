"""Exchanges of warm-up rounds: clients send what a clustering wants to see, and nothing that trains."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from lcfl.core.messages import Downlink
from lcfl.core.state import FederationState
from lcfl.methods.exchange.base import Exchange, ModelKind
from lcfl.methods.exchange.global_model import NoExchange
from lcfl.methods.local.training import LocalOutput
from lcfl.models.layout import Layout
from lcfl.models.subset import ParameterSubset, layer_subset

__all__ = ["NamedLayers", "Signature"]


@dataclass(frozen=True)
class NamedLayers(Exchange):
    """The initial model down, some layers of the trained model up: P + P_L floats (FedClust Algorithm 1, lines 3, 4).

    For warm-up rounds: nothing that trains can be made of a few layers alone.

    Args:
        layers: names of layers, each with all that is inside it; None: the last layer.
    """

    layers: Sequence[str] | None = None

    keeps_model = False
    sends: ClassVar[tuple[str, ...]] = ("model",)
    returns: ClassVar[tuple[str, ...]] = ("layers",)
    models: ClassVar[tuple[ModelKind, ...]] = ()
    reported: ClassVar[tuple[ModelKind, ...]] = ()

    def down(self, state: FederationState, client: int, layout: Layout) -> Downlink:
        """theta^0."""
        return Downlink({"model": state.initial})

    def subset(self, layout: Layout) -> ParameterSubset:
        """Where the layers' parameters lie.

        Raises:
            ValueError: if there is no such layer.
        """
        return layer_subset(layout, self.layers or 1, with_buffers=False)

    def up(self, trained: LocalOutput, downlink: Downlink, layout: Layout) -> Mapping[str, Tensor]:
        """The named layers' parameters, one after the other in the order of the network, ``[P_L]``."""
        return {"layers": self.subset(layout).take(trained.model)}


@dataclass(frozen=True)
class Signature(NoExchange):
    """Nothing down, the signature of the client's data up (PACFL before training): D p floats per label of its own."""

    keeps_model = False
    returns: ClassVar[tuple[str, ...]] = ("signature",)

    def up(self, trained: LocalOutput, downlink: Downlink, layout: Layout) -> Mapping[str, Tensor]:
        """U_i."""
        return {"signature": trained.extras["signature"]}
