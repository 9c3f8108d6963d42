"""The metrics of one round, from the first that is logged until they are written."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from lcfl.core.metric_names import is_of_server

__all__ = ["RoundRow"]


class RoundRow:
    """The metrics of the current round by name, which become a row of ``metrics.csv`` and of the loggers."""

    def __init__(self) -> None:
        self._metrics: dict[str, float] = {}
        self._is_written = False

    def log(self, name: str, value: float) -> None:
        """Adds a metric of a callback.

        Raises:
            ValueError: for a name that lcfl logs itself, for anything but one number, and while the row is `written`.
        """
        if is_of_server(name):
            raise ValueError(
                f"server.log({name!r}): lcfl logs this name, or names that begin like it, itself; give another one, "
                f"such as my/{name}."
            )
        if self._is_written:
            raise ValueError(
                f"server.log({name!r}): too late, because the round's row is already written when on_round_logged and "
                "on_fit_end are called. Log in on_aggregated or on_evaluated instead."
            )
        try:
            self._metrics[name] = float(value)
        except (TypeError, ValueError, RuntimeError):
            got = type(value).__name__
            raise ValueError(f"server.log({name!r}): got {got}; a metric must be one number.") from None

    def update(self, metrics: Mapping[str, float]) -> None:
        """Adds metrics of the server; they replace those of the same name."""
        self._metrics |= metrics

    def add(self, name: str, number: float) -> None:
        """Adds a number to a metric of the server, which a training round and its extra rounds share."""
        self._metrics[name] = self._metrics.get(name, 0.0) + number

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Adds the seconds spent inside to ``time/<what>_s``."""
        begin = time.perf_counter()
        yield
        self.add(f"time/{what}_s", time.perf_counter() - begin)

    def take(self) -> dict[str, float]:
        """Returns the metrics and begins the next row."""
        row, self._metrics = self._metrics, {}
        return row

    @contextmanager
    def written(self) -> Iterator[None]:
        """Marks the row as written; a metric that is logged inside comes too late for it."""
        self._is_written = True
        try:
            yield
        finally:
            self._is_written = False
