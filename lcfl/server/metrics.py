"""Per-client metrics, their summaries over clients, and the names under which they are logged.

A name has the form ``<stage>/<protocol>/<model>/<metric>``, for example ``test/own_split/personal/acc``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, isfinite, isnan, nan

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lcfl.core.metric_names import TRIVIAL, Reported
from lcfl.core.state import FederationState
from lcfl.data.protocols import BACKDOOR
from lcfl.methods.local.training import LocalOutput
from lcfl.models.module import FederatedModule

__all__ = [
    "ClientMetrics",
    "Evaluation",
    "cluster_metrics",
    "co_membership_jaccard",
    "fault_metrics",
    "is_undefined",
    "summarize",
    "training_metrics",
    "trivial_metrics",
]

WORST_SHARE = 0.1
LOSS = "train/loss"


@dataclass(frozen=True)
class ClientMetrics:
    """One metric of one kind of model under one protocol, for every client that has data for it.

    Attributes:
        clients: the numbers of the clients ``[n]``.
        values: the metric of each client ``[n]``.
        num_samples: the number of samples that each client was measured on ``[n]``.
        larger_is_better: whether larger values are better.
    """

    clients: NDArray[np.int64]
    values: NDArray[np.float64]
    num_samples: NDArray[np.int64]
    larger_is_better: bool = True


def summarize(name: str, metric: ClientMetrics) -> dict[str, float]:
    """Returns summaries over clients: the mean, ``_weighted`` by samples, ``_std`` (ddof 0) and ``_worst10``.

    ``_worst10`` is the mean over the ceil(10 %) clients with the worst values, and NaN is the worst.
    """
    ascending = np.sort(metric.values)
    number = ceil(WORST_SHARE * len(ascending))
    worst = ascending[:number] if metric.larger_is_better else ascending[-number:]
    return {
        name: float(metric.values.mean()),
        f"{name}_weighted": float(np.average(metric.values, weights=metric.num_samples)),
        f"{name}_std": float(metric.values.std()),
        f"{name}_worst10": nan if np.isnan(ascending[-1]) else float(worst.mean()),  # NaN is sorted to the end
    }


def is_undefined(name: str, metrics: Mapping[str, float]) -> bool:
    """Returns whether a client's samples have no such metric, as AUROC for one class or R2 for one sample.

    The metric is then missing, or not a number although the loss is finite. If the loss is not, the model has diverged.
    """
    return name not in metrics or (isnan(metrics[name]) and isfinite(metrics.get("loss", nan)))


@dataclass
class Evaluation:
    """Results of one evaluation: per-client metrics by full name, e.g. ``val/own_split/personal/acc``.

    Attributes:
        reported: the metric that is reported.
        directions: whether larger values are better, by metric; one that nobody knows counts as better if larger.
    """

    by_name: dict[str, ClientMetrics] = field(default_factory=dict)
    reported: Reported = field(default_factory=Reported)
    directions: Mapping[str, bool | None] = field(default_factory=dict)

    @classmethod
    def of(cls, module: FederatedModule) -> "Evaluation":
        """Returns an empty evaluation of a module's metrics."""
        reported = module.reported
        return cls({}, reported, module.directions | {reported.name: reported.larger_is_better})

    def add(self, prefix: str, clients: list[int], results: list[Mapping[str, float]], num_samples: list[int]) -> None:
        """Adds the metrics of `clients` under `prefix`; `num_samples` is the number of samples of each client.

        A client for which a metric is not defined (`is_undefined`) does not count in its summaries, unless it is not
        defined for any client.
        """
        is_attack = prefix.split("/")[1:2] == [BACKDOOR]  # whose success is better if it is smaller
        for metric in dict.fromkeys(name for result in results for name in result):
            known = [row for row, result in enumerate(results) if metric in result]
            rows = [row for row in known if not is_undefined(metric, results[row])] or known
            self.by_name[f"{prefix}/{metric}"] = ClientMetrics(
                np.asarray([clients[row] for row in rows], dtype=np.int64),
                np.asarray([results[row][metric] for row in rows], dtype=np.float64),
                np.asarray([num_samples[row] for row in rows], dtype=np.int64),
                (self.directions.get(metric) is not False) != is_attack,
            )

    def __or__(self, other: "Evaluation") -> "Evaluation":
        """Returns both evaluations combined."""
        return replace(self, by_name=self.by_name | other.by_name)

    def of_reported(self) -> dict[str, ClientMetrics]:
        """Returns the reported metric of every set and kind of model, by full name."""
        return {name: each for name, each in self.by_name.items() if name.endswith(f"/{self.reported.name}")}

    def summary(self) -> dict[str, float]:
        """Returns all summaries by name as a row for the logs. A loss that is not reported has only its mean."""
        row: dict[str, float] = {}
        for name, metric in self.by_name.items():
            is_loss = name.endswith("/loss") and self.reported.name != "loss"
            row |= {name: float(metric.values.mean())} if is_loss else summarize(name, metric)
        return row


def training_metrics(trained: Sequence[LocalOutput]) -> dict[str, float]:
    """Returns the mean loss of the clients, and the means of what their training steps logged.

    A loss that is not finite does not count. The server learns it only of clients whose uploads have noise. What a step
    has logged as ``train/loss`` does not count, because this is the name of the loss that it returns.
    """
    values: dict[str, list[float]] = {}
    for output in trained:
        losses = {} if output.loss is None or not isfinite(output.loss) else {LOSS: output.loss}
        logged = {name: value for name, value in output.logged.items() if name != LOSS}
        for name, value in (losses | logged).items():
            values.setdefault(name, []).append(value)
    return {name: float(np.mean(of_clients)) for name, of_clients in values.items()}


def cluster_metrics(
    before: Tensor, state: FederationState, trained: Sequence[int], groups: NDArray[np.int64] | None
) -> dict[str, float]:
    """Returns how many clusters have members, how many clients moved, and how stable the clusters are.

    Args:
        before: the cluster of each client ``[N]`` when the round began.
        state: the state after the round's clustering.
        trained: the clients that trained in this round.
        groups: the true group of each client ``[N]``, for the adjusted Rand index; None if there are none.
    """
    grouped = state.active & (state.assignment >= 0)
    now = state.assignment[grouped]
    moved = (before != state.assignment) & state.active
    metrics = {
        "cluster/count": float(len(now.unique())),
        "cluster/moved": float(moved.sum()),
        "cluster/moved_untrained": float(moved.sum() - moved[list(trained)].sum()),
    }
    if state.round > 0:  # the clusters before the first round are not the result of a round
        both = [each[state.active].numpy() for each in (before, state.assignment)]
        metrics["cluster/stability"] = co_membership_jaccard(*both)
    if groups is not None and len(now) > 1:
        from sklearn.metrics import adjusted_rand_score  # imported here because only clustered runs need it

        metrics["cluster/ari"] = float(adjusted_rand_score(groups[grouped.numpy()], now.numpy()))
    return metrics


def fault_metrics(state: FederationState, faulty: Sequence[int]) -> dict[str, float]:
    """Returns the share of faulty clients in the cluster of an honest and of a faulty client, means over clients.

    Without clusters, all clients are in one. Clients that have no cluster yet do not count. The two numbers are the
    same if faulty clients are spread evenly over the clusters, and 0 and 1 if they are in clusters of their own.
    """
    is_faulty, grouped = torch.zeros_like(state.active), state.active & (state.assignment >= 0)
    is_faulty[list(faulty)] = True
    _, cluster_n = state.assignment[grouped].unique(return_inverse=True)
    is_faulty_n = is_faulty[grouped]
    share_K = cluster_n.bincount(is_faulty_n.double()) / cluster_n.bincount()
    return {
        f"fault/among_{name}": float(share_K[cluster_n[clients]].mean())
        for name, clients in (("honest", ~is_faulty_n), ("faulty", is_faulty_n))
        if clients.any()
    }


def co_membership_jaccard(before: NDArray[np.int64], after: NDArray[np.int64]) -> float:
    """Returns |pairs in both| / |pairs in either|, over pairs of clients that share a cluster (AS-CFL section 4.4.2).

    This is the paper's "Jaccard similarity of cluster memberships between consecutive rounds". It is 1 if the groups
    are the same, whatever their numbers. It is also 1 if no clients share a cluster before or after.

    Args:
        before: the cluster of each client ``[N]``. A number below 0 means that the client has no cluster and shares
            none.
        after: the same, one round later.
    """
    alone = -1 - np.arange(len(before))
    before, after = (np.where(each < 0, alone, each) for each in (before, after))
    numbers = [np.unique(each, return_inverse=True)[1] for each in (before, after)]
    joint, earlier, later = map(_pairs, (numbers[0] * len(before) + numbers[1], *numbers))
    union = earlier + later - joint
    return joint / union if union else 1.0


def _pairs(labels: NDArray[np.int64]) -> int:
    """Returns how many pairs have the same label."""
    counts = np.unique(labels, return_counts=True)[1]
    return int((counts * (counts - 1)).sum()) // 2


def trivial_metrics(values: Sequence[Mapping[str, float]], reported: Reported) -> dict[str, float]:
    """Returns ``test/<protocol>/trivial/<reported metric>``, the mean over clients with test samples.

    It is empty if the network's outputs and the targets have no form in which a constant is known.

    Args:
        values: the metric of each client by protocol (`lcfl.distributed.trivial_baseline`); nan if it has none.
        reported: the reported metric.
    """
    known = {name: [each[name] for each in values if not isnan(each[name])] for name in (values[0] if values else ())}
    return {f"test/{name}/{TRIVIAL}/{reported.name}": float(np.mean(each)) for name, each in known.items() if each}
