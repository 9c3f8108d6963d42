"""The mean of updates inside every cluster (AS-CFL).

Legend: P parameters and Q buffer entries in a model's flat vector, K clusters.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lcfl.core.messages import Uplink
from lcfl.core.model_sums import add_models
from lcfl.core.state import FederationState
from lcfl.methods.aggregation.base import Aggregation
from lcfl.models.layout import Layout

__all__ = ["UpdateMean", "updated_model"]


@dataclass(frozen=True)
class UpdateMean(Aggregation):
    """``w_k <- base_k + sum_i (n_i / N_k) Delta_i`` over this round's members of cluster k (AS-CFL section 3.4).

    base_k is the same mean of the models that these members were sent: the paper's w_k^t has no meaning for a
    cluster that was made in this round, and where the membership has not changed base_k is w_k^t (reading A12).
    The noise of Algorithm 1, line 31 is a transform of uploads, `lcfl.GaussianNoise`. A cluster without any
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
