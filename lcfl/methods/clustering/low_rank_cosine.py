"""Online clustering by the cosine of low-rank models: LCFed sections III-A and III-B.

Legend: N clients, K clusters, P parameters, D components.
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
from lcfl.core.state import FederationState
from lcfl.core.validation import check_choices
from lcfl.methods.aggregation import mean_model
from lcfl.methods.clustering.base import Clustering, ExtraRound, NewcomerView, ServerView, check_num_clusters
from lcfl.methods.clustering.initialisation import balanced_labels, spherical_kmeans
from lcfl.methods.clustering.similarity import assign, cosine, principal_components, project, project_all
from lcfl.methods.exchange import FullModel
from lcfl.methods.local.training import LocalTraining, LocalUpdate

__all__ = ["LowRankCosine", "directions", "fitted", "recoded"]

FLOAT_BYTES = 4
RULE = "the cluster that lies, seen from the global model, in the direction of a newcomer's short run from there"


@dataclass
class LowRankCosine(Clustering):
    """``R_i = arg max_k cos(M^T w_i, M^T Omega_k)`` at the end of every round (LCFed Eq. 3 and 4).

    Before the first round a subset S_d of the clients trains once from the initial model, without
    pulls; M is fitted to what comes up and stays (Algorithm 1, line 2). k-means on the directions of
    these first codes gives R and Omega: with the equal centres of a literal start all cosines tie and
    everybody lands in one cluster (reading A26).

    The server projects: it holds w_i. The paper's clients store M and send M^T w_i themselves; what
    that would add to the round's traffic is logged as ``comm/client_projection_bytes``.

    The paper compares with Omega of before the round's aggregation, and so does this. Clients that
    never took part keep their cluster; the others are assigned anew every round, as their centres move.

    Args:
        num_clusters: K.
        dimension: D; fewer with a warning where the models span less.
        center: subtract the mean of the fitted models before projecting. False is the paper's formula,
            True what a library's PCA does (reading A4).
        offline_clients: |S_d|; all clients if there are fewer.
        offline_steps: mini-batches of the offline run; None for one ordinary local run.
        keep_offline_models: let the offline models be the clients' first own models; by default they are
            forgotten, which keeps LCFed with mu = lambda = 0 equal to Local.
        init: ``kmeans`` as above; ``random``: a balanced random R, centres from the offline models.
    """

    num_clusters: int = 10
    dimension: int = 50
    center: bool = False
    offline_clients: int = 1000
    offline_steps: int | None = None
    keep_offline_models: bool = False
    init: Literal["kmeans", "random"] = "kmeans"

    newcomer_rule: ClassVar[str] = RULE

    def __post_init__(self) -> None:
        for name in ("num_clusters", "dimension", "offline_clients"):
            if getattr(self, name) < 1:
                raise ValueError(f"LowRankCosine: got {name}={getattr(self, name)}; it must be at least 1.")
        if self.offline_clients < 2:
            raise ValueError("LowRankCosine: got offline_clients=1; principal components need at least 2 models.")
        if self.offline_steps is not None and self.offline_steps < 1:
            raise ValueError(f"LowRankCosine: got offline_steps={self.offline_steps}; it must be at least 1, or null.")
        check_choices("LowRankCosine", self)
        self._offset: Tensor | None = None

    def check(self, num_clients: int) -> None:
        """K is at most N, and N is at least 2."""
        if num_clients < 2:
            raise ValueError(
                f"method.clustering: LowRankCosine got data.num_clients={num_clients}; principal components need the "
                "models of at least 2 clients: raise data.num_clients or use a method without this clustering."
            )
        check_num_clusters(self, self.num_clusters, num_clients)

    def warmup_rounds(self, num_clients: int) -> list[ExtraRound]:
        """The offline phase: S_d is spread evenly over the client numbers."""
        chosen = np.linspace(0, num_clients - 1, min(num_clients, self.offline_clients)).round().astype(int)
        return [ExtraRound(chosen.tolist(), self._offline_work())]

    def on_extra_round_end(self, server: ServerView, state: FederationState, uploads: Sequence[Uplink]) -> None:
        """Fits M to the offline models; the first codes, R and Omega."""
        if len(uploads) < 2:
            raise ValueError(
                f"LowRankCosine: {len(uploads)} of the offline models came up finite; principal components need "
                "at least 2. Lower the optimizer's learning rate."
            )
        clients = [upload.client for upload in uploads]
        models = [upload.payload["model"] for upload in uploads]
        model_nP = torch.stack(models)[:, : server.layout.num_parameters]
        state.projection = fitted(model_nP, self.dimension, "LowRankCosine")
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
        everybody_stores_it = int(state.active.sum()) * state.projection.numel()
        server.log("comm/client_projection_bytes", FLOAT_BYTES * (everybody_stores_it + code_nD.numel()))
        if self.keep_offline_models:
            state.clients.update({client: ClientState(model) for client, model in zip(clients, models, strict=True)})
            state.participated[clients] = True

    def on_round_end(self, server: ServerView, state: FederationState, uploads: Sequence[Uplink]) -> None:
        """New codes of this round's clients, then the E-step over all that ever took part."""
        assert state.projection is not None and state.codes is not None
        codes = recoded(state, uploads, self._offset)
        server.log("comm/client_projection_bytes", FLOAT_BYTES * len(uploads) * codes.shape[1])
        centre_KD = project(state.centres[:, : server.layout.num_parameters], state.projection, self._offset)
        known = state.participated
        assignment = state.assignment.clone()
        assignment[known] = assign(cosine(codes[known], centre_KD), assignment[known])
        state.assignment = assignment

    def place_newcomer(self, newcomer: NewcomerView, state: FederationState) -> int:
        """``arg max_k cos(M^T (w - G), M^T (Omega_k - G))`` with w trained briefly from the global model G.

        Eq. 4 compares a member's model, trained for many rounds, with the centres as they are. A newcomer's has only
        begun: as seen from where it began, its direction already tells the clusters apart, its position does not.
        """
        assert state.projection is not None
        own_1P, centre_KP = directions(newcomer, state, self._offline_work())
        return int(cosine(project(own_1P, state.projection), project(centre_KP, state.projection)).argmax())

    def state_dict(self) -> dict[str, Tensor | None]:
        """The mean that `center` subtracts."""
        return {"offset": self._offset}

    def load_state_dict(self, state: dict[str, Tensor | None]) -> None:
        """Puts back the mean that `center` subtracts."""
        self._offset = state["offset"]

    def _offline_work(self) -> LocalTraining | None:
        return None if self.offline_steps is None else LocalTraining(steps=self.offline_steps)


def directions(
    newcomer: NewcomerView, state: FederationState, local_update: LocalUpdate | None = None
) -> tuple[Tensor, Tensor]:
    """Of a newcomer's short run ``[1, P]`` and of the centres ``[K, P]``, both from the global model: P down, P up."""
    uplink = newcomer.run(Downlink({"model": state.global_model}), FullModel(), local_update)
    models = torch.cat([uplink.payload["model"].unsqueeze(0), state.centres]) - state.global_model
    models = models[:, : newcomer.layout.num_parameters]
    return models[:1], models[1:]


def recoded(state: FederationState, uploads: Sequence[Uplink], offset_P: Tensor | None) -> Tensor:
    """The state's codes ``[N, D]`` with new ones of the models that were just sent; those of before stay."""
    assert state.projection is not None and state.codes is not None
    new_nD = project_all((upload.payload["model"] for upload in uploads), state.projection, offset_P)
    state.codes = state.codes.clone()
    state.codes[[upload.client for upload in uploads]] = new_nD
    return state.codes


def fitted(model_nP: Tensor, dimension: int, owner: str) -> Tensor:
    """M ``[P, D]``: `principal_components`, with a warning in the name of `owner` where the models span fewer."""
    basis_PD = principal_components(model_nP, dimension)
    if basis_PD.shape[1] < dimension:
        warnings.warn(
            f"{owner}: dimension={dimension}, but {len(model_nP)} models span only {basis_PD.shape[1]} components; "
            f"going on with {basis_PD.shape[1]}. More models would give more.",
            stacklevel=3,
        )
    return basis_PD
