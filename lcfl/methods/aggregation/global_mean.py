"""Aggregations into one model for all clients.

Legend: P parameters and Q buffer entries in a model's flat vector, K clusters.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lcfl.core.messages import Uplink
from lcfl.core.schema import Array, Forms
from lcfl.core.state import FederationState
from lcfl.methods.aggregation.base import Aggregation, Merge, Weights, mean_model
from lcfl.models.layout import Layout

__all__ = ["GlobalMean", "NormalisedMean", "normalised_step"]


@dataclass(frozen=True)
class GlobalMean(Merge):
    """Takes FedAvg's mean: ``w <- sum_i n_i w_i / sum_i n_i`` over this round's uploads.

    Args:
        weights: ``samples`` weighs a client by n_i. ``uniform`` gives every client the same weight.
        rule: how models are merged, for example `TrimmedMean`; None for the weighted mean.
        optimizer: the optimizer of the server, for example `ServerAdam`; None to take the merged model as it is.

    Raises:
        ValueError: for an unknown word.
    """

    keeps_centres: ClassVar[bool] = False
    weights: Weights = "samples"

    def __call__(self, state: FederationState, uploads: Sequence[Uplink], layout: Layout) -> None:
        """Replaces the global model."""
        weights = [upload.num_samples if self.weights == "samples" else 1 for upload in uploads]
        models = [upload.payload["model"] for upload in uploads]
        merged = self.merged(models, weights, state.global_model, layout)
        state.centres = self.stepped(state, merged.unsqueeze(0), {0: uploads}, layout)
        state.global_model = state.centres[0]


def normalised_step(
    model: Tensor, models: Sequence[Tensor], samples: Sequence[int], normalisers: Sequence[Tensor]
) -> Tensor:
    """Returns FedNova's step (Eq. 7), ``tau_eff sum_i p_i d_i`` in float64, which is subtracted from the global model.

    Here p_i = n_i / sum_j n_j, d_i = (w - w_i) / a_i, and tau_eff = sum_i p_i t_i. If all a_i = t_i are equal, this is
    FedAvg's step.

    Args:
        model: w, ``[P]``.
        models: w_i, ``[P]`` each.
        samples: n_i.
        normalisers: (a_i, t_i), or (a_i) for t_i = a_i; a_i > 0.
    """
    share = torch.tensor(samples, dtype=torch.float64)
    share /= share.sum()
    effective = sum(weight * float(numbers[-1]) for weight, numbers in zip(share.tolist(), normalisers, strict=True))
    step = torch.zeros(len(model), dtype=torch.float64)
    for weight, numbers, local_model in zip(share.tolist(), normalisers, models, strict=True):
        step.add_(model.double() - local_model.double(), alpha=weight * effective / float(numbers[0]))
    return step


@dataclass(frozen=True)
class NormalisedMean(Aggregation):
    """Divides every client's change of the model by its own a_i before it averages the changes (FedNova).

    v <- gamma v + tau_eff sum_i p_i d_i; w <- w - v. Buffers take FedAvg's mean. A client that took no step is left
    out.

    Args:
        momentum: gamma of the server (``gmf`` in the authors' code). With 0, nothing is remembered.

    Raises:
        ValueError: for a momentum outside [0, 1).
    """

    reads: ClassVar[tuple[str, ...]] = ("model", "normaliser")
    keeps_centres: ClassVar[bool] = False
    remembers: ClassVar[Forms] = {"velocity": Array(("P",))}
    momentum: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise ValueError(
                f"method.aggregation: got momentum={self.momentum}; allowed are numbers from 0 to below 1."
            )

    def __call__(self, state: FederationState, uploads: Sequence[Uplink], layout: Layout) -> None:
        """Replaces the global model, and v if there is momentum."""
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
            if "velocity" in state.aggregation:
                step += self.momentum * state.aggregation["velocity"].double()
            state.aggregation["velocity"] = step.float()
        state.global_model = mean_model(models, samples, layout)
        state.global_model[:end] = (before.double() - step).float()
        state.centres = state.global_model.unsqueeze(0)
