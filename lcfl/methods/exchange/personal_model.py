"""Exchanges for clients that keep a personal model near the model of their cluster.

Legend: P parameters of a model, P_phi parameters of its embedding.
"""

from dataclasses import dataclass
from typing import ClassVar

from lcfl.core.messages import Downlink
from lcfl.core.state import FederationState
from lcfl.methods.exchange.base import Exchange, ModelKind
from lcfl.models.layout import Layout

__all__ = ["CentreAndEmbedding", "ClusterReference", "EnvelopeModel"]


@dataclass(frozen=True)
class ClusterReference(Exchange):
    """Sends the client's cluster centre down and the client's model up: 2P floats.

    The local update, with ``start: own``, is pulled to the centre, and the client keeps its model. mu in
    mu/2 |w_i - Omega|^2 is ``model.cluster_weight``. The personal model is the one that the client keeps, or what the
    local update's `adaptation` makes of it and the centre (FedALA, or fine-tuning).
    """

    keeps_model = True
    sends: ClassVar[tuple[str, ...]] = ("centre",)
    models: ClassVar[tuple[ModelKind, ...]] = ("personal", "cluster", "global", "after_local")
    reported: ClassVar[tuple[ModelKind, ...]] = ("personal", "cluster")
    adapts = "if_any"

    def down(self, state: FederationState, client: int, layout: Layout) -> Downlink:
        """Returns the cluster centre Omega_{R_i}."""
        return Downlink({"centre": state.centre_of(client)})


@dataclass(frozen=True)
class CentreAndEmbedding(ClusterReference):
    """Sends the client's cluster centre and the global embedding down, and the client's model up.

    This takes 2P + P_phi floats (LCFed Algorithm 1, lines 6 and 8). The projection stays with the server, which holds
    w_i and can project it. A client therefore need neither store M nor send M w_i.
    """

    sends: ClassVar[tuple[str, ...]] = ("centre", "embedding")

    def down(self, state: FederationState, client: int, layout: Layout) -> Downlink:
        """Returns the cluster centre Omega_{R_i} and the global embedding Phi."""
        embedding = layout.embedding_of(state.global_model)
        return Downlink({"centre": state.centre_of(client), "embedding": embedding})


@dataclass(frozen=True)
class EnvelopeModel(Exchange):
    """Sends the client's cluster model down and what the run made of it up: 2P floats.

    It is for `EnvelopeTraining`, which starts from the cluster model. The client keeps a different model, its personal
    one, which the server never sees.
    """

    keeps_model = True
    uploads_whole: ClassVar[bool] = False
    sends: ClassVar[tuple[str, ...]] = ("model",)
    extras: ClassVar[tuple[str, ...]] = ("model",)
    models: ClassVar[tuple[ModelKind, ...]] = ("personal", "cluster", "global", "after_local")
    reported: ClassVar[tuple[ModelKind, ...]] = ("personal", "cluster")

    def down(self, state: FederationState, client: int, layout: Layout) -> Downlink:
        """Returns the cluster model Omega_{R_i}."""
        return Downlink({"model": state.centre_of(client)})
