"""FedAC's online clustering: a projection that is fitted anew every so many rounds (FedAC Algorithms 1 and 2).

Legend: N clients, n of them with a model, K clusters, P parameters, D components.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from lcfl.core.messages import Uplink
from lcfl.core.state import FederationState
from lcfl.core.validation import check_choices
from lcfl.methods.clustering.base import Clustering, NewcomerView, ServerView
from lcfl.methods.clustering.initialisation import balanced_labels, spherical_kmeans
from lcfl.methods.clustering.low_rank_cosine import FLOAT_BYTES, RULE, directions, fitted, recoded
from lcfl.methods.clustering.similarity import assign, cosine, project, project_all

__all__ = ["RefreshedLowRankCosine"]

FEWEST_FITTED = 2  # models that have a principal component; where all others have left there is one
MOST_FITTED = 1000  # models that a projection is fitted to: as many as LCFed's offline phase trains
CLIENTS_AT_A_TIME = 16  # of whole models in memory where the similarity is of whole models


@dataclass
class RefreshedLowRankCosine(Clustering):
    """``R_i = arg max_k cos(M w_i, M Omega_k)`` with M refreshed from the stored models (FedAC Algorithm 1, 10-11).

    Training starts with a random balanced assignment: with the equal centres of a literal start all
    cosines tie and everybody lands in one cluster. Once max(2 K, N / 2) clients, at most N, have taken part, M is
    fitted to their models and, by default, k-means on the directions of their codes gives R (reading A26); from
    then on every round ends with the E-step, against the centres of before the round's aggregation.

    The server projects: it holds w_i. The paper's clients store M and send M w_i themselves; what that
    would add to the traffic, M for everybody at each refresh included, is logged as
    ``comm/client_projection_bytes``.

    Args:
        num_clusters: K at the start.
        dimension: D; fewer with a warning where the models span less.
        refresh_every: rounds from one fit of M to the next.
        center: subtract the mean of the fitted models before projecting (reading A4).
        fit_over: the models that M is fitted to at a refresh: ``stored``, the last received of all clients, or
            ``participants``, this round's (Algorithm 2, UpdateMap; the first fit is always over the stored ones);
            of more than 1,000 clients 1,000, evenly spread over their numbers.
        similarity: what the E-step compares; the paper's ablation (Fig. 3 c, d). ``cosine`` and ``l2`` compare
            whole models.
        init: how the clusters begin: ``kmeans`` as above; ``random``, the first E-step goes on from the random R and
            its centres, as Algorithm 1 reads; ``common``, until M is fitted everybody is in one cluster, which k-means
            then divides into K, and who comes later first trains from the global model. Where local runs start at a
            centre, models tell which centre that was: this keeps R from finding again what was drawn.
    """

    num_clusters: int = 10
    dimension: int = 50
    refresh_every: int = 100
    center: bool = False
    fit_over: Literal["stored", "participants"] = "stored"
    similarity: Literal["low_rank_cosine", "cosine", "low_rank_l2", "l2"] = "low_rank_cosine"
    init: Literal["kmeans", "random", "common"] = "kmeans"

    newcomer_rule: ClassVar[str] = RULE

    def __post_init__(self) -> None:
        for name in ("num_clusters", "dimension", "refresh_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"RefreshedLowRankCosine: got {name}={getattr(self, name)}; it must be at least 1.")
        check_choices("RefreshedLowRankCosine", self)
        self._offset: Tensor | None = None
        self._fitted: int | None = None

    @property
    def uses_stored(self) -> bool:
        """It needs the models of everybody that ever took part."""
        return True

    def check(self, num_clients: int) -> None:
        """K is at most N, and N is at least 2."""
        if num_clients < max(2, self.num_clusters):
            raise ValueError(
                f"method.clustering: RefreshedLowRankCosine got num_clusters={self.num_clusters} for data.num_clients="
                f"{num_clients}; at least 2 clients and one per cluster are needed: lower num_clusters or raise "
                "data.num_clients."
            )

    def on_fit_start(self, server: ServerView, state: FederationState) -> None:
        """A random balanced R and equal centres, or one cluster of all, unless a checkpoint says otherwise."""
        if state.callbacks or state.round > 0:
            return
        self._offset, self._fitted = None, None
        state.assignment = state.assignment.clone()
        number = 1 if self.init == "common" else self.num_clusters
        state.assignment[state.active] = balanced_labels(int(state.active.sum()), number, server.seed)
        state.centres = state.initial.repeat(number, 1)

    def on_round_end(self, server: ServerView, state: FederationState, uploads: Sequence[Uplink]) -> None:
        """M if it is due, codes, then the E-step."""
        known = torch.nonzero(state.participated).flatten()
        if self._fitted is None:
            num_clients = int(state.active.sum())
            wanted = min(max(2 * self.num_clusters, num_clients / 2), num_clients)
            if len(known) < max(wanted, FEWEST_FITTED):
                return
            self._refresh(server, state, known)
            if self.init != "random":
                assert state.codes is not None
                state.assignment = state.assignment.clone()
                if self.init == "common":
                    state.assignment[:] = -1
                    state.centres = state.centres.repeat(self.num_clusters, 1)
                state.assignment[known] = spherical_kmeans(state.codes[known], state.num_clusters, server.seed)
                return
        elif state.round - self._fitted >= self.refresh_every and len(known) >= FEWEST_FITTED:
            over = known
            if self.fit_over == "participants" and len(uploads) >= FEWEST_FITTED:
                over = torch.tensor([upload.client for upload in uploads])
            self._refresh(server, state, over)
        else:
            codes = recoded(state, uploads, self._offset)
            server.log("comm/client_projection_bytes", FLOAT_BYTES * len(uploads) * codes.shape[1])
        assignment = state.assignment.clone()
        assignment[known] = assign(self._similarities(server, state, known), assignment[known])
        state.assignment = assignment

    def place_newcomer(self, newcomer: NewcomerView, state: FederationState) -> int:
        """As LCFed's, by this clustering's similarity; by the smallest training loss while M has not been fitted."""
        if not self.similarity.startswith("low_rank"):
            return int(_alike(self.similarity, *directions(newcomer, state)).argmax())
        if state.projection is None:
            return super().place_newcomer(newcomer, state)
        own_1P, centre_KP = directions(newcomer, state)
        codes = (project(each, state.projection) for each in (own_1P, centre_KP))
        return int(_alike(self.similarity, *codes).argmax())

    def state_dict(self) -> dict[str, Any]:
        """The mean that `center` subtracts, and the round in which M was fitted."""
        return {"offset": self._offset, "fitted": self._fitted}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Puts back the mean that `center` subtracts, and the round in which M was fitted."""
        self._offset, self._fitted = state["offset"], state["fitted"]

    def _refresh(self, server: ServerView, state: FederationState, over: Tensor) -> None:
        """M from the models of the clients `over`, and the codes of all that have taken part."""
        num_parameters, over = server.layout.num_parameters, _spread(over)
        model_nP = torch.stack([state.model_of(client)[:num_parameters] for client in over.tolist()])
        state.projection = fitted(model_nP, self.dimension, type(self).__name__)
        self._offset = model_nP.mean(dim=0) if self.center else None
        self._fitted = state.round
        codes, known = torch.zeros(state.num_clients, state.projection.shape[1]), state.participated
        models = (state.model_of(client) for client in torch.nonzero(known).flatten().tolist())
        codes[known] = project_all(models, state.projection, self._offset)
        state.codes = codes
        everybody_stores_it = int(state.active.sum()) * state.projection.numel()
        server.log("comm/client_projection_bytes", FLOAT_BYTES * (everybody_stores_it + codes.numel()))

    def _similarities(self, server: ServerView, state: FederationState, known: Tensor) -> Tensor:
        """Of the clients `known` to the centres, ``[n, K]``; larger is more alike."""
        centre_KP = state.centres[:, : server.layout.num_parameters]
        if self.similarity.startswith("low_rank"):
            assert state.codes is not None and state.projection is not None
            centre_KD = project(centre_KP, state.projection, self._offset)
            return _alike(self.similarity, state.codes[known], centre_KD)
        rows = []
        for part in known.split(CLIENTS_AT_A_TIME):
            model_nP = torch.stack([state.model_of(client)[: centre_KP.shape[1]] for client in part.tolist()])
            rows.append(_alike(self.similarity, model_nP, centre_KP))
        return torch.cat(rows)


def _spread(clients: Tensor) -> Tensor:
    """At most `MOST_FITTED` of them, evenly spread."""
    if len(clients) <= MOST_FITTED:
        return clients
    return clients[torch.linspace(0, len(clients) - 1, MOST_FITTED).round().long()]


def _alike(similarity: str, row_nD: Tensor, centre_KD: Tensor) -> Tensor:
    return cosine(row_nD, centre_KD) if similarity.endswith("cosine") else -torch.cdist(row_nD, centre_KD)
