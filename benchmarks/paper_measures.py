"""What the papers' tables and figures measure, from a finished run."""

from collections.abc import Callable
from json import loads
from math import nan

import numpy as np
from paper_items import Cell

from lcfl.runs.comparison import rounds_to_peak
from lcfl.runs.finished import FinishedRun

__all__ = ["MEASURES", "OVER_ROUNDS", "best_accuracy", "kinds_of"]

MEGABIT = 1e6 / 8  # bytes
NUM_CLIENTS = 100  # of FedClust

Measure = Callable[[FinishedRun, str, str, Cell], float]


def accuracy(run: FinishedRun, protocol: str, model: str, cell: Cell) -> float:
    """Returns the final accuracy in percent."""
    return 100 * run.metrics[f"test/{protocol}/{model}/acc"]


def best_accuracy(run: FinishedRun, protocol: str, model: str, cell: Cell) -> float:
    """Returns the accuracy in percent of the best evaluated round; nan if only the last model was evaluated."""
    values = [value for _, _, value in _curve(run, protocol, model)]
    return max(accuracy(run, protocol, model, cell), 100 * max(values)) if values else nan


def rounds_to_target(run: FinishedRun, protocol: str, model: str, cell: Cell) -> float:
    """Returns the number of rounds after which an evaluation first reaches the target; nan if none does."""
    return next((number for number, _, value in _curve(run, protocol, model) if value >= _target(cell)), nan)


def megabits_to_target(run: FinishedRun, protocol: str, model: str, cell: Cell) -> float:
    """Returns the megabits that a client has sent and received by then, the mean over all clients, in training rounds.

    The printed numbers are whole numbers of rounds, so they leave out warm-up rounds, signatures and new draws. All
    training rounds of these methods send the same number of bytes.
    """
    last = run.history[-1]
    size = last["comm/down_bytes"] + last["comm/up_bytes"]
    return rounds_to_target(run, protocol, model, cell) * size / MEGABIT / NUM_CLIENTS


def all_megabits_to_target(run: FinishedRun, protocol: str, model: str, cell: Cell) -> float:
    """Returns the same, including what was sent before the first training round."""
    reached = (size for _, size, value in _curve(run, protocol, model) if value >= _target(cell))
    return next(reached, nan) / MEGABIT / NUM_CLIENTS


def rounds_to_peak90(run: FinishedRun, protocol: str, model: str, cell: Cell) -> float:
    """Returns the number of rounds until nine tenths of the peak."""
    return rounds_to_peak(_curve(run, protocol, model))


def megabytes_to_peak90(run: FinishedRun, protocol: str, model: str, cell: Cell) -> float:
    """Returns the megabytes that all clients have sent and received by then."""
    rounds = rounds_to_peak90(run, protocol, model, cell)
    return next((size / 1e6 for number, size, _ in _curve(run, protocol, model) if number == rounds), nan)


def uplink(run: FinishedRun, protocol: str, model: str, cell: Cell) -> float:
    """Returns the megabytes that all clients together send in a round, the mean over rounds."""
    return float(np.mean([row["comm/up_bytes"] for row in run.history])) / 1e6


def newcomers(run: FinishedRun, protocol: str, model: str, cell: Cell) -> float:
    """Returns the accuracy in percent of the newcomers, ``before`` or ``after`` they train."""
    metrics = loads((run.path / "newcomers.json").read_text())["metrics"]
    return 100 * float(metrics[f"test/{protocol}/{model}/acc"])


def stability(run: FinishedRun, protocol: str, model: str, cell: Cell) -> float:
    """Returns the mean Jaccard similarity of the clusters of consecutive rounds."""
    return run.metrics["cluster/stability"]


def granularity(run: FinishedRun, protocol: str, model: str, cell: Cell) -> float:
    """Returns the mean over clusters of FedAC's G in the last round."""
    return float(np.mean(_granularities(run)))


def granularity_variance(run: FinishedRun, protocol: str, model: str, cell: Cell) -> float:
    """Returns the variance over clusters of FedAC's G in the last round."""
    return float(np.var(_granularities(run)))


def clusters(run: FinishedRun, protocol: str, model: str, cell: Cell) -> float:
    """Returns the number of clusters in the last round; nan for a method without clusters."""
    return run.history[-1].get("cluster/count", nan)


MEASURES: dict[str, Measure] = {
    "test_accuracy": accuracy,
    "newcomer_test_accuracy": newcomers,
    "rounds_to_target": rounds_to_target,
    "communication_mb": megabits_to_target,
    "all_communication_mb": all_megabits_to_target,
    "rounds_to_90pct_peak": rounds_to_peak90,
    "megabytes_to_90pct_peak": megabytes_to_peak90,
    "uplink_mb": uplink,
    "stability_jaccard": stability,
    "granularity": granularity,
    "granularity_variance": granularity_variance,
    "clusters": clusters,
}
OF_CURVES = (
    "rounds_to_target",
    "communication_mb",
    "all_communication_mb",
    "rounds_to_90pct_peak",
    "megabytes_to_90pct_peak",
)
OVER_ROUNDS = {"granularity": "cluster/granularity", "clusters": "cluster/count"}  # columns of metrics.csv


def kinds_of(run: FinishedRun, metric: str) -> list[tuple[str, str]]:
    """Returns the protocols and the kinds of model, or stages of newcomers, of which there is a metric.

    Metrics of clusters and of bytes have none: both are empty.
    """
    if metric == "newcomer_test_accuracy":
        return [(protocol, stage) for protocol in run.protocols for stage in ("before", "after")]
    if metric == "test_accuracy":
        return run.test_sets
    if metric in OF_CURVES:
        return [(protocol, model) for protocol, model in run.test_sets if _curve(run, protocol, model)]
    return [("", "")]


def _curve(run: FinishedRun, protocol: str, model: str) -> list[tuple[int, float, float]]:
    return run.curve(f"test/{protocol}/{model}/acc")


def _target(cell: Cell) -> float:
    assert cell.target is not None, "Tables 4 and 5 of FedClust name one for each cell"
    return cell.target


def _granularities(run: FinishedRun) -> list[float]:
    found = [value for name, value in run.history[-1].items() if name.startswith("cluster/granularity_")]
    return found or [nan]
