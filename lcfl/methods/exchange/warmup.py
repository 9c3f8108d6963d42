"""Exchanges for warm-up rounds.

Clients send what a clustering needs. The uploads do not train any model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from lcfl.core.messages import Downlink
from lcfl.core.schema import Array
from lcfl.core.state import FederationState
from lcfl.methods.exchange.base import Exchange, ModelKind
from lcfl.methods.exchange.global_model import NoExchange
from lcfl.methods.local.training import LocalOutput
from lcfl.models.layout import Layout
from lcfl.models.subset import ParameterSubset, layer_subset

__all__ = ["NamedLayers", "Signature"]


@dataclass(frozen=True)
class NamedLayers(Exchange):
    """Sends the initial model down and some layers of the trained model up: P + P_L floats.

    This is FedClust Algorithm 1, lines 3, 4. It is only for warm-up rounds, because a few layers alone do not make a
    model that could be trained further.

    Args:
        layers: patterns of the layers; a layer includes everything inside it. None selects the last layer.
    """

    layers: Sequence[str] | None = None

    sends: ClassVar[tuple[str, ...]] = ("model",)
    returns: ClassVar[tuple[str, ...]] = ("layers",)
    models: ClassVar[tuple[ModelKind, ...]] = ()
    reported: ClassVar[tuple[ModelKind, ...]] = ()

    def down(self, state: FederationState, client: int, layout: Layout) -> Downlink:
        """Returns the initial model theta^0."""
        return Downlink({"model": state.initial})

    def subset(self, layout: Layout) -> ParameterSubset:
        """Returns where the layers' parameters lie.

        Raises:
            ValueError: for a pattern that covers nothing that is trained.
        """
        return layer_subset(layout, self.layers or 1, with_buffers=False)

    def up(self, output: LocalOutput, downlink: Downlink, layout: Layout) -> Mapping[str, Tensor]:
        """Returns the parameters of the named layers ``[P_L]``, concatenated in the order of the network."""
        return {"layers": self.subset(layout).take(output.for_server)}

    def change_of(self, payload: Mapping[str, Tensor], downlink: Downlink, layout: Layout) -> Tensor | None:
        """Returns the change of the named layers ``[P_L]``."""
        return payload["layers"] - self.subset(layout).take(downlink.payload["model"])

    def upload_forms(self, layout: Layout) -> dict[str, Array]:
        """Returns the form of the parameters."""
        return {"layers": Array((self.subset(layout).size,))}


@dataclass(frozen=True)
class Signature(NoExchange):
    """Sends nothing down and the signature of the client's data up: D p floats per label that the client has.

    PACFL uses it before training.
    """

    keeps_model = False
    returns: ClassVar[tuple[str, ...]] = ("signature",)
    extras: ClassVar[tuple[str, ...]] = ("signature",)

    def upload_forms(self, layout: Layout) -> dict[str, Array]:
        """Returns the form of the signature, which has a row for each number of a sample."""
        return {"signature": Array(("D", None))}
