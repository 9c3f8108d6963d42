"""Ends a run when a validation metric no longer improves."""

from collections.abc import Mapping
from typing import ClassVar, Literal

from lcfl.callbacks.monitored_metric import MonitoredMetric
from lcfl.core.callback import Callback
from lcfl.core.schema import Forms, Number
from lcfl.core.state import FederationState
from lcfl.server.server import Server

__all__ = ["EarlyStopping"]


class EarlyStopping(Callback):
    """Stops after `patience` evaluations without an improvement of more than `min_delta`.

    Args:
        monitor: a validation metric, e.g. ``val/own_split/personal/acc``; None for the reported metric
            (``model.report``) of the first kind of model that the method reports.
        patience: number of evaluations without improvement after which the run stops.
        min_delta: the metric must improve by more than this.
        mode: whether larger (``max``) or smaller (``min``) is better; None for what is known of the metric.

    Raises:
        ValueError: for a metric of test data or one that is never measured, a patience below 1 or a negative
            `min_delta`.
    """

    shapes_result = True
    remembers: ClassVar[Forms] = {"best": (float, None), "waited": Number(int, 0)}

    def __init__(
        self,
        monitor: str | None = None,
        patience: int = 5,
        min_delta: float = 0.0,
        mode: Literal["max", "min"] | None = None,
    ) -> None:
        if patience < 1 or min_delta < 0:
            raise ValueError(
                f"EarlyStopping: got patience={patience}, min_delta={min_delta}; allowed are >= 1 and >= 0."
            )
        self.monitor, self.patience, self.min_delta, self.mode = monitor, patience, min_delta, mode
        self._monitored = MonitoredMetric("EarlyStopping", monitor, mode)
        self.forget()

    def forget(self) -> None:
        """Forgets the best score and how long it has waited for a better one."""
        self._best: float | None = None
        self._waited = 0

    def check_monitor(self, metrics: Mapping[str, bool], default: str) -> None:
        """Refuses a monitor that is never measured."""
        self._monitored = MonitoredMetric("EarlyStopping", self.monitor, self.mode).among(metrics, default)

    def on_round_logged(self, server: Server, state: FederationState, row: dict[str, float]) -> None:
        """Checks the metric in rounds that have it."""
        score = self._monitored.score(row, server)
        if score is None:
            return
        if self._best is None or score > self._best + self.min_delta:
            self._best, self._waited = score, 0
        else:
            self._waited += 1
        if self._waited >= self.patience:
            state.should_stop = True

    def on_fit_end(self, server: Server) -> None:
        """Warns if no round had the metric."""
        self._monitored.warn_if_never_seen(server)
