"""Exchanges of a part of the model. The rest stays with the client.

Legend: P parameters and Q buffer entries in a model's flat vector, S shared entries.
"""

import warnings
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from lcfl.core.clients import ClientState
from lcfl.core.messages import Downlink, Uplink
from lcfl.core.schema import Array
from lcfl.core.state import FederationState
from lcfl.methods.exchange.base import Exchange, ModelKind
from lcfl.methods.local.training import LocalOutput
from lcfl.models.layout import Layout
from lcfl.models.subset import ParameterSubset, embedding_subset, layer_subset, other_layers

__all__ = ["AdaptedEmbedding", "OwnLayers", "PartialModel", "SharedEmbedding", "SharedLayers"]


@dataclass(frozen=True)
class PartialModel(Exchange):
    """Sends a part of the model down and up, 2S floats. The rest belongs to the client and is never sent.

    A local run starts from the client's own model with the server's part in it. The client's personal model consists
    of the rest from its last run (of the initial model before its first run) and the current shared part. On the
    server, uploaded models are completed with the rest of the server's model, so that every aggregation merges only
    the shared part. Buffers belong to their layer.
    """

    keeps_model = True
    uploads_whole: ClassVar[bool] = False
    sends: ClassVar[tuple[str, ...]] = ("shared",)
    models: ClassVar[tuple[ModelKind, ...]] = ("personal", "after_local")
    reported: ClassVar[tuple[ModelKind, ...]] = ("personal",)

    @abstractmethod
    def subset(self, layout: Layout) -> ParameterSubset:
        """Returns the part that is shared."""

    def check(self, layout: Layout) -> None:
        """Warns if the part is empty or the whole model.

        Raises:
            ValueError: for a part that the network does not have.
        """
        try:
            size = self.subset(layout).size
        except ValueError as error:
            raise ValueError(f"method.exchange: {type(self).__name__}: {error}") from None
        if size in (0, layout.size):
            what = "no layer, so every client trains alone" if size == 0 else "every layer, so nothing is personal"
            warnings.warn(f"method.exchange: {type(self).__name__} shares {what}.", stacklevel=3)

    def down(self, state: FederationState, client: int, layout: Layout) -> Downlink:
        """Returns the server's part ``[S]``."""
        return Downlink({"shared": self.subset(layout).take(state.centre_of(client))})

    def at_client(self, downlink: Downlink, state: ClientState, layout: Layout) -> Downlink:
        """Returns a ``model`` to start from: the client's own model with the server's part in it."""
        if "shared" not in downlink.payload:  # a warm-up round sends other contents
            return downlink
        assert state.model is not None, "the exchange keeps models at the clients"
        return Downlink({"model": self.subset(layout).put(downlink.payload["shared"], state.model)})

    def evaluation_down(self, state: FederationState, client: int, kind: ModelKind, layout: Layout) -> Downlink:
        """Returns the server's current part ``[S]`` for the personal model."""
        return self.down(state, client, layout)

    def model_at_client(self, kind: ModelKind, downlink: Downlink, state: ClientState, layout: Layout) -> Tensor:
        """Returns the client's own model with the server's part in it."""
        return self.at_client(downlink, state, layout).payload["model"]

    def up(self, output: LocalOutput, downlink: Downlink, layout: Layout) -> Mapping[str, Tensor]:
        """Returns the client's part ``[S]``."""
        return {"shared": self.subset(layout).take(output.model)}

    def upload_forms(self, layout: Layout) -> dict[str, Array]:
        """Returns the form of the client's part."""
        return {"shared": Array((self.subset(layout).size,))}

    def change_of(self, payload: Mapping[str, Tensor], downlink: Downlink, layout: Layout) -> Tensor | None:
        """Returns the change of the part, among zeros for the other parameters."""
        sent = downlink.payload.get("shared")
        if sent is None:  # a warm-up round sends a whole model
            sent = self.subset(layout).take(downlink.payload["model"])
        apart = payload["shared"] - sent
        return self.subset(layout).put(apart, torch.zeros(layout.size))[: layout.num_parameters]

    def at_server(self, uplink: Uplink, state: FederationState, layout: Layout) -> Uplink:
        """Returns a ``model``: the server's model with the client's part in it."""
        model = self.subset(layout).put(uplink.payload["shared"], state.centre_of(uplink.client))
        return replace(uplink, payload={"model": model})


@dataclass(frozen=True)
class SharedEmbedding(PartialModel):
    """Shares the embedding phi; the decision head h stays with the client: 2 P_phi floats (FedPer)."""

    def subset(self, layout: Layout) -> ParameterSubset:
        """Returns the embedding phi and the buffers of its layers."""
        return embedding_subset(layout)


@dataclass(frozen=True)
class AdaptedEmbedding(SharedEmbedding):
    """`SharedEmbedding` for heads that are not trained: 2 P_phi floats; a client adapts the model it uses (FedBABU).

    The global model is (Phi, h) with the initial head h, which all clients have. The personal model is what the local
    update's `adaptation` makes of it. It is made for an evaluation and not kept.
    """

    models: ClassVar[tuple[ModelKind, ...]] = ("personal", "global", "after_local")
    adapts = "always"

    def evaluation_down(self, state: FederationState, client: int, kind: ModelKind, layout: Layout) -> Downlink:
        """Returns the global ``model``, or the server's current part for any other kind."""
        whole = Downlink({"model": state.global_model})
        return whole if kind == "global" else super().evaluation_down(state, client, kind, layout)


@dataclass(frozen=True)
class OwnLayers(PartialModel):
    """Keeps some layers at the client and shares all others (FedBN).

    Args:
        own_layers: patterns of what stays with the client; None for the layers with running statistics, which are those
            of batch normalisation. Scale, shift and statistics of such a layer stay together.
    """

    own_layers: list[str] | None = None

    def subset(self, layout: Layout) -> ParameterSubset:
        """Returns the parameters and buffers of the shared layers.

        Raises:
            ValueError: if no layer stays with the client.
        """
        return other_layers(layout, self.own_layers)


@dataclass(frozen=True)
class SharedLayers(PartialModel):
    """Shares some layers; the others stay with the client: 2 P_g floats (LG-FedAvg).

    Args:
        global_layers: the number of last layers with trained parameters that are shared, or patterns of what is shared
            (``[embedding.9, decision]``, ``["*norm*"]``).
    """

    global_layers: int | list[str] = 2

    def __post_init__(self) -> None:
        if self.global_layers in (0, []) or (isinstance(self.global_layers, int) and self.global_layers < 0):
            raise ValueError(
                f"method.exchange: got global_layers={self.global_layers}; allowed are a number >= 1 of last layers, "
                "or a list of layer names or patterns."
            )

    def subset(self, layout: Layout) -> ParameterSubset:
        """Returns the parameters and buffers of the shared layers."""
        return layer_subset(layout, self.global_layers)
