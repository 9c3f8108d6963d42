"""The base class of exchanges, and what transforms do to an upload on its way."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, TypeVar

import numpy as np
from torch import Tensor

from lcfl.clients import ClientState
from lcfl.local.update import LocalUpdate, Trained
from lcfl.messages import Downlink, Uplink
from lcfl.networks.split import Layout
from lcfl.state import FederationState
from lcfl.upload import GaussianNoise, Guarantee, Releases, UploadTransform
from lcfl.upload.base import NAMES

__all__ = ["Exchange", "ModelKind"]

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
