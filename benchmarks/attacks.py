"""Measures what faulty clients do to the others: MNIST in four blocks, 100 clients, 25 a round, LeNet-5, 100 rounds.

    python benchmarks/attacks.py --root data --jobs 2
    python benchmarks/attacks.py --figure docs/results/attacks.png

Every method runs with every rule, fault and share of faulty clients, and each run adds a row to the table. Runs that
are in the table already are skipped, so an interrupted script goes on when it is started again.
"""

import argparse
import csv
import multiprocessing
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lcfl.cli import federated_cli
from lcfl.figures.base import save

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TABLE = Path(__file__).parents[1] / "docs" / "results" / "attacks.csv"
KEYS = ("method", "rule", "fault", "share", "seed", "rounds")
VALUES = ("acc", "acc_worst10", "attack_success", "among_honest", "among_faulty")
SHARES = (0.0, 0.1, 0.2, 0.3, 0.4)
METHODS = {"fedavg": "global", "ifca": "cluster", "fedclust": "cluster", "lcfed": "personal"}  # reported kind of model
RULES = {
    "mean": "null",
    "median": "{class_path: CoordinateMedian}",
    "trimmed mean": "{class_path: TrimmedMean, init_args: {share: 0.3}}",
    "multi-Krum": "{class_path: Krum, init_args: {attackers: 0.3, keep: 3}}",
    "clipping": "{class_path: ClippedMean, init_args: {radius: 0.3}}",
}
SIGN_FLIP = "{class_path: ScaledUpdate, init_args: {clients: %s, factor: -4}}"
LABEL_FLIP = "{class_path: LabelFlip, init_args: {clients: %s}}"
REPLACEMENT = (
    "{class_path: Backdoor, init_args: {clients: %s, target: 0}}, "
    "{class_path: ScaledUpdate, init_args: {clients: %s, factor: 4}}"
)
FAULTS = {"label flip": LABEL_FLIP, "sign flip": SIGN_FLIP, "backdoor": REPLACEMENT}
# LCFed's centres are means over stored models, for which there are no rules.
PARTICIPANTS = "over: participants, embedding_over: participants, "

Key = tuple[str, ...]


def keys_of(
    methods: Sequence[str], rules: Sequence[str], faults: Sequence[str], seeds: Sequence[int], rounds: int
) -> Iterator[Key]:
    """Yields all runs. Without faulty clients there is one run for all faults, which counts as a backdoor's."""
    for seed, share, fault, method, rule in product(seeds, SHARES, faults, methods, rules):
        if share or fault == "backdoor":
            yield method, rule, fault, str(share), str(seed), str(rounds)


def words_of(key: Key, root: str, folder: str) -> list[str]:
    """Returns the words of ``lcfl`` for a run."""
    method, rule, fault, share, seed, rounds = key
    over = PARTICIPANTS if method == "lcfed" and rule != "mean" else ""
    words = ["fit", "-c", "configs/data/mnist.yaml", "-c", f"configs/methods/{method}.yaml"]
    words += ["-c", "method: {local_update: {init_args: {steps: 5, epochs: null, fill_batch: false, lr_decay: 1.0}}}"]
    words += ["-c", f"method: {{aggregation: {{init_args: {{{over}rule: {RULES[rule]}}}}}}}"]
    words += [
        "-c",
        f"data: {{faults: [{FAULTS[fault].replace('%s', share)}]}}",
        f"--data.dataset.init_args.root={root}",
    ]
    words += [f"--data.seed={seed}", f"--seed_everything={seed}", "--model.optimizer.init_args.lr=0.05"]
    words += [f"--trainer.rounds={rounds}", "--trainer.clients_per_round=25", "--trainer.evaluate_every=0"]
    words += ["--trainer.final_models=[]", "--trainer.devices=1", "--trainer.logger=false"]
    return [*words, "--trainer.enable_progress_bar=false", f"--trainer.default_root_dir={folder}"]


def measured(key: Key, root: str) -> dict[str, str]:
    """Carries out a run and returns its row of the table."""
    sys.argv = ["lcfl"]
    with tempfile.TemporaryDirectory() as folder:
        run = federated_cli.main(words_of(key, root, folder))
        metrics = run.metrics
        with (run.path / "metrics.csv").open(newline="") as file:
            last = list(csv.DictReader(file))[-1]
    kind = METHODS[key[0]]
    values = {name: metrics[f"test/own_split/{kind}/{name}"] for name in ("acc", "acc_worst10")}
    values["attack_success"] = metrics.get(f"test/backdoor/{kind}/acc", np.nan)
    values |= {name: float(last.get(f"fault/{name}") or "nan") for name in ("among_honest", "among_faulty")}
    return dict(zip(KEYS, key, strict=True)) | {name: f"{values[name]:.6f}" for name in VALUES}


def read(path: Path) -> dict[Key, dict[str, str]]:
    """Returns the rows of a table by their runs; none if there is no table."""
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        return {tuple(row[name] for name in KEYS): row for row in csv.DictReader(file)}


def append(path: Path, row: dict[str, str]) -> None:
    """Adds a row to a table."""
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, [*KEYS, *VALUES], lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerow(row)


def draw(rows: dict[Key, dict[str, str]]) -> "Figure":
    """Draws the accuracy of the honest clients for each fault, and the success of the backdoor; a column per method."""
    from matplotlib.figure import Figure

    panels = [(fault, "acc", "accuracy in %") for fault in FAULTS]
    panels.append(("backdoor", "attack_success", "success of the attack in %"))
    ends = sorted({key[4:] for key in rows})  # seed and rounds
    figure = Figure((3 * len(METHODS), 2.6 * len(panels)), layout="constrained")
    axes = figure.subplots(len(panels), len(METHODS), sharex=True, sharey=True)
    for (place, (fault, value, label)), (column, method) in product(enumerate(panels), enumerate(METHODS)):
        panel = axes[place, column]
        for rule in RULES:
            keys = [[(method, rule, fault if x else "backdoor", str(x), *end) for end in ends] for x in SHARES]
            numbers = [[100 * float(rows[key][value]) for key in own if key in rows] for own in keys]
            known = [(x, np.mean(own), np.std(own)) for x, own in zip(SHARES, numbers, strict=True) if own]
            if known:
                shares, means, deviations = zip(*known, strict=True)
                panel.errorbar(shares, means, deviations, marker="o", markersize=3, label=rule, linewidth=1)
        panel.set_title(f"{method}, {fault}", fontsize="medium")
        panel.grid(alpha=0.3)
        if column == 0:
            panel.set_ylabel(label)
        if place == len(panels) - 1:
            panel.set_xlabel("share of faulty clients")
    axes[0, 0].legend(fontsize="small")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default="data", help="folder with torchvision's MNIST")
    parser.add_argument("--methods", default=",".join(METHODS), help="names, separated by commas (default: all)")
    parser.add_argument("--rules", default=",".join(RULES), help="names, separated by commas (default: all)")
    parser.add_argument(
        "--faults",
        default=",".join(FAULTS),
        help="names, separated by commas (default: all); the runs without faulty clients come with backdoor",
    )
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--table", type=Path, default=TABLE)
    parser.add_argument("--figure", type=Path, help="only draw the table into this file")
    options = parser.parse_args()
    if options.figure:
        save(draw(read(options.table)), options.figure)
        return
    names = [getattr(options, name).split(",") for name in ("methods", "rules", "faults")]
    seeds = [int(seed) for seed in options.seeds.split(",")]
    done = read(options.table)
    missing = [key for key in keys_of(*names, seeds, options.rounds) if key not in done]
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        waiting = [pool.submit(measured, key, options.root) for key in missing]
        for number, run in enumerate(as_completed(waiting), 1):
            row = run.result()
            append(options.table, row)
            print(f"{number}/{len(missing)}", *row.values(), flush=True)


if __name__ == "__main__":
    main()
