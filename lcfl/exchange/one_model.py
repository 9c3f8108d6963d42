"""Exchanges of one model for all clients, or of none."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from lcfl.exchange.base import Exchange, ModelKind
from lcfl.local.update import Trained
from lcfl.messages import Downlink
from lcfl.networks.split import Layout
from lcfl.state import FederationState

__all__ = ["AdaptedModel", "FullModel", "NoExchange", "NormalisedModel", "Reference"]


@dataclass(frozen=True)
class FullModel(Exchange):
    """The whole model down, the whole model up: 2P floats (FedAvg and all that refine it)."""

    keeps_model = False
    sends: ClassVar[tuple[str, ...]] = ("model",)
    models: ClassVar[tuple[ModelKind, ...]] = ("global", "after_local")
    reported: ClassVar[tuple[ModelKind, ...]] = ("global",)

    def down(self, state: FederationState, client: int, layout: Layout) -> Downlink:
        """The global model."""
        return Downlink({"model": state.global_model})

    def up(self, trained: Trained, downlink: Downlink, layout: Layout) -> Mapping[str, Tensor]:
        """w_i."""
        return {"model": trained.model}


@dataclass(frozen=True)
class Reference(FullModel):
    """The global model down, to start from and to be pulled to; the client's model up: 2P floats (FedProx).

    For a local update with ``start: centre``; mu of mu/2 |w - w_t|^2 is ``model.cluster_weight``.
    """

    sends: ClassVar[tuple[str, ...]] = ("centre",)

    def down(self, state: FederationState, client: int, layout: Layout) -> Downlink:
        """The global model w_t, under the name of what a client is pulled to."""
        return Downlink({"centre": state.global_model})


@dataclass(frozen=True)
class NormalisedModel(Reference):
    """As `Reference`, and the normaliser a_i goes up with the model: 2P + 1 floats (FedNova).

    P + 2 floats up where `NormalisedTraining` sends tau_i beside a_i.
    """

    returns: ClassVar[tuple[str, ...]] = ("model", "normaliser")
    extras: ClassVar[tuple[str, ...]] = ("normaliser",)

    def up(self, trained: Trained, downlink: Downlink, layout: Layout) -> Mapping[str, Tensor]:
        """w_i and a_i: the server, which has w, makes d_i = (w - w_i) / a_i of them."""
        return {"model": trained.model, "normaliser": trained.extras["normaliser"]}


@dataclass(frozen=True)
class AdaptedModel(FullModel):
    """The whole model down and up, 2P floats, and a step on its own data before a client uses it (Per-FedAvg).

    The personal model is what the local update's `adaptation` makes of the global one; it is made for an evaluation
    and not kept.
    """

    models: ClassVar[tuple[ModelKind, ...]] = ("personal", "global", "after_local")
    reported: ClassVar[tuple[ModelKind, ...]] = ("personal",)
    adapts: ClassVar[bool] = True


@dataclass(frozen=True)
class NoExchange(Exchange):
    """Nothing down, nothing up: every client trains alone (Local).

    Args:
        full_budget: every client trains in every round, as if it were sampled: R rounds are R local runs for each.
            Otherwise it trains as often as with every other method, when it is sampled.
    """

    full_budget: bool = False
    keeps_model = True
    sends: ClassVar[tuple[str, ...]] = ()
    returns: ClassVar[tuple[str, ...]] = ()
    models: ClassVar[tuple[ModelKind, ...]] = ("personal", "after_local")
    reported: ClassVar[tuple[ModelKind, ...]] = ("personal",)

    @property
    def everyone(self) -> bool:
        """`full_budget`."""
        return self.full_budget

    def down(self, state: FederationState, client: int, layout: Layout) -> Downlink:
        """An empty message."""
        return Downlink({})

    def up(self, trained: Trained, downlink: Downlink, layout: Layout) -> Mapping[str, Tensor]:
        """An empty message."""
        return {}
