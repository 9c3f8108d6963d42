"""Exchanges of one model for all clients, or of no model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from lcfl.core.messages import Downlink
from lcfl.core.schema import Array
from lcfl.core.state import FederationState
from lcfl.methods.exchange.base import Exchange, ModelKind, Source
from lcfl.models.layout import Layout

__all__ = ["AdaptedModel", "FullModel", "NoExchange", "NormalisedModel", "GlobalReference"]


@dataclass(frozen=True)
class FullModel(Exchange):
    """Sends the whole model down and the whole model up: 2P floats (FedAvg and all methods that refine it)."""

    sends: ClassVar[tuple[str, ...]] = ("model",)
    source: ClassVar[Source] = "global"
    models: ClassVar[tuple[ModelKind, ...]] = ("global", "after_local")
    reported: ClassVar[tuple[ModelKind, ...]] = ("global",)

    def down(self, state: FederationState, client: int, layout: Layout) -> Downlink:
        """Returns the global model."""
        return Downlink({"model": state.global_model})


@dataclass(frozen=True)
class GlobalReference(FullModel):
    """Sends the global model down and the client's model up: 2P floats (FedProx).

    The local update, with ``start: centre``, starts from the global model and is pulled to it. mu in mu/2 |w - w_t|^2
    is ``model.cluster_weight``.
    """

    sends: ClassVar[tuple[str, ...]] = ("centre",)

    def down(self, state: FederationState, client: int, layout: Layout) -> Downlink:
        """Returns the global model w_t, named ``centre`` because a client is pulled to it."""
        return Downlink({"centre": state.global_model})


@dataclass(frozen=True)
class NormalisedModel(GlobalReference):
    """`GlobalReference` that also sends the normaliser a_i up: 2P + 1 floats (FedNova).

    The upload has P + 2 floats if `NormalisedTraining` adds tau_i to a_i.
    """

    returns: ClassVar[tuple[str, ...]] = ("model", "normaliser")
    extras: ClassVar[tuple[str, ...]] = ("normaliser",)

    def update_norm(self, payload: Mapping[str, Tensor], downlink: Downlink, layout: Layout) -> float:
        """Returns the norm of w_i - w, of (w_i - w) / a_i or of tau_i (w_i - w) / a_i, whichever is the largest."""
        norm, (length, *steps) = super().update_norm(payload, downlink, layout), payload["normaliser"].tolist()
        if not length > 0:  # the aggregation leaves it out
            return norm
        return norm * float(max(1, 1 / length, *(number / length for number in steps)))

    def upload_forms(self, layout: Layout) -> dict[str, Array]:
        """Returns the forms of w_i and of a_i, perhaps with tau_i."""
        return {"model": Array((layout.size,)), "normaliser": Array((range(1, 3),), low=0)}


@dataclass(frozen=True)
class AdaptedModel(FullModel):
    """Sends the whole model down and up, 2P floats; a client adapts the model before it uses it (Per-FedAvg).

    The adaptation is a step on the client's data. The personal model is what the local update's `adaptation` makes of
    the global model. It is made for an evaluation and not kept.
    """

    models: ClassVar[tuple[ModelKind, ...]] = ("personal", "global", "after_local")
    reported: ClassVar[tuple[ModelKind, ...]] = ("personal",)
    adapts = "always"


@dataclass(frozen=True)
class NoExchange(Exchange):
    """Sends nothing down and nothing up, so every client trains alone (Local).

    Args:
        full_budget: whether every client trains in every round as if it were sampled, so that R rounds are R local runs
            for each client. Otherwise a client trains when it is sampled, as often as with every other method.
    """

    full_budget: bool = False
    keeps_model = True
    sends: ClassVar[tuple[str, ...]] = ()
    source: ClassVar[Source] = "nothing"
    returns: ClassVar[tuple[str, ...]] = ()
    models: ClassVar[tuple[ModelKind, ...]] = ("personal", "after_local")
    reported: ClassVar[tuple[ModelKind, ...]] = ("personal",)

    @property
    def full_participation(self) -> bool:
        """Whether all clients take part in every round, which is `full_budget`."""
        return self.full_budget

    def down(self, state: FederationState, client: int, layout: Layout) -> Downlink:
        """Returns an empty message."""
        return Downlink({})
