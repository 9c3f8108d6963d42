"""Exchanges of one model for all clients, or of none."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from lcfl.core.messages import Downlink
from lcfl.core.state import FederationState
from lcfl.methods.exchange.base import Exchange, ModelKind
from lcfl.methods.local.training import LocalOutput, LocalUpdate
from lcfl.models.layout import Layout

__all__ = ["AdaptedModel", "FullModel", "NoExchange", "NormalisedModel", "GlobalReference"]


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

    def up(self, trained: LocalOutput, downlink: Downlink, layout: Layout) -> Mapping[str, Tensor]:
        """w_i."""
        return {"model": trained.model}


@dataclass(frozen=True)
class GlobalReference(FullModel):
    """The global model down, to start from and to be pulled to; the client's model up: 2P floats (FedProx).

    For a local update with ``start: centre``; mu of mu/2 |w - w_t|^2 is ``model.cluster_weight``.
    """

    sends: ClassVar[tuple[str, ...]] = ("centre",)

    def down(self, state: FederationState, client: int, layout: Layout) -> Downlink:
        """The global model w_t, under the name of what a client is pulled to."""
        return Downlink({"centre": state.global_model})


@dataclass(frozen=True)
class NormalisedModel(GlobalReference):
    """As `GlobalReference`, and the normaliser a_i goes up with the model: 2P + 1 floats (FedNova).

    P + 2 floats up where `NormalisedTraining` sends tau_i beside a_i.
    """

    returns: ClassVar[tuple[str, ...]] = ("model", "normaliser")
    extras: ClassVar[tuple[str, ...]] = ("normaliser",)

    def up(self, trained: LocalOutput, downlink: Downlink, layout: Layout) -> Mapping[str, Tensor]:
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

    def evaluation_update(self, kind: ModelKind, local_update: LocalUpdate) -> LocalUpdate | None:
        """For the personal model, the `adaptation` of the local update.

        Raises:
            ValueError: if the local update has none.
        """
        if kind != "personal":
            return super().evaluation_update(kind, local_update)
        if local_update.adaptation is None:
            raise ValueError(
                f"method: AdaptedModel needs a local update with an adaptation, e.g. MetaTraining; "
                f"{type(local_update).__name__} has none. Use FullModel."
            )
        return local_update.adaptation


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
    def full_participation(self) -> bool:
        """`full_budget`."""
        return self.full_budget

    def down(self, state: FederationState, client: int, layout: Layout) -> Downlink:
        """An empty message."""
        return Downlink({})

    def up(self, trained: LocalOutput, downlink: Downlink, layout: Layout) -> Mapping[str, Tensor]:
        """An empty message."""
        return {}
