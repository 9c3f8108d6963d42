"""Measures which layers tell two groups of clients apart, as in FedClust's Fig. 1: CIFAR-10, VGG16, ten clients.

    python benchmarks/fedclust_layers.py --root data --epochs 1

Five clients have five of the classes, and five have the other five. Each client trains VGG16 from the same weights, and
the distance of two clients is that of the weights and bias of one layer: 1, 7 (convolutions), 14 or 16 (fully
connected). The table also says how much larger distances between groups are than within them, and whether the tree of
clients, cut in two, gives the groups. The paper does not say how long the clients train.
"""

import argparse
import csv
import tempfile
from collections.abc import Sequence
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from sklearn.metrics import adjusted_rand_score
from torch import Tensor

from lcfl import Callback, FederatedDataModule, FederatedModule, Federation, Method
from lcfl.core.messages import Uplink
from lcfl.core.state import FederationState
from lcfl.data.datasets import CIFAR10, RandomLike
from lcfl.data.partition import Pathological
from lcfl.figures.base import save
from lcfl.methods.aggregation import ClusterMean
from lcfl.methods.clustering import OneShotHierarchical
from lcfl.methods.clustering.agglomerative import cut_tree, pairwise_distances
from lcfl.methods.exchange import ClusterModel, NamedLayers
from lcfl.methods.local import LocalTraining
from lcfl.models import VGG16
from lcfl.server.server import Server

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LAYERS = {"1": "embedding.conv1", "7": "embedding.conv7", "14": "embedding.fc14", "16": "decision"}
RANDOM_IMAGES = 1000
NUM_CLIENTS, CLASSES_PER_CLIENT = 10, 5
FOLDER = Path(__file__).parents[1] / "docs" / "results" / "papers"


class Uploads(Callback):
    """Keeps the uploads of the warm-up round."""

    def __init__(self) -> None:
        self.uploads: Sequence[Uplink] = ()

    def on_extra_round_end(self, server: Server, state: FederationState, uploads: Sequence[Uplink]) -> None:
        """Keeps them."""
        self.uploads = uploads


def warm_up(root: str, epochs: int, samples: int | None, seed: int) -> tuple[dict[str, Tensor], list[int]]:
    """Trains every client, and returns the layers ``[N, P_L]`` by name, and the group of each client."""
    images = CIFAR10(root)
    data = FederatedDataModule(
        RandomLike(images, RANDOM_IMAGES) if root == "random" else images,
        Pathological(CLASSES_PER_CLIENT, sizes=None if samples is None else (samples, samples)),
        NUM_CLIENTS,
        seed=seed,
    )
    module = FederatedModule(VGG16, partial(torch.optim.SGD, lr=0.01, momentum=0.5))
    clustering = OneShotHierarchical(choose=None, num_clusters=2, layers=list(LAYERS.values()))
    method = Method(
        LocalTraining(epochs=epochs), ClusterModel(), ClusterMean("participants", "participants"), [clustering]
    )
    watch = Uploads()
    with tempfile.TemporaryDirectory() as folder:
        Federation(
            rounds=0,
            clients_per_round=1.0,
            evaluate_every=0,
            final_models=[],
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            default_root_dir=folder,
            seed=seed,
            callbacks=[watch],
        ).fit(module, data, method)
    sizes = [NamedLayers([layer]).subset(module.layout).size for layer in LAYERS.values()]
    parts = torch.stack([upload.payload["layers"] for upload in watch.uploads]).split(sizes, dim=1)
    groups = data.population.groups
    assert groups is not None, "blocks are groups"
    return dict(zip(LAYERS, parts, strict=True)), [int(groups[upload.client]) for upload in watch.uploads]


def rows_of(layer_NL: dict[str, Tensor], groups: Sequence[int]) -> list[dict[str, object]]:
    """Returns the distance of each pair of clients in each layer."""
    return [
        {
            "layer": name,
            "client": i,
            "other": j,
            "same_group": groups[i] == groups[j],
            "distance": float(distance_NN[i, j]),
        }
        for name, distance_NN in ((name, pairwise_distances(each_NL)) for name, each_NL in layer_NL.items())
        for i, j in combinations(range(len(groups)), 2)
    ]


def draw(layer_NL: dict[str, Tensor], groups: Sequence[int]) -> "Figure":
    """Draws a map of distances per layer, with the clients of a group side by side."""
    from matplotlib.figure import Figure

    order = sorted(range(len(groups)), key=groups.__getitem__)
    figure = Figure(figsize=(3.6 * len(layer_NL), 3.6), dpi=100, layout="constrained")
    for (name, each_NL), axes in zip(layer_NL.items(), figure.subplots(1, len(layer_NL)), strict=True):
        image = axes.imshow(pairwise_distances(each_NL)[order][:, order], cmap="viridis_r", vmin=0)
        axes.set_title(f"layer {name}")
        axes.set_xticks(range(len(order)), order)
        axes.set_yticks(range(len(order)), order)
        figure.colorbar(image, ax=axes, shrink=0.8)
    figure.suptitle("FedClust, Fig. 1: distance of the weights of two clients")
    return figure


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default="data", help="folder of cifar-10-batches-py; random for random images")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--samples", type=int, help="images of each client (default: all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of fedclust-fig1.csv and .png")
    options = parser.parse_args(args)
    layer_NL, groups = warm_up(options.root, options.epochs, options.samples, options.seed)
    rows = rows_of(layer_NL, groups)
    print("| layer | within groups | between groups | ratio | groups found |\n| --- | --- | --- | --- | --- |")
    for name, each_NL in layer_NL.items():
        within, between = (
            torch.tensor([row["distance"] for row in rows if (row["layer"], row["same_group"]) == (name, same)]).mean()
            for same in (True, False)
        )
        found = cut_tree(pairwise_distances(each_NL), "average", num_clusters=2).labels
        is_found = "yes" if adjusted_rand_score(groups, found) == 1 else "no"
        print(f"| {name} | {within:.4g} | {between:.4g} | {between / within:.3f} | {is_found} |")
    options.out.mkdir(parents=True, exist_ok=True)
    with (options.out / "fedclust-fig1.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    save(draw(layer_NL, groups), options.out / "fedclust-fig1.png")


if __name__ == "__main__":
    main()
