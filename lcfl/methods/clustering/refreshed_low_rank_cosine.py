"""FedAC's online clustering, whose projection is fitted anew at regular intervals (FedAC Algorithms 1 and 2).

Legend: N clients, n clients with a model, K clusters, P parameters, D components.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from lcfl.core.messages import Uplink
from lcfl.core.schema import Array, Forms
from lcfl.core.state import FederationState
from lcfl.methods.clustering.base import Clustering, NewcomerInterface, ServerInterface
from lcfl.methods.clustering.initialisation import balanced_labels, spherical_kmeans
from lcfl.methods.clustering.low_rank_cosine import (
    FLOAT_BYTES,
    RULE,
    Similarity,
    directions,
    fit_projection,
    most_alike,
    similarities,
    update_codes,
)
from lcfl.methods.clustering.similarity import assign, project_all, spread

__all__ = ["RefreshedLowRankCosine"]

FEWEST_FITTED = 2  # models with a principal component; only one model is left if all other clients have left


@dataclass
class RefreshedLowRankCosine(Clustering):
    """Sets ``R_i = arg max_k cos(M w_i, M Omega_k)``, M refreshed from stored models (FedAC Algorithm 1, 10-11).

    Training starts with a random balanced assignment, because a literal start with equal centres would make all cosines
    tie and put all clients in one cluster. Once max(2 K, N / 2) clients, at most N, have taken part, M is fitted to
    their models. By default, k-means on the directions of their codes then gives R (reading A26). From then on every
    round ends with the E-step against the centres from before the round's aggregation. A client that has not taken part
    yet keeps its random R, because the server knows nothing about it. The cluster is as random after k-means as before,
    and the E-step replaces it in the client's first round.

    The server computes the projection, because it holds w_i. In the paper the clients store M and send M w_i
    themselves. The traffic that this would add, including M for every client at each refresh, is logged as
    ``comm/client_projection_bytes``.

    Args:
        num_clusters: K at the start.
        dimension: D; reduced with a warning if the models span fewer components.
        refresh_every: the number of rounds from one fit of M to the next.
        center: whether to subtract the mean of the fitted models before projecting (reading A4).
        fit_over: the models that M is fitted to at a refresh: ``stored``, the last received models of all clients, or
            ``participants``, this round's models (Algorithm 2, UpdateMap). The first fit always uses the stored models.
            With more than 1,000 clients, 1,000 clients evenly spread over their numbers are used.
        similarity: what the E-step compares, as in the paper's ablation (Fig. 3 c, d). ``cosine`` and ``l2`` compare
            whole models.
        init: how the clusters begin. ``kmeans``: as described above. ``random``: the first E-step continues from the
            random R and its centres, as Algorithm 1 reads. ``common``: all clients are in one cluster until M is
            fitted; k-means then divides it into K, and clients that join later first train from the global model. If
            local runs start at a centre, the models reveal which centre it was. ``common`` prevents R from merely
            reproducing the random draw.
    """

    num_clusters: int = 10
    dimension: int = 50
    refresh_every: int = 100
    center: bool = False
    fit_over: Literal["stored", "participants"] = "stored"
    similarity: Similarity = "low_rank_cosine"
    init: Literal["kmeans", "random", "common"] = "kmeans"

    sets_clusters: ClassVar[bool] = True
    newcomer_rule: ClassVar[str] = RULE
    remembers: ClassVar[Forms] = {"offset": (Array(("P",)), None), "fitted": (int, None)}

    def __post_init__(self) -> None:
        for name in ("num_clusters", "dimension", "refresh_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"RefreshedLowRankCosine: got {name}={getattr(self, name)}; it must be at least 1.")
        self.forget()

    def forget(self) -> None:
        """Forgets the last run."""
        self._offset: Tensor | None = None
        self._fitted: int | None = None

    @property
    def uses_stored_models(self) -> bool:
        """Always true, because it needs the models of all clients that ever took part."""
        return True

    def check(self, num_clients: int) -> None:
        """Checks that K is at most N and that N is at least 2."""
        if num_clients < max(2, self.num_clusters):
            raise ValueError(
                f"method.clustering: RefreshedLowRankCosine got num_clusters={self.num_clusters} for data.num_clients="
                f"{num_clients}; at least 2 clients and one per cluster are needed. Lower num_clusters or raise "
                "data.num_clients."
            )

    def on_fit_start(self, server: ServerInterface, state: FederationState) -> None:
        """Sets a random balanced R and equal centres, or one cluster of all clients, unless a checkpoint is resumed."""
        if state.callbacks or state.round > 0:
            return
        state.assignment = state.assignment.clone()
        number = 1 if self.init == "common" else self.num_clusters
        state.assignment[state.active] = balanced_labels(int(state.active.sum()), number, server.seed)
        state.centres = state.initial.repeat(number, 1)

    def on_round_end(self, server: ServerInterface, state: FederationState, uploads: Sequence[Uplink]) -> None:
        """Fits M if it is due, updates the codes, then runs the E-step."""
        known = torch.nonzero(state.participated).flatten()
        if self._fitted is None:
            num_clients = int(state.active.sum())
            needed = min(max(2 * self.num_clusters, num_clients / 2), num_clients)
            if len(known) < max(needed, FEWEST_FITTED):
                return
            self._refresh(server, state, known)
            if self.init != "random":
                assert state.codes is not None
                state.assignment = state.assignment.clone()
                if self.init == "common":
                    state.assignment[:] = -1
                    state.take_clusters([0] * self.num_clusters)  # a tuning may have divided the common one already
                state.assignment[known] = spherical_kmeans(state.codes[known], state.num_clusters, server.seed)
                return
        elif state.round - self._fitted >= self.refresh_every and len(known) >= FEWEST_FITTED:
            over = known
            if self.fit_over == "participants" and len(uploads) >= FEWEST_FITTED:
                over = torch.tensor([upload.client for upload in uploads])
            self._refresh(server, state, over)
        else:
            codes = update_codes(state, uploads, self._offset)
            server.log("comm/client_projection_bytes", FLOAT_BYTES * len(uploads) * codes.shape[1])
        assignment = state.assignment.clone()
        assignment[known] = assign(
            similarities(self.similarity, state, known, server.layout, self._offset), assignment[known]
        )
        state.assignment = assignment

    def place_newcomer(self, newcomer: NewcomerInterface, state: FederationState) -> int:
        """Returns the cluster as `LowRankCosine.place_newcomer` does, by this clustering's similarity.

        A low-rank similarity needs M. Until M has been fitted, the smallest training loss decides.
        """
        if self.similarity.startswith("low_rank") and state.projection is None:
            return super().place_newcomer(newcomer, state)
        return most_alike(self.similarity, state, *directions(newcomer, state))

    def _refresh(self, server: ServerInterface, state: FederationState, over: Tensor) -> None:
        """Fits M to the models of the clients `over`, and recomputes the codes of all clients that have taken part."""
        num_parameters, fitted = server.layout.num_parameters, spread(over.tolist())
        model_nP = torch.stack([model[:num_parameters] for model in state.stored_models(fitted)])
        state.projection = fit_projection(model_nP, self.dimension, type(self).__name__)
        self._offset = model_nP.mean(dim=0) if self.center else None
        self._fitted = state.round
        codes, known = torch.zeros(state.num_clients, state.projection.shape[1]), state.participated
        models = state.stored_models(torch.nonzero(known).flatten().tolist())
        codes[known] = project_all(models, state.projection, self._offset)
        state.codes = codes
        projection_floats = int(state.active.sum()) * state.projection.numel()
        server.log("comm/client_projection_bytes", FLOAT_BYTES * (projection_floats + codes[known].numel()))
