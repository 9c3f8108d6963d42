"""Ends a run whose clients' updates cannot be used."""

from pathlib import Path

from lcfl.runs.metrics_table import MetricsTable
from lcfl.server.reception import Received

__all__ = ["UsableUpdates"]

MOST_FAILED_ROUNDS = 20  # in a row, all of which begin from the same models


class UsableUpdates:
    """Counts the training rounds in a row in which updates arrived, and none was finite.

    An update with noise counts as used, because the server cannot see what is below the noise.

    Args:
        table: ``metrics.csv``, which has the numbers of the whole run.
        run_dir: the run directory.
        max_update_norm: the largest norm of an update that is not refused; None for no limit.
    """

    def __init__(self, table: MetricsTable, run_dir: Path, max_update_norm: float | None) -> None:
        self._table, self._run_dir = table, run_dir
        self._causes = {
            "train/failed_clients": "were not finite (set a smaller model.optimizer.lr, unless samples are not finite)",
            "train/refused_clients": f"were beyond trainer.max_update_norm={max_update_norm} (raise it)",
        }
        self._failed: list[int] = []  # the number of updates in each round

    def count(self, received: Received) -> None:
        """Counts what has been received in a training round. A round in which no update arrived does not count."""
        if received.results or received.num_refused:
            self._failed = []
        elif received.num_failed:
            self._failed.append(received.num_failed)

    def check_last_rounds(self) -> None:
        """Raises an error if in each of the last rounds updates arrived, and none was finite.

        Raises:
            ValueError: with the number of updates.
        """
        if len(self._failed) >= MOST_FAILED_ROUNDS:
            raise ValueError(
                f"{self._run_dir}: the run does not go on, because in each of the last {len(self._failed)} rounds no "
                f"update could be used: {self._why({'train/failed_clients': sum(self._failed)})}."
            )

    def check_whole_run(self) -> None:
        """Raises an error if in a whole run updates arrived, but none could be used.

        Raises:
            ValueError: with the number of updates by cause.
        """
        numbers = {name: int(sum(self._table.column(name))) for name in self._causes}
        if any(numbers.values()):
            raise ValueError(
                f"{self._run_dir}: nothing was learned, because no update could be used: {self._why(numbers)}."
            )

    def _why(self, numbers: dict[str, int]) -> str:
        return " and ".join(f"{number} {self._causes[name]}" for name, number in numbers.items() if number)
