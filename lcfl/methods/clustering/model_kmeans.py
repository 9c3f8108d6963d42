"""k-means of whole models, one step per round (FeSEM and the clustering of CGPFL).

Legend: N clients, n clients with a model, K clusters, P parameters.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor

from lcfl.core.clients import ClientStore
from lcfl.core.messages import Uplink
from lcfl.core.schema import Array, Forms, Number
from lcfl.core.state import FederationState
from lcfl.methods.aggregation import mean_model
from lcfl.methods.clustering.base import Clustering, ServerInterface, check_num_clusters
from lcfl.methods.clustering.initialisation import kmeans
from lcfl.methods.clustering.similarity import assign, leading_coordinates, squared_distances_to_centres

__all__ = ["ModelKMeans"]


@dataclass
class ModelKMeans(Clustering):
    """Sets ``R_i = arg min_k |w_i - Omega_k|^2`` over whole models (FeSEM's E-step; the M-step is the aggregation).

    All clients train one common model until K clients with different models are known. This is the case after round 0
    if K clients take part in it, and otherwise after the first few rounds together. k-means (k-means++ seeding, the
    best of ten) on these models gives the first R and Omega. From then on every round ends with one E-step against the
    centres from before the round's aggregation.

    A client whose model was missing when the first clusters were formed has no cluster. It is sent the global model
    until its first model is compared with the centres.

    Args:
        num_clusters: K.
        over: whose models are compared. ``participants``: this round's uploads. ``stored``: the last received model of
            every client that ever took part, for centres over stored models. Centres over participants move away from
            models that are some rounds old, and clients with such old models leave clusters that are right.
    """

    remembers: ClassVar[Forms] = {"is_begun": bool, "waiting": {Number(int, 0, "N"): Array(("S",))}}

    num_clusters: int = 4
    over: Literal["stored", "participants"] = "participants"

    def __post_init__(self) -> None:
        if self.num_clusters < 1:
            raise ValueError(f"ModelKMeans: got num_clusters={self.num_clusters}; it must be at least 1.")
        self.forget()

    def forget(self) -> None:
        """Forgets the last run."""
        self._is_begun = False
        self._waiting: dict[int, Tensor] = {}  # over participants: uploads from before the first clusters

    @property
    def uses_stored_models(self) -> bool:
        """Whether `over` is ``stored``."""
        return self.over == "stored"

    def check(self, num_clients: int) -> None:
        """Checks that K is at most N."""
        check_num_clusters(self, self.num_clusters, num_clients)

    def on_round_end(self, server: ServerInterface, state: FederationState, uploads: Sequence[Uplink]) -> None:
        """Forms the first clusters once there are K models, and runs the E-step afterwards."""
        known = torch.nonzero(state.participated).flatten().tolist()
        if not self._is_begun:
            if self.uses_stored_models:
                models = dict(zip(known, state.stored_models(known), strict=True))
            else:
                models = {i: model for i, model in self._waiting.items() if state.active[i]} | _uploaded(uploads)
            self._begin(models, server, state)
            self._waiting = {} if self._is_begun or self.uses_stored_models else models
            return
        centre_KP = state.centres[:, : server.layout.num_parameters]
        if self.uses_stored_models:  # centres go to the models, of which there are more
            clients, parts = known, state.clients.at_owners(partial(_far_from_stored, centre_KP=centre_KP), known)
        else:
            models = _uploaded(uploads)
            clients, parts = list(models), [squared_distances_to_centres(models.values(), centre_KP)]
        if clients:
            assignment = state.assignment.clone()
            assignment[clients] = assign(-torch.cat(parts), assignment[clients])
            state.assignment = assignment

    def _begin(self, models: dict[int, Tensor], server: ServerInterface, state: FederationState) -> None:
        """Sets the first R and Omega, unless there are fewer than K different models."""
        if len(models) < self.num_clusters:
            return
        clients = list(models)
        model_nP = torch.stack([model[: server.layout.num_parameters] for model in models.values()])
        code_nn = leading_coordinates(model_nP - model_nP.mean(dim=0), None)  # has the same distances as the models
        label_n = kmeans(code_nn, self.num_clusters, server.seed)
        if int(label_n.max()) + 1 < self.num_clusters:
            return
        self._is_begun = True
        state.assignment = torch.full_like(state.assignment, -1)
        state.assignment[clients] = label_n
        members = [
            [models[i] for i, k in zip(clients, label_n.tolist(), strict=True) if k == cluster]
            for cluster in range(self.num_clusters)
        ]
        state.centres = torch.stack([mean_model(each, [1] * len(each), server.layout) for each in members])


def _uploaded(uploads: Sequence[Uplink]) -> dict[int, Tensor]:
    return {upload.client: upload.payload["model"] for upload in uploads}


def _far_from_stored(store: ClientStore, clients: list[int], centre_KP: Tensor) -> Tensor:
    """Returns the squared distances of the stored models of some clients to the centres."""
    return squared_distances_to_centres((state.stored_model for state in store.states(clients)), centre_KP)
