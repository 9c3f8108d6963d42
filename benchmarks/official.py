"""Compares a round of lcfl with the code of the methods' authors, from the same weights and on the same batches.

    python benchmarks/official.py CLONES --csv docs/results/official.csv

CLONES is a folder with clones of the repositories in `COMPARISONS`, each under the repository's own name. Their code
is imported from there and called; none of it is part of lcfl. A repository that is not there is skipped. A folder
that is not a git clone may hold a file ``COMMIT`` with the commit. The comparisons are in the folder ``authors``.

Each comparison prints the largest absolute difference of what both have made, and the same divided by the largest
change that the authors' code has made. In float32, sums of the same numbers in another order differ by 1e-7 to 1e-5.
Where the codes do different things, the row says what.
"""

import argparse
import csv
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from authors import clustered, drift, personal, robust
from authors.common import Comparison

# Method: function, repository, and whose code it is.
COMPARISONS: dict[str, tuple[Comparison, str, str]] = {
    "FedALA": (personal.fedala, "TsingZ0/FedALA", "the authors'"),
    "pFedMe": (personal.pfedme, "CharlieDinh/pFedMe", "the authors'"),
    "FedRep": (personal.fedrep, "lgcollins/FedRep", "the authors'"),
    "LG-FedAvg": (personal.lg_fedavg, "pliang279/LG-FedAvg", "the authors'"),
    "FedBABU": (personal.fedbabu, "jhoon-oh/FedBABU", "the authors'"),
    "FedBN": (personal.fedbn, "med-air/FedBN", "the authors'"),
    "APFL": (personal.apfl, "MLOPTPSU/FedTorch", "the authors'"),
    "Ditto": (personal.ditto, "jhoon-oh/FedBABU", "FedBABU's authors'"),
    "FedDyn": (drift.feddyn, "alpemreacar/FedDyn", "the authors'"),
    "SCAFFOLD": (drift.scaffold, "alpemreacar/FedDyn", "FedDyn's authors'"),
    "FedProx": (drift.fedprox, "alpemreacar/FedDyn", "FedDyn's authors'"),
    "FedNova": (drift.fednova, "JYWa/FedNova", "the authors'"),
    "IFCA": (clustered.ifca, "jichan3751/ifca", "the authors'"),
    "CFL": (clustered.cfl, "felisat/clustered-federated-learning", "the authors'"),
    "PACFL": (clustered.pacfl, "MMorafah/PACFL", "the authors'"),
    "CLoVE": (clustered.clove, "Nokia-Bell-Labs/Loss-Vector-based-Clustered-Federated-Learning", "the authors'"),
    "robust rules": (robust.rules, "epfml/byzantine-robust-noniid-optimizer", "centred clipping's authors'"),
}
TABLE = Path(__file__).parents[1] / "docs" / "results" / "official.csv"
FIELDS = ("method", "repository", "commit", "code", "compared", "difference", "relative", "reason")


def commit_of(folder: Path) -> str:
    """Returns the commit of a clone."""
    if (folder / "COMMIT").exists():
        return (folder / "COMMIT").read_text().strip()
    words = ["git", "--git-dir", str(folder / ".git"), "rev-parse", "HEAD"]
    return subprocess.run(words, capture_output=True, text=True).stdout.strip() or "unknown"


def main(words: Sequence[str] | None = None) -> list[dict[str, str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clones", type=Path, help="the folder of the clones")
    parser.add_argument("--methods", nargs="+", choices=list(COMPARISONS), default=list(COMPARISONS))
    parser.add_argument("--csv", type=Path, help="writes the table to this file")
    args = parser.parse_args(words)
    table: list[dict[str, str]] = []
    torch.set_num_threads(1)
    np.random.seed(0)  # APFL's code draws the order of its clients, and so that of its sums, from this generator
    for method in args.methods:
        compare, repository, code = COMPARISONS[method]
        folder = (args.clones / repository.split("/")[1]).resolve()
        if not folder.is_dir():
            print(f"{method}: skipped, there is no clone of {repository} at {folder}")
            continue
        commit = commit_of(folder)
        rows = list(compare(folder))  # what the authors' code prints is not shown
        print(f"{method}: {repository} at {commit[:10]}, {code} code")
        for row in rows:
            relative = "" if row.relative is None else f"{row.relative:.1e}"
            print(f"  {row.compared}: {row.difference:.1e}", relative and f"({relative} of the change)", row.reason)
            values = (method, repository, commit, code, row.compared, f"{row.difference:.1e}", relative, row.reason)
            table.append(dict(zip(FIELDS, values, strict=True)))
    if args.csv is not None:
        write(args.csv, table)
    return table


def write(path: Path, table: Sequence[dict[str, str]]) -> None:
    """Writes the rows, and keeps those that a file has of methods that were not compared this time."""
    compared, kept = {row["method"] for row in table}, []
    if path.is_file():
        with path.open(newline="") as file:
            kept = [row for row in csv.DictReader(file) if row["method"] not in compared]
    order = list(COMPARISONS)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted([*kept, *table], key=lambda row: order.index(row["method"])))


if __name__ == "__main__":
    main()
