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
    """Takes the mean of updates: ``w_k <- base_k + sum_i (n_i / N_k) Delta_i`` (AS-CFL section 3.4).

    The sum is over this round's members of cluster k. base_k is the mean, with the same weights, of the models that
    these members were sent. The paper's w_k^t has no meaning for a cluster that was formed in this round. If the
    members have not changed, base_k is w_k^t (reading A12). The noise of Algorithm 1, line 31 is an upload transform,
    `lcfl.GaussianNoise`, before the upload or before this aggregation. A cluster without any upload keeps its model.
    The global model is the same mean over all uploads.
    """

    reads: ClassVar[tuple[str, ...]] = ("update",)

    def __call__(self, state: FederationState, uploads: Sequence[Uplink], layout: Layout) -> None:
        """Replaces the cluster models and the global model."""
        centres = state.centres.clone()
        for cluster in range(state.num_clusters):
            members = [upload for upload in uploads if int(state.assignment[upload.client]) == cluster]
            if members:
                centres[cluster] = updated_model(members, layout)
        state.centres = centres
        state.global_model = updated_model(uploads, layout)


def updated_model(uploads: Sequence[Uplink], layout: Layout) -> Tensor:
    """Returns sum_i (n_i / N) (start_i + Delta_i) ``[P + Q]``, summed in float64.

    start_i is the model that client i was sent. Integer buffers take their maximum.
    """
    share = torch.tensor([upload.num_samples for upload in uploads], dtype=torch.float64)
    share /= share.sum()
    total = torch.zeros(layout.size, dtype=torch.float64)
    models = []
    for upload in uploads:
        assert upload.answers is not None, "the server attaches the downlink that an upload answers"
        models.append((upload.answers.payload["model"], upload.payload["update"]))
    add_models(total, [part for pair in models for part in pair], share.repeat_interleave(2).tolist())
    mean = total.to(torch.float32)
    for entries in layout.integer_slices():
        mean[entries] = torch.stack([start[entries] + update[entries] for start, update in models]).amax(dim=0)
    return mean
