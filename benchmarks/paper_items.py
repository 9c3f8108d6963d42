"""The tables and figures of the four papers, as cells that ``papers.py`` runs.

A cell is a configuration of ``configs/papers``, a method, and in a figure also a value of what the figure varies.
Printed numbers are those of ``docs/results/published``.
"""

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import nan
from pathlib import Path

__all__ = ["FILES", "ITEMS", "Cell", "Item"]

PUBLISHED = Path(__file__).parents[1] / "docs" / "results" / "published"
FILES = {  # that a data set needs, below the folder of data
    "cifar10": "cifar-10-batches-py/*",
    "cifar100": "cifar-100-python/*",
    "mnist": "MNIST/raw/*",
    "fmnist": "FashionMNIST/raw/*",
    "emnist": "EMNIST/raw/emnist-byclass-*",
    "svhn": "train_32x32.mat",
}

Printed = dict[str, tuple[float, float]]  # mean and standard deviation by metric; accuracies in percent


@dataclass(frozen=True)
class Cell:
    """One place of a table, or one point of a figure.

    Attributes:
        config: the name of a file in ``configs/papers``: ``<paper>-<table>-<data set>-<partition>``.
        method: the name of a file in ``configs/methods``.
        point: what the figure varies, as text; empty in a table.
        words: the options of this point; empty if the configuration already has this value.
        target: the accuracy whose first round is asked for, between 0 and 1.
        printed: the printed numbers.
    """

    config: str
    method: str
    point: str = ""
    words: tuple[str, ...] = ()
    target: float | None = None
    printed: Printed = field(default_factory=dict)

    @property
    def paper(self) -> str:
        """The paper whose configuration it is."""
        return self.config.split("-")[0]

    @property
    def dataset(self) -> str:
        """The data set."""
        return self.config.split("-")[2]

    @property
    def column(self) -> str:
        """The data set and the partition."""
        return self.config.split("-", 2)[2]

    @property
    def row(self) -> str:
        """The method and the point."""
        return f"{self.method} {self.point}".strip()


@dataclass(frozen=True)
class Item:
    """A table or a figure.

    Attributes:
        title: what it is called in its paper.
        cells: its cells.
        metrics: what is measured.
        words: the options of every run. Items with the same cells and words share their runs.
        picture: how it is drawn: ``table`` (a panel per column), ``lines`` (over the points), ``surface`` (over pairs
            of values) or ``curves`` (over rounds).
        shown_rounds: the rounds that a picture over rounds shows; None for all.
    """

    title: str
    cells: tuple[Cell, ...]
    metrics: tuple[str, ...] = ("test_accuracy",)
    words: tuple[str, ...] = ()
    picture: str = "table"
    shown_rounds: int | None = None


def _published(item: str) -> Iterator[dict[str, str]]:
    with (PUBLISHED / f"{item}.csv").open(newline="") as file:
        yield from csv.DictReader(file)


def _printed_in(row: Mapping[str, str]) -> Printed:
    """Returns the printed number of a cell; none if it cannot be what its column says."""
    if "suspected misprint" in row["note"]:
        return {}
    scale = 100 if row["unit"] == "fraction" and row["metric"] == "test_accuracy" else 1
    mean, std = (scale * float(row[name]) if row[name] else nan for name in ("mean", "std"))
    return {row["metric"]: (mean, std)}


def _column_of(row: Mapping[str, str]) -> str:
    return f"{row['dataset']}-{row['partition'].removesuffix('+rotation')}"


def _table(item: str, configs: str | None = None, renamed: Mapping[str, str] | None = None) -> tuple[Cell, ...]:
    """Returns the printed cells of a table.

    Args:
        item: the name of its file of printed numbers.
        configs: the table whose configurations it shares; None for those of its own name.
        renamed: the methods that have another name in lcfl.
    """
    cells = []
    for row in _published(item):
        target = row["model_count_or_param"].removeprefix("target=")
        cells.append(
            Cell(
                config=f"{configs or item}-{_column_of(row)}",
                method=(renamed or {}).get(row["method"], row["method"]),
                target=float(target) / 100 if target else None,
                printed=_printed_in(row),
            )
        )
    return tuple(cells)


def _points(
    configs: Iterable[str],
    methods: Sequence[str],
    points: Mapping[str, Sequence[str]],
    printed: Mapping[tuple[str, str], Printed] | None = None,
) -> tuple[Cell, ...]:
    """Returns the cells of a figure: all configurations x methods x points, with printed numbers by (method, point)."""
    return tuple(
        Cell(config, method, point, tuple(words), printed=(printed or {}).get((method, point), {}))
        for config, method, (point, words) in product(configs, methods, points.items())
    )


def _ascfl_table3() -> tuple[Cell, ...]:
    """Returns all 24 cells. The text that we have prints six of them."""
    printed = {(_column_of(row), ASCFL_NAMES[row["method"]]): _printed_in(row) for row in _published("ascfl-table3")}
    columns = [f"{dataset}-dirichlet-{alpha}" for dataset in ("mnist", "emnist") for alpha in ("0.8", "0.6", "0.4")]
    return tuple(
        Cell(f"ascfl-table3-{column}", method, printed=printed.get((column, method), {}))
        for column, method in product(columns, ("fedavg", "cfl_fixed", "ifca", "ascfl"))
    )


def _ascfl_table4() -> tuple[Cell, ...]:
    """Returns AS-CFL without each of its parts. Printed changes are taken from the numbers of the full method."""
    variants = {
        "full": "ascfl",
        "without positive incentive": "ascfl_no_incentive",
        "without dynamic adjustment": "ascfl_no_adjustment",
        "without low-rank factorization": "ascfl_no_lowrank",
    }
    printed: dict[tuple[str, str], Printed] = {}
    changes = {"test_accuracy_drop": "test_accuracy", "rounds_increase": "rounds_to_90pct_peak"}
    for row in _published("ascfl-table4"):
        key = row["dataset"], row["model_count_or_param"]
        full = printed.get((row["dataset"], "full"), {})
        metric, change = changes.get(row["metric"], ""), row["mean"]
        if row["metric"] in ("test_accuracy", "rounds_to_90pct_peak"):
            printed.setdefault(key, {}).update(_printed_in(row))
        elif metric in full and metric not in printed.get(key, {}):
            before = full[metric][0]
            value = before - float(change) if metric == "test_accuracy" else before * (1 + float(change) / 100)
            printed.setdefault(key, {})[metric] = value, nan
    return tuple(
        Cell(f"ascfl-table3-{dataset}-dirichlet-0.6", method, printed=printed.get((dataset, variant), {}))
        for dataset, (variant, method) in product(("mnist", "emnist"), variants.items())
    )


def _ascfl_alphas() -> tuple[Cell, ...]:
    """Returns AS-CFL and CFL over alpha, with the printed numbers of the tables, too."""
    rows = [*_published("ascfl-fig4"), *_published("ascfl-table3"), *_published("ascfl-table4")]
    printed = {
        (ASCFL_NAMES[row["method"]], f"alpha={float(_column_of(row).rpartition('-')[2]):g}"): _printed_in(row)
        for row in rows
        if row["dataset"] == "mnist"
        and row["metric"] == "test_accuracy"
        and row["model_count_or_param"] in ("", "full")
    }
    option = "--data.partition.init_args.base.init_args.alpha"
    points = {f"alpha={alpha:g}": [f"{option}={alpha}"] for alpha in (1.0, 0.8, 0.6, 0.4, 0.2, 0.1)}
    points["alpha=0.4"] = []
    return _points([ASCFL_MNIST], ["ascfl", "cfl_fixed"], points, printed)


def _ascfl_thetas() -> tuple[Cell, ...]:
    """Returns AS-CFL over the threshold of its incentive."""
    printed = {("ascfl", row["model_count_or_param"]): _printed_in(row) for row in _published("ascfl-fig5")}
    points = {f"theta={theta:.2f}": [f"--method.clustering.0.theta={theta}"] for theta in (0.75, 0.8, 0.85, 0.9)}
    points["theta=0.85"] = []
    return _points([ASCFL_MNIST], ["ascfl"], points, printed)


def _ascfl_dropouts() -> tuple[Cell, ...]:
    """Returns AS-CFL without and with clients that drop out."""
    shares = {"no dropout": 0.0, "dropout=10 percent per round": 0.1}
    printed = {
        ("ascfl", f"dropout={shares[row['model_count_or_param']]:g}"): _printed_in(row)
        for row in _published("ascfl-intext")
        if row["model_count_or_param"] in shares
    }
    points = {"dropout=0": [], "dropout=0.1": ["--trainer.client_dropout=0.1"]}
    return _points([ASCFL_MNIST], ["ascfl"], points, printed)


def _ascfl_bytes() -> tuple[Cell, ...]:
    """Returns AS-CFL with and without compressed uploads, and the methods that it is compared with."""
    names = {"without low-rank aggregation": "", "with low-rank aggregation": "compressed"}
    printed = {
        names[row["model_count_or_param"]]: _printed_in(row)
        for row in _published("ascfl-intext")
        if row["metric"] == "uplink_mb"
    }
    others = [Cell(ASCFL_MNIST, method) for method in ("fedavg", "cfl_fixed")]
    compressed = "--method.exchange.init_args.transforms=[{class_path: LowRankCompression}]"
    plain = Cell(ASCFL_MNIST, "ascfl", printed=printed[""])
    return (plain, Cell(ASCFL_MNIST, "ascfl", "compressed", (compressed,), printed=printed["compressed"]), *others)


ASCFL_NAMES = {"ascfl": "ascfl", "cfl": "cfl_fixed", "fedavg": "fedavg", "ifca": "ifca"}  # its CFL has a fixed K
ASCFL_MNIST = "ascfl-table3-mnist-dirichlet-0.4"
LCFED_CIFAR = ("lcfed-table1-cifar10-pathological-3", "lcfed-table1-cifar10-dirichlet-0.1")
FEDAC_CIFAR = ("fedac-table1-cifar10-pathological-3", "fedac-table1-cifar10-dirichlet-0.1")
FEDAC_BOTH = (*FEDAC_CIFAR, "fedac-table1-cifar100-pathological-8", "fedac-table1-cifar100-dirichlet-0.1")
SKEWED = [f"fedclust-table1-{dataset}-label-skew-20" for dataset in ("cifar10", "cifar100", "fmnist", "svhn")]
# These papers do not say which images a client is tested on. Their configurations hold a part of its own back.
BOTH_TESTS = ("--data.protocols=[own_split,label_view]",)
EVERY_ROUND = ("--trainer.evaluate_every=1",)  # for numbers of rounds
STRENGTHS = (0, 0.1, 0.5, 1)
PULLS = {
    f"mu={mu} lambda={weight}": [f"--model.cluster_weight={mu}", f"--model.global_weight={weight}"]
    for mu, weight in product(STRENGTHS, STRENGTHS)
} | {"mu=0.5 lambda=0.5": []}
SIMILARITIES = {"low_rank_cosine": [], "l2": ["--method.clustering.0.similarity=l2"]}
PRESET = {f"K={number}": [f"--method.clustering.0.num_clusters={number}"] for number in (2, 5, 10, 15, 20)}
NO_MOVES = ("--method.clustering.1.lower=0", "--method.clustering.1.upper=1e9")
FIXED = {f"fixed {point}": [*words, *NO_MOVES] for point, words in PRESET.items()}
TUNED = PRESET | {"K=10": []}
# FedClust's figure varies lambda, the height at which the tree is cut. K is the number of clusters that it gives.
TREES = {
    f"K={number}": ["--method.clustering.0.choose=null", f"--method.clustering.0.num_clusters={number}"]
    for number in (1, 2, 4, 8, 16, 32, 64, 100)
}
TO_PEAK = ("test_accuracy", "uplink_mb", "rounds_to_90pct_peak", "megabytes_to_90pct_peak")
ITEMS = {
    "fedac-table1": Item("FedAC, Table 1", _table("fedac-table1"), words=BOTH_TESTS),
    "fedac-fig3ab": Item(
        "FedAC, Fig. 3(a) and (b)", _points(FEDAC_BOTH, ["fedac"], PULLS), words=BOTH_TESTS, picture="surface"
    ),
    "fedac-fig3cd": Item("FedAC, Fig. 3(c) and (d)", _points(FEDAC_BOTH, ["fedac"], SIMILARITIES), words=BOTH_TESTS),
    "fedac-fig4c": Item(
        "FedAC, Fig. 4(c)",
        _points(FEDAC_CIFAR, ["fedac"], FIXED),
        ("granularity", "granularity_variance", "clusters"),
        BOTH_TESTS,
        "lines",
    ),
    "fedac-fig4d": Item(
        "FedAC, Fig. 4(d)",
        _points(FEDAC_CIFAR, ["fedac"], TUNED),
        ("granularity", "clusters"),
        BOTH_TESTS,
        "curves",
    ),
    "lcfed-table1": Item("LCFed, Table I", _table("lcfed-table1", renamed={"fedac": "lcfed"}), words=BOTH_TESTS),
    "lcfed-fig2": Item("LCFed, Fig. 2", _points(LCFED_CIFAR, ["lcfed"], PULLS), words=BOTH_TESTS, picture="surface"),
    "ascfl-table3": Item("AS-CFL, Table 3", _ascfl_table3(), words=EVERY_ROUND),
    "ascfl-table4": Item(
        "AS-CFL, Table 4 and Fig. 3", _ascfl_table4(), ("test_accuracy", "rounds_to_90pct_peak"), EVERY_ROUND
    ),
    "ascfl-fig2": Item(
        "AS-CFL, Fig. 2",
        _points(["ascfl-table3-emnist-dirichlet-0.6"], ["ascfl", "cfl_fixed"], {"": []}),
        words=EVERY_ROUND,
        picture="curves",
    ),
    "ascfl-fig4": Item("AS-CFL, Fig. 4", _ascfl_alphas(), words=EVERY_ROUND, picture="lines"),
    "ascfl-fig5": Item("AS-CFL, Fig. 5", _ascfl_thetas(), ("stability_jaccard", "test_accuracy"), EVERY_ROUND, "lines"),
    "ascfl-dropout": Item("AS-CFL, section 4.2.3: clients that drop out", _ascfl_dropouts(), words=EVERY_ROUND),
    "ascfl-bytes": Item("AS-CFL, section 4.2.3: communication", _ascfl_bytes(), TO_PEAK, EVERY_ROUND),
    "fedclust-table1": Item("FedClust, Table 1", _table("fedclust-table1"), words=EVERY_ROUND),
    "fedclust-table2": Item("FedClust, Table 2", _table("fedclust-table2"), words=EVERY_ROUND),
    "fedclust-table3": Item("FedClust, Table 3", _table("fedclust-table3")),
    "fedclust-table4": Item(
        "FedClust, Table 4", _table("fedclust-table4", "fedclust-table1"), ("rounds_to_target",), EVERY_ROUND
    ),
    "fedclust-table5": Item(
        "FedClust, Table 5",
        _table("fedclust-table5", "fedclust-table2"),
        ("communication_mb", "all_communication_mb"),
        EVERY_ROUND,
    ),
    "fedclust-table6": Item("FedClust, Table 6", _table("fedclust-table6"), ("newcomer_test_accuracy",)),
    "fedclust-fig3": Item(
        "FedClust, Fig. 3",
        tuple(Cell(cell.config, cell.method) for cell in _table("fedclust-table1")),
        words=EVERY_ROUND,
        picture="curves",
        shown_rounds=80,
    ),
    "fedclust-fig4": Item("FedClust, Fig. 4", _points(SKEWED, ["fedclust"], TREES), picture="lines"),
}
