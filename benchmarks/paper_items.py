"""The tables and figures of the four papers, as cells that ``papers.py`` runs.

A cell is a configuration of ``configs/papers``, a method, and in a figure also a value of what the figure varies.
Printed numbers are those of ``docs/results/published``. A reading is one way to understand what a paper leaves open,
and is given by the options that it changes.
"""

import csv
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import nan
from pathlib import Path

__all__ = ["AS_CONFIGURED", "FILES", "ITEMS", "READINGS", "Cell", "Item", "file_missing", "words_of"]

PUBLISHED = Path(__file__).parents[1] / "docs" / "results" / "published"
AS_CONFIGURED = "as_configured"
METRICS = ("test_accuracy", "newcomer_test_accuracy", "rounds_to_target", "communication_mb", "rounds_to_90pct_peak")
METRICS += ("stability_jaccard",)

Printed = Mapping[str, tuple[float, float]]  # by metric: mean and standard deviation, accuracies in percent


@dataclass(frozen=True)
class Cell:
    """One place of a table, or one point of a figure.

    Attributes:
        config: the name of a file in ``configs/papers``.
        method: the name of a file in ``configs/methods``.
        point: what the figure varies, as text; empty in a table.
        words: the options of this point.
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
    def dataset(self) -> str:
        """The name of the data set in the name of the configuration."""
        return self.config.split("-")[2]

    @property
    def column(self) -> str:
        """The data set and the partition."""
        return self.config.split("-", 2)[2]

    @property
    def row(self) -> str:
        """The method and the point."""
        return " ".join(filter(None, [self.method, self.point]))


@dataclass(frozen=True)
class Item:
    """A table or a figure.

    Attributes:
        title: what it is called in its paper.
        cells: its cells.
        metrics: what is measured.
        words: the options of every run.
        picture: how it is drawn: ``table`` (a panel per column), ``lines`` (over the points), ``surface`` (over pairs
            of values) or ``curves`` (over rounds).
    """

    title: str
    cells: tuple[Cell, ...]
    metrics: tuple[str, ...] = ("test_accuracy",)
    words: tuple[str, ...] = ()
    picture: str = "table"


def _published(item: str) -> Iterator[dict[str, str]]:
    with (PUBLISHED / f"{item}.csv").open(newline="") as file:
        yield from csv.DictReader(file)


def _number(text: str, unit: str = "") -> float:
    return nan if not text else float(text) * (100 if unit == "fraction" else 1)


def _printed_in(row: Mapping[str, str]) -> Printed:
    unit = row["unit"] if row["metric"] == "test_accuracy" else ""
    return {row["metric"]: (_number(row["mean"], unit), _number(row["std"], unit))}


def _table(item: str, configs: str | None = None, renamed: Mapping[str, str] | None = None) -> tuple[Cell, ...]:
    """Returns the cells of a table.

    Args:
        item: the name of its file of printed numbers.
        configs: the table whose configurations it shares; None for those of its own name.
        renamed: the methods that have another name in lcfl.
    """
    cells = []
    for row in _published(item):
        config = f"{configs or item}-{row['dataset']}-{row['partition'].removesuffix('+rotation')}"
        target = row["model_count_or_param"].removeprefix("target=")
        method = (renamed or {}).get(row["method"], row["method"])
        at = float(target) / 100 if target else None
        cells.append(Cell(config, method, target=at, printed=_printed_in(row)))
    return tuple(cells)


def _points(
    configs: Iterable[str],
    methods: Iterable[str],
    points: Mapping[str, Sequence[str]],
    printed: Mapping[tuple[str, str], Printed] | None = None,
) -> tuple[Cell, ...]:
    """Returns the cells of a figure: all configurations x methods x points, with printed numbers by (method, point)."""
    methods = list(methods)
    return tuple(
        Cell(config, method, point, tuple(words), printed=(printed or {}).get((method, point), {}))
        for config in configs
        for method in methods
        for point, words in points.items()
    )


def _ablation() -> tuple[Cell, ...]:
    """Returns AS-CFL without each of its parts. Printed drops are taken from the accuracy of the full method."""
    variants = {
        "full": "ascfl",
        "without positive incentive": "ascfl_no_incentive",
        "without dynamic adjustment": "ascfl_no_adjustment",
        "without low-rank factorization": "ascfl_no_lowrank",
    }
    printed: dict[tuple[str, str], dict[str, tuple[float, float]]] = {}
    for row in _published("ascfl-table4"):
        if row["metric"] in METRICS:
            printed.setdefault((row["dataset"], row["model_count_or_param"]), {}).update(_printed_in(row))
    full, _ = printed["mnist", "full"]["test_accuracy"]
    for row in _published("ascfl-table4"):
        if row["metric"] == "test_accuracy_drop" and row["dataset"] == "mnist":
            value = full - float(row["mean"])
            printed.setdefault(("mnist", row["model_count_or_param"]), {})["test_accuracy"] = value, nan
    return tuple(
        Cell(f"ascfl-table3-{dataset}-dirichlet-0.6", method, printed=printed.get((dataset, variant), {}))
        for dataset in ("mnist", "emnist")
        for variant, method in variants.items()
    )


def _alphas() -> tuple[Cell, ...]:
    """Returns AS-CFL and CFL over alpha."""
    option = "--data.partition.init_args.base.init_args.alpha"
    printed = {
        (row["method"], f"alpha={float(row['partition'].split('-')[1].removesuffix('+rotation')):g}"): _printed_in(row)
        for row in _published("ascfl-fig4")
    }
    points = {f"alpha={alpha:g}": [f"{option}={alpha}"] for alpha in (1.0, 0.8, 0.6, 0.4, 0.2, 0.1)}
    return _points(["ascfl-table3-mnist-dirichlet-0.4"], ["ascfl", "cfl"], points, printed)


def _thetas() -> tuple[Cell, ...]:
    """Returns AS-CFL over the threshold of its incentive."""
    printed = {
        ("ascfl", row["model_count_or_param"]): {"stability_jaccard": (float(row["mean"]), nan)}
        for row in _published("ascfl-fig5")
    }
    points = {f"theta={theta:.2f}": [f"--method.clustering.0.theta={theta}"] for theta in (0.75, 0.8, 0.85, 0.9)}
    return _points(["ascfl-table3-mnist-dirichlet-0.4"], ["ascfl"], points, printed)


def _dropouts() -> tuple[Cell, ...]:
    """Returns AS-CFL without and with clients that drop out."""
    printed = {
        (
            "ascfl",
            row["model_count_or_param"].replace("=10 percent per round", "=0.1").replace("no dropout", "dropout=0"),
        ): _printed_in(row)
        for row in _published("ascfl-intext")
        if row["metric"] == "test_accuracy"
    }
    points = {f"dropout={share:g}": [f"--trainer.client_dropout={share}"] for share in (0.0, 0.1)}
    return _points(["ascfl-table3-mnist-dirichlet-0.4"], ["ascfl"], points, printed)


BOTH_TESTS = ("--data.protocols=[own_split,label_view]",)
CIFAR = ["lcfed-table1-cifar10-pathological-3", "lcfed-table1-cifar10-dirichlet-0.1"]
FEDAC_CIFAR = ["fedac-table1-cifar10-pathological-3", "fedac-table1-cifar10-dirichlet-0.1"]
LABEL_SKEW = ["fedclust-table1-cifar10-label-skew-20", "fedclust-table1-fmnist-label-skew-20"]
SIMILARITIES = {name: [f"--method.clustering.0.similarity={name}"] for name in ("low_rank_cosine", "l2")}
CLUSTER_NUMBERS = {f"K={number}": [f"--method.clustering.0.num_clusters={number}"] for number in (2, 5, 10, 15, 20)}
NO_MOVES = ("--method.clustering.1.lower=0", "--method.clustering.1.upper=1e9")
FIXED_NUMBERS = {f"fixed {point}": [*words, *NO_MOVES] for point, words in CLUSTER_NUMBERS.items()}
TREES = {
    f"K={number}": ["--method.clustering.0.choose=null", f"--method.clustering.0.num_clusters={number}"]
    for number in (1, 2, 4, 8, 16, 32, 64, 100)
}
STRENGTHS = (0, 0.1, 0.5, 1)
PULLS = {
    f"mu={mu} lambda={weight}": [f"--model.cluster_weight={mu}", f"--model.global_weight={weight}"]
    for mu in STRENGTHS
    for weight in STRENGTHS
}
ITEMS = {
    "fedac-table1": Item("FedAC, Table 1", _table("fedac-table1"), words=BOTH_TESTS),
    "fedac-fig3ab": Item(
        "FedAC, Fig. 3(a) and (b)", _points(FEDAC_CIFAR, ["fedac"], PULLS), words=BOTH_TESTS, picture="surface"
    ),
    "fedac-fig3cd": Item("FedAC, Fig. 3(c) and (d)", _points(FEDAC_CIFAR, ["fedac"], SIMILARITIES), words=BOTH_TESTS),
    "fedac-fig4c": Item(
        "FedAC, Fig. 4(c)",
        _points(FEDAC_CIFAR, ["fedac"], FIXED_NUMBERS),
        ("granularity", "granularity_variance"),
        BOTH_TESTS,
        "lines",
    ),
    "fedac-fig4d": Item(
        "FedAC, Fig. 4(d)",
        _points(FEDAC_CIFAR, ["fedac"], CLUSTER_NUMBERS),
        ("granularity", "clusters"),
        BOTH_TESTS,
        "curves",
    ),
    "lcfed-table1": Item("LCFed, Table I", _table("lcfed-table1", renamed={"fedac": "lcfed"}), words=BOTH_TESTS),
    "lcfed-fig2": Item("LCFed, Fig. 2", _points(CIFAR, ["lcfed"], PULLS), words=BOTH_TESTS, picture="surface"),
    "ascfl-table3": Item("AS-CFL, Table 3", _table("ascfl-table3")),
    "ascfl-table4": Item("AS-CFL, Table 4 and Fig. 3", _ablation(), ("test_accuracy", "rounds_to_90pct_peak")),
    "ascfl-fig2": Item(
        "AS-CFL, Fig. 2", _points(["ascfl-table3-emnist-dirichlet-0.6"], ["ascfl", "cfl"], {"": []}), picture="curves"
    ),
    "ascfl-fig4": Item("AS-CFL, Fig. 4", _alphas(), picture="lines"),
    "ascfl-fig5": Item("AS-CFL, Fig. 5", _thetas(), ("stability_jaccard", "test_accuracy"), picture="lines"),
    "ascfl-dropout": Item("AS-CFL, section 4.2.3, clients that drop out", _dropouts()),
    "fedclust-table1": Item("FedClust, Table 1", _table("fedclust-table1"), words=BOTH_TESTS),
    "fedclust-table2": Item("FedClust, Table 2", _table("fedclust-table2"), words=BOTH_TESTS),
    "fedclust-table3": Item("FedClust, Table 3", _table("fedclust-table3"), words=BOTH_TESTS),
    "fedclust-table4": Item(
        "FedClust, Table 4", _table("fedclust-table4", "fedclust-table1"), ("rounds_to_target",), BOTH_TESTS
    ),
    "fedclust-table5": Item(
        "FedClust, Table 5", _table("fedclust-table5", "fedclust-table2"), ("communication_mb",), BOTH_TESTS
    ),
    "fedclust-table6": Item("FedClust, Table 6", _table("fedclust-table6"), ("newcomer_test_accuracy",), BOTH_TESTS),
    "fedclust-fig3": Item(
        "FedClust, Fig. 3",
        tuple(Cell(cell.config, cell.method) for cell in _table("fedclust-table1")),
        words=BOTH_TESTS,
        picture="curves",
    ),
    "fedclust-fig4": Item(
        "FedClust, Fig. 4", _points(LABEL_SKEW, ["fedclust"], TREES), words=BOTH_TESTS, picture="lines"
    ),
}

LENETS = {
    "cifar10": "{class_path: lcfl.models.LeNet5}",
    "cifar100": "{class_path: lcfl.models.LeNet5, init_args: {num_classes: 100}}",
    "mnist": "{class_path: lcfl.models.LeNet5, init_args: {in_channels: 1, image_size: 28}}",
}
PULLED = ("lcfed", "lcfed_plus", "fedac", "fedac_silhouette", "fedac_plus")
# What neither LCFed nor FedAC prints: momentum, and one more option of each method, two values of each.
MOMENTA = "model.optimizer.init_args.momentum=0,0.9"
PULL_PAIRS = "model={cluster_weight: 1, global_weight: 0},{cluster_weight: 0.5, global_weight: 0.5}"
NUMBERS = "method.clustering.0.num_clusters=4,10"
DECAYS = "model.optimizer.init_args.weight_decay=0,0.001"
UNPRINTED = dict.fromkeys(PULLED, PULL_PAIRS) | dict.fromkeys(("fesem", "fedgroup", "fl_hc", "ifca", "cgpfl"), NUMBERS)
RATES = "model.optimizer.init_args.lr=0.1,0.01,0.001"  # FedClust prints all three for these methods
MANY_RATES = ("fedavg", "fedprox", "fednova", "cfl")


def lenet(cell: Cell) -> list[str] | None:
    """LeNet-5 with 62,006 parameters (on MNIST 44,426), which LCFed names."""
    return [f"--model.network={LENETS[cell.dataset]}"] if cell.dataset in LENETS else None


def ring(cell: Cell) -> list[str] | None:
    """Each client has n labels, and the clients form as many groups with equal labels as there are labels."""
    return _labels(cell, "LabelRing")


def random(cell: Cell) -> list[str] | None:
    """Each client has n random labels."""
    return _labels(cell, "LabelSkew", ", draw: random")


def _labels(cell: Cell, partition: str, more: str = "") -> list[str] | None:
    kind, _, number = cell.column.partition("-")[2].rpartition("-")
    if kind != "pathological":
        return None
    return [
        f"--data.partition={{class_path: {partition}, init_args: {{num_labels: {number}, sizes: [50, 350]{more}}}}}"
    ]


def momentum(cell: Cell) -> list[str]:
    """A momentum of 0.9."""
    return ["--model.optimizer.init_args.momentum=0.9"]


def faster(cell: Cell) -> list[str]:
    """A learning rate of 0.05."""
    return ["--model.optimizer.init_args.lr=0.05"]


def epochs(cell: Cell) -> list[str]:
    """Local iterations are epochs."""
    return ["--method.local_update.init_args.steps=null", "--method.local_update.init_args.epochs=5"]


def everyone(cell: Cell) -> list[str]:
    """All clients take part in each round."""
    return ["--trainer.clients_per_round=1.0"]


def no_global_pull(cell: Cell) -> list[str] | None:
    """LCFed and FedAC with mu = 1 and lambda = 0."""
    return ["--model.cluster_weight=1", "--model.global_weight=0"] if cell.method in PULLED else None


def tuned(cell: Cell) -> list[str]:
    """The best of four trials on validation data: two momenta, and two values of one option of the method."""
    return [f"--grid={MOMENTA}", f"--grid={UNPRINTED.get(cell.method, DECAYS)}"]


def tuned_rate(cell: Cell) -> list[str] | None:
    """The best of FedClust's three learning rates on validation data."""
    return [f"--grid={RATES}"] if cell.method in MANY_RATES else None


def adapted(cell: Cell) -> list[str]:
    """Models are also tested after a local update in every evaluation."""
    return ["--trainer.evaluate_models=[after_local]"]


def letters(cell: Cell) -> list[str] | None:
    """EMNIST's letters, 26 classes, instead of its 62 classes."""
    if cell.dataset != "emnist":
        return None
    return ["--data.dataset.init_args.split=letters", "--model.network.init_args.num_classes=26"]


def strict(cell: Cell) -> list[str] | None:
    """AS-CFL's incentive as its Eq. 3 has it."""
    return ["--method.clustering.0.rule=strict"] if cell.method == "ascfl" else None


_READINGS = (lenet, ring, random, momentum, faster, epochs, everyone, no_global_pull, tuned, tuned_rate, adapted)
READINGS: dict[str, Callable[[Cell], list[str] | None]] = {
    each.__name__: each for each in (*_READINGS, letters, strict)
}
FILES = {  # below the folder of data
    "cifar10": "cifar-10-batches-py/*",
    "cifar100": "cifar-100-python/*",
    "mnist": "MNIST/raw/*",
    "fmnist": "FashionMNIST/raw/*",
    "emnist": "EMNIST/raw/emnist-byclass-*",
    "svhn": "train_32x32.mat",
}


def words_of(cell: Cell, reading: str) -> list[str] | None:
    """Returns the options of a reading, such as ``lenet+ring``; None if it does not apply to the cell."""
    words = [READINGS[name](cell) for name in reading.split("+") if name != AS_CONFIGURED]
    return None if None in words else [word for each in words for word in each or ()]


def file_missing(cell: Cell, reading: str, root: Path) -> str | None:
    """Returns the files below `root` that the cell needs and that are not there; None if nothing is missing."""
    pattern = FILES.get(cell.dataset, "*")
    if "letters" in reading.split("+"):
        pattern = pattern.replace("byclass", "letters")
    return None if any(root.glob(pattern)) else pattern
