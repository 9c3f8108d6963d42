"""Groups of clients by the direction of their first updates, formed once (FedGroup).

Legend: N clients, n pre-trained clients, K groups, P parameters.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lcfl.core import rng
from lcfl.core.messages import Downlink, Uplink
from lcfl.core.schema import Array, Forms
from lcfl.core.state import FederationState
from lcfl.methods.aggregation import mean_model
from lcfl.methods.clustering.agglomerative import cut_tree
from lcfl.methods.clustering.base import NOTHING_USABLE, Clustering, ExtraRound, NewcomerInterface, ServerInterface
from lcfl.methods.clustering.initialisation import kmeans
from lcfl.methods.clustering.similarity import EPSILON, assign, cosine, leading_coordinates
from lcfl.methods.exchange import FullModel
from lcfl.methods.local.training import LocalTraining

__all__ = ["UpdateDirections", "decomposed_cosines", "mean_cosine_differences"]

MAX_ITER = 20  # iterations of k-means, as in the authors' code


def decomposed_cosines(update_nP: Tensor, dimension: int) -> Tensor:
    """Returns EDC ``[n, D]``: the cosines of each update with the first D left singular vectors of all updates."""
    code_nD = leading_coordinates(update_nP, None)
    length_n1: Tensor = code_nD.norm(dim=1, keepdim=True).clamp(min=EPSILON)
    return code_nD[:, :dimension] / length_n1


def mean_cosine_differences(update_nP: Tensor) -> NDArray[np.float64]:
    """Returns MADC ``[n, n]``: ``1 / (n - 2) sum_z |cos(i, z) - cos(j, z)|`` over all other clients z."""
    code_nD = leading_coordinates(update_nP, None)
    cosine_nn = cosine(code_nD, code_nD).numpy()
    num = len(cosine_nn)
    apart_nn = np.stack([np.abs(cosine_n - cosine_nn).sum(axis=1) for cosine_n in cosine_nn])
    own_nn = np.abs(np.diag(cosine_nn)[:, None] - cosine_nn)  # the term z = i and, by symmetry, z = j
    matrix: NDArray[np.float64] = (apart_nn - own_nn - own_nn.T) / max(num - 2, 1)
    np.fill_diagonal(matrix, 0.0)
    return np.maximum(np.maximum(matrix, matrix.T), 0.0)


@dataclass
class UpdateDirections(Clustering):
    """Groups clients once by the directions of their first updates Delta_i from the initial model (FedGroup).

    Before the first round min(`clients_per_group` K, N) clients, evenly spread over the numbers, pre-train from the
    initial model. k-means of their decomposed cosines gives the groups. A group's model is the unweighted mean of its
    members' pre-trained models. Its direction is the mean of their updates.

    Any other client has no group until it is sampled. It then also pre-trains from the initial model first, in an extra
    round, and joins the group with ``arg min_g (1 - cos(Delta_i, direction_g)) / 2``. A client whose update is zero
    joins a random group. If another callback has merged or split clusters, a group is in the cluster that holds most of
    its clients.

    Args:
        num_clusters: K; fewer if there are fewer distinct directions.
        pretrain_steps: mini-batches of a pre-training.
        clients_per_group: how many clients per group pre-train before the first round; the total is K times this.
        measure: ``edc`` as described above; ``madc`` for complete linkage of the mean differences of pairwise cosines.
    """

    has_extra_rounds: ClassVar[bool] = True
    newcomer_rule: ClassVar[str] = "the group whose update direction is nearest to that of the newcomer's pre-training"
    remembers: ClassVar[Forms] = {
        "direction": (Array(("groups", "P")), None),
        "group": Array((None,), torch.int64, -1, "groups"),
    }

    num_clusters: int = 5
    pretrain_steps: int = 50
    clients_per_group: int = 20
    measure: Literal["edc", "madc"] = "edc"

    def __post_init__(self) -> None:
        for name in ("num_clusters", "pretrain_steps", "clients_per_group"):
            if getattr(self, name) < 1:
                raise ValueError(f"UpdateDirections: got {name}={getattr(self, name)}; it must be at least 1.")
        self.forget()

    def forget(self) -> None:
        """Forgets the last run."""
        self._direction: Tensor | None = None
        self._group = torch.zeros(0, dtype=torch.int64)  # the group of each client, -1 for none
        self._asked = -1  # the last round for which new clients were asked to pre-train

    def warmup_rounds(self, num_clients: int) -> list[ExtraRound]:
        """Returns the pre-training before the first round."""
        number = min(num_clients, self.clients_per_group * self.num_clusters)
        chosen = np.linspace(0, num_clients - 1, number).round().astype(int)
        return [ExtraRound(chosen.tolist(), self._pretraining())]

    def extra_round(self, state: FederationState, sampled: Sequence[int]) -> ExtraRound | None:
        """Returns the pre-training of the sampled clients without a group, if there are any."""
        cold = [client for client in sampled if state.assignment[client] < 0]
        if not cold or self._asked == state.round:
            return None
        self._asked = state.round
        return ExtraRound(cold, self._pretraining())

    def on_extra_round_end(self, server: ServerInterface, state: FederationState, uploads: Sequence[Uplink]) -> None:
        """Forms the groups, or assigns clients without a group to them."""
        clients = [upload.client for upload in uploads]
        deltas = [(upload.payload["model"] - state.initial)[: server.layout.num_parameters] for upload in uploads]
        state.assignment = state.assignment.clone()
        if self._direction is None:
            if not uploads:
                raise ValueError(f"UpdateDirections: got no usable pre-trained model; {NOTHING_USABLE}")
            label_n = self._grouped(torch.stack(deltas), clients, server.seed)
            state.assignment[:] = -1
            state.assignment[clients] = label_n
            self._group = state.assignment.clone()
            members = [torch.nonzero(label_n == group).flatten().tolist() for group in range(int(label_n.max()) + 1)]
            models = [upload.payload["model"] for upload in uploads]
            state.centres = torch.stack(
                [mean_model([models[i] for i in group], [1] * len(group), server.layout) for group in members]
            )
            self._direction = torch.stack([torch.stack([deltas[i] for i in group]).mean(dim=0) for group in members])
        elif uploads:
            update_nP = torch.stack(deltas)
            label_n = assign(cosine(update_nP, self._direction), torch.full((len(clients),), -1))
            label_n = _with_random(label_n, update_nP, clients, len(self._direction), server.seed)
            state.assignment[clients] = torch.tensor([self._cluster_of(group, state) for group in label_n.tolist()])
            self._group[clients] = label_n

    def place_newcomer(self, newcomer: NewcomerInterface, state: FederationState) -> int:
        """Returns ``arg min_g (1 - cos(Delta, direction_g)) / 2``, as for a sampled client without a group.

        This sends P floats down and P up. If the newcomer's update is zero, the smallest loss decides.
        """
        uplink = newcomer.run(Downlink({"model": state.initial}), FullModel(), self._pretraining())
        update_P = (uplink.payload["model"] - state.initial)[: newcomer.layout.num_parameters]
        if self._direction is None or not update_P.any():
            return super().place_newcomer(newcomer, state)
        return self._cluster_of(int(cosine(update_P[None], self._direction).argmax()), state)

    def _cluster_of(self, group: int, state: FederationState) -> int:
        """Returns the cluster that holds most clients of a group, or the cluster of the same number if none is left."""
        cluster_n = state.assignment[(self._group == group) & (state.assignment >= 0)]
        return int(cluster_n.mode().values) if len(cluster_n) else min(group, state.num_clusters - 1)

    def _pretraining(self) -> LocalTraining:
        return LocalTraining(steps=self.pretrain_steps)

    def _grouped(self, update_nP: Tensor, clients: list[int], seed: int) -> Tensor:
        """Returns the group ``[n]`` of every pre-trained client. No group is empty."""
        moved = torch.nonzero(update_nP.any(dim=1)).flatten()
        label_n = torch.zeros(len(clients), dtype=torch.int64)
        if len(moved) == 0:
            return label_n
        if self.measure == "edc":
            label_n[moved] = kmeans(
                decomposed_cosines(update_nP[moved], self.num_clusters), self.num_clusters, seed, max_iter=MAX_ITER
            )
        else:
            number = min(self.num_clusters, len(moved))
            groups = cut_tree(mean_cosine_differences(update_nP[moved]), "complete", num_clusters=number)
            label_n[moved] = torch.from_numpy(groups.labels)
        return _with_random(label_n, update_nP, clients, int(label_n.max()) + 1, seed)


def _with_random(label_n: Tensor, update_nP: Tensor, clients: list[int], num_groups: int, seed: int) -> Tensor:
    """Returns the same groups, with a random group for each client whose update is zero."""
    label_n = label_n.clone()
    for position in torch.nonzero(~update_nP.any(dim=1)).flatten().tolist():
        label_n[position] = int(rng.generator(seed, "random group", clients[position]).integers(num_groups))
    return label_n
