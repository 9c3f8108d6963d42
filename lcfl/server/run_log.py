"""Where the row of a round goes: ``metrics.csv`` and the loggers."""

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from lightning.fabric.loggers.logger import Logger

from lcfl.core.state import FederationState
from lcfl.runs.metrics_table import MetricsTable
from lcfl.server.round_row import RoundRow

__all__ = ["RunLog"]


class RunLog:
    """Writes rows to ``metrics.csv`` and to the loggers. A run goes on if a logger fails.

    Args:
        row: the metrics of the current round.
        table: ``metrics.csv``.
        loggers: the loggers that receive the row of every training round.
        state: the state of the federation, which counts the rounds.
    """

    def __init__(self, row: RoundRow, table: MetricsTable, loggers: Sequence[Logger], state: FederationState) -> None:
        self._row, self._table, self._loggers, self._state = row, table, loggers, state
        self._failed: set[str] = set()
        self._logging_s = 0.0  # of the round before, whose row was written before they were known

    @contextmanager
    def finished_row(self, number: int, begin: float) -> Iterator[dict[str, float]]:
        """Writes the row of round `number` and yields it; what is done inside counts as logging.

        Rows of warm-up rounds go only to the table.
        """
        end = time.perf_counter()
        self._row.update({"time/round_s": end - begin, "time/logging_s": self._logging_s})
        row = self._row.take()
        self._table.append(number, row)
        if number >= 0:
            self.tell_loggers("log_metrics", lambda each: each.log_metrics(row, step=number))
        with self._row.written():
            yield row
        self._logging_s = time.perf_counter() - end

    def tell_loggers(self, method: str, tell: Callable[[Logger], None]) -> None:
        """Calls a method of every logger. If one fails, it warns once: the run has its own table, and goes on."""
        for logger in self._loggers:
            try:
                tell(logger)
            except Exception as error:  # of any kind, because a logger may need a network or a disk
                name = f"{type(logger).__name__}.{method}"
                if name not in self._failed:
                    warnings.warn(
                        f"{name} failed after {max(self._state.round, 0)} rounds ({type(error).__name__}: {error}). "
                        "The run goes on, and later failures are not shown; metrics.csv has all rows.",
                        stacklevel=2,
                    )
                self._failed.add(name)
