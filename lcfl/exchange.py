"""What goes down to a client and what comes up from it: one class per kind of exchange."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from lcfl.local.update import Trained
from lcfl.messages import Downlink
from lcfl.networks.split import Layout
from lcfl.state import FederationState

__all__ = ["CentreAndEmbedding", "ClusterModel", "Exchange", "FullModel", "ModelKind", "NoExchange"]

ModelKind = Literal["personal", "cluster", "global", "after_local"]


class Exchange(ABC):
    """Downlink and uplink of one client.

    Class attributes:
        keeps_model: whether a client keeps its own model w_i between participations.
        sends: the names in its downlink.
        returns: the names in its uplink.
        models: the kinds of model that the method has, the one its paper reports first.
        reported: the kinds its paper reports; they are evaluated during a run, all kinds at its end.
    """

    keeps_model: bool
    sends: ClassVar[tuple[str, ...]]
    returns: ClassVar[tuple[str, ...]] = ("model",)
    models: ClassVar[tuple[ModelKind, ...]]
    reported: ClassVar[tuple[ModelKind, ...]]

    @abstractmethod
    def down(self, state: FederationState, client: int, layout: Layout) -> Downlink:
        """What the server sends to the client at the start of a round."""

    def personal(self, state: FederationState, client: int, layout: Layout) -> Tensor:
        """The client's personal model: its own w_i, or what the server would send while it has none."""
        own = state.clients[client].model
        return own if own is not None and bool(state.participated[client]) else state.centre_of(client)

    @abstractmethod
    def up(self, trained: Trained, downlink: Downlink, layout: Layout) -> Mapping[str, Tensor]:
        """What the client sends of its trained model ``[P + Q]``, or of what else its run found."""


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

    def up(self, trained: Trained, downlink: Downlink, layout: Layout) -> Mapping[str, Tensor]:
        """w_i."""
        return {"model": trained.model}


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

    def up(self, trained: Trained, downlink: Downlink, layout: Layout) -> Mapping[str, Tensor]:
        """w_i."""
        return {"model": trained.model}


@dataclass(frozen=True)
class NoExchange(Exchange):
    """Nothing down, nothing up: every client trains alone (Local)."""

    keeps_model = True
    sends: ClassVar[tuple[str, ...]] = ()
    returns: ClassVar[tuple[str, ...]] = ()
    models: ClassVar[tuple[ModelKind, ...]] = ("personal", "after_local")
    reported: ClassVar[tuple[ModelKind, ...]] = ("personal",)

    def down(self, state: FederationState, client: int, layout: Layout) -> Downlink:
        """An empty message."""
        return Downlink({})

    def up(self, trained: Trained, downlink: Downlink, layout: Layout) -> Mapping[str, Tensor]:
        """An empty message."""
        return {}
