"""Clusters of the losses that the models of all clusters have on the clients' data (CLoVE).

Legend: N clients, n clients with a loss vector, K clusters, m models that have a loss.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from lcfl.core.messages import Uplink
from lcfl.core.schema import Forms, Number
from lcfl.core.state import FederationState
from lcfl.methods.clustering.base import Clustering, ExtraRound, ServerInterface, check_num_clusters
from lcfl.methods.clustering.initialisation import balanced_labels, first_is_repeated, kmeans
from lcfl.methods.exchange import ClusterLosses, Exchange
from lcfl.methods.local.least_loss import NO_LOSS, LossVector
from lcfl.methods.local.training import LocalUpdate

__all__ = ["LossVectorKMeans", "match_to_models"]


def match_to_models(loss_nK: Tensor, label_n: Tensor) -> Tensor:
    """Returns the model ``[n]`` of each client, by a matching of groups of clients with models at minimum cost.

    The cost of a group and a model is the sum of the losses that the model has on the members' data. Each model goes
    to at most one group. Groups count in the order of their first clients, so the names of the labels do not matter.

    Args:
        loss_nK: the loss vectors.
        label_n: the group of each client, of at most K groups.
    """
    from scipy.optimize import linear_sum_assignment  # imported here because only some methods need it

    order = {label: number for number, label in enumerate(dict.fromkeys(label_n.tolist()))}
    group_n = torch.tensor([order[label] for label in label_n.tolist()])
    cost_gK = torch.zeros(len(order), loss_nK.shape[1], dtype=torch.float64).index_add(0, group_n, loss_nK.double())
    _, model_g = linear_sum_assignment(cost_gK.numpy())
    return torch.as_tensor(model_g, dtype=torch.int64)[group_n]


@dataclass
class LossVectorKMeans(Clustering):
    """Clusters this round's clients by their loss vectors (F_i(Omega_1), ..., F_i(Omega_K)), before they train (CLoVE).

    Training begins with K different random models. Before every training round there is an extra round, in which the
    clients of the round receive all K models and send their loss vectors. k-means of the loss vectors gives groups,
    and a matching at minimum cost gives every group a model (`match_to_models`). The clients then train the model of
    their group. A client that has never taken part has no cluster. A model that has diverged goes to no group.

    Args:
        num_clusters: K.
        first: what the clients of round 0 train. ``losses``: the models that their loss vectors lead to. ``random``:
            models dealt out at random in equal shares, as the authors do for classification.
        stable_rounds: clustering ends once every client of a round has been given the same model in each of its last
            so many rounds. From then on there are no loss vectors, and a client without a cluster takes the model
            with the smallest loss. None for no end.
    """

    reads: ClassVar[tuple[str, ...]] = ()
    has_extra_rounds: ClassVar[bool] = True
    sets_clusters: ClassVar[bool] = True
    remembers: ClassVar[Forms] = {"streaks": {Number(int, 0, "N"): Number(int, 1)}, "is_stable": bool}

    num_clusters: int = 4
    first: Literal["losses", "random"] = "losses"
    stable_rounds: int | None = None

    def __post_init__(self) -> None:
        if self.num_clusters < 1:
            raise ValueError(f"LossVectorKMeans: got num_clusters={self.num_clusters}; it must be at least 1.")
        if self.stable_rounds is not None and self.stable_rounds < 1:
            raise ValueError(
                f"LossVectorKMeans: got stable_rounds={self.stable_rounds}; it must be at least 1, or null for a "
                "clustering in every round."
            )
        self.forget()

    def forget(self) -> None:
        """Forgets the last run."""
        self._streaks: dict[int, int] = {}  # for how many of its rounds a client has been given the same model
        self._is_stable = False
        self._asked = -1  # the last round for which loss vectors were requested

    def check(self, num_clients: int) -> None:
        """Checks that K is at most N."""
        check_num_clusters(self, self.num_clusters, num_clients)

    def on_fit_start(self, server: ServerInterface, state: FederationState) -> None:
        """Sets K random models as centres and leaves all clients without a cluster, unless a checkpoint is resumed."""
        if state.callbacks or state.round > 0:
            return
        state.assignment = torch.full((state.num_clients,), -1)
        state.centres = torch.stack([server.initial_model(number) for number in range(self.num_clusters)])
        if self.first == "losses" and first_is_repeated(state.centres):
            raise ValueError(
                "LossVectorKMeans: the initial models are equal, so all entries of a loss vector are equal. Set first: "
                "random, or remove model.init_from, or name the head in model.init_except."
            )

    def on_clients_sampled(self, server: ServerInterface, state: FederationState, sampled: Sequence[int]) -> None:
        """Deals the models out at random in round 0, if `first` is ``random``."""
        if self.first == "random" and state.round == 0:
            state.assignment = state.assignment.clone()
            state.assignment[list(sampled)] = balanced_labels(len(sampled), self.num_clusters, server.seed)

    @property
    def extra_parts(self) -> list[tuple[LocalUpdate, Exchange | None]]:
        """The round of the loss vectors."""
        return [(LossVector(), ClusterLosses())]

    def extra_round(self, state: FederationState, sampled: Sequence[int]) -> ExtraRound | None:
        """Requests the loss vectors of this round's clients, or, in the end, of those without a cluster."""
        if self._asked == state.round or (self.first == "random" and state.round == 0):
            return None
        self._asked = state.round
        clients = [client for client in sampled if state.assignment[client] < 0] if self._is_stable else list(sampled)
        return ExtraRound(clients, LossVector(), ClusterLosses()) if clients else None

    def on_extra_round_end(self, server: ServerInterface, state: FederationState, uploads: Sequence[Uplink]) -> None:
        """Gives every client with a loss vector a model."""
        uploads = [upload for upload in uploads if "losses" in upload.payload]
        # A client without any loss, whose samples may be broken, says nothing about the models.
        uploads = [upload for upload in uploads if bool((upload.payload["losses"] < NO_LOSS).any())]
        if not uploads:
            return
        clients = [upload.client for upload in uploads]
        loss_nK = torch.stack([upload.payload["losses"] for upload in uploads])
        # A model without a loss has diverged. No client gets it.
        model_m = torch.nonzero((loss_nK < NO_LOSS).all(dim=0)).flatten()
        if not len(model_m):
            return
        loss_nm = loss_nK[:, model_m]
        if self._is_stable:
            model_n = model_m[loss_nm.argmin(dim=1)]
        else:
            group_n = kmeans(loss_nm, min(self.num_clusters, len(model_m)), server.seed, state.round)
            model_n = model_m[match_to_models(loss_nm, group_n)]
        before_n = state.assignment[clients]
        state.assignment = state.assignment.clone()
        state.assignment[clients] = model_n
        if self.stable_rounds is not None and not self._is_stable:
            for client, is_same in zip(clients, (model_n == before_n).tolist(), strict=True):
                self._streaks[client] = self._streaks.get(client, 0) + 1 if is_same else 1
            self._is_stable = all(self._streaks[client] >= self.stable_rounds for client in clients)
