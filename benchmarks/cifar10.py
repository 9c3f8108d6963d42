"""CIFAR-10 as in LCFed's and FedAC's tables: 100 clients, 25 a round, LeNet-5, 1,000 rounds.

    python benchmarks/cifar10.py --root data --seeds 0 1

Chooses mu and lambda per partition and method on validation data (300 rounds, seed 0), then runs LCFed,
LCFed plus, FedAvg and Local, and prints two Markdown tables: accuracies beside the majority baseline, and
the adjusted Rand index over rounds where the groups are known. What is finished is not run again, what was
interrupted is resumed: start it as often as needed, and one process per partition at the same time with
``--partitions ... --devices 1``. Every run is an ordinary ``lcfl fit`` whose command is printed first.
"""

import argparse
import csv
import json
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

PARTITIONS = {
    "pathological-3": ["Pathological", "--data.partition.classes_per_client=3", "--data.partition.sizes=[50,350]"],
    "dirichlet-0.1": ["ClientDirichlet", "--data.partition.alpha=0.1", "--data.partition.sizes=[50,350]"],
}
# K = 10 is the papers' number; the blocks of the pathological partition are four groups, and there we try K = 4 too.
METHODS = {
    "pathological-3": [("lcfed", 10), ("lcfed", 4), ("lcfed_plus", 10), ("lcfed_plus", 4), ("fedavg", 0), ("local", 0)],
    "dirichlet-0.1": [("lcfed", 10), ("lcfed_plus", 10), ("fedavg", 0), ("local", 0)],
}
WEIGHTS = [(0.0, 0.0), (0.1, 0.1), (0.5, 0.5), (1.0, 0.5)]
TUNING_ROUNDS = 300
COURSE = [1, 10, 50, 100, 200, 500, 1000]
KINDS = ["personal", "cluster", "global", "after_local"]


@dataclass(frozen=True)
class Experiment:
    """One run: a partition, a method with K clusters (0: it has none) and its mu and lambda, a seed and a length."""

    partition: str
    method: str
    num_clusters: int
    weights: tuple[float, float] | None
    seed: int
    rounds: int

    @property
    def name(self) -> str:
        """Tells every setting that differs between runs."""
        clusters = f"-k{self.num_clusters}" if self.num_clusters else ""
        weights = f"-mu{self.weights[0]}-lambda{self.weights[1]}" if self.weights else ""
        return f"cifar10-{self.partition}-{self.method}{clusters}{weights}-seed{self.seed}-{self.rounds}"

    def command(self, root: str, logs: Path, devices: str) -> list[str]:
        """The `lcfl fit` that makes this run."""
        words = [sys.executable, "-m", "lcfl", "fit"]
        words += ["-c", "configs/data/cifar10.yaml", "-c", f"configs/methods/{self.method}.yaml"]
        words += [f"--data.partition={PARTITIONS[self.partition][0]}", *PARTITIONS[self.partition][1:]]
        words += [f"--data.dataset.init_args.root={root}", "--data.dataset.init_args.download=false"]
        if self.num_clusters:
            words += [f"--method.clustering.init_args.num_clusters={self.num_clusters}"]
        if self.weights:
            words += [f"--model.cluster_weight={self.weights[0]}", f"--model.global_weight={self.weights[1]}"]
        words += [f"--seed_everything={self.seed}", f"--trainer.rounds={self.rounds}", "--trainer.clients_per_round=25"]
        words += ["--trainer.evaluate_every=50", f"--trainer.devices={devices}"]
        return [*words, f"--trainer.default_root_dir={logs}", f"--trainer.name={self.name}"]


@dataclass(frozen=True)
class Laboratory:
    """Where the data and the runs lie; makes a run or finds it finished."""

    root: str
    logs: Path
    devices: str

    def run(self, experiment: Experiment) -> Path:
        """The directory of the finished run; starts or resumes it if it is not finished."""
        runs = sorted((self.logs / experiment.name).glob("version_*"))
        finished = [path for path in runs if (path / "summary.json").is_file()]
        if finished:
            return finished[-1]
        words = experiment.command(self.root, self.logs, self.devices)
        if any(next((path / "checkpoints").glob("round-*.ckpt"), None) for path in runs):
            words += ["--ckpt_path=last"]
        print(shlex.join(words[1:]), flush=True)
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
        return self.run(experiment)

    def metrics(self, experiment: Experiment) -> dict[str, float]:
        """The final metrics of a run."""
        return dict(json.loads((self.run(experiment) / "summary.json").read_text())["metrics"])

    def rand_index(self, experiment: Experiment) -> dict[int, float]:
        """Completed rounds -> adjusted Rand index of the assignment; empty if nothing is clustered."""
        with (self.run(experiment) / "metrics.csv").open() as file:
            rows = [row for row in csv.DictReader(file) if row.get("cluster/ari")]
        return {int(row["round"]) + 1: float(row["cluster/ari"]) for row in rows}

    def tuned_weights(self, partition: str, method: str) -> tuple[float, float]:
        """The (mu, lambda) with the best validation accuracy of personal models, K = 10, seed 0."""
        scores = {
            weights: self.metrics(Experiment(partition, method, 10, weights, 0, TUNING_ROUNDS)) for weights in WEIGHTS
        }
        for weights, score in scores.items():
            found = ", ".join(f"{k} {score[f'val/own_split/{k}/acc']:.4f}" for k in ("personal", "cluster"))
            print(f"tuning {partition} {method} mu, lambda = {weights}: validation {found}", flush=True)
        return max(scores, key=lambda weights: scores[weights]["val/own_split/personal/acc"])


def summary(values: list[float]) -> str:
    """Mean and, of several seeds, the standard deviation."""
    spread = f" ± {stdev(values):.2f}" if len(values) > 1 else ""
    return f"{mean(values):.2f}{spread}" if values else "-"


def markdown(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def draw(courses: dict[str, dict[int, float]], path: Path) -> None:
    """The adjusted Rand index over rounds, a line per run."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="round", ylabel="adjusted Rand index", xscale="log", ylim=(0, 1.02))
    for label, course in courses.items():
        axes.plot(list(course), list(course.values()), label=label, linewidth=1)
    axes.legend(fontsize="small", ncols=2)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default="data", help="where torchvision's cifar-10-batches-py lies")
    parser.add_argument("--logs", type=Path, default=Path("logs"), help="trainer.default_root_dir")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--partitions", nargs="+", default=list(PARTITIONS), choices=list(PARTITIONS))
    parser.add_argument("--devices", default="auto", help="trainer.devices; results do not depend on it")
    parser.add_argument("--figure", type=Path, help="write the adjusted Rand index over rounds to this PNG")
    o = parser.parse_args()
    laboratory = Laboratory(o.root, o.logs, o.devices)
    table, courses = [], {}
    for partition in o.partitions:
        for method, num_clusters in METHODS[partition]:
            weights = laboratory.tuned_weights(partition, method) if num_clusters else None
            label = f"{method}, K = {num_clusters}" if num_clusters else method
            runs = [Experiment(partition, method, num_clusters, weights, seed, o.rounds) for seed in o.seeds]
            found = [laboratory.metrics(run) for run in runs]
            row = [partition, label, f"{weights[0]}, {weights[1]}" if weights else "-"]
            for kind in KINDS:
                row.append(summary([100 * m[name] for m in found if (name := f"test/own_split/{kind}/acc") in m]))
            table.append([*row, summary([100 * m["test/own_split/majority/acc"] for m in found])])
            print(" | ".join(table[-1]), flush=True)
            for run in runs:
                if course := laboratory.rand_index(run):
                    courses[f"{label}, seed {run.seed}"] = course
    print(
        "\n" + markdown(["partition", "method", "mu, lambda", *(k.replace("_", " ") for k in KINDS), "majority"], table)
    )
    if courses:
        rounds = [n for n in COURSE if all(n in course for course in courses.values())]
        rows = [[label, *(f"{course[n]:.2f}" for n in rounds)] for label, course in courses.items()]
        print("\n" + markdown(["adjusted Rand index after round", *map(str, rounds)], rows))
        if o.figure:
            draw(courses, o.figure)


if __name__ == "__main__":
    main()
