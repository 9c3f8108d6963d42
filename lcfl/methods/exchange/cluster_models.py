"""Exchanges of the models of clusters, for clients that keep none of their own.

Legend: K clusters, P + Q length of a model's flat vector.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from lcfl.core.messages import Downlink
from lcfl.core.state import FederationState
from lcfl.methods.exchange.base import Exchange, ModelKind
from lcfl.methods.local.least_loss import LeastLoss
from lcfl.methods.local.training import LocalOutput, LocalUpdate
from lcfl.models.layout import Layout

__all__ = ["AllCentres", "ClusterChoice", "ClusterModel", "ClusterUpdate"]


@dataclass(frozen=True)
class ClusterModel(Exchange):
    """The model of the client's cluster down, the trained model up: 2P floats (FedAvg inside every cluster).

    Args:
        keeps_model: whether the model that a client sent stays in the store until its next one, for a
            clustering or an aggregation over all clients (FeSEM); it is not where the client's next run starts.
    """

    keeps_model: bool = False
    sends: ClassVar[tuple[str, ...]] = ("model",)
    models: ClassVar[tuple[ModelKind, ...]] = ("cluster", "global", "after_local")
    reported: ClassVar[tuple[ModelKind, ...]] = ("cluster",)

    def down(self, state: FederationState, client: int, layout: Layout) -> Downlink:
        """Omega_{R_i}."""
        return Downlink({"model": state.centre_of(client)})

    def up(self, trained: LocalOutput, downlink: Downlink, layout: Layout) -> Mapping[str, Tensor]:
        """w_i."""
        return {"model": trained.model}


@dataclass(frozen=True)
class ClusterUpdate(Exchange):
    """The model of the client's cluster down, what training changed in it up: 2P floats (AS-CFL Algorithm 1, 4-10)."""

    keeps_model = False
    sends: ClassVar[tuple[str, ...]] = ("model",)
    returns: ClassVar[tuple[str, ...]] = ("update",)
    models: ClassVar[tuple[ModelKind, ...]] = ("cluster", "global", "after_local")
    reported: ClassVar[tuple[ModelKind, ...]] = ("cluster",)

    def down(self, state: FederationState, client: int, layout: Layout) -> Downlink:
        """w_k of the client's cluster."""
        return Downlink({"model": state.centre_of(client)})

    def up(self, trained: LocalOutput, downlink: Downlink, layout: Layout) -> Mapping[str, Tensor]:
        """Delta_i = w_i - w_k."""
        return {"update": trained.model - downlink.payload["model"]}


@dataclass(frozen=True)
class AllCentres(Exchange):
    """All K cluster models down, the trained model and the number of the chosen cluster up (IFCA).

    (K + 1) P floats and a number of four bytes. Which model is a client's is its own choice, also when it is
    evaluated: by the training loss of the models as they are then.
    """

    keeps_model = False
    sends: ClassVar[tuple[str, ...]] = ("centres",)
    returns: ClassVar[tuple[str, ...]] = ("model", "cluster")
    models: ClassVar[tuple[ModelKind, ...]] = ("cluster", "global", "after_local")
    reported: ClassVar[tuple[ModelKind, ...]] = ("cluster",)

    def down(self, state: FederationState, client: int, layout: Layout) -> Downlink:
        """Omega, ``[K, P + Q]``."""
        return Downlink({"centres": state.centres})

    def evaluation_update(self, kind: ModelKind, local_update: LocalUpdate) -> LocalUpdate | None:
        """For the model of the cluster, the choice by the least training loss."""
        return LeastLoss() if kind == "cluster" else super().evaluation_update(kind, local_update)

    def up(self, trained: LocalOutput, downlink: Downlink, layout: Layout) -> Mapping[str, Tensor]:
        """w_i and j."""
        return {"model": trained.model, "cluster": trained.extras["cluster"]}


@dataclass(frozen=True)
class ClusterChoice(AllCentres):
    """All K cluster models down, the number of the chosen one up: K P floats and four bytes (IFCA before training)."""

    returns: ClassVar[tuple[str, ...]] = ("cluster",)

    def up(self, trained: LocalOutput, downlink: Downlink, layout: Layout) -> Mapping[str, Tensor]:
        """j."""
        return {"cluster": trained.extras["cluster"]}
