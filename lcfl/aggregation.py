"""How uploads are merged into the server's models.

Legend: P parameters and Q buffer entries in a model's flat vector, K clusters.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from lcfl.messages import Uplink
from lcfl.networks.split import Layout
from lcfl.state import FederationState
from lcfl.sums import ModelSums, add_models
from lcfl.wording import check_choices

__all__ = [
    "REFRESH_EVERY",
    "Aggregation",
    "BlendedClusterMean",
    "ClusterMean",
    "GlobalMean",
    "NoAggregation",
    "NormalisedMean",
    "Weights",
    "mean_model",
    "UpdateMean",
    "normalised_step",
    "stored_mean",
    "stored_sums",
    "updated_model",
]

Weights = Literal["samples", "uniform"]

REFRESH_EVERY = 100  # rounds after which sums of stored models are made from nothing


def mean_model(models: Sequence[Tensor], weights: Sequence[float], layout: Layout) -> Tensor:
    """The weighted mean of flat models ``[P + Q]``; integer buffers take their maximum.

    Weights are normalised first and summed up in float64 in the given order, so that a mean does not
    depend on where the models were trained.
    """
    share = torch.tensor(weights, dtype=torch.float64)
    share /= share.sum()
    total = torch.zeros(layout.size, dtype=torch.float64)
    add_models(total, models, share.tolist())
    mean = total.to(torch.float32)
    for place in layout.integer_slices():
        mean[place] = torch.stack([model[place] for model in models]).amax(dim=0)
    return mean


def stored_sums(state: FederationState, group_N: Tensor, num_groups: int, layout: Layout) -> ModelSums:
    """The sums of the stored models of each group: those that the store keeps, brought up to date, or new ones.

    New ones in every hundredth round (`REFRESH_EVERY`), where the number of groups has changed, and where roundings
    may have come near to what float32 shows.

    Args:
        state: whose store is meant.
        group_N: the group of every client, int64; -1 for those that do not count.
        num_groups: how many there are.
        layout: of the models.
    """
    sums = state.clients.sums
    if sums is not None and len(sums.total) == num_groups and state.round % REFRESH_EVERY > 0:
        sums.regroup(group_N, state.model_of)
        if sums.is_exact_enough:
            return sums
    sums = state.clients.sums = ModelSums.of(group_N, num_groups, layout.size, state.model_of)
    return sums


def stored_mean(state: FederationState, sums: ModelSums, groups: slice, layout: Layout) -> Tensor | None:
    """The mean ``[P + Q]`` of the stored models of some groups; integer buffers take their maximum. None of nobody."""
    counts = sums.counts()
    number = int(counts[groups].sum())
    if not number:
        return None
    mean = (sums.total[groups].sum(dim=0) / number).float()
    if layout.integer_slices():
        wanted = torch.zeros(len(counts), dtype=torch.bool)
        wanted[groups] = True
        clients = torch.nonzero(wanted[sums.group] & (sums.group >= 0)).flatten().tolist()
        for place in layout.integer_slices():
            mean[place] = torch.stack([state.model_of(client)[place] for client in clients]).amax(dim=0)
    return mean


class Aggregation(ABC):
    """Merges a round's uploads, or the stored models, into the server's models.

    Class attributes:
        reads: the names in an uplink that it merges.
        keeps_centres: whether there is one centre per cluster afterwards.
    """

    reads: ClassVar[tuple[str, ...]] = ("model",)
    keeps_centres: ClassVar[bool] = True

    @property
    def over_stored(self) -> bool:
        """Whether it merges models of clients that did not take part in this round, too."""
        return False

    @abstractmethod
    def __call__(self, state: FederationState, uploads: Sequence[Uplink], layout: Layout) -> None:
        """Replaces the models in `state`; is not called in a round without uploads."""


@dataclass(frozen=True)
class NoAggregation(Aggregation):
    """The server learns nothing (Local)."""

    reads: ClassVar[tuple[str, ...]] = ()

    def __call__(self, state: FederationState, uploads: Sequence[Uplink], layout: Layout) -> None:
        """Leaves the state as it is."""


@dataclass(frozen=True)
class GlobalMean(Aggregation):
    """FedAvg: ``w <- sum_i n_i w_i / sum_i n_i`` over this round's uploads.

    Args:
        weights: ``samples`` weighs a client by n_i, ``uniform`` gives every client the same weight.

    Raises:
        ValueError: for another word.
    """

    keeps_centres: ClassVar[bool] = False
    weights: Weights = "samples"

    def __post_init__(self) -> None:
        check_choices("method.aggregation", self)

    def __call__(self, state: FederationState, uploads: Sequence[Uplink], layout: Layout) -> None:
        """The new global model."""
        weights = [upload.num_samples if self.weights == "samples" else 1 for upload in uploads]
        state.global_model = mean_model([upload.payload["model"] for upload in uploads], weights, layout)
        state.centres = state.global_model.unsqueeze(0)


def normalised_step(
    model: Tensor, models: Sequence[Tensor], samples: Sequence[int], normalisers: Sequence[Tensor]
) -> Tensor:
    """FedNova Eq. 7: ``tau_eff sum_i p_i d_i`` in float64, to be taken off the global model.

    p_i = n_i / sum_j n_j, d_i = (w - w_i) / a_i, and tau_eff = sum_i p_i t_i. Equal a_i = t_i give FedAvg's step.

    Args:
        model: w, ``[P]``.
        models: w_i, ``[P]`` each.
        samples: n_i.
        normalisers: (a_i), then t_i = a_i, or (a_i, t_i); a_i > 0.
    """
    share = torch.tensor(samples, dtype=torch.float64)
    share /= share.sum()
    effective = sum(weight * float(each[-1]) for weight, each in zip(share.tolist(), normalisers, strict=True))
    step = torch.zeros(len(model), dtype=torch.float64)
    for weight, each, theirs in zip(share.tolist(), normalisers, models, strict=True):
        step.add_(model.double() - theirs.double(), alpha=weight * effective / float(each[0]))
    return step


@dataclass(frozen=True)
class NormalisedMean(Aggregation):
    """FedNova: every client's change of the model is divided by its own a_i before they are averaged.

    v <- gamma v + tau_eff sum_i p_i d_i; w <- w - v. Buffers are FedAvg's mean. A client that took no step is left
    out.

    Args:
        momentum: gamma of the server (``gmf`` in the authors' code); with 0 nothing is remembered.

    Raises:
        ValueError: for a momentum outside [0, 1).
    """

    reads: ClassVar[tuple[str, ...]] = ("model", "normaliser")
    keeps_centres: ClassVar[bool] = False
    momentum: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise ValueError(
                f"method.aggregation: got momentum={self.momentum}; allowed are numbers from 0 to below 1."
            )

    def __call__(self, state: FederationState, uploads: Sequence[Uplink], layout: Layout) -> None:
        """The new global model, and v where there is momentum."""
        uploads = [upload for upload in uploads if float(upload.payload["normaliser"][0]) > 0]
        if not uploads:
            return
        samples, end = [upload.num_samples for upload in uploads], layout.num_parameters
        models = [upload.payload["model"] for upload in uploads]
        before = state.global_model[:end]
        step = normalised_step(
            before, [model[:end] for model in models], samples, [upload.payload["normaliser"] for upload in uploads]
        )
        if self.momentum > 0:
            if state.velocity is not None:
                step += self.momentum * state.velocity.double()
            state.velocity = step.float()
        state.global_model = mean_model(models, samples, layout)
        state.global_model[:end] = (before.double() - step).float()
        state.centres = state.global_model.unsqueeze(0)


@dataclass(frozen=True)
class ClusterMean(Aggregation):
    """Means per cluster and over everybody, unweighted as in LCFed section III-A and FedAC Eq. 3 and 5.

    Omega_k is the mean of the models of cluster k, Phi the embedding of the mean of all: the paper
    prints Phi as a plain sum, which the pull lambda/2 |phi - Phi|^2 rules out (reading A2).
    A cluster without any such model keeps its centre.

    Means over stored models are quotients of sums that follow what changes, see `stored_sums`: a round costs what it
    moved and trained, however many models are stored.

    Args:
        over: whose models make a centre. ``stored``: the last received model of every member that ever
            took part, as LCFed section III-A; ``participants``: of this round's members only (reading A34).
        embedding_over: whose embeddings make Phi. ``stored``: everybody that ever took part (LCFed);
            ``participants``: this round's clients (FedAC Algorithm 1, line 9).
        weights: ``uniform`` gives every client the same weight, ``samples`` weighs it by n_i (FedAvg inside every
            cluster; over participants only).

    Raises:
        ValueError: for another word, or weights by samples over stored models.
    """

    over: Literal["stored", "participants"] = "stored"
    embedding_over: Literal["stored", "participants"] = "stored"
    weights: Weights = "uniform"

    def __post_init__(self) -> None:
        check_choices("method.aggregation", self)
        if self.weights == "samples" and self.over_stored:
            raise ValueError(
                f"method.aggregation: ClusterMean got weights='samples' with over={self.over!r} and embedding_over="
                f"{self.embedding_over!r}; weights by samples are those of a round's uploads: set both to "
                "participants, or weights to uniform."
            )

    @property
    def over_stored(self) -> bool:
        """Whether one of the two means is over stored models."""
        return "stored" in (self.over, self.embedding_over)

    def __call__(self, state: FederationState, uploads: Sequence[Uplink], layout: Layout) -> None:
        """The new centres and the new global model, whose embedding is Phi."""
        centres, num_clusters = state.centres.clone(), state.num_clusters
        if self.over == "stored":
            of_cluster_N = torch.where(state.assignment >= 0, state.assignment, num_clusters)  # the last: of no cluster
            sums = stored_sums(state, torch.where(state.participated, of_cluster_N, -1), num_clusters + 1, layout)
            means = [stored_mean(state, sums, slice(k, k + 1), layout) for k in range(num_clusters)]
        else:
            cluster_n = state.assignment[[upload.client for upload in uploads]].tolist()
            sent = list(zip(uploads, cluster_n, strict=True))
            means = [self._mean([each for each, own in sent if own == k], layout) for k in range(num_clusters)]
            if self.embedding_over == "stored":
                sums = stored_sums(state, torch.where(state.participated, 0, -1), 1, layout)
        for cluster, mean in enumerate(means):
            if mean is not None:
                centres[cluster] = mean
        state.centres = centres
        if self.embedding_over == "stored":
            mean = stored_mean(state, sums, slice(None), layout)
        else:
            mean = self._mean(uploads, layout)
        assert mean is not None, "somebody has just sent a model"
        state.global_model = mean

    def _mean(self, uploads: Sequence[Uplink], layout: Layout) -> Tensor | None:
        """Of models that were just sent; None of nobody."""
        if not uploads:
            return None
        weights = [upload.num_samples if self.weights == "samples" else 1 for upload in uploads]
        return mean_model([upload.payload["model"] for upload in uploads], weights, layout)


@dataclass(frozen=True)
class UpdateMean(Aggregation):
    """``w_k <- base_k + sum_i (n_i / N_k) Delta_i`` over this round's members of cluster k (AS-CFL section 3.4).

    base_k is the same mean of the models that these members were sent: the paper's w_k^t has no meaning for a
    cluster that was made in this round, and where the membership has not changed base_k is w_k^t (reading A12).
    The noise of Algorithm 1, line 31 is a transform of uploads, `lcfl.upload.GaussianNoise`. A cluster without any
    upload keeps its model; the global model is the same mean over all uploads.
    """

    reads: ClassVar[tuple[str, ...]] = ("update",)

    def __call__(self, state: FederationState, uploads: Sequence[Uplink], layout: Layout) -> None:
        """The new cluster models and the new global model."""
        centres = state.centres.clone()
        for cluster in range(state.num_clusters):
            theirs = [upload for upload in uploads if int(state.assignment[upload.client]) == cluster]
            if theirs:
                centres[cluster] = updated_model(theirs, layout)
        state.centres = centres
        state.global_model = updated_model(uploads, layout)


def updated_model(uploads: Sequence[Uplink], layout: Layout) -> Tensor:
    """sum_i (n_i / N) (start_i + Delta_i) ``[P + Q]``, start_i being what client i was sent; summed up in float64."""
    share = torch.tensor([upload.num_samples for upload in uploads], dtype=torch.float64)
    share /= share.sum()
    total = torch.zeros(layout.size, dtype=torch.float64)
    models = []
    for upload in uploads:
        assert upload.answers is not None, "the server says what it had sent"
        models.append((upload.answers.payload["model"], upload.payload["update"]))
    add_models(total, [part for pair in models for part in pair], share.repeat_interleave(2).tolist())
    mean = total.to(torch.float32)
    for place in layout.integer_slices():
        mean[place] = torch.stack([start[place] + update[place] for start, update in models]).amax(dim=0)
    return mean


@dataclass(frozen=True)
class BlendedClusterMean(ClusterMean):
    """`ClusterMean` that goes only a part of the way: ``Omega_k <- (1 - beta) Omega_k + beta mean`` (pFedMe, CGPFL).

    Args:
        over: see `ClusterMean`.
        embedding_over: see `ClusterMean`.
        weights: see `ClusterMean`.
        beta: 1 is `ClusterMean`; above 1 a centre's parameters go beyond the mean, up to 2.

    Raises:
        ValueError: for a beta outside (0, 2].
    """

    beta: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.beta <= 2:
            raise ValueError(f"method.aggregation: got beta={self.beta}; allowed are numbers above 0 and up to 2.")

    def __call__(self, state: FederationState, uploads: Sequence[Uplink], layout: Layout) -> None:
        """The new centres; the global model is the mean itself. A counter in buffers is always the mean's."""
        before = state.centres
        super().__call__(state, uploads, layout)
        if self.beta == 1:
            return
        blended = before + self.beta * (state.centres - before)
        # Beyond the mean a running variance can be negative: buffers stop there.
        kept = [slice(layout.num_parameters, None)] if self.beta > 1 else layout.integer_slices()
        for place in kept:
            blended[:, place] = state.centres[:, place]
        state.centres = blended
