"""A metric by which a callback decides. It never uses test data, and larger scores are better."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf, isfinite, isnan, nan
from typing import Literal

from lcfl.server.server import Server

__all__ = ["MonitoredMetric"]

OWN = ("val/", "cluster/", "comm/", "time/")  # logged by lcfl; modules and callbacks log other names
SOMETIMES = (  # some rounds lack these, e.g. the first round has no earlier clusters to compare with
    "cluster/ari",
    "cluster/stability",
    "cluster/granularity",
    "cluster/threshold",
    "cluster/silhouette",
    "cluster/mean_update",
    "cluster/max_update",
    "cluster/admitted",
    "cluster/tested_models",
)


@dataclass(frozen=True)
class MonitoredMetric:
    """The metric that `owner` watches.

    Whether it exists is checked as early as it can be known.

    Args:
        owner: name of the callback, for errors.
        name: name of the metric, e.g. ``val/own_split/personal/acc``; None for the reported metric.
        mode: whether larger (``max``) or smaller (``min``) is better; None for what is known of the metric. If
            nothing is known, larger is better, except for losses.

    Raises:
        ValueError: for an empty name, or a metric of test data, which is reported but never used to choose.
    """

    owner: str
    name: str | None
    mode: Literal["max", "min"] | None

    def __post_init__(self) -> None:
        if self.name == "":
            raise ValueError(
                f"{self.owner}: got an empty monitor; name a metric such as val/own_split/personal/acc, or leave it "
                "out."
            )
        if self.name is not None and self.name.startswith("test/"):
            raise ValueError(
                f"{self.owner}: got monitor={self.name}; test data must not decide anything. Use its validation twin, "
                f"val/{self.name.removeprefix('test/')}."
            )

    def among(self, metrics: Mapping[str, bool], default: str) -> "MonitoredMetric":
        """Returns the metric with a name and a mode, see `lcfl.core.callback.Callback.check_monitor`.

        Raises:
            ValueError: if it is a metric of evaluations that none of them has.
        """
        name = self.name or default
        mode = self.mode or ("max" if metrics.get(name, not name.endswith("/loss")) else "min")
        found = replace(self, name=name, mode=mode)
        found._check(metrics)
        return found

    def _check(self, names: Mapping[str, bool]) -> None:
        assert self.name is not None
        if not self.name.startswith("val/"):
            return
        if not names:
            raise ValueError(
                f"{self.owner}: monitor={self.name} is never measured during this run. Set trainer.evaluate_every to "
                "1 or more; if it is, no client that is evaluated has samples for it."
            )
        known = [name for name in names if name.startswith("val/")]
        if not known:
            raise ValueError(
                f"{self.owner}: monitor={self.name} needs validation data, and no client that is evaluated has any: "
                "set data.val_fraction, e.g. to 0.1, or raise trainer.evaluate_clients."
            )
        self._check_among(known)

    def score(self, row: Mapping[str, float], server: Server) -> float | None:
        """Returns the metric of a round, negated under ``min`` and -inf if it is NaN because models have diverged.

        Returns None in a round that does not measure it, or in which it is defined for no client.

        Raises:
            ValueError: if a round that is evaluated shows that the metric does not exist.
        """
        assert self.name is not None, "among() gives it a name"
        if self.name in row:
            score = -row[self.name] if self.mode == "min" else row[self.name]
            if not isnan(score):
                return score
            return None if isfinite(row.get(f"{self.name.rpartition('/')[0]}/loss", nan)) else -inf
        if _is_complete(row, server) and self.name not in server.table.columns:
            self._check_row(row)
        return None

    def warn_if_never_seen(self, server: Server) -> None:
        """Warns at the end of a complete run if no round had the metric."""
        assert self.name is not None
        columns = server.table.columns
        if server.is_done and all(map(isnan, server.table.column(self.name))):
            known = ", ".join(sorted(name for name in columns if name not in ("round", self.name)))
            is_nan = self.name in columns
            had = f"monitor={self.name} was NaN in every round" if is_nan else f"no round had monitor={self.name}"
            warnings.warn(f"{self.owner}: {had}, so it decided nothing; the rounds had {known}.", stacklevel=2)

    def _check_row(self, row: Mapping[str, float]) -> None:
        """Checks the row of an evaluated round that lacks the metric, like all rounds before it."""
        assert self.name is not None
        if self.name.startswith("val/"):  # evaluations have it, but the clients that do may have left or be lost
            return
        if self.name.startswith(SOMETIMES) and "cluster/count" in row:
            return
        if self.name.startswith(OWN):
            self._check_among(list(row))
        elif "train/loss" in row:  # otherwise no client has reported what training steps log
            warnings.warn(
                f"{self.owner}: no round so far has had monitor={self.name}. Unless the module or a callback logs it "
                "later, it is misspelt; metrics.csv lists the metrics that exist.",
                stacklevel=2,
            )

    def _check_among(self, known: list[str]) -> None:
        if self.name not in known:
            raise ValueError(
                f"{self.owner}: there is no metric {self.name}; the metrics are {', '.join(sorted(known))}."
            )


def _is_complete(row: Mapping[str, float], server: Server) -> bool:
    """Returns whether a row has all metrics that rows have: its round was evaluated, or no training round is."""
    return "time/eval_s" in row or (server.schedule.evaluate_every == 0 and server.state.round > 0)
