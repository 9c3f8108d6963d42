"""Run directories as `fit` leaves them, with given numbers."""

import csv
import json


def made(root, name, seed, accuracies=(0.5, 0.6), protocol="own_split", clusters=None, at_end=(), **identity):
    """Makes the run ``<root>/<name>/version_<next>`` and returns its path.

    It has a warm-up round, and then one evaluated round per accuracy with 10 MB and 2 s each. At the end, models of the
    kinds `at_end` are also evaluated and are as good as the global model.
    """
    number = len(list((root / name).glob("version_*")))
    path = root / name / f"version_{number}"
    path.mkdir(parents=True)
    test = f"test/{protocol}"
    metric = f"{test}/global/acc"
    rows = [{"round": -1, "time/round_s": 1.0}]
    for round_, accuracy in enumerate(accuracies):
        row = {"round": round_, "time/round_s": 2.0, "comm/total_bytes": 10e6 * (round_ + 1), metric: accuracy}
        rows.append(row | ({} if clusters is None else {"cluster/count": clusters}))
    with (path / "metrics.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[-1].keys(), restval="")
        writer.writeheader()
        writer.writerows(rows)
    defaults = {"data": "d", "partition": "p", "clients_per_round": 5, "batch_size": 32, "drop_last": False}
    defaults["precision"] = "32-true"
    final = {f"{test}/trivial/acc": 0.25}
    for kind in ("global", *at_end):
        final |= {f"{test}/{kind}/acc": accuracies[-1], f"{test}/{kind}/acc_worst10": accuracies[-1] / 2}
    summary = {
        "metrics": final,
        "rounds": len(accuracies),
        "total_bytes": 10_000_000 * len(accuracies),
        "identity": {"seed": seed, **defaults, **identity},
    }
    (path / "summary.json").write_text(json.dumps(summary))
    return path
