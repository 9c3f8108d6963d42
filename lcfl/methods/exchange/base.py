"""The base class of exchanges, which also applies the transforms to an upload."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import hypot
from typing import ClassVar, Literal, Self

import numpy as np
import torch
from torch import Tensor
from torch.linalg import vector_norm

from lcfl.core import rng
from lcfl.core.clients import ClientState
from lcfl.core.messages import Downlink, Uplink
from lcfl.core.schema import Array
from lcfl.core.state import FederationState
from lcfl.core.validation import CheckedFields
from lcfl.methods.exchange.transforms import GaussianNoise, PrivacyGuarantee, UploadTransform
from lcfl.methods.exchange.transforms.base import TRANSFORMABLE
from lcfl.methods.local.training import LocalOutput, LocalUpdate
from lcfl.models.layout import Layout

__all__ = ["Exchange", "ModelKind", "Source"]

ModelKind = Literal["personal", "cluster", "global", "after_local"]
Source = Literal["clusters", "global", "clients", "nothing"]


@dataclass(frozen=True)
class Exchange(CheckedFields, ABC):
    """Defines the downlink and the uplink of one client.

    Args:
        transforms: what an upload goes through, in this order: compression, clipping, noise. Transforms work on the
            difference to what the server sent, and the server adds the two up again.

    Class attributes:
        keeps_model: whether a client keeps its own model w_i between participations.
        uploads_whole: whether the server has seen all of the model that a client keeps.
        joins_warmup: whether it can exchange what a plain local run gives, for the warm-up rounds of a clustering.
        uses_stored_models: whether what it sends depends on the stored models of other clients.
        sends: the names in its downlink.
        source: where the models in its downlink come from: the ``clusters``, the ``global`` model, the ``clients``, or
            ``nothing`` if it sends none.
        returns: the names in its uplink, as the server reads it.
        extras: the names in `returns` that it takes from `LocalOutput.extras`.
        models: the kinds of model that the method has; the kind that its paper reports comes first.
        reported: the kinds that its paper reports. Every evaluation measures them.
        adapts: whether the local update's `adaptation` makes the personal model: ``never``, ``always``, or ``if_any``,
            if the local update has one.
        full_participation: whether all clients take part in every round, sampled or not.
    """

    keeps_model: bool = field(init=False, default=False)
    transforms: Sequence[UploadTransform] = field(kw_only=True, default=())

    uploads_whole: ClassVar[bool] = True
    joins_warmup: ClassVar[bool] = True
    uses_stored_models: ClassVar[bool] = False
    sends: ClassVar[tuple[str, ...]]
    source: ClassVar[Source] = "clusters"
    returns: ClassVar[tuple[str, ...]] = ("model",)
    extras: ClassVar[tuple[str, ...]] = ()
    models: ClassVar[tuple[ModelKind, ...]]
    reported: ClassVar[tuple[ModelKind, ...]]
    adapts: ClassVar[Literal["never", "if_any", "always"]] = "never"

    @property
    def full_participation(self) -> bool:
        """Whether all clients take part in every round, sampled or not."""
        return False

    @property
    def hides_model(self) -> bool:
        """Whether clients keep a model that the server never sees, because they send none, a part, or a changed one."""
        is_seen = self.uploads_whole and "model" in self.returns and not self.transforms
        return self.keeps_model and not is_seen

    def check_attributes(self, *names: str) -> None:
        """Raises a ValueError if it lacks one of these class attributes."""
        if missing := [name for name in names if not hasattr(self, name)]:
            raise ValueError(
                f"method: {type(self).__name__} does not say what it is: set its class attributes "
                f"{', '.join(missing)}, as described in lcfl.Exchange."
            )

    def check(self, layout: Layout) -> None:
        """Checks that it can exchange a network; called before any data is loaded.

        Raises:
            ValueError: for a network that it cannot exchange.
        """

    @abstractmethod
    def down(self, state: FederationState, client: int, layout: Layout) -> Downlink:
        """Returns what the server sends to the client at the start of a round."""

    def evaluation_update(self, kind: ModelKind, local_update: LocalUpdate) -> LocalUpdate | None:
        """Returns the local update with which a client makes its model of that kind for an evaluation.

        It starts from what the server would send now. Returns None if the client needs no run.

        Args:
            kind: the kind of model.
            local_update: the method's local update.

        Raises:
            ValueError: if the method's local update cannot make such a model.
        """
        if kind == "after_local":
            return local_update
        if kind != "personal" or self.adapts == "never":
            return None
        if self.adapts == "always" and local_update.adaptation is None:
            raise ValueError(
                f"method: {type(self).__name__} needs a local update with an adaptation, e.g. MetaTraining or "
                f"FineTunedTraining, but {type(local_update).__name__} has none. Use FullModel or SharedEmbedding."
            )
        return local_update.adaptation

    def evaluation_down(self, state: FederationState, client: int, kind: ModelKind, layout: Layout) -> Downlink:
        """Returns what the client needs for its model of that kind, if no local update makes the model.

        This is the ``model`` itself, or nothing for a personal model that the client keeps: its own w_i.
        """
        if kind == "global":
            return Downlink({"model": state.global_model})
        if kind == "personal" and self.keeps_model and bool(state.participated[client]):
            return Downlink({})
        return Downlink({"model": state.centre_of(client)})

    def model_at_client(self, kind: ModelKind, downlink: Downlink, state: ClientState, layout: Layout) -> Tensor:
        """Returns the client's model ``[P + Q]`` of that kind, from `evaluation_down` and what the client keeps."""
        if "model" in downlink.payload:
            return downlink.payload["model"]
        assert state.model is not None, "the exchange keeps models at the clients"
        return state.model

    def model_of_run(self, kind: ModelKind, downlink: Downlink, output: LocalOutput) -> Tensor:
        """Returns the client's model ``[P + Q]`` of that kind, from a run of the `evaluation_update`."""
        return output.model

    def personal(self, state: FederationState, client: int, layout: Layout) -> Tensor:
        """Returns the client's personal model: its own w_i, or what the server would send while the client has none."""
        downlink = self.evaluation_down(state, client, "personal", layout)
        return self.model_at_client("personal", downlink, state.clients[client], layout)

    def newcomer_model(self, state: FederationState, client: int, layout: Layout) -> Tensor:
        """Returns the model ``[P + Q]`` that a client gets that joins after the last round: its personal model."""
        return self.personal(state, client, layout)

    def at_client(self, downlink: Downlink, state: ClientState, layout: Layout) -> Downlink:
        """Combines a downlink with what the client keeps. The local update sees the result."""
        return downlink

    def at_server(self, uplink: Uplink, state: FederationState, layout: Layout) -> Uplink:
        """Combines an uplink with what the server knows. Clusterings and the aggregation see the result."""
        return uplink

    def up(self, output: LocalOutput, downlink: Downlink, layout: Layout) -> Mapping[str, Tensor]:
        """Returns what the client sends: the names in `returns` that are ``model`` or in `extras`.

        ``model`` is the model ``[P + Q]`` that was trained for the server. An exchange adds whatever else it sends.
        """
        names = [name for name in self.returns if name == "model" or name in self.extras]
        return {name: output.for_server if name == "model" else output.extras[name] for name in names}

    def change_of(self, payload: Mapping[str, Tensor], downlink: Downlink, layout: Layout) -> Tensor | None:
        """Returns the change of the parameters ``[P]`` that an upload brings; None if it brings no parameters."""
        end, sent = layout.num_parameters, downlink.model_for(payload)
        if "update" in payload:
            return payload["update"][:end]
        return payload["model"][:end] - sent[:end] if "model" in payload and sent is not None else None

    def update_norm(self, payload: Mapping[str, Tensor], downlink: Downlink, layout: Layout) -> float:
        """Returns the L2 norm of the change of the parameters that an upload brings, and of the control variate.

        Nothing else in an upload counts, such as buffers or losses.
        """
        changes = (self.change_of(payload, downlink, layout), payload.get("control_change"))
        return hypot(*(float(vector_norm(each, dtype=torch.float64)) for each in changes if each is not None))

    def upload_forms(self, layout: Layout) -> dict[str, Array]:
        """Returns the form of each vector that `up` returns, to which clients on machines of their own are held.

        The letter K stands for the number of clusters. By default each vector in `returns` is as long as a model.
        """
        return {name: Array((layout.size,)) for name in self.returns}

    def encode(
        self, output: LocalOutput, downlink: Downlink, layout: Layout, draw: np.random.Generator
    ) -> Mapping[str, Tensor]:
        """Returns what goes over the wire.

        Without transforms this is the result of `up`. With transforms it is the encoded difference between that result
        and the downlink.
        """
        payload = self.up(output, downlink, layout)
        if not self.transforms or not payload:
            return payload
        update = {name: vector - _known(name, downlink, len(vector)) for name, vector in payload.items()}
        for transform in self.transforms:
            update = dict(transform.encode(update, layout, draw))
        return update

    def decode(self, payload: Mapping[str, Tensor], downlink: Downlink, layout: Layout) -> Mapping[str, Tensor]:
        """Returns what the server reads from an upload that went through the transforms."""
        if not self.transforms or not payload:
            return payload
        for transform in reversed(self.transforms):
            payload = transform.decode(payload, layout)
        return {name: vector + _known(name, downlink, len(vector)) for name, vector in payload.items()}

    def as_received(self, state: ClientState, payload: Mapping[str, Tensor]) -> ClientState:
        """Returns a client's state with the model that the server read from its upload, if transforms change it."""
        if self.transforms and self.keeps_model and self.uploads_whole and "model" in payload:
            return replace(state, received=payload["model"])
        return state

    def before_aggregation(self, uploads: Sequence[Uplink], layout: Layout, seed: int, number: int) -> list[Uplink]:
        """Returns the uploads of round `number` with the noise that is added after the clustering."""
        late = [noise for noise in self.noises if noise.before == "aggregation"]
        read = list(uploads)
        for position, upload in enumerate(uploads if late else ()):
            draw = rng.generator(seed, "aggregation", number, upload.client)
            payload = dict(upload.payload)
            for noise in late:
                payload = noise.add_noise(payload, layout, draw)
            read[position] = replace(upload, payload={name: each.float() for name, each in payload.items()})
        return read

    @property
    def noises(self) -> list[GaussianNoise]:
        """The transforms that clip uploads and add noise."""
        return [each for each in self.transforms if isinstance(each, GaussianNoise)]

    def calibrated(self, num_uploads: int) -> Self:
        """Returns the exchange with transforms whose settings follow from the most uploads of any client."""
        if not self.transforms:
            return self
        return replace(self, transforms=[transform.calibrated(num_uploads) for transform in self.transforms])

    def privacy_guarantee(self, num_uploads: int) -> PrivacyGuarantee | None:
        """Returns what the noise on uploads guarantees if no client uploads more often than `num_uploads` times.

        Returns None if there is no noise, or if nothing bounds what the uploads reveal.
        """
        guarantees = [noise.privacy_guarantee(num_uploads) for noise in self.noises]
        known = [guarantee for guarantee in guarantees if guarantee is not None]
        return min(known, key=lambda guarantee: guarantee.epsilon) if known else None


def _known(name: str, downlink: Downlink, length: int) -> Tensor | float:
    """Returns the part of an uploaded vector that the server knows.

    This is what the server sent under that name, or else the model or centre that it sent.
    """
    if name not in TRANSFORMABLE:
        allowed = ", ".join(TRANSFORMABLE)
        raise ValueError(f"method.exchange: got an upload of {name!r}; transforms work only on {allowed}.")
    if name == "update":
        return 0.0
    sent = downlink.payload.get(name, downlink.model_for({}))
    return 0.0 if sent is None else sent[:length]
