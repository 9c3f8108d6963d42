"""Per-client metrics, their summaries over clients, and the names they are logged under.

A name says what was measured: ``<stage>/<protocol>/<model>/<metric>``, for example
``test/own_split/personal/acc``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil

import numpy as np
from numpy.typing import NDArray

__all__ = ["ClientMetrics", "Evaluation", "co_membership_jaccard", "summarize"]

WORST_SHARE = 0.1


@dataclass(frozen=True)
class ClientMetrics:
    """One metric of one kind of model under one protocol, for every client that has such data.

    Attributes:
        clients: their numbers ``[n]``.
        values: the metric of each ``[n]``.
        num_samples: how many samples each was measured on ``[n]``.
    """

    clients: NDArray[np.int64]
    values: NDArray[np.float64]
    num_samples: NDArray[np.int64]


def summarize(name: str, metric: ClientMetrics) -> dict[str, float]:
    """Summaries over clients: mean, ``_weighted`` by samples, ``_std`` (ddof 0), ``_worst10``.

    ``_worst10`` is the mean over the ceil(10 %) clients with the lowest values.
    """
    lowest = np.sort(metric.values)[: ceil(WORST_SHARE * len(metric.values))]
    return {
        name: float(metric.values.mean()),
        f"{name}_weighted": float(np.average(metric.values, weights=metric.num_samples)),
        f"{name}_std": float(metric.values.std()),
        f"{name}_worst10": float(lowest.mean()),
    }


@dataclass
class Evaluation:
    """What one evaluation found: per-client metrics by full name, e.g. ``val/own_split/personal/acc``."""

    by_name: dict[str, ClientMetrics] = field(default_factory=dict)

    def add(self, prefix: str, clients: list[int], results: list[Mapping[str, float]], num_samples: list[int]) -> None:
        """Adds the metrics of `clients`, measured on `num_samples` samples each, under `prefix`."""
        for metric in results[0] if results else ():
            self.by_name[f"{prefix}/{metric}"] = ClientMetrics(
                np.asarray(clients, dtype=np.int64),
                np.asarray([result[metric] for result in results], dtype=np.float64),
                np.asarray(num_samples, dtype=np.int64),
            )

    def __or__(self, other: "Evaluation") -> "Evaluation":
        """Both together."""
        return Evaluation(self.by_name | other.by_name)

    def summary(self) -> dict[str, float]:
        """All summaries by name, a row for the logs; of the loss only its mean."""
        row: dict[str, float] = {}
        for name, metric in self.by_name.items():
            row |= {name: float(metric.values.mean())} if name.endswith("/loss") else summarize(name, metric)
        return row


def co_membership_jaccard(before: NDArray[np.int64], after: NDArray[np.int64]) -> float:
    """|pairs of both| / |pairs of either| of the pairs of clients that share a cluster (AS-CFL section 4.4.2).

    The paper's "Jaccard similarity of cluster memberships between consecutive rounds": 1 where the groups are the
    same, whatever their numbers; 1 where nobody shares a cluster before or after.

    Args:
        before: the cluster of each client ``[N]``; one below 0 is none, whose client is with nobody.
        after: the same, one round later.
    """
    alone = -1 - np.arange(len(before))
    before, after = (np.where(each < 0, alone, each) for each in (before, after))
    numbers = [np.unique(each, return_inverse=True)[1] for each in (before, after)]
    joint, earlier, later = map(_pairs, (numbers[0] * len(before) + numbers[1], *numbers))
    union = earlier + later - joint
    return joint / union if union else 1.0


def _pairs(labels: NDArray[np.int64]) -> int:
    """How many pairs have the same label."""
    counts = np.unique(labels, return_counts=True)[1]
    return int((counts * (counts - 1)).sum()) // 2
