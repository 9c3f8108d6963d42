"""Local updates in which a client compares the models of all clusters (IFCA, CLoVE).

Legend: K clusters, P + Q length of a model's flat vector.
"""

from dataclasses import dataclass, replace
from math import inf, isnan
from typing import ClassVar

import torch
from torch import Tensor

from lcfl.core.clients import ClientState
from lcfl.core.messages import Downlink
from lcfl.methods.local.training import Engine, LocalData, LocalOutput, LocalTraining, LocalUpdate

__all__ = ["NO_LOSS", "LeastLoss", "LeastLossTraining", "LossVector", "least_loss", "losses_of"]

NO_LOSS = torch.finfo(torch.float32).max  # in place of an infinite loss or NaN, which no server accepts


def losses_of(centre_KP: Tensor, data: LocalData, engine: Engine) -> list[float]:
    """Returns the loss F_i(Omega_k) of each cluster's model over all training samples of the client."""
    return [engine.loss(centre, data.indices) for centre in centre_KP]


def least_loss(centre_KP: Tensor, data: LocalData, engine: Engine) -> tuple[int, float]:
    """Returns j = arg min_k F_i(Omega_k) (IFCA Algorithm 1) and its loss over all training samples of the client.

    In a tie the lowest number wins, because a client remembers nothing of earlier rounds. A model whose loss is NaN
    never wins against a model that has a loss.
    """
    losses = losses_of(centre_KP, data, engine)
    comparable = [inf if isnan(loss) else loss for loss in losses]
    chosen = comparable.index(min(comparable))
    return chosen, losses[chosen]


@dataclass(frozen=True)
class LeastLoss(LocalUpdate):
    """Chooses the model with the least training loss and trains nothing."""

    reads: ClassVar[tuple[str, ...]] = ("centres",)
    provides: ClassVar[tuple[str, ...]] = ("cluster",)

    def __call__(self, state: ClientState, downlink: Downlink, data: LocalData, engine: Engine) -> LocalOutput:
        """Returns Omega_j unchanged, and j in ``extras["cluster"]``."""
        centres = downlink.payload["centres"]
        chosen, loss = least_loss(centres, data, engine)
        return LocalOutput(centres[chosen], state.consumed, loss, extras={"cluster": _number(chosen)})

    def cost(self, num_samples: int, batch_size: int) -> int:
        """Returns `num_samples`. Every sample counts once, whatever K is."""
        return num_samples


@dataclass(frozen=True)
class LossVector(LocalUpdate):
    """Computes the loss of each cluster's model and trains nothing (CLoVE)."""

    reads: ClassVar[tuple[str, ...]] = ("centres",)
    provides: ClassVar[tuple[str, ...]] = ("losses",)

    def __call__(self, state: ClientState, downlink: Downlink, data: LocalData, engine: Engine) -> LocalOutput:
        """Returns (F_i(Omega_1), ..., F_i(Omega_K)) in ``extras["losses"]``, ``[K]``.

        A loss that is NaN or infinite is `NO_LOSS`.
        """
        centres = downlink.payload["centres"]
        losses = torch.tensor(losses_of(centres, data, engine), dtype=torch.float32)
        losses = losses.nan_to_num(nan=NO_LOSS, posinf=NO_LOSS)
        return LocalOutput(centres[0], state.consumed, None, extras={"losses": losses})

    def cost(self, num_samples: int, batch_size: int) -> int:
        """Returns `num_samples`. Every sample counts once, whatever K is."""
        return num_samples


@dataclass(frozen=True)
class LeastLossTraining(LocalTraining):
    """Chooses the model with the least training loss and trains it (IFCA Algorithm 1 with model averaging)."""

    reads: ClassVar[tuple[str, ...]] = ("centres",)
    provides: ClassVar[tuple[str, ...]] = ("cluster",)
    adds: ClassVar[tuple[str, ...]] = ("model",)

    def __call__(self, state: ClientState, downlink: Downlink, data: LocalData, engine: Engine) -> LocalOutput:
        """Chooses j = arg min_k F_i(Omega_k) and trains w <- Omega_j as `LocalTraining`; j in ``extras["cluster"]``."""
        centres = downlink.payload["centres"]
        chosen, _ = least_loss(centres, data, engine)
        trained = super().__call__(state, Downlink({"model": centres[chosen]}), data, engine)
        return replace(trained, extras={"cluster": _number(chosen)})

    def cost(self, num_samples: int, batch_size: int) -> int:
        """Returns the number of samples for the choice and the training."""
        return num_samples + super().cost(num_samples, batch_size)


def _number(cluster: int) -> Tensor:
    return torch.tensor(cluster, dtype=torch.int32)
