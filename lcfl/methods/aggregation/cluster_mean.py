"""Aggregations into one model per cluster.

Legend: P parameters and Q buffer entries in a model's flat vector, K clusters.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lcfl.core.clients import ClientStore
from lcfl.core.messages import Uplink
from lcfl.core.model_sums import ModelSums
from lcfl.core.state import FederationState
from lcfl.methods.aggregation.base import Merge, Weights
from lcfl.models.layout import Layout

__all__ = ["REFRESH_EVERY", "BlendedClusterMean", "ClusterMean", "stored_mean", "stored_sums"]

REFRESH_EVERY = 100  # rounds after which sums of stored models are recomputed from scratch


def stored_sums(state: FederationState, group_N: Tensor, num_groups: int, layout: Layout) -> ModelSums:
    """Returns the sums of the stored models of each group.

    The sums that the store keeps are updated if possible. They are recomputed from scratch in every hundredth round
    (`REFRESH_EVERY`), if the number of groups has changed, and if rounding errors may have come close to the precision
    of float32.

    Args:
        state: the state whose store holds the models.
        group_N: the group of every client, int64; -1 for clients that do not count.
        num_groups: the number of groups.
        layout: the layout of the models.
    """
    sums = state.clients.sums
    if sums is not None and len(sums.total) == num_groups and state.round % REFRESH_EVERY > 0:
        sums.regroup(group_N, state.clients.move_models)
        if sums.is_exact_enough:
            return sums
    state.clients.sums = ModelSums.from_models(group_N, num_groups, layout.size, state.clients.move_models)
    return state.clients.sums


def stored_mean(state: FederationState, sums: ModelSums, groups: slice, layout: Layout) -> Tensor | None:
    """Returns the mean ``[P + Q]`` of the stored models of some groups, or None if the groups have no client.

    Integer buffers take their maximum.
    """
    counts = sums.counts()
    number = int(counts[groups].sum())
    if not number:
        return None
    mean = (sums.total[groups].sum(dim=0) / number).float()
    if layout.integer_slices():
        is_counted = torch.zeros(len(counts), dtype=torch.bool)
        is_counted[groups] = True
        clients = torch.nonzero(is_counted[sums.group] & (sums.group >= 0)).flatten().tolist()
        for entries in layout.integer_slices():
            largest = state.clients.at_owners(functools.partial(_largest, entries=entries), clients)
            mean[entries] = torch.stack(largest).amax(dim=0)
    return mean


def _largest(store: ClientStore, clients: list[int], entries: slice) -> Tensor:
    """Returns the largest value of each of these entries over the stored models of the clients."""
    return torch.stack([store[client].stored_model[entries] for client in clients]).amax(dim=0)


@dataclass(frozen=True)
class ClusterMean(Merge):
    """Takes means per cluster and over all clients, unweighted as in LCFed section III-A and FedAC Eq. 3 and 5.

    Omega_k is the mean of the models of cluster k. Phi is the embedding of the mean of all models. The paper prints Phi
    as a plain sum, but the pull lambda/2 |phi - Phi|^2 rules that out (reading A2). A cluster without any model to
    average keeps its centre.

    Means over stored models are quotients of sums that are updated with each change, see `stored_sums`. The cost of a
    round therefore depends on how many models were trained or moved, and not on how many are stored.

    Args:
        over: whose models form a centre. ``stored``: the last received model of every member that ever took part, as
            in LCFed section III-A. ``participants``: the models of the members that took part in this round (reading
            A34).
        embedding_over: whose embeddings form Phi. ``stored``: all clients that ever took part (LCFed).
            ``participants``: this round's clients (FedAC Algorithm 1, line 9).
        weights: ``uniform`` gives every client the same weight. ``samples`` weighs a client by n_i, which is FedAvg
            inside every cluster; it is allowed over participants only.
        rule: how models are merged, for example `TrimmedMean`, allowed over participants only; None for the mean.
        optimizer: the optimizer of the centres, for example `ServerAdam`; None to take the merged models as they are.

    Raises:
        ValueError: for an unknown word, or for weights by samples or a rule over stored models.
    """

    over: Literal["stored", "participants"] = "stored"
    embedding_over: Literal["stored", "participants"] = "stored"
    weights: Weights = "uniform"

    def __post_init__(self) -> None:
        if self.weights == "samples" and self.uses_stored_models:
            raise ValueError(
                f"method.aggregation: ClusterMean got weights='samples' with over={self.over!r} and embedding_over="
                f"{self.embedding_over!r}; only the uploads of a round can be weighed by samples. Set both to "
                "participants, or weights to uniform."
            )
        if self.rule is not None and self.uses_stored_models:
            raise ValueError(
                f"method.aggregation: ClusterMean got the rule {type(self.rule).__name__} with over={self.over!r} and "
                f"embedding_over={self.embedding_over!r}; over stored models there are only means. Set both to "
                "participants, or rule to null."
            )

    @property
    def uses_stored_models(self) -> bool:
        """Whether at least one of the two means is over stored models."""
        return "stored" in (self.over, self.embedding_over)

    def __call__(self, state: FederationState, uploads: Sequence[Uplink], layout: Layout) -> None:
        """Replaces the centres and the global model, whose embedding is Phi."""
        centres, num_clusters = state.centres.clone(), state.num_clusters
        sent: dict[int, list[Uplink]] = {}
        for upload in uploads:
            if (cluster := int(state.assignment[upload.client])) >= 0:
                sent.setdefault(cluster, []).append(upload)
        if self.over == "stored":
            # Clients without a cluster form one more group, the last one.
            of_cluster_N = torch.where(state.assignment >= 0, state.assignment, num_clusters)
            sums = stored_sums(state, torch.where(state.participated, of_cluster_N, -1), num_clusters + 1, layout)
            means = [stored_mean(state, sums, slice(k, k + 1), layout) for k in range(num_clusters)]
        else:
            means = [self._mean(sent.get(k, ()), centres[k], layout) for k in range(num_clusters)]
            if self.embedding_over == "stored":
                sums = stored_sums(state, torch.where(state.participated, 0, -1), 1, layout)
        for cluster, own in enumerate(means):
            if own is not None:
                centres[cluster] = own
        state.centres = self.stepped(state, centres, sent, layout)
        if self.embedding_over == "stored":
            mean = stored_mean(state, sums, slice(None), layout)
        else:
            mean = self._mean(uploads, state.global_model, layout)
        assert mean is not None, "at least one client has just sent a model"
        state.global_model = mean

    def _mean(self, uploads: Sequence[Uplink], start: Tensor, layout: Layout) -> Tensor | None:
        """Returns what the models that were just sent are merged to, or None if there are none."""
        if not uploads:
            return None
        weights = [upload.num_samples if self.weights == "samples" else 1 for upload in uploads]
        return self.merged([upload.payload["model"] for upload in uploads], weights, start, layout)


@dataclass(frozen=True)
class BlendedClusterMean(ClusterMean):
    """`ClusterMean` that blends old and new centres: ``Omega_k <- (1 - beta) Omega_k + beta mean`` (pFedMe, CGPFL).

    Args:
        over: see `ClusterMean`.
        embedding_over: see `ClusterMean`.
        weights: see `ClusterMean`.
        beta: 1 is `ClusterMean`. Above 1, a centre's parameters go beyond the mean. At most 2.

    Raises:
        ValueError: for a beta outside (0, 2].
    """

    beta: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.beta <= 2:
            raise ValueError(f"method.aggregation: got beta={self.beta}; allowed are numbers above 0 and up to 2.")

    def __call__(self, state: FederationState, uploads: Sequence[Uplink], layout: Layout) -> None:
        """Replaces the centres by blended ones and the global model by the mean itself.

        Integer buffers are always those of the mean.
        """
        before = state.centres
        super().__call__(state, uploads, layout)
        if self.beta == 1:
            return
        blended = before + self.beta * (state.centres - before)
        # Beyond the mean, a running variance could become negative, so buffers stop at the mean.
        unblended = [slice(layout.num_parameters, None)] if self.beta > 1 else layout.integer_slices()
        for entries in unblended:
            blended[:, entries] = state.centres[:, entries]
        state.centres = blended
