"""Runs every method on CIFAR-10: 100 clients, 25 a round, LeNet-5, 1,000 rounds, three seeds, tuned on validation data.

    python benchmarks/cifar10.py --root data --partition pathological --jobs 2
    python benchmarks/cifar10.py --root data --partition dirichlet --methods lcfed,fedac,ascfl,fedclust

The script runs one ``lcfl sweep``, whose command is printed first. The four trials of a method are two learning rates
with two values of the option that it depends on most, or four learning rates. They have as many rounds as the runs,
because options that prevent overfitting look useless before clients overfit. If the command is given again, finished
runs are skipped and interrupted ones are resumed.
"""

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

from lcfl.cli.commands import sweep

PARTITIONS = {
    "pathological": ["--data.partition=Pathological", "--data.partition.classes_per_client=3"],
    # The two other readings of "3 labels per client", see docs/partitions.md.
    "ring": ["--data.partition=LabelRing", "--data.partition.num_labels=3"],
    "random": ["--data.partition=LabelSkew", "--data.partition.num_labels=3", "--data.partition.draw=random"],
    "dirichlet": ["--data.partition=ClientDirichlet", "--data.partition.alpha=0.1"],
}

TWO_RATES = ["model.optimizer.init_args.lr=0.02,0.05"]
FOUR_RATES = ["model.optimizer.init_args.lr=0.01,0.02,0.03,0.05"]  # at 0.1 FedAvg diverges after 300 to 500 rounds
PULLS = [*TWO_RATES, "model={cluster_weight: 0, global_weight: 0},{cluster_weight: 1, global_weight: 0.5}"]
# In blocks, the pull towards the cluster is known to gain eight points, so only the global pull is tuned.
GLOBAL_PULLS = [*TWO_RATES, "model={cluster_weight: 1, global_weight: 0},{cluster_weight: 1, global_weight: 0.5}"]
CLUSTERS = [*TWO_RATES, "method.clustering.init_args.num_clusters=4,10"]
# With so few clusters, average linkage leaves nearly all clients in one of them.
PACFL_TREES = "method.clustering.init_args={num_clusters: 4, linkage: complete},{num_clusters: 10, linkage: average}"
# At a tenth of the largest first update, one run of three is never split in blocks, and too seldom under Dirichlet.
CFL_THRESHOLDS = "method.clustering.init_args={eps1: 0.1, eps2: 0.4},{eps1: 0.2, eps2: 1.2}"
# The files of AS-CFL and FedClust have ten epochs, as in their papers. Here, every method has five steps.
FIVE_STEPS = "method.local_update.init_args={steps: 5, epochs: null, fill_batch: false, lr_decay: 1.0}"
# LeNet-5 with batch normalisation, which cannot train on one sample.
NORMED_LENET = "{class_path: CNN, init_args: {channels: [6, 16], padding: 0, hidden: [120, 84], batch_norm: true}}"
FINE_TUNING = "method.local_update.init_args.fine_tuning_steps"
SERVER_RATE = "method.aggregation.init_args.optimizer.init_args.lr"
GRIDS = {
    "fedavg": FOUR_RATES,
    "fedper": ["model.optimizer.init_args.lr=0.005,0.01,0.02,0.03"],  # at 0.05 two of three seeds diverge
    "fedrep": [*TWO_RATES, "method.local_update.init_args.head_steps=5,20"],
    "fedbabu": [*TWO_RATES, "method.local_update.init_args.fine_tuned=all,head"],
    "fedbn": [*FOUR_RATES, f"model.network={NORMED_LENET}", "data.drop_last=true"],
    "local": FOUR_RATES,
    "lcfed": GLOBAL_PULLS,
    "lcfed_plus": PULLS,
    "fedac": GLOBAL_PULLS,
    "fedac_silhouette": GLOBAL_PULLS,
    "fedac_plus": PULLS,
    "fedclust": [*TWO_RATES, "method.clustering.init_args.choose=gap,silhouette", FIVE_STEPS],
    "ascfl": [*FOUR_RATES, FIVE_STEPS],
    "fedprox": [*TWO_RATES, "model.cluster_weight=0.01,0.1"],
    "fednova": FOUR_RATES,
    "scaffold": ["model.optimizer.init_args.lr=0.001,0.002,0.005,0.01"],  # the smallest of FOUR_RATES was the best
    "feddyn": ["model.optimizer.init_args.lr=0.005,0.01", "model.cluster_weight=0.01,0.1"],  # at 0.02 it diverges
    "fedavgm": [*TWO_RATES, f"{SERVER_RATE}=0.3,1.0"],
    "fedadam": [*TWO_RATES, f"{SERVER_RATE}=0.01,0.03"],
    "fedyogi": [*TWO_RATES, f"{SERVER_RATE}=0.01,0.03"],
    "fedadagrad": [*TWO_RATES, f"{SERVER_RATE}=0.03,0.1"],
    "lg_fedavg": FOUR_RATES,
    "per_fedavg": [*TWO_RATES, "method.local_update.init_args.inner_lr=0.01,0.02"],  # at 0.05 it diverges
    "ditto": [*TWO_RATES, "model.cluster_weight=0.1,1"],
    "pfedme": ["method.local_update.init_args.inner_lr=0.01,0.02", "method.local_update.init_args.outer_lr=0.02,0.05"],
    "apfl": [*TWO_RATES, "method.local_update.init_args.alpha=0.25,0.75"],
    "fedala": [*TWO_RATES, "method.local_update.init_args.layers=1,3"],
    "late_clusters": ["model.optimizer.init_args.lr=0.03,0.05", f"{FINE_TUNING}=50,100"],
    "fedamp": [*TWO_RATES, "method.exchange.init_args={step: 0.1, sigma: 0.1},{step: 0.3, sigma: 0.3}"],
    "fedlc": [*TWO_RATES, "method.local_update.init_args.tau=0.5,2"],
    "fesem": CLUSTERS,
    "fedgroup": CLUSTERS,
    "fl_hc": CLUSTERS,
    # At 0.05, some clients of CGPFL diverge in every third round.
    "cgpfl": ["method.local_update.init_args.inner_lr=0.01,0.02", "method.clustering.init_args.num_clusters=4,10"],
    "ifca": CLUSTERS,
    "clove": CLUSTERS,
    "cfl": [*TWO_RATES, CFL_THRESHOLDS],
    "cfl_fixed": CLUSTERS,
    "pacfl": [*TWO_RATES, PACFL_TREES],
}
# Without groups in the data, more clusters are better than the ten of the papers or the nine of FedClust. On validation
# data, they gain three points for FeSEM and six for PACFL. IFCA and CLoVE send every model to every client, so they
# keep ten.
MORE_CLUSTERS = [*TWO_RATES, "method.clustering.init_args.num_clusters=20,40"]
DIRICHLET_GRIDS = GRIDS | {
    "lcfed": PULLS,
    "fedac": PULLS,
    "fedac_silhouette": PULLS,
    "fedclust": [
        *TWO_RATES,
        "method.clustering.init_args={choose: null, num_clusters: 20},{choose: null, num_clusters: 40}",
        FIVE_STEPS,
    ],
    "fesem": MORE_CLUSTERS,
    "fedgroup": MORE_CLUSTERS,
    "fl_hc": MORE_CLUSTERS,
    "cfl_fixed": MORE_CLUSTERS,
    # Smaller rates and fewer clusters are better than those tried in blocks.
    "cgpfl": ["method.local_update.init_args.inner_lr=0.005,0.01", "method.clustering.init_args.num_clusters=1,4"],
    "pacfl": [
        *TWO_RATES,
        "method.clustering.init_args={linkage: average, num_clusters: 20},{linkage: average, num_clusters: 40}",
    ],
}


def grids_of(partition: str) -> dict[str, list[str]]:
    """Returns the grids of each method on one of the partitions."""
    return DIRICHLET_GRIDS if partition == "dirichlet" else GRIDS


def words_of(partition: str, methods: Sequence[str], root: str, rounds: int) -> list[str]:
    """Returns the arguments of ``lcfl sweep``, without seeds, jobs and folder."""
    words = ["-c", "configs/data/cifar10.yaml", *PARTITIONS[partition], "--data.partition.sizes=[50,350]"]
    words += [f"--data.dataset.init_args.root={root}", "--data.protocols=[own_split,label_view]", "--data.proxy=1000"]
    words += ["--trainer.clients_per_round=25", "--trainer.evaluate_every=100", "--trainer.enable_progress_bar=false"]
    words += [f"--trainer.rounds={rounds}", f"--methods={','.join(methods)}"]
    grids = grids_of(partition)
    return [*words, *(f"--grid={method}:{grid}" for method in methods for grid in grids[method])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default="data", help="folder with torchvision's cifar-10-batches-py")
    parser.add_argument("--partition", choices=PARTITIONS, default="pathological")
    parser.add_argument("--methods", default=",".join(GRIDS), help="names, separated by commas (default: all)")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time, each with one rank")
    parser.add_argument("--out", type=Path, help="folder of the runs (default: logs/cifar10-PARTITION)")
    options = parser.parse_args()
    methods = options.methods.split(",")
    words = words_of(options.partition, methods, options.root, options.rounds)
    words += [f"--seeds={options.seeds}", f"--jobs={options.jobs}", "--trainer.devices=1"]
    words += [f"--out={options.out or Path('logs') / f'cifar10-{options.partition}'}"]
    print("lcfl sweep", shlex.join(words), flush=True)
    sweep.main(words)


if __name__ == "__main__":
    main()
