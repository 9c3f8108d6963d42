"""Every method on CIFAR-10: 100 clients, 25 a round, LeNet-5, 1,000 rounds, three seeds, tuned on validation data.

    python benchmarks/cifar10.py --root data --partition pathological --jobs 2
    python benchmarks/cifar10.py --root data --partition dirichlet --methods lcfed,fedac,ascfl,fedclust

One ``lcfl sweep``, which is printed first. A method's four trials are two learning rates and two values of what it
depends on most, or four learning rates. They are as long as the runs: what keeps clients from overfitting looks useless
before they do. Given again, the command skips what is done and resumes what was begun.
"""

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

from lcfl.cli.commands import sweep

PARTITIONS = {
    "pathological": ["--data.partition=Pathological", "--data.partition.classes_per_client=3"],
    "dirichlet": ["--data.partition=ClientDirichlet", "--data.partition.alpha=0.1"],
}

TWO_RATES = ["model.optimizer.init_args.lr=0.02,0.05"]
FOUR_RATES = ["model.optimizer.init_args.lr=0.01,0.02,0.03,0.05"]  # at 0.1 FedAvg diverges after 300 to 500 rounds
PULLS = [*TWO_RATES, "model={cluster_weight: 0, global_weight: 0},{cluster_weight: 1, global_weight: 0.5}"]
# In blocks the cluster's pull is known to be worth eight points, and the question is the global one.
GLOBAL_PULLS = [*TWO_RATES, "model={cluster_weight: 1, global_weight: 0},{cluster_weight: 1, global_weight: 0.5}"]
CLUSTERS = [*TWO_RATES, "method.clustering.init_args.num_clusters=4,10"]
# With so few clusters average linkage leaves nearly everybody in one of them.
PACFL_TREES = "method.clustering.init_args={num_clusters: 4, linkage: complete},{num_clusters: 10, linkage: average}"
# In blocks one run of three is never cut at a tenth of the largest first update, and under Dirichlet too seldom.
CFL_THRESHOLDS = "method.clustering.init_args={eps1: 0.1, eps2: 0.4},{eps1: 0.2, eps2: 1.2}"
# AS-CFL's and FedClust's files have their papers' ten epochs; here every method has five steps.
FIVE_STEPS = "method.local_update.init_args={steps: 5, epochs: null, fill_batch: false, lr_decay: 1.0}"
GRIDS = {
    "fedavg": FOUR_RATES,
    "fedper": ["model.optimizer.init_args.lr=0.005,0.01,0.02,0.03"],  # at 0.05 two of three seeds diverge
    "local": FOUR_RATES,
    "lcfed": GLOBAL_PULLS,
    "lcfed_plus": PULLS,
    "fedac": GLOBAL_PULLS,
    "fedac_plus": PULLS,
    "fedclust": [*TWO_RATES, "method.clustering.init_args.choose=gap,silhouette", FIVE_STEPS],
    "ascfl": [*FOUR_RATES, FIVE_STEPS],
    "fedprox": [*TWO_RATES, "model.cluster_weight=0.01,0.1"],
    "fednova": FOUR_RATES,
    "lg_fedavg": FOUR_RATES,
    "per_fedavg": [*TWO_RATES, "method.local_update.init_args.inner_lr=0.01,0.02"],  # at 0.05 it diverges
    "fesem": CLUSTERS,
    "fedgroup": CLUSTERS,
    "fl_hc": CLUSTERS,
    # at 0.05 some of CGPFL's clients diverge in every third round
    "cgpfl": ["method.local_update.init_args.inner_lr=0.01,0.02", "method.clustering.init_args.num_clusters=4,10"],
    "ifca": CLUSTERS,
    "cfl": [*TWO_RATES, CFL_THRESHOLDS],
    "pacfl": [*TWO_RATES, PACFL_TREES],
}
# Without groups in the data more clusters are better than the papers' ten or FedClust's nine: on validation
# data by three points for FeSEM and by six for PACFL. IFCA, which sends every client all of them, is left with ten.
MORE_CLUSTERS = [*TWO_RATES, "method.clustering.init_args.num_clusters=20,40"]
DIRICHLET_GRIDS = GRIDS | {
    "lcfed": PULLS,
    "fedac": PULLS,
    "fedclust": [
        *TWO_RATES,
        "method.clustering.init_args={choose: null, num_clusters: 20},{choose: null, num_clusters: 40}",
        FIVE_STEPS,
    ],
    "fesem": MORE_CLUSTERS,
    "fedgroup": MORE_CLUSTERS,
    "fl_hc": MORE_CLUSTERS,
    # in both a smaller rate and fewer clusters are better than what is tried in blocks
    "cgpfl": ["method.local_update.init_args.inner_lr=0.005,0.01", "method.clustering.init_args.num_clusters=1,4"],
    "pacfl": [
        *TWO_RATES,
        "method.clustering.init_args={linkage: average, num_clusters: 20},{linkage: average, num_clusters: 40}",
    ],
}


def grids_of(partition: str) -> dict[str, list[str]]:
    """What is tuned for each method on one of the partitions."""
    return DIRICHLET_GRIDS if partition == "dirichlet" else GRIDS


def words_of(partition: str, methods: Sequence[str], root: str, rounds: int) -> list[str]:
    """What stands behind ``lcfl sweep``, without seeds, jobs and folder."""
    words = ["-c", "configs/data/cifar10.yaml", *PARTITIONS[partition], "--data.partition.sizes=[50,350]"]
    words += [f"--data.dataset.init_args.root={root}", "--data.protocols=[own_split,label_view]", "--data.proxy=1000"]
    words += ["--trainer.clients_per_round=25", "--trainer.evaluate_every=100", "--trainer.enable_progress_bar=false"]
    words += [f"--trainer.rounds={rounds}", f"--methods={','.join(methods)}"]
    grids = grids_of(partition)
    return [*words, *(f"--grid={method}:{grid}" for method in methods for grid in grids[method])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default="data", help="where torchvision's cifar-10-batches-py lies")
    parser.add_argument("--partition", choices=PARTITIONS, default="pathological")
    parser.add_argument("--methods", default=",".join(GRIDS), help="separated by commas; all by default")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time, each with one rank")
    parser.add_argument("--out", type=Path, help="folder of the runs (logs/cifar10-PARTITION)")
    options = parser.parse_args()
    methods = options.methods.split(",")
    words = words_of(options.partition, methods, options.root, options.rounds)
    words += [f"--seeds={options.seeds}", f"--jobs={options.jobs}", "--trainer.devices=1"]
    words += [f"--out={options.out or Path('logs') / f'cifar10-{options.partition}'}"]
    print("lcfl sweep", shlex.join(words), flush=True)
    sweep.main(words)


if __name__ == "__main__":
    main()
