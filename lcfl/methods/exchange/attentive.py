"""The exchange of FedAMP, which sends every client a mean of all models that favours models like its own.

Legend: P parameters and Q buffer entries in a model's flat vector, N clients.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import exp
from typing import ClassVar

import torch
from torch import Tensor

from lcfl.core.messages import Downlink
from lcfl.core.state import FederationState
from lcfl.methods.exchange.base import ModelKind, Source
from lcfl.methods.exchange.personal_model import ClusterReference
from lcfl.models.layout import Layout

__all__ = ["AttentiveReference", "attentive_mean"]


def attentive_mean(own: Tensor, others: Iterable[Tensor], step: float, sigma: float, num_parameters: int) -> Tensor:
    """Returns ``u_i = xi_ii w_i + sum_j xi_ij w_j`` (FedAMP, Algorithm 1), with the buffers of w_i.

    xi_ij = alpha A'(|w_i - w_j|^2) with A(x) = 1 - exp(-x / sigma), and xi_ii = 1 - sum_j xi_ij. If the others' weights
    sum to more than 1, they are divided by their sum, so that u_i stays a mean. The sum is taken in float64.

    Args:
        own: w_i, ``[P + Q]``.
        others: w_j, ``[P + Q]`` each.
        step: alpha.
        sigma: sigma.
        num_parameters: P; distances are those of parameters.
    """
    moved, attention = torch.zeros(num_parameters, dtype=torch.float64), 0.0
    for other in others:
        apart = other[:num_parameters] - own[:num_parameters]
        weight = step * exp(-float(apart.square().sum()) / sigma) / sigma
        if weight > 0:
            moved.add_(apart, alpha=weight)
            attention += weight
    mean = own.clone()
    mean[:num_parameters] = own[:num_parameters] + moved / max(1.0, attention)
    return mean


@dataclass(frozen=True)
class AttentiveReference(ClusterReference):
    """Sends the cloud model u_i of a client down and the client's model up: 2P floats (FedAMP, Algorithm 1).

    u_i is computed when it is sent, from the stored models of all clients that have taken part. One pass over them for
    each client of a round takes N P operations and no more memory than a model. The local update, with ``start: own``,
    is pulled to u_i. lambda / alpha is ``model.cluster_weight``.

    Args:
        step: alpha, the length of the step from w_i to u_i.
        sigma: the squared distance over which the attention to another model falls by a factor of e.

    Raises:
        ValueError: for numbers that are not positive.
    """

    uses_stored_models: ClassVar[bool] = True
    source: ClassVar[Source] = "clients"
    models: ClassVar[tuple[ModelKind, ...]] = ("personal", "global", "after_local")
    reported: ClassVar[tuple[ModelKind, ...]] = ("personal",)

    step: float = 0.3
    sigma: float = 0.3

    def __post_init__(self) -> None:
        if not min(self.step, self.sigma) > 0:
            raise ValueError(f"method.exchange: got step={self.step}, sigma={self.sigma}; allowed are numbers above 0.")

    def down(self, state: FederationState, client: int, layout: Layout) -> Downlink:
        """Returns u_i. The model of a client that has never taken part is the initial one."""
        others = [each for each in torch.nonzero(state.participated).flatten().tolist() if each != client]
        (own,) = state.stored_models([client])
        u = attentive_mean(own, state.stored_models(others), self.step, self.sigma, layout.num_parameters)
        return Downlink({"centre": u})

    def evaluation_down(self, state: FederationState, client: int, kind: ModelKind, layout: Layout) -> Downlink:
        """Returns u_i for the personal model of a client that has never taken part."""
        if kind == "personal" and not bool(state.participated[client]):
            return Downlink({"model": self.down(state, client, layout).payload["centre"]})
        return super().evaluation_down(state, client, kind, layout)

    def newcomer_model(self, state: FederationState, client: int, layout: Layout) -> Tensor:
        """Returns the mean of all models, because the u_i of a newcomer would be near the initial model."""
        return state.centre_of(client)
