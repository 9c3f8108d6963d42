"""The names of metrics. Those of evaluations have the form ``<stage>/<protocol>/<model>/<metric>``."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isfinite, isnan, nan
from typing import Any

__all__ = [
    "ACCURACY",
    "BACKDOOR",
    "MODEL_KINDS",
    "SUMMARIES",
    "TRIVIAL",
    "Reported",
    "added_metrics",
    "definitions_of",
    "digits",
    "is_of_server",
    "is_reserved",
]

MODEL_KINDS = ("personal", "cluster", "global", "after_local")  # in the order in which tables show them
SUMMARIES = ("_weighted", "_std", "_worst10")  # endings of the summaries over clients other than the mean
BY_SERVER = ("comm/", "time/", "cluster/", "val/", "test/", "fault/")  # how names begin that the server logs
OF_ROUNDS = ("round", "train/failed_clients", "train/dropped_clients", "train/refused_clients")  # which it logs, too
OF_SERVER = (  # the names that no callback may log, apart from those that begin like a measurement
    *("train/loss", *OF_ROUNDS, "comm/down_bytes", "comm/up_bytes", "comm/total_bytes"),
    *("cluster/moved", "cluster/moved_untrained", "cluster/stability", "cluster/ari"),
)
BACKDOOR = "backdoor"  # the protocol that a run with a `lcfl.data.faults.Backdoor` has in addition
# What says that a metric counts as lcfl's accuracy does, in its description.
OWN_ACCURACY = {
    "class": "torchmetrics.classification.accuracy.MulticlassAccuracy",
    "top_k": 1,
    "average": "micro",
    "multidim_average": "global",
}
TRIVIAL = "trivial"  # stands for a kind of model: always the same prediction, see `lcfl.distributed.trivial_baseline`


@dataclass(frozen=True)
class Reported:
    """The metric that tables, figures, progress, comparisons and sweeps show (``model.report``).

    Attributes:
        name: its name, the last part of full names.
        larger_is_better: whether larger values are better.
    """

    name: str = "acc"
    larger_is_better: bool = True

    @property
    def is_accuracy(self) -> bool:
        """Whether it is the accuracy, which is shown in percent."""
        return self.name == "acc"

    @property
    def title(self) -> str:
        """What it is called in texts."""
        return "accuracy" if self.is_accuracy else self.name

    @property
    def unit(self) -> str:
        """What follows its title, e.g. `` in %``."""
        return " in %" if self.is_accuracy else ""

    @property
    def axis(self) -> str:
        """What it is called along an axis."""
        return "accuracy (%)" if self.is_accuracy else self.name

    @property
    def trivial(self) -> str:
        """What its trivial baseline is called in texts."""
        return "majority class" if self.is_accuracy else "trivial"

    def text(self, value: float) -> str:
        """Returns a value as text: an accuracy in percent with two decimals, others as `digits`; blank for nan."""
        return f"{100 * value:.2f}" if self.is_accuracy and isfinite(value) else digits(value)

    def scaled(self, value: float) -> float:
        """Returns a value in the unit that pictures show: accuracies in percent."""
        return 100 * value if self.is_accuracy else value

    def score(self, value: float) -> float:
        """Returns a number that is larger for better values; nan for nan."""
        return nan if isnan(value) else value if self.larger_is_better else -value

    def best(self, values: Iterable[float]) -> float:
        """Returns the best of some values; nan if there are none but nan."""
        known = [value for value in values if not isnan(value)]
        return max(known, key=self.score, default=nan)

    def is_reached(self, value: float, target: float) -> bool:
        """Returns whether a value is as good as a target."""
        return self.score(value) >= self.score(target)


ACCURACY = Reported()


def digits(value: float) -> str:
    """Returns a number with four decimals, or four digits of a large or small one; blank if it is not finite."""
    if not isfinite(value):
        return ""
    return f"{value:.4f}" if value == 0 or 0.001 <= abs(value) < 10 else f"{value:.4g}"


def added_metrics(names: Iterable[str], reported: str = "acc") -> list[str]:
    """Returns the metrics other than the loss and the reported one (``model.metrics``).

    Args:
        names: full names, such as ``test/own_split/global/f1``.
        reported: the name of the reported metric.
    """
    parts = [name.split("/") for name in names if not name.endswith(SUMMARIES)]
    last = [each[3] for each in parts if len(each) == 4 and each[0] in ("val", "test")]
    return list(dict.fromkeys(name for name in last if name not in ("loss", reported)))


def is_reserved(name: str) -> bool:
    """Returns whether a row of metrics has this name from the server, so that a module may not log it."""
    return name.startswith(BY_SERVER) or name in OF_ROUNDS


def is_of_server(name: str) -> bool:
    """Returns whether the server writes a metric of this name, so that a callback may not log it.

    A clustering logs names that begin with ``cluster/``, among them ``cluster/count`` in a round before training.
    """
    return name.startswith(("time/", "val/", "test/", "fault/")) or name in OF_SERVER


def definitions_of(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what the metrics of a run are, by name, from its identity.

    lcfl's accuracy is the same whether it is the only metric, which has no description, or not.
    """
    metrics: dict[str, Any] = dict(identity.get("metrics", {}))
    if not metrics or metrics.get("acc", {}).items() >= OWN_ACCURACY.items():
        metrics["acc"] = OWN_ACCURACY
    return metrics
