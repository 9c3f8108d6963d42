"""Exchanges of cluster models, for clients that keep no personal model.

Legend: K clusters, P + Q length of a model's flat vector.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lcfl.core.messages import Downlink
from lcfl.core.schema import Array
from lcfl.core.state import FederationState
from lcfl.methods.exchange.base import Exchange, ModelKind
from lcfl.methods.local.least_loss import LeastLoss
from lcfl.methods.local.training import LocalOutput, LocalUpdate
from lcfl.models.layout import Layout

__all__ = ["AllCentres", "ClusterChoice", "ClusterLosses", "ClusterModel", "ClusterUpdate"]


@dataclass(frozen=True)
class ClusterModel(Exchange):
    """Sends the client's cluster model down and the trained model up: 2P floats (FedAvg inside every cluster).

    Args:
        keeps_model: whether the model that a client sent stays in the store until the client sends the next one, for a
            clustering or an aggregation over all clients (FeSEM). The client's next run does not start from it.
    """

    keeps_model: bool = False
    sends: ClassVar[tuple[str, ...]] = ("model",)
    models: ClassVar[tuple[ModelKind, ...]] = ("cluster", "global", "after_local")
    reported: ClassVar[tuple[ModelKind, ...]] = ("cluster",)

    def down(self, state: FederationState, client: int, layout: Layout) -> Downlink:
        """Returns the cluster model Omega_{R_i}."""
        return Downlink({"model": state.centre_of(client)})


@dataclass(frozen=True)
class ClusterUpdate(Exchange):
    """Sends the client's cluster model down and the change from training up: 2P floats (AS-CFL Algorithm 1, 4-10)."""

    sends: ClassVar[tuple[str, ...]] = ("model",)
    returns: ClassVar[tuple[str, ...]] = ("update",)
    models: ClassVar[tuple[ModelKind, ...]] = ("cluster", "global", "after_local")
    reported: ClassVar[tuple[ModelKind, ...]] = ("cluster",)

    def down(self, state: FederationState, client: int, layout: Layout) -> Downlink:
        """Returns the model w_k of the client's cluster."""
        return Downlink({"model": state.centre_of(client)})

    def up(self, output: LocalOutput, downlink: Downlink, layout: Layout) -> Mapping[str, Tensor]:
        """Returns the update Delta_i = w_i - w_k."""
        return {"update": output.model - downlink.payload["model"]}


@dataclass(frozen=True)
class AllCentres(Exchange):
    """Sends all K cluster models down, and the trained model and the number of the chosen cluster up (IFCA).

    This takes (K + 1) P floats and a number of four bytes. A client chooses its cluster model by the training loss.
    For an evaluation it chooses again, among the current models.
    """

    joins_warmup: ClassVar[bool] = False
    sends: ClassVar[tuple[str, ...]] = ("centres",)
    returns: ClassVar[tuple[str, ...]] = ("model", "cluster")
    extras: ClassVar[tuple[str, ...]] = ("cluster",)
    models: ClassVar[tuple[ModelKind, ...]] = ("cluster", "global", "after_local")
    reported: ClassVar[tuple[ModelKind, ...]] = ("cluster",)

    def down(self, state: FederationState, client: int, layout: Layout) -> Downlink:
        """Returns all cluster models Omega, ``[K, P + Q]``."""
        return Downlink({"centres": state.centres})

    def evaluation_update(self, kind: ModelKind, local_update: LocalUpdate) -> LocalUpdate | None:
        """Returns the choice by the least training loss for the cluster model."""
        return LeastLoss() if kind == "cluster" else super().evaluation_update(kind, local_update)

    def model_of_run(self, kind: ModelKind, downlink: Downlink, output: LocalOutput) -> Tensor:
        """Returns Omega_j for the cluster model. Clients that choose the same one share its memory."""
        return downlink.payload["centres"][int(output.extras["cluster"])] if kind == "cluster" else output.model

    def upload_forms(self, layout: Layout) -> dict[str, Array]:
        """Returns the forms of what it uploads: a model, the number of one of K clusters, or a loss for each."""
        forms = {
            "model": Array((layout.size,)),
            "cluster": Array((), torch.int32, 0, "K"),
            "losses": Array(("K",)),
        }
        return {name: forms[name] for name in self.returns}


@dataclass(frozen=True)
class ClusterChoice(AllCentres):
    """Sends all K cluster models down and the number of the chosen one up: K P floats and four bytes.

    IFCA uses it before training.
    """

    returns: ClassVar[tuple[str, ...]] = ("cluster",)


@dataclass(frozen=True)
class ClusterLosses(AllCentres):
    """Sends all K cluster models down and their losses on the client's training samples up: K P + K floats.

    CLoVE uses it before the training of a round.
    """

    returns: ClassVar[tuple[str, ...]] = ("losses",)
    extras: ClassVar[tuple[str, ...]] = ("losses",)
