"""CIFAR-10 as in LCFed's and FedAC's tables: 100 clients, 25 a round, LeNet-5, 1,000 rounds.

    python benchmarks/cifar10.py --root data --seeds 0 1

Chooses mu and lambda per partition and method on validation data (300 rounds, seed 0), then runs LCFed,
LCFed plus, FedAvg and Local, and prints one Markdown table with the majority baseline. What is finished
is not run again, what was interrupted is resumed: start it as often as needed. Every run is an ordinary
``lcfl fit`` whose command is printed first.
"""

import argparse
import csv
import json
import shlex
import subprocess
import sys
from itertools import product
from pathlib import Path
from statistics import mean, stdev

PARTITIONS = {
    "pathological-3": ["Pathological", "--data.partition.classes_per_client=3", "--data.partition.sizes=[50,350]"],
    "dirichlet-0.1": ["ClientDirichlet", "--data.partition.alpha=0.1", "--data.partition.sizes=[50,350]"],
}
METHODS = ["lcfed", "lcfed_plus", "fedavg", "local"]
TUNED = ["lcfed", "lcfed_plus"]
WEIGHTS = [(0.0, 0.0), (0.1, 0.1), (0.5, 0.1), (0.5, 0.5), (1.0, 0.5), (2.0, 0.5)]
TUNING_ROUNDS = 300


def command(
    partition: str, method: str, seed: int, rounds: int, weights: tuple[float, float] | None, o: argparse.Namespace
) -> tuple[str, list[str]]:
    """The name of a run and the command that makes it."""
    name = f"cifar10-{partition}-{method}-seed{seed}-{rounds}"
    words = [
        sys.executable,
        "-m",
        "lcfl",
        "fit",
        "-c",
        "configs/data/cifar10.yaml",
        "-c",
        f"configs/methods/{method}.yaml",
    ]
    words += [f"--data.partition={PARTITIONS[partition][0]}", *PARTITIONS[partition][1:]]
    words += [f"--data.dataset.init_args.root={o.root}", "--data.dataset.init_args.download=false"]
    words += [f"--seed_everything={seed}", f"--trainer.rounds={rounds}", "--trainer.clients_per_round=25"]
    words += ["--trainer.evaluate_every=50", f"--trainer.default_root_dir={o.logs}"]
    if weights is not None:
        words += [f"--model.cluster_weight={weights[0]}", f"--model.global_weight={weights[1]}"]
        name += f"-mu{weights[0]}-lambda{weights[1]}"
    return name, [*words, f"--trainer.name={name}"]


def run(
    partition: str, method: str, seed: int, rounds: int, weights: tuple[float, float] | None, o: argparse.Namespace
) -> Path:
    """The directory of the finished run; starts or resumes it if it is not finished."""
    name, words = command(partition, method, seed, rounds, weights, o)
    runs = sorted((Path(o.logs) / name).glob("version_*"))
    finished = [path for path in runs if (path / "summary.json").is_file()]
    if finished:
        return finished[-1]
    if any((path / "checkpoints").glob("round-*.ckpt") for path in runs):
        words += ["--ckpt_path=last"]
    print(f"{shlex.join(words[1:])}", flush=True)
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    return run(partition, method, seed, rounds, weights, o)


def metrics(path: Path) -> dict[str, float]:
    """The final metrics of a run."""
    return dict(json.loads((path / "summary.json").read_text())["metrics"])


def tuned_weights(partition: str, method: str, o: argparse.Namespace) -> tuple[float, float]:
    """The (mu, lambda) with the best validation accuracy of personal models, seed 0."""
    scores = {w: metrics(run(partition, method, 0, TUNING_ROUNDS, w, o))["val/own_split/personal/acc"] for w in WEIGHTS}
    for weights, score in scores.items():
        print(f"tuning {partition} {method} mu, lambda = {weights}: validation {score:.4f}", flush=True)
    return max(scores, key=lambda weights: scores[weights])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default="data", help="where torchvision's cifar-10-batches-py lies")
    parser.add_argument("--logs", default="logs", help="trainer.default_root_dir")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--partitions", nargs="+", default=list(PARTITIONS), choices=list(PARTITIONS))
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    o = parser.parse_args()
    rows = []
    for partition, method in product(o.partitions, o.methods):
        weights = tuned_weights(partition, method, o) if method in TUNED else None
        runs = [run(partition, method, seed, o.rounds, weights, o) for seed in o.seeds]
        found = [metrics(path) for path in runs]
        row = [partition, method, "-" if weights is None else f"{weights[0]}, {weights[1]}"]
        for kind in ("personal", "cluster", "global", "after_local"):
            values = [100 * m[name] for m in found if (name := f"test/own_split/{kind}/acc") in m]
            spread = f" +- {stdev(values):.2f}" if len(values) > 1 else ""
            row.append(f"{mean(values):.2f}{spread}" if values else "-")
        row.append(f"{100 * mean(m['test/own_split/majority/acc'] for m in found):.2f}")
        ari = [
            [r["cluster/ari"] for r in csv.DictReader((path / "metrics.csv").open()) if r.get("cluster/ari")]
            for path in runs
        ]
        row.append(" ".join(f"{float(a[-1]):.2f}" for a in ari if a) or "-")
        rows.append(row)
        print(" | ".join(row), flush=True)
    heads = [
        "partition",
        "method",
        "mu, lambda",
        "personal",
        "cluster",
        "global",
        "after local",
        "majority",
        "ARI per seed",
    ]
    print("\n| " + " | ".join(heads) + " |\n|" + "---|" * len(heads))
    for row in rows:
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
