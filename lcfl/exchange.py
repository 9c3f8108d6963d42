"""What goes down to a client and what comes up from it: one class per kind of exchange."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from lcfl.clients import ClientState
from lcfl.local.choice import LeastLoss
from lcfl.local.update import LocalUpdate, Trained
from lcfl.messages import Downlink, Uplink
from lcfl.networks.split import Layout
from lcfl.state import FederationState
from lcfl.upload import GaussianNoise, Guarantee, Releases, UploadTransform
from lcfl.upload.base import NAMES

__all__ = [
    "AdaptedModel",
    "AllCentres",
    "CentreAndEmbedding",
    "Choice",
    "ClusterModel",
    "ClusterUpdate",
    "Exchange",
    "FullModel",
    "ModelKind",
    "NamedLayers",
    "NoExchange",
    "NormalisedModel",
    "Reference",
    "Signature",
]

ModelKind = Literal["personal", "cluster", "global", "after_local"]
Self = TypeVar("Self", bound="Exchange")


@dataclass(frozen=True)
class Exchange(ABC):
    """Downlink and uplink of one client.

    Args:
        transforms: what an upload goes through, in this order: compression, clipping, noise. They work on the
            difference to what the server sent, and the server puts that back together.

    Class attributes:
        keeps_model: whether a client keeps its own model w_i between participations.
        uploads_whole: whether the server has seen all of the model that a client keeps.
        sends: the names in its downlink.
        returns: the names in its uplink, as the server reads it.
        extras: those of them that it takes from `Trained.extras`.
        models: the kinds of model that the method has, the one its paper reports first.
        reported: the kinds its paper reports; they are evaluated during a run, all kinds at its end.
        adapts: whether a client's personal model is what the local update's `adaptation` makes of what the server
            sends, on the client's own data.
        everyone: whether all clients take part in every round, sampled or not.
        chooser: how a client that is evaluated finds its cluster where it is not the server that knows it; the number
            stands in ``extras["cluster"]`` of what this local update gives.
    """

    keeps_model: bool = field(init=False, default=False)
    transforms: Sequence[UploadTransform] = field(kw_only=True, default=())

    uploads_whole: ClassVar[bool] = True
    sends: ClassVar[tuple[str, ...]]
    returns: ClassVar[tuple[str, ...]] = ("model",)
    extras: ClassVar[tuple[str, ...]] = ()
    models: ClassVar[tuple[ModelKind, ...]]
    reported: ClassVar[tuple[ModelKind, ...]]
    adapts: ClassVar[bool] = False
    chooser: ClassVar[LocalUpdate | None] = None

    @property
    def everyone(self) -> bool:
        """See the class attributes."""
        return False

    def check(self, layout: Layout) -> None:  # noqa: B027 - most can exchange any network
        """Raises a ValueError for a network that it cannot exchange; called before any data is loaded."""

    @abstractmethod
    def down(self, state: FederationState, client: int, layout: Layout) -> Downlink:
        """What the server sends to the client at the start of a round."""

    def personal(self, state: FederationState, client: int, layout: Layout) -> Tensor:
        """The client's personal model: its own w_i, or what the server would send while it has none."""
        own = state.clients[client].model
        return own if own is not None and bool(state.participated[client]) else state.centre_of(client)

    def received(self, downlink: Downlink, state: ClientState, layout: Layout) -> Downlink:
        """What the client makes of a downlink with what it keeps: the local update sees this one."""
        return downlink

    def delivered(self, uplink: Uplink, state: FederationState, layout: Layout) -> Uplink:
        """What the server makes of an uplink with what it knows: clusterings and aggregation see this one."""
        return uplink

    @abstractmethod
    def up(self, trained: Trained, downlink: Downlink, layout: Layout) -> Mapping[str, Tensor]:
        """What the client sends of its trained model ``[P + Q]``, or of what else its run found."""

    def upload(
        self, trained: Trained, downlink: Downlink, layout: Layout, draw: np.random.Generator
    ) -> Mapping[str, Tensor]:
        """What goes over the wire: `up`, or with transforms what these make of its difference to the downlink."""
        payload = self.up(trained, downlink, layout)
        if not self.transforms or not payload:
            return payload
        update = {name: vector - _known(name, downlink, len(vector)) for name, vector in payload.items()}
        for transform in self.transforms:
            update = dict(transform.sent(update, layout, draw))
        return update

    def read(self, payload: Mapping[str, Tensor], downlink: Downlink, layout: Layout) -> Mapping[str, Tensor]:
        """What the server reads out of an upload that went through the transforms."""
        if not self.transforms or not payload:
            return payload
        for transform in reversed(self.transforms):
            payload = transform.received(payload, layout)
        return {name: vector + _known(name, downlink, len(vector)) for name, vector in payload.items()}

    def calibrated(self: Self, releases: Releases) -> Self:
        """The same with transforms whose settings follow from the length of the run."""
        if not self.transforms:
            return self
        return replace(self, transforms=[transform.calibrated(releases) for transform in self.transforms])

    def guarantee(self, releases: Releases) -> Guarantee | None:
        """What the noise on uploads guarantees after these releases; None where there is none or nothing bounds it."""
        found = [each.guarantee(releases) for each in self.transforms if isinstance(each, GaussianNoise)]
        known = [guarantee for guarantee in found if guarantee is not None]
        return min(known, key=lambda guarantee: guarantee.epsilon) if known else None


def _known(name: str, downlink: Downlink, length: int) -> Tensor | float:
    """The part of an uploaded vector that the server knows: what it sent under that name, or the centre it sent."""
    if name not in NAMES:
        raise ValueError(f"method.exchange: transforms know {', '.join(NAMES)}; got an upload of {name!r}.")
    if name == "update":
        return 0.0
    sent = downlink.payload.get(name, downlink.payload.get("model", downlink.payload.get("centre")))
    return 0.0 if sent is None else sent[:length]


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

    def up(self, trained: Trained, downlink: Downlink, layout: Layout) -> Mapping[str, Tensor]:
        """Delta_i = w_i - w_k."""
        return {"update": trained.model - downlink.payload["model"]}


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
    chooser: ClassVar[LocalUpdate | None] = LeastLoss()

    def down(self, state: FederationState, client: int, layout: Layout) -> Downlink:
        """Omega, ``[K, P + Q]``."""
        return Downlink({"centres": state.centres})

    def up(self, trained: Trained, downlink: Downlink, layout: Layout) -> Mapping[str, Tensor]:
        """w_i and j."""
        return {"model": trained.model, "cluster": trained.extras["cluster"]}


@dataclass(frozen=True)
class Choice(AllCentres):
    """All K cluster models down, the number of the chosen one up: K P floats and four bytes (IFCA before training)."""

    returns: ClassVar[tuple[str, ...]] = ("cluster",)

    def up(self, trained: Trained, downlink: Downlink, layout: Layout) -> Mapping[str, Tensor]:
        """j."""
        return {"cluster": trained.extras["cluster"]}


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


@dataclass(frozen=True)
class NamedLayers(Exchange):
    """The initial model down, some layers of the trained model up: P + P_L floats (FedClust Algorithm 1, lines 3, 4).

    For opening rounds: nothing that trains can be made of a few layers alone.

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

    def up(self, trained: Trained, downlink: Downlink, layout: Layout) -> Mapping[str, Tensor]:
        """The named layers' parameters, one after the other in the order of the network, ``[P_L]``."""
        return {"layers": torch.cat([trained.model[place] for place in layout.places_of(self.layers)])}


@dataclass(frozen=True)
class Signature(NoExchange):
    """Nothing down, the signature of the client's data up (PACFL before training): D p floats per label of its own."""

    keeps_model = False
    returns: ClassVar[tuple[str, ...]] = ("signature",)

    def up(self, trained: Trained, downlink: Downlink, layout: Layout) -> Mapping[str, Tensor]:
        """U_i."""
        return {"signature": trained.extras["signature"]}
