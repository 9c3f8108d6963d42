"""Online clustering by the cosine of low-rank models (LCFed sections III-A and III-B).

Legend: N clients, K clusters, P trained parameters, D components.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from lcfl.core.clients import ClientState
from lcfl.core.messages import Downlink, Uplink
from lcfl.core.schema import Array, Forms
from lcfl.core.state import FederationState
from lcfl.methods.aggregation import mean_model
from lcfl.methods.clustering.base import (
    NOTHING_USABLE,
    Clustering,
    ExtraRound,
    NewcomerInterface,
    ServerInterface,
    check_num_clusters,
)
from lcfl.methods.clustering.initialisation import balanced_labels, spherical_kmeans
from lcfl.methods.clustering.similarity import assign, cosine, principal_components, project, project_all
from lcfl.methods.exchange import FullModel
from lcfl.methods.local.training import LocalTraining, LocalUpdate
from lcfl.models.layout import Layout

__all__ = ["LowRankCosine", "Similarity", "directions", "fit_projection", "most_alike", "similarities", "update_codes"]

FLOAT_BYTES = 4
CLIENTS_AT_A_TIME = 16  # whole models in memory at once if the similarity compares whole models
RULE = "the cluster whose direction from the global model is closest to the newcomer's after a short training run"

Similarity = Literal["low_rank_cosine", "cosine", "low_rank_l2", "l2"]


@dataclass
class LowRankCosine(Clustering):
    """Sets ``R_i = arg max_k cos(M^T w_i, M^T Omega_k)`` at the end of every round (LCFed Eq. 3 and 4).

    Before the first round a subset S_d of the clients trains once from the initial model, without pulls. M is fitted to
    the uploaded models and stays fixed (Algorithm 1, line 2). k-means on the directions of these first codes gives R
    and Omega. A literal start with equal centres would make all cosines tie and put all clients in one cluster
    (reading A26).

    The server computes the projection, because it holds w_i. In the paper the clients store M and send M^T w_i
    themselves. The traffic that this would add to the round is logged as ``comm/client_projection_bytes``.

    As in the paper, models are compared with Omega from before the round's aggregation. Clients that never took part
    keep their cluster. The others are assigned anew in every round, because the centres move.

    Args:
        num_clusters: K.
        dimension: D; reduced with a warning if the models span fewer components.
        center: whether to subtract the mean of the fitted models before projecting. False is the paper's formula,
            True is what a library's PCA does (reading A4).
        offline_clients: |S_d|; all clients if there are fewer.
        offline_steps: mini-batches of the offline run; None for one ordinary local run.
        keep_offline_models: whether the offline models become the clients' first personal models. By default they are
            discarded, so that LCFed with mu = lambda = 0 equals Local.
        similarity: what the E-step compares. ``low_rank_cosine`` is the paper's Eq. 4. ``cosine`` and ``l2`` compare
            whole models, as CGPFL and FeSEM do in section IV-C; M then only gives the first R.
        init: ``kmeans`` as described above; ``random`` for a balanced random R with centres from the offline models.
    """

    num_clusters: int = 10
    dimension: int = 50
    center: bool = False
    offline_clients: int = 1000
    offline_steps: int | None = None
    keep_offline_models: bool = False
    similarity: Similarity = "low_rank_cosine"
    init: Literal["kmeans", "random"] = "kmeans"

    newcomer_rule: ClassVar[str] = RULE
    remembers: ClassVar[Forms] = {"offset": (Array(("P",)), None)}

    def __post_init__(self) -> None:
        for name in ("num_clusters", "dimension", "offline_clients"):
            if getattr(self, name) < 1:
                raise ValueError(f"LowRankCosine: got {name}={getattr(self, name)}; it must be at least 1.")
        if self.offline_clients < 2:
            raise ValueError("LowRankCosine: got offline_clients=1; principal components need at least 2 models.")
        if self.offline_steps is not None and self.offline_steps < 1:
            raise ValueError(f"LowRankCosine: got offline_steps={self.offline_steps}; it must be at least 1, or null.")
        self.forget()

    def forget(self) -> None:
        """Forgets the last run."""
        self._offset: Tensor | None = None

    @property
    def hands_out_uploads(self) -> bool:
        """Whether `keep_offline_models` is set."""
        return self.keep_offline_models

    @property
    def uses_stored_models(self) -> bool:
        """Whether it compares whole models, or gives clients the offline ones to keep."""
        return self.keep_offline_models or not self.similarity.startswith("low_rank")

    def check(self, num_clients: int) -> None:
        """Checks that K is at most N and that N is at least 2."""
        if num_clients < 2:
            raise ValueError(
                f"method.clustering: LowRankCosine got data.num_clients={num_clients}; principal components need the "
                "models of at least 2 clients. Raise data.num_clients or use a method without this clustering."
            )
        check_num_clusters(self, self.num_clusters, num_clients)

    def warmup_rounds(self, num_clients: int) -> list[ExtraRound]:
        """Returns the offline phase, whose clients S_d are spread evenly over the client numbers."""
        chosen = np.linspace(0, num_clients - 1, min(num_clients, self.offline_clients)).round().astype(int)
        return [ExtraRound(chosen.tolist(), self._offline_work())]

    def on_extra_round_end(self, server: ServerInterface, state: FederationState, uploads: Sequence[Uplink]) -> None:
        """Fits M to the offline models and sets the first codes, R and Omega."""
        if len(uploads) < 2:
            raise ValueError(
                f"LowRankCosine: got {len(uploads)} usable offline models; principal components need at least 2; "
                f"{NOTHING_USABLE}"
            )
        clients = [upload.client for upload in uploads]
        models = [upload.payload["model"] for upload in uploads]
        model_nP = torch.stack(models)[:, : server.layout.num_parameters]
        state.projection = fit_projection(model_nP, self.dimension, "LowRankCosine")
        self._offset = model_nP.mean(dim=0) if self.center else None
        code_nD = project(model_nP, state.projection, self._offset)
        state.codes = torch.zeros(state.num_clients, code_nD.shape[1])
        state.codes[clients] = code_nD

        state.assignment = state.assignment.clone()
        state.assignment[state.active] = balanced_labels(int(state.active.sum()), self.num_clusters, server.seed)
        if self.init == "kmeans":
            state.assignment[clients] = spherical_kmeans(code_nD, self.num_clusters, server.seed)
        centres = state.initial.repeat(self.num_clusters, 1)
        for cluster in range(self.num_clusters):
            members = [
                model for client, model in zip(clients, models, strict=True) if state.assignment[client] == cluster
            ]
            if members:
                centres[cluster] = mean_model(members, [1] * len(members), server.layout)
        state.centres = centres
        projection_floats = int(state.active.sum()) * state.projection.numel()
        server.log("comm/client_projection_bytes", FLOAT_BYTES * (projection_floats + code_nD.numel()))
        if self.keep_offline_models:
            state.clients.update({client: ClientState(model) for client, model in zip(clients, models, strict=True)})
            state.participated[clients] = True

    def on_round_end(self, server: ServerInterface, state: FederationState, uploads: Sequence[Uplink]) -> None:
        """Computes new codes of this round's clients, then runs the E-step over all clients that ever took part."""
        assert state.projection is not None and state.codes is not None
        codes = update_codes(state, uploads, self._offset)
        server.log("comm/client_projection_bytes", FLOAT_BYTES * len(uploads) * codes.shape[1])
        known = torch.nonzero(state.participated).flatten()
        similarity_nK = similarities(self.similarity, state, known, server.layout, self._offset)
        assignment = state.assignment.clone()
        assignment[known] = assign(similarity_nK, assignment[known])
        state.assignment = assignment

    def place_newcomer(self, newcomer: NewcomerInterface, state: FederationState) -> int:
        """Returns ``arg max_k cos(M^T (w - G), M^T (Omega_k - G))``, w trained briefly from the global model G.

        Eq. 4 compares a member's model, trained for many rounds, with the centres as they are. A newcomer's model has
        only begun to train. Seen from its starting point, its direction already tells the clusters apart, but its
        position does not. Another `similarity` compares the same directions.
        """
        return most_alike(self.similarity, state, *directions(newcomer, state, self._offline_work()))

    def _offline_work(self) -> LocalTraining | None:
        return None if self.offline_steps is None else LocalTraining(steps=self.offline_steps)


def directions(
    newcomer: NewcomerInterface, state: FederationState, local_update: LocalUpdate | None = None
) -> tuple[Tensor, Tensor]:
    """Returns the directions of a newcomer's short run ``[1, P]`` and of the centres ``[K, P]`` from the global model.

    This sends P floats down and P up.
    """
    uplink = newcomer.run(Downlink({"model": state.global_model}), FullModel(), local_update)
    models = torch.cat([uplink.payload["model"].unsqueeze(0), state.centres]) - state.global_model
    models = models[:, : newcomer.layout.num_parameters]
    return models[:1], models[1:]


def similarities(
    similarity: Similarity, state: FederationState, clients: Tensor, layout: Layout, offset_P: Tensor | None
) -> Tensor:
    """Returns the similarity ``[n, K]`` of the last models of n clients to the centres; larger is more alike.

    Args:
        similarity: what is compared; the low-rank ones need the state's codes and M.
        state: the state.
        clients: the numbers of the clients.
        layout: the layout of the models, whose buffers do not count.
        offset_P: what is subtracted before a projection.
    """
    centre_KP = state.centres[:, : layout.num_parameters]
    if similarity.startswith("low_rank"):
        assert state.codes is not None and state.projection is not None
        return _alike(similarity, state.codes[clients], project(centre_KP, state.projection, offset_P))
    rows = [torch.zeros(0, len(centre_KP))]
    for part in clients.split(CLIENTS_AT_A_TIME) if len(clients) else ():
        model_nP = torch.stack([model[: layout.num_parameters] for model in state.stored_models(part.tolist())])
        rows.append(_alike(similarity, model_nP, centre_KP))
    return torch.cat(rows)


def most_alike(similarity: Similarity, state: FederationState, own_1P: Tensor, centre_KP: Tensor) -> int:
    """Returns the centre that is most alike to a newcomer's direction; both are projected for a low-rank similarity."""
    if similarity.startswith("low_rank"):
        assert state.projection is not None
        own_1P, centre_KP = project(own_1P, state.projection), project(centre_KP, state.projection)
    return int(_alike(similarity, own_1P, centre_KP).argmax())


def _alike(similarity: Similarity, row_nD: Tensor, centre_KD: Tensor) -> Tensor:
    if similarity.endswith("cosine"):
        return cosine(row_nD, centre_KD)
    return -torch.cdist(row_nD, centre_KD, compute_mode="donot_use_mm_for_euclid_dist")  # differences, which are exact


def update_codes(state: FederationState, uploads: Sequence[Uplink], offset_P: Tensor | None) -> Tensor:
    """Replaces the codes of the clients that just uploaded, and returns the state's codes ``[N, D]``.

    The codes of all other clients stay.
    """
    assert state.projection is not None and state.codes is not None
    new_nD = project_all((upload.payload["model"] for upload in uploads), state.projection, offset_P)
    state.codes = state.codes.clone()
    state.codes[[upload.client for upload in uploads]] = new_nD
    return state.codes


def fit_projection(model_nP: Tensor, dimension: int, owner: str) -> Tensor:
    """Returns M ``[P, D]`` of `principal_components`; warns in the name of `owner` if the models span fewer than D."""
    basis_PD = principal_components(model_nP, dimension)
    if basis_PD.shape[1] < dimension:
        warnings.warn(
            f"{owner}: dimension={dimension}, but {len(model_nP)} models span only {basis_PD.shape[1]} components; "
            f"using {basis_PD.shape[1]}. More models would give more components.",
            stacklevel=3,
        )
    return basis_PD
