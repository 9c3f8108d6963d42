"""Clusters that the clients choose themselves (the server's side of IFCA).

Legend: N clients, K clusters, P + Q the length of a model's flat vector.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from lcfl.core.messages import Uplink
from lcfl.core.schema import Forms, Number
from lcfl.core.state import FederationState
from lcfl.methods.clustering.base import Clustering, ExtraRound, ServerInterface, check_num_clusters
from lcfl.methods.clustering.initialisation import first_is_repeated
from lcfl.methods.exchange import ClusterChoice, Exchange
from lcfl.methods.local.least_loss import LeastLoss
from lcfl.methods.local.training import LocalUpdate

__all__ = ["ChoiceBeforeTraining", "ClientChoice"]

MOST_REDRAWS = 1000  # with more, round 0 would not begin


@dataclass
class ClientChoice(Clustering):
    """Sets R_i to what client i chose: ``arg min_k F_i(Omega_k)`` by its training loss (IFCA Algorithm 1).

    Training begins with K different random models. The first one is the model that all other methods begin with. A
    client that has never chosen has no cluster.

    If one random model is the best for nearly all clients, it alone is trained and stays the best. Therefore all
    clients choose once before round 0, without training. While a model is chosen by fewer than `min_share` of N / K
    clients, K other models are drawn and tried, at most `max_redraws` times. If all draws fail, the draw whose least
    chosen model was chosen most often is used. Each of these extra rounds sends K P floats down per client, which are
    counted in round 0.

    Args:
        num_clusters: K.
        max_redraws: the largest number of redraws; 0 for no such extra round at all.
        min_share: the part of an equal share of the clients, N / K, that must choose each model, from 0 to 1.
    """

    reads: ClassVar[tuple[str, ...]] = ("cluster",)
    has_extra_rounds: ClassVar[bool] = True
    sets_clusters: ClassVar[bool] = True
    remembers: ClassVar[Forms] = {"draw": Number(int, 0), "least": [int], "is_settled": bool}

    num_clusters: int = 4
    max_redraws: int = 10
    min_share: float = 0.4

    def __post_init__(self) -> None:
        if self.num_clusters < 1 or not 0 <= self.max_redraws <= MOST_REDRAWS or not 0 <= self.min_share <= 1:
            raise ValueError(
                f"ClientChoice: got num_clusters={self.num_clusters}, max_redraws={self.max_redraws}, min_share="
                f"{self.min_share}; num_clusters must be at least 1, max_redraws from 0 to {MOST_REDRAWS}, and "
                "min_share from 0 to 1."
            )
        self.forget()

    def forget(self) -> None:
        """Forgets the last run."""
        self._draw = 0  # the draw that the centres come from, for readers of a checkpoint
        self._least: list[int] = []  # for each tried draw, how often its least chosen model was chosen
        self._is_settled = self.max_redraws == 0 or self.num_clusters == 1

    def check(self, num_clients: int) -> None:
        """Checks that K is at most N."""
        check_num_clusters(self, self.num_clusters, num_clients)

    def on_fit_start(self, server: ServerInterface, state: FederationState) -> None:
        """Sets K random models as centres and leaves all clients without a cluster, unless a checkpoint is resumed."""
        if state.callbacks or state.round > 0:
            return
        state.assignment = torch.full((state.num_clients,), -1)
        self._use(0, server, state)
        if first_is_repeated(state.centres):
            raise ValueError(
                "ClientChoice: the initial models are equal, so every client would always choose the first one. IFCA "
                "needs models that are drawn at random: remove model.init_from, or name the head in model.init_except."
            )

    @property
    def extra_parts(self) -> list[tuple[LocalUpdate, Exchange | None]]:
        """The choice among the models of a draw."""
        return [(LeastLoss(), ClusterChoice())]

    def extra_round(self, state: FederationState, sampled: Sequence[int]) -> ExtraRound | None:
        """Lets all clients choose among the models of a draw, until a draw is good enough or all have been tried."""
        if self._is_settled:
            return None
        return ExtraRound(torch.nonzero(state.active).flatten().tolist(), LeastLoss(), ClusterChoice())

    def on_extra_round_end(self, server: ServerInterface, state: FederationState, uploads: Sequence[Uplink]) -> None:
        """Keeps the current draw, takes the next one, or returns to the best of all."""
        if self._is_settled or state.round < 0:
            return
        chosen = torch.tensor([int(upload.payload["cluster"]) for upload in uploads], dtype=torch.int64)
        self._least.append(int(chosen.bincount(minlength=self.num_clusters).min()))
        if len(chosen) and self._least[-1] >= self.min_share * len(chosen) / self.num_clusters:
            self._is_settled = True
        elif len(self._least) <= self.max_redraws:
            self._use(len(self._least), server, state)
        else:
            self._is_settled = True
            best = self._least.index(max(self._least))
            self._use(best, server, state)
            warnings.warn(
                f"ClientChoice: after {self.max_redraws} redraws, no draw of {self.num_clusters} initial models had "
                f"each model chosen by at least {self.min_share} of an equal share of the clients. Using draw {best}, "
                f"whose least chosen model was chosen by {self._least[best]} of {len(chosen)}. Try fewer clusters.",
                stacklevel=2,
            )
        server.log("cluster/redraws", len(self._least) - 1)

    def on_round_end(self, server: ServerInterface, state: FederationState, uploads: Sequence[Uplink]) -> None:
        """Sets R_i of this round's clients to their choices."""
        state.assignment = state.assignment.clone()
        for upload in uploads:
            state.assignment[upload.client] = int(upload.payload["cluster"])

    def _use(self, draw: int, server: ServerInterface, state: FederationState) -> None:
        self._draw = draw
        numbers = range(draw * self.num_clusters, (draw + 1) * self.num_clusters)
        state.centres = torch.stack([server.initial_model(number) for number in numbers])


@dataclass
class ChoiceBeforeTraining(ClientChoice):
    """Lets this round's clients choose in a round of its own, before they train (IFCA with any local update).

    `ClientChoice` needs an exchange that sends all models to train, and a local update that chooses one of them. Here
    both may be those of another method: the chosen model is what `ClusterModel`, for example, sends. With that and
    `LocalTraining`, the models are those of IFCA. The extra round sends K P floats down and a number up per client, and
    the model to train is sent once more.

    The arguments are those of `ClientChoice`.
    """

    reads: ClassVar[tuple[str, ...]] = ()

    def forget(self) -> None:
        """Forgets the last run."""
        super().forget()
        self._asked = -1  # the last round for which choices were requested

    def extra_round(self, state: FederationState, sampled: Sequence[int]) -> ExtraRound | None:
        """Requests the choices of this round's clients, once the models are drawn."""
        if not self._is_settled:
            return super().extra_round(state, sampled)
        if self._asked == state.round:
            return None
        self._asked = state.round
        return ExtraRound(list(sampled), LeastLoss(), ClusterChoice())

    def on_extra_round_end(self, server: ServerInterface, state: FederationState, uploads: Sequence[Uplink]) -> None:
        """Sets R_i of this round's clients to their choices, once the models are drawn."""
        if self._asked == state.round:
            choices = [upload for upload in uploads if "cluster" in upload.payload]
            super().on_round_end(server, state, choices)
        else:
            super().on_extra_round_end(server, state, uploads)

    def on_round_end(self, server: ServerInterface, state: FederationState, uploads: Sequence[Uplink]) -> None:
        """Leaves the clusters as they are."""
