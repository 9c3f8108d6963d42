"""k-means of whole models, one step per round (FeSEM and the clustering of CGPFL).

Legend: N clients, n clients with a model, K clusters, P parameters.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from lcfl.core.messages import Uplink
from lcfl.core.schema import Array, Forms, Number
from lcfl.core.state import FederationState
from lcfl.core.validation import check_choices
from lcfl.methods.aggregation import mean_model
from lcfl.methods.clustering.base import Clustering, ServerInterface, check_num_clusters
from lcfl.methods.clustering.initialisation import kmeans
from lcfl.methods.clustering.similarity import assign, leading_coordinates, squared_distances_to_centres

__all__ = ["ModelKMeans"]

CLIENTS_AT_A_TIME = 16  # whole models in memory at once


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
        check_choices("ModelKMeans", self)
        if self.num_clusters < 1:
            raise ValueError(f"ModelKMeans: got num_clusters={self.num_clusters}; it must be at least 1.")
        self._forget()

    def _forget(self) -> None:
        self._is_begun = False
        self._waiting: dict[int, Tensor] = {}  # over participants: uploads from before the first clusters

    @property
    def uses_stored_models(self) -> bool:
        """Whether `over` is ``stored``."""
        return self.over == "stored"

    def check(self, num_clients: int) -> None:
        """Checks that K is at most N."""
        check_num_clusters(self, self.num_clusters, num_clients)

    def on_fit_start(self, state: FederationState) -> None:
        """Forgets what an earlier run left in this object."""
        if not state.callbacks:
            self._forget()

    def on_round_end(self, server: ServerInterface, state: FederationState, uploads: Sequence[Uplink]) -> None:
        """Forms the first clusters once there are K models, and runs the E-step afterwards."""
        if self.over == "participants":
            models = {upload.client: upload.payload["model"] for upload in uploads}
        else:
            known = torch.nonzero(state.participated).flatten().tolist()
            models = dict(zip(known, state.stored_models(known), strict=True))
        if not self._is_begun:
            models = {i: model for i, model in self._waiting.items() if state.active[i]} | models
            self._begin(models, server, state)
            self._waiting = {} if self._is_begun or self.uses_stored_models else models
        elif models:
            clients, num_parameters = list(models), server.layout.num_parameters
            centre_KP = state.centres[:, :num_parameters]
            far_nK = torch.cat(
                [
                    squared_distances_to_centres(
                        torch.stack([models[client][:num_parameters] for client in part]), centre_KP
                    )
                    for part in _parts(clients)
                ]
            )
            assignment = state.assignment.clone()
            assignment[clients] = assign(-far_nK, assignment[clients])
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


def _parts(clients: list[int]) -> list[list[int]]:
    return [clients[start : start + CLIENTS_AT_A_TIME] for start in range(0, len(clients), CLIENTS_AT_A_TIME)]
