"""Ends a run whose clients' updates cannot be used."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from lcfl.runs.metrics_table import MetricsTable
from lcfl.server.reception import Received

__all__ = ["UsableUpdates"]

MOST_FAILED_ROUNDS = (
    20  # in a row; the models are those before them, and a run of which no client trains never recovers
)
FAILED, REFUSED = "train/failed_clients", "train/refused_clients"


class UsableUpdates:
    """Counts the training rounds in a row in which updates arrived, but none could be used.

    An update with noise counts as used, because the server cannot see what is below the noise.

    Args:
        table: ``metrics.csv``, which has the numbers of the whole run.
        run_dir: the run directory.
        max_update_norm: the largest norm of an update that is not refused; None for no limit.
    """

    def __init__(self, table: MetricsTable, run_dir: Path, max_update_norm: float | None) -> None:
        self._table, self._run_dir = table, run_dir
        self._causes = {
            FAILED: "were not finite (set a smaller model.optimizer.lr, unless samples are not finite)",
            REFUSED: f"were beyond trainer.max_update_norm={max_update_norm} (raise it)",
        }
        self._rounds, self._numbers = 0, Counter[str]()

    def count(self, received: Received) -> None:
        """Counts what has been received in a training round. A round in which no update arrived does not count."""
        if received.results:
            self._rounds, self._numbers = 0, Counter()
        elif received.num_failed or received.num_refused:
            self._rounds += 1
            self._numbers.update({FAILED: received.num_failed, REFUSED: received.num_refused})

    def check_last_rounds(self) -> None:
        """Raises an error if in each of the last rounds updates arrived, but none could be used.

        Raises:
            ValueError: with the number of updates by cause.
        """
        if self._rounds >= MOST_FAILED_ROUNDS:
            raise ValueError(
                f"{self._run_dir}: the run does not go on, because in each of the last {self._rounds} rounds no update "
                f"could be used: {self._why(self._numbers)}."
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

    def _why(self, numbers: Mapping[str, int]) -> str:
        return " and ".join(f"{number} {self._causes[name]}" for name, number in numbers.items() if number)
