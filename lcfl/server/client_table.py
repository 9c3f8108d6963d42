"""The table of the clients at the end of a run: one row each, with their names and their metrics."""

import csv
import io
from pathlib import Path

from lcfl.core.files import write_whole
from lcfl.core.state import FederationState
from lcfl.data.population import Population
from lcfl.server.metrics import Evaluation

__all__ = ["write_client_table"]


def write_client_table(
    path: Path, evaluation: Evaluation, population: Population, state: FederationState, is_clustered: bool
) -> None:
    """Writes ``clients.csv``: number, name, training samples, cluster and faults of every client, and its metrics.

    A cell is empty if a client has no samples for a metric, or is faulty. Newcomers and clients that have left have no
    row.

    Args:
        path: the file.
        evaluation: the last evaluation.
        population: the clients' names and samples.
        state: the state at the end.
        is_clustered: whether the method has clusters.
    """
    metrics = {
        name: dict(zip(metric.clients.tolist(), metric.values.tolist(), strict=True))
        for name, metric in evaluation.by_name.items()
    }
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    named, clustered, has_faults = population.names is not None, is_clustered, bool(population.faulty)
    writer.writerow(
        ["client", *["name"] * named, "train_samples", *["cluster"] * clustered, *["faults"] * has_faults, *metrics]
    )
    for client in state.active.nonzero().flatten().tolist():
        row: list[object] = [client]
        row += population.names_of([client]) or []
        row.append(len(population.train[client]))
        row += [int(state.assignment[client])] * clustered
        row += [" ".join(type(fault).__name__ for fault in population.faulty.get(client, ()))] * has_faults
        writer.writerow([*row, *(values.get(client, "") for values in metrics.values())])
    write_whole(path, text.getvalue().encode())
