"""Robust aggregation rules: how the models of one group become one model if some clients cannot be trusted.

Legend: n models of a group, P parameters and Q buffer entries in a model's flat vector.
"""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import floor

import torch
from torch import Tensor

from lcfl.core.model_sums import add_models
from lcfl.core.validation import CheckedFields
from lcfl.models.layout import Layout

__all__ = ["AggregationRule", "ClippedMean", "CoordinateMedian", "GeometricMedian", "Krum", "TrimmedMean"]

COLUMNS = 2**17  # entries of all models that are sorted or multiplied at once


class AggregationRule(CheckedFields, ABC):
    """Merges the models of one group: those of all clients, or those of one cluster.

    A buffer becomes the median of those that were sent, so that fewer than half of the clients cannot spoil it.
    """

    @abstractmethod
    def __call__(self, models: Sequence[Tensor], weights: Sequence[float], start: Tensor, layout: Layout) -> Tensor:
        """Returns the model ``[P + Q]`` of the group.

        Args:
            models: the models that were sent, ``[P + Q]`` each, at least one.
            weights: the weight of each; not normalised. Not every rule uses them.
            start: the model of the group before this round, ``[P + Q]``.
            layout: the layout of models.
        """


@dataclass(frozen=True)
class CoordinateMedian(AggregationRule):
    """Takes the median of every parameter (Yin et al. 2018, Algorithm 1, option I). All clients have the same weight.

    Of an even number of values it is the mean of the two in the middle.
    """

    def __call__(self, models: Sequence[Tensor], weights: Sequence[float], start: Tensor, layout: Layout) -> Tensor:
        """See `AggregationRule`."""
        return _trimmed_mean(models, (len(models) - 1) // 2, layout)


@dataclass(frozen=True)
class TrimmedMean(AggregationRule):
    """Takes the mean of every parameter without its smallest and its largest values (Yin et al. 2018, option II).

    All clients have the same weight.

    Args:
        share: beta. floor(beta n) values are left out at either end.

    Raises:
        ValueError: for a share outside [0, 0.5).
    """

    share: float = 0.1

    def __post_init__(self) -> None:
        _check_share(self, "share", self.share)

    def __call__(self, models: Sequence[Tensor], weights: Sequence[float], start: Tensor, layout: Layout) -> Tensor:
        """See `AggregationRule`."""
        cut = _part(self.share, len(models))
        if cut == 0 < self.share:
            _warn_of_small_groups(self, "leaves out none of their values")
        return _trimmed_mean(models, cut, layout)


@dataclass(frozen=True)
class Krum(AggregationRule):
    """Takes the mean of the models that lie closest to their neighbours (Blanchard et al. 2017, Krum and multi-Krum).

    The score of a model is the sum of its squared distances to the n - f - 2 nearest others, and the models with the
    smallest scores are merged. Ties go to the client with the lower number. All merged models have the same weight.
    Only parameters count for the distances.

    Args:
        attackers: f / n, the share of clients that may send anything. The guarantee of the paper needs n > 2 f + 2.
        keep: m, the number of models that are merged: 1 is Krum. A number above n - f stands for n - f.

    Raises:
        ValueError: for a share outside [0, 0.5), or a number below 1.
    """

    attackers: float = 0.2
    keep: int = 1

    def __post_init__(self) -> None:
        _check_share(self, "attackers", self.attackers)
        if self.keep < 1:
            raise ValueError(f"method.aggregation: Krum got keep={self.keep}; it must be at least 1.")

    def __call__(self, models: Sequence[Tensor], weights: Sequence[float], start: Tensor, layout: Layout) -> Tensor:
        """See `AggregationRule`."""
        number = len(models)
        num_attackers = _part(self.attackers, number)
        if self.attackers > 0 and (num_attackers == 0 or number <= 2 * num_attackers + 2):
            _warn_of_small_groups(self, "may keep the model of an attacker")
        nearest = max(1, number - num_attackers - 2)
        far_nn = _squared_distances(models, start, layout.num_parameters)
        score_n = far_nn.sort(dim=1).values[:, 1 : 1 + nearest].sum(dim=1)  # without that to itself, which is 0
        best = score_n.argsort(stable=True)[: min(self.keep, number - num_attackers)].sort().values.tolist()
        mean = _weighted_sum([models[i] for i in best], [1 / len(best)] * len(best))
        return _with_median_buffers(mean, models, layout)


@dataclass(frozen=True)
class GeometricMedian(AggregationRule):
    """Takes the point whose weighted distances to all models have the smallest sum (RFA, Pillutla et al. 2022).

    It is found by the smoothed Weiszfeld algorithm (Algorithm 2):

        R times: beta_i <- alpha_i / max(nu, |v - w_i|); v <- sum_i beta_i w_i / sum_i beta_i

    v begins at the weighted median of every parameter. The authors' code begins at the mean, and a few steps cannot
    recover from that if one update is enormous. Only parameters count for the distances.

    Args:
        iterations: R, the number of steps.
        smoothing: nu.

    Raises:
        ValueError: for fewer than one step, or a nu that is not positive.
    """

    iterations: int = 4
    smoothing: float = 1e-6

    def __post_init__(self) -> None:
        if self.iterations < 1 or not self.smoothing > 0:
            raise ValueError(
                f"method.aggregation: GeometricMedian got iterations={self.iterations} and smoothing={self.smoothing}; "
                "allowed are a number from 1 and a number above 0."
            )

    def __call__(self, models: Sequence[Tensor], weights: Sequence[float], start: Tensor, layout: Layout) -> Tensor:
        """See `AggregationRule`."""
        share_n = torch.tensor(weights, dtype=torch.float64)
        median = _weighted_medians(models, share_n)
        for _ in range(self.iterations):
            far_n = _distances(models, median, layout.num_parameters)
            factor_n = share_n / far_n.clamp(min=self.smoothing)
            factor_n /= factor_n.sum()
            median = _weighted_sum(models, factor_n.tolist())
        return _with_median_buffers(median, models, layout)


@dataclass(frozen=True)
class ClippedMean(AggregationRule):
    """Takes the mean of updates that are shortened to a norm.

        v <- w; L times: v <- v + sum_i alpha_i (w_i - v) min(1, radius / |w_i - v|)

    w is the model of the group before the round. With one step, this is norm clipping (Sun et al. 2019). With more, it
    is centred clipping (Karimireddy et al. 2021, Eq. 7) with v_0 = 0, without momentum at the clients.

    Only parameters count for the norm.

    Args:
        radius: the longest update, in the L2 norm.
        iterations: L.

    Raises:
        ValueError: for a radius that is not positive, or fewer than one step.
    """

    radius: float = 1.0
    iterations: int = 1

    def __post_init__(self) -> None:
        if not self.radius > 0 or self.iterations < 1:
            raise ValueError(
                f"method.aggregation: ClippedMean got radius={self.radius} and iterations={self.iterations}; allowed "
                "are a number above 0 and a number from 1."
            )

    def __call__(self, models: Sequence[Tensor], weights: Sequence[float], start: Tensor, layout: Layout) -> Tensor:
        """See `AggregationRule`."""
        share_n = torch.tensor(weights, dtype=torch.float64)
        share_n /= share_n.sum()
        centre = start.double()
        for _ in range(self.iterations):
            far_n = _distances(models, centre, layout.num_parameters)
            factor_n = share_n * (self.radius / far_n).clamp(max=1)
            centre = centre * (1 - float(factor_n.sum())) + _weighted_sum(models, factor_n.tolist())
        return _with_median_buffers(centre, models, layout)


def _check_share(rule: AggregationRule, name: str, share: float) -> None:
    if not 0 <= share < 0.5:
        raise ValueError(
            f"method.aggregation: {type(rule).__name__} got {name}={share}; allowed are shares from 0 to below 0.5."
        )


def _warn_of_small_groups(rule: AggregationRule, what: str) -> None:
    """Warns of a small group. Python shows this once, because the text is always the same."""
    warnings.warn(
        f"method.aggregation: {rule} has merged a group of so few models that it {what}. Let more clients take part "
        "in a round, or use fewer clusters.",
        stacklevel=3,
    )


def _part(share: float, number: int) -> int:
    """Returns floor(share * number), in which 0.3 * 10 is 3."""
    return floor(share * number + 1e-9)


def _trimmed_mean(models: Sequence[Tensor], cut: int, layout: Layout) -> Tensor:
    """Returns the mean of every entry without its `cut` smallest and `cut` largest values."""
    merged = torch.empty(layout.size, dtype=torch.float64)
    for begin in range(0, layout.size, COLUMNS):
        sorted_nC = torch.stack([model[begin : begin + COLUMNS] for model in models]).sort(dim=0).values
        merged[begin : begin + COLUMNS] = sorted_nC[cut : len(models) - cut].double().mean(dim=0)
    return _with_median_buffers(merged, models, layout)


def _weighted_medians(models: Sequence[Tensor], weight_n: Tensor) -> Tensor:
    """Returns for every entry the smallest value up to which there is half of the weight, in float64."""
    medians = torch.empty(len(models[0]), dtype=torch.float64)
    for begin in range(0, len(medians), COLUMNS):
        values_nC, order_nC = torch.stack([model[begin : begin + COLUMNS] for model in models]).sort(dim=0, stable=True)
        is_half_nC = weight_n[order_nC].cumsum(dim=0) >= weight_n.sum() / 2
        medians[begin : begin + COLUMNS] = values_nC.gather(0, is_half_nC.int().argmax(dim=0, keepdim=True))[0]
    return medians


def _weighted_sum(models: Sequence[Tensor], factors: Sequence[float]) -> Tensor:
    total = torch.zeros(len(models[0]), dtype=torch.float64)
    add_models(total, models, factors)
    return total


def _distances(models: Sequence[Tensor], other: Tensor, num_parameters: int) -> Tensor:
    """Returns the distance of each model's parameters to those of another one ``[n]``, in float64."""
    far = [torch.linalg.vector_norm(model[:num_parameters].double() - other[:num_parameters]) for model in models]
    return torch.stack(far)


def _squared_distances(models: Sequence[Tensor], start: Tensor, num_parameters: int) -> Tensor:
    """Returns the squared distances between models ``[n, n]`` in float64."""
    gram_nn = torch.zeros(len(models), len(models), dtype=torch.float64)
    for begin in range(0, num_parameters, COLUMNS):
        end = min(begin + COLUMNS, num_parameters)
        update_nC = torch.stack([model[begin:end].double() - start[begin:end] for model in models])
        gram_nn += update_nC @ update_nC.T
    square_n = gram_nn.diagonal()
    return (square_n[:, None] + square_n - 2 * gram_nn).clamp(min=0).fill_diagonal_(0)


def _with_median_buffers(merged: Tensor, models: Sequence[Tensor], layout: Layout) -> Tensor:
    """Returns a merged model in float32, whose buffers are the medians, of an even number the lower, of those sent."""
    result = merged.float()
    if layout.buffers:
        result[layout.num_parameters :] = torch.stack([model[layout.num_parameters :] for model in models]).median(0)[0]
    return result
