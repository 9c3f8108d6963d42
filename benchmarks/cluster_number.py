"""Tests how FedAC's two criteria correct a wrong number of clusters, with 40 synthetic clients in four groups.

    python benchmarks/cluster_number.py

Prints, for each criterion and each initial K, the number of clusters, the adjusted Rand index and the mean
granularity G after some rounds.
"""

import tempfile
import warnings
from functools import partial

import torch

from lcfl import Callback, FederatedModule, Federation, Method
from lcfl.data.datamodule import FederatedDataModule
from lcfl.data.datasets import Synthetic
from lcfl.data.partition import Pathological
from lcfl.methods.aggregation import ClusterMean
from lcfl.methods.clustering import ClusterNumberTuning, RefreshedLowRankCosine
from lcfl.methods.exchange import CentreAndEmbedding
from lcfl.methods.local import LocalTraining
from lcfl.models import MLP

SHOWN = [6, 9, 11, 13, 16, 21, 31, 60]


class Rows(Callback):
    """Keeps the metrics of every round."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_round_logged(self, row: dict[str, float]) -> None:
        """Keeps the metrics of the round."""
        self.rows.append(row)


def train(criterion: str, num_clusters: int) -> list[dict[str, float]]:
    """Trains a federation that starts with `num_clusters` clusters, and returns its metrics by round."""
    data = FederatedDataModule(Synthetic(samples_per_class=400, test_per_class=0, separation=1.0), Pathological(2), 40)
    module = FederatedModule(
        partial(MLP, 16, [16], 8), partial(torch.optim.SGD, lr=0.1), cluster_weight=0.1, global_weight=0.1
    )
    clustering = [
        RefreshedLowRankCosine(num_clusters, dimension=20, refresh_every=20),
        ClusterNumberTuning("silhouette" if criterion == "silhouette" else "ratio", literal=criterion == "literal"),
    ]
    mean = ClusterMean("stored", "participants")
    method = Method(LocalTraining(steps=5), CentreAndEmbedding(), mean, clustering)
    watch = Rows()
    with tempfile.TemporaryDirectory() as folder:
        Federation(
            max(SHOWN),
            clients_per_round=10,
            evaluate_every=0,
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            default_root_dir=folder,
            callbacks=[watch],
        ).fit(module, data, method)
    return watch.rows


def main() -> None:
    warnings.simplefilter("ignore")  # about components that a few models do not span
    print("clusters, adjusted Rand index, G after round " + ", ".join(map(str, SHOWN)))
    for criterion in ("silhouette", "ratio", "literal"):
        for num_clusters in (1, 2, 8, 12):
            rows = train(criterion, num_clusters)
            cells = []
            for row in (rows[number - 1] for number in SHOWN):
                ratio = row.get("cluster/granularity", float("nan"))  # not defined for one cluster
                cells.append(f"{row['cluster/count']:.0f} {row['cluster/ari']:.2f} {ratio:.3f}")
            print(f"{criterion:<10} from {num_clusters:>2}: " + " | ".join(cells), flush=True)


if __name__ == "__main__":
    main()
