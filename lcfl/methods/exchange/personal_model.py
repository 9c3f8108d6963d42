"""Exchanges for clients that keep a personal model near the model of their cluster.

Legend: P parameters of a model, P_phi of them in the embedding.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from lcfl.core.messages import Downlink
from lcfl.core.state import FederationState
from lcfl.methods.exchange.base import Exchange, ModelKind
from lcfl.methods.local.training import LocalOutput
from lcfl.models.layout import Layout

__all__ = ["CentreAndEmbedding", "ClusterReference", "EnvelopeModel"]


@dataclass(frozen=True)
class CentreAndEmbedding(Exchange):
    """Down the centre of the client's cluster and the global embedding, up the client's model.

    2P + P_phi floats (LCFed Algorithm 1, lines 6 and 8). The projection stays with the server, which
    holds w_i and can project it itself: a client need neither store M nor send M w_i.
    """

    keeps_model = True
    sends: ClassVar[tuple[str, ...]] = ("centre", "embedding")
    models: ClassVar[tuple[ModelKind, ...]] = ("personal", "cluster", "global", "after_local")
    reported: ClassVar[tuple[ModelKind, ...]] = ("personal", "cluster")

    def down(self, state: FederationState, client: int, layout: Layout) -> Downlink:
        """Omega_{R_i} and Phi."""
        embedding = layout.embedding_of(state.global_model)
        return Downlink({"centre": state.centre_of(client), "embedding": embedding})

    def up(self, trained: LocalOutput, downlink: Downlink, layout: Layout) -> Mapping[str, Tensor]:
        """w_i."""
        return {"model": trained.model}


@dataclass(frozen=True)
class ClusterReference(Exchange):
    """The centre of the client's cluster down, to be pulled to; its own model up, which it keeps: 2P floats.

    For a local update with ``start: own``; mu of mu/2 |w_i - Omega|^2 is ``model.cluster_weight``.
    """

    keeps_model = True
    sends: ClassVar[tuple[str, ...]] = ("centre",)
    models: ClassVar[tuple[ModelKind, ...]] = ("personal", "cluster", "global", "after_local")
    reported: ClassVar[tuple[ModelKind, ...]] = ("personal", "cluster")

    def down(self, state: FederationState, client: int, layout: Layout) -> Downlink:
        """Omega_{R_i}."""
        return Downlink({"centre": state.centre_of(client)})

    def up(self, trained: LocalOutput, downlink: Downlink, layout: Layout) -> Mapping[str, Tensor]:
        """w_i."""
        return {"model": trained.model}


@dataclass(frozen=True)
class EnvelopeModel(Exchange):
    """The model of the client's cluster down, to start from; what the run made of it up: 2P floats.

    The client keeps another model, its personal one, which the server never sees; for `EnvelopeTraining`.
    """

    keeps_model = True
    uploads_whole: ClassVar[bool] = False
    sends: ClassVar[tuple[str, ...]] = ("model",)
    extras: ClassVar[tuple[str, ...]] = ("model",)
    models: ClassVar[tuple[ModelKind, ...]] = ("personal", "cluster", "global", "after_local")
    reported: ClassVar[tuple[ModelKind, ...]] = ("personal", "cluster")

    def down(self, state: FederationState, client: int, layout: Layout) -> Downlink:
        """Omega_{R_i}."""
        return Downlink({"model": state.centre_of(client)})

    def up(self, trained: LocalOutput, downlink: Downlink, layout: Layout) -> Mapping[str, Tensor]:
        """w, not the personal theta_i."""
        return {"model": trained.extras["model"]}
