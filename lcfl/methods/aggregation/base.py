"""The base class of aggregations, and the mean that most aggregations use.

Legend: P parameters and Q buffer entries in a model's flat vector, K clusters.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import ClassVar, Literal

import torch
from torch import Tensor

from lcfl.core.messages import Uplink
from lcfl.core.model_sums import add_models
from lcfl.core.schema import Array, Forms
from lcfl.core.state import FederationState
from lcfl.core.validation import CheckedFields
from lcfl.methods.aggregation.rules import AggregationRule
from lcfl.methods.aggregation.server_optimizers import MEMORIES, ServerOptimizer
from lcfl.models.layout import Layout

__all__ = ["Aggregation", "Merge", "NoAggregation", "Weights", "mean_model"]

MODELS_AT_A_TIME = 128  # in a mean; with fewer, the sum would be read and written more often

Weights = Literal["samples", "uniform"]


def mean_model(models: Iterable[Tensor], weights: Sequence[float], layout: Layout) -> Tensor:
    """Returns the weighted mean of flat models ``[P + Q]``; integer buffers take their maximum.

    Weights are normalised first. The sum is taken in float64 and in the given order, so that a mean does not depend on
    where the models were trained. At most `MODELS_AT_A_TIME` models of an iterator are held at once.
    """
    share = torch.tensor(weights, dtype=torch.float64)
    share /= share.sum()
    total, integers, largest = torch.zeros(layout.size, dtype=torch.float64), layout.integer_slices(), []
    pairs = zip(models, share.tolist(), strict=True)
    while some := list(islice(pairs, MODELS_AT_A_TIME)):
        add_models(total, *zip(*some, strict=True))
        largest.append([torch.stack([model[entries] for model, _ in some]).amax(dim=0) for entries in integers])
        del some  # before the next models are there
    mean = total.to(torch.float32)
    for entries, each in zip(integers, zip(*largest, strict=True), strict=True):
        mean[entries] = torch.stack(each).amax(dim=0)
    return mean


class Aggregation(CheckedFields, ABC):
    """Merges a round's uploads, or the stored models, into the server's models.

    An aggregation stores what it must remember between rounds, such as a momentum, in ``state.aggregation``, which is
    part of every checkpoint.

    Class attributes:
        reads: the names in an uplink that it merges.
        also_reads: the names in an uplink that it uses if they are there.
        keeps_centres: whether it leaves one centre per cluster.
        remembers: the forms (`lcfl.core.schema`) of values in ``state.aggregation``, checked when a run resumes.
    """

    reads: ClassVar[tuple[str, ...]] = ("model",)
    also_reads: ClassVar[tuple[str, ...]] = ()
    keeps_centres: ClassVar[bool] = True
    remembers: ClassVar[Forms] = {}

    @property
    def uses_stored_models(self) -> bool:
        """Whether it also merges stored models of clients that did not take part in this round."""
        return False

    @abstractmethod
    def __call__(self, state: FederationState, uploads: Sequence[Uplink], layout: Layout) -> None:
        """Replaces the models in `state`. It is not called in a round without uploads."""


@dataclass(frozen=True)
class NoAggregation(Aggregation):
    """Merges nothing, so the server learns nothing (Local)."""

    reads: ClassVar[tuple[str, ...]] = ()

    def __call__(self, state: FederationState, uploads: Sequence[Uplink], layout: Layout) -> None:
        """Leaves the state as it is."""


@dataclass(frozen=True)
class Merge(Aggregation):
    """Base class of aggregations that merge the models of groups, by a mean unless they are given another rule.

    If clients send changes of their control variates, the control variate of a group is updated as well, c <- c + (1/N)
    sum_i (change of c_i), where N is the number of clients in the group (SCAFFOLD Eq. 5).

    Args:
        rule: how the models of a group become one; None for their weighted mean.
        optimizer: performs an update step from the model of a group to the merged one; None for the merged one.
            Buffers are always those of the merged model.
    """

    also_reads: ClassVar[tuple[str, ...]] = ("control_change",)
    remembers: ClassVar[Forms] = {**MEMORIES, "control": Array(("G", "P"))}

    rule: AggregationRule | None = field(default=None, kw_only=True)
    optimizer: ServerOptimizer | None = field(default=None, kw_only=True)

    def merged(self, models: Sequence[Tensor], weights: Sequence[float], start: Tensor, layout: Layout) -> Tensor:
        """Returns the merged model ``[P + Q]`` of a group, given its model before the round."""
        return mean_model(models, weights, layout) if self.rule is None else self.rule(models, weights, start, layout)

    def stepped(
        self, state: FederationState, merged_GM: Tensor, uploads: Mapping[int, Sequence[Uplink]], layout: Layout
    ) -> Tensor:
        """Returns the models of the server ``[G, P + Q]`` after the step of the optimizer from ``state.centres``.

        Args:
            state: the state, which holds what is remembered of each group.
            merged_GM: the merged models.
            uploads: this round's uploads, by group; groups without any are left out.
            layout: the layout of the models.
        """
        end, sizes = layout.num_parameters, {group: self._size(state, group) for group in uploads}
        if any("control_change" in upload.payload for own in uploads.values() for upload in own):
            control_GP = state.aggregation.get("control")
            if control_GP is None or len(control_GP) != len(merged_GM):
                control_GP = torch.zeros(len(merged_GM), end)
            sums_GP = control_GP.double()
            for group, own in uploads.items():
                changes = [upload.payload["control_change"] for upload in own]
                add_models(sums_GP[group], changes, [1 / sizes[group]] * len(own))
            state.aggregation["control"] = sums_GP.float()
        if self.optimizer is None:
            return merged_GM
        shares = {group: len(own) / sizes[group] for group, own in uploads.items()}
        after_GP = self.optimizer(state.aggregation, state.centres[:, :end], merged_GM[:, :end], shares)
        models_GM, rows = state.centres.clone(), list(uploads)  # a group without uploads keeps its buffers, too
        models_GM[rows] = torch.cat([after_GP, merged_GM[:, end:]], dim=1)[rows]
        return models_GM

    def _size(self, state: FederationState, group: int) -> int:
        """Returns the number of clients in a group."""
        in_group = state.assignment == group if self.keeps_centres else torch.ones_like(state.active)
        return int((state.active & in_group).sum())
