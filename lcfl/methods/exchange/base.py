"""The base class of exchanges, and what transforms do to an upload on its way."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, TypeVar

import numpy as np
from torch import Tensor

from lcfl.core.clients import ClientState
from lcfl.core.messages import Downlink, Uplink
from lcfl.core.state import FederationState
from lcfl.methods.exchange.transforms import GaussianNoise, Guarantee, Releases, UploadTransform
from lcfl.methods.exchange.transforms.base import NAMES
from lcfl.methods.local.training import LocalOutput, LocalUpdate
from lcfl.models.layout import Layout

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
        extras: those of them that it takes from `LocalOutput.extras`.
        models: the kinds of model that the method has, the one its paper reports first.
        reported: the kinds its paper reports; they are evaluated during a run, all kinds at its end.
        full_participation: whether all clients take part in every round, sampled or not.
    """

    keeps_model: bool = field(init=False, default=False)
    transforms: Sequence[UploadTransform] = field(kw_only=True, default=())

    uploads_whole: ClassVar[bool] = True
    sends: ClassVar[tuple[str, ...]]
    returns: ClassVar[tuple[str, ...]] = ("model",)
    extras: ClassVar[tuple[str, ...]] = ()
    models: ClassVar[tuple[ModelKind, ...]]
    reported: ClassVar[tuple[ModelKind, ...]]

    @property
    def full_participation(self) -> bool:
        """See the class attributes."""
        return False

    def check(self, layout: Layout) -> None:  # noqa: B027 - most can exchange any network
        """Raises a ValueError for a network that it cannot exchange; called before any data is loaded."""

    @abstractmethod
    def down(self, state: FederationState, client: int, layout: Layout) -> Downlink:
        """What the server sends to the client at the start of a round."""

    def evaluation_update(self, kind: ModelKind, local_update: LocalUpdate) -> LocalUpdate | None:
        """The local update with which a client makes its model of that kind for an evaluation.

        None where the server knows the model. A local update that chooses a cluster gives its number in
        ``extras["cluster"]``.

        Args:
            kind: of model.
            local_update: the method's own.

        Raises:
            ValueError: if the method's local update cannot make such a model.
        """
        return local_update if kind == "after_local" else None

    def personal(self, state: FederationState, client: int, layout: Layout) -> Tensor:
        """The client's personal model: its own w_i, or what the server would send while it has none."""
        own = state.clients[client].model
        return own if own is not None and bool(state.participated[client]) else state.centre_of(client)

    def at_client(self, downlink: Downlink, state: ClientState, layout: Layout) -> Downlink:
        """What the client makes of a downlink with what it keeps: the local update sees this one."""
        return downlink

    def at_server(self, uplink: Uplink, state: FederationState, layout: Layout) -> Uplink:
        """What the server makes of an uplink with what it knows: clusterings and aggregation see this one."""
        return uplink

    @abstractmethod
    def up(self, trained: LocalOutput, downlink: Downlink, layout: Layout) -> Mapping[str, Tensor]:
        """What the client sends of its trained model ``[P + Q]``, or of what else its run found."""

    def encode(
        self, trained: LocalOutput, downlink: Downlink, layout: Layout, draw: np.random.Generator
    ) -> Mapping[str, Tensor]:
        """What goes over the wire: `up`, or with transforms what these make of its difference to the downlink."""
        payload = self.up(trained, downlink, layout)
        if not self.transforms or not payload:
            return payload
        update = {name: vector - _known(name, downlink, len(vector)) for name, vector in payload.items()}
        for transform in self.transforms:
            update = dict(transform.encode(update, layout, draw))
        return update

    def decode(self, payload: Mapping[str, Tensor], downlink: Downlink, layout: Layout) -> Mapping[str, Tensor]:
        """What the server reads out of an upload that went through the transforms."""
        if not self.transforms or not payload:
            return payload
        for transform in reversed(self.transforms):
            payload = transform.decode(payload, layout)
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
