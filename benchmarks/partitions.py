"""Prints facts about partitions of balanced labels, or of the real data sets.

    python benchmarks/partitions.py --draws 4000
    python benchmarks/partitions.py --root data

The first command reads no images: a partition uses only labels, and those of CIFAR-10, CIFAR-100 and data sets of the
size of MNIST are taken as balanced. The second command reads the data sets in the folder. It prints the numbers of
`lcfl partition` for the configurations of the papers next to the numbers that the papers state. docs/partitions.md
shows the output of both.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from lcfl.cli.commands.partition import parser as partition_options
from lcfl.core import rng
from lcfl.data.datamodule import FederatedDataModule
from lcfl.data.partition import ClassDirichlet, ClientDirichlet, ClientShares, LabelRing, LabelSkew, Pathological
from lcfl.data.partition.base import Indices, Partition

CONFIGS = Path(__file__).parents[1] / "configs" / "data"
# What the paper of a configuration, or the code of the paper, states about its data, or what follows from it.
STATED = {
    "cifar10": "FedAC: 50 to 350 images, 3 labels",
    "cifar10_pathological4": "LCFed: 4 labels",
    "cifar10_dirichlet": "FedAC: 50 to 350 images, alpha = 0.1",
    "cifar100": "FedAC: 50 to 350 images, 8 labels",
    "cifar100_pathological10": "LCFed: 10 labels",
    "cifar100_dirichlet": "FedAC: 50 to 350 images, alpha = 0.1",
    "mnist": "LCFed: 3 labels",
    "cifar10_fedclust_dirichlet": "NIID-Bench: at least 10 images, mean 500",
    "cifar10_fedclust_skew20": "FedClust: 20 % of the labels, mean 500",
    "cifar10_fedclust_skew30": "FedClust: 30 % of the labels, mean 500",
    "cifar100_fedclust_dirichlet": "NIID-Bench: at least 10 images, mean 500",
    "cifar100_fedclust_skew20": "FedClust: 20 % of the labels, mean 500",
    "cifar100_fedclust_skew30": "FedClust: 30 % of the labels, mean 500",
    "fashion_mnist_fedclust_dirichlet": "NIID-Bench: at least 10 images, mean 600",
    "fashion_mnist_fedclust_skew20": "FedClust: 20 % of the labels, mean 600",
    "fashion_mnist_fedclust_skew30": "FedClust: 30 % of the labels, mean 600",
    "mnist_ascfl": "AS-CFL: 20 clients, 10 % to 60 % of a share of 3,000, mean 1,050",
    "mnist_ifca": "IFCA: 2,400 clients with 100 images, 4 groups",
}


def labels_of(num_classes: int, num_samples: int) -> Indices:
    """Returns balanced labels."""
    return np.repeat(np.arange(num_classes), num_samples // num_classes)


def draws(partition: Partition, labels: Indices, num_clients: int, number: int) -> Iterator[ClientShares | None]:
    """Yields partitions for different seeds; None for a seed that the partition refuses."""
    for seed in range(number):
        try:
            yield partition(labels, num_clients, rng.generator(seed, "partition"))
        except ValueError:
            yield None


def counts_of(labels: Indices, shares: ClientShares) -> Indices:
    """Returns the number of samples of each label for each client ``[N, C]``."""
    return np.stack([np.bincount(labels[share], minlength=labels.max() + 1) for share in shares.indices])


def acceptance(labels: Indices, min_samples: int, number: int) -> float:
    """Returns the share of draws of NIID-Bench's Dirichlet(0.1) over 100 clients that meet the minimum."""
    rule = ClassDirichlet(0.1, min_samples=min_samples, max_tries=1)
    return float(np.mean([shares is not None for shares in draws(rule, labels, 100, number)]))


def statistics(rule: Partition, labels: Indices, number: int) -> dict[str, float]:
    """Returns statistics of the clients' data, averaged over draws."""
    rows = []
    for shares in draws(rule, labels, 100, number):
        assert shares is not None
        counts = counts_of(labels, shares)
        sizes = counts.sum(axis=1)
        majority = counts.max(axis=1)
        rows.append(
            {
                "median size": np.median(sizes),
                "largest": sizes.max(),
                "labels": (counts > 0).sum(axis=1).mean(),
                "majority share": (majority / sizes).mean(),
                "by samples": majority.sum() / sizes.sum(),
            }
        )
    return {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}


def blocks(num_classes: int, per_client: int) -> str:
    """Returns the sizes and the numbers of classes of the groups of 100 clients in the pathological partition."""
    labels = labels_of(num_classes, 50_000)
    shares = Pathological(per_client)(labels, 100, rng.generator(0, "partition"))
    assert shares.groups is not None
    first = [int(np.flatnonzero(shares.groups == group)[0]) for group in range(shares.groups.max() + 1)]
    sizes = np.bincount(shares.groups)
    owned = [len(np.unique(labels[shares.indices[client]])) for client in first]
    return ", ".join(f"{size} x {classes}" for size, classes in zip(sizes, owned, strict=True))


def readings(num_classes: int, per_client: int) -> Iterator[str]:
    """Yields what 100 clients own under each reading of "n labels per client", with 50 to 350 samples each."""
    rules = {
        "blocks": Pathological(per_client, (50, 350)),
        "ring": LabelRing(per_client, (50, 350)),
        "random": LabelSkew(per_client, "random", (50, 350)),
    }
    labels = labels_of(num_classes, 50_000)
    for name, rule in rules.items():
        (shares,) = draws(rule, labels, 100, 1)
        if shares is None:
            yield f"{name}: refused, because a class has too few samples for the clients that drew it"
            continue
        owns = counts_of(labels, shares) > 0
        clients = ", ".join(f"{(owns.sum(axis=1) == n).sum()} x {n}" for n in np.unique(owns.sum(axis=1))[::-1])
        alike = (owns[:, None] == owns).all(axis=2).sum(axis=1) - 1
        yield f"{name}: {clients}; {len(np.unique(owns, axis=0))} label sets, {alike.mean():.1f} others with the same"


def row(name: str, root: str) -> str:
    """Returns a line of the table of real data: the statistics of all samples of the clients in a configuration."""
    options = partition_options()
    words = [f"--data.dataset.init_args.{word}" for word in (f"root={root}", "download=false")]
    data: FederatedDataModule = options.instantiate(options.parse_args(["-c", f"{CONFIGS / name}.yaml", *words])).data
    data.prepare_data()
    data.setup()
    population = data.population
    roles = [
        population.train,
        population.val,
        *([population.test["own_split"]] if "own_split" in population.test else []),
    ]
    size_N = sum(np.array([len(each) for each in role]) for role in roles)
    labels_N, share_N = (
        (population.label_counts > 0).sum(axis=1),
        population.label_counts.max(axis=1) / population.sizes,
    )
    protocol = data.protocols[0]
    majority = 100 * float(np.nanmean(population.majority_accuracy(protocol, data.samples.labels)))
    groups = "-" if population.groups is None else str(len(np.unique(population.groups)))
    cells = [f"`{name}`", STATED[name], groups]
    cells += [f"{size_N.min()}, {np.median(size_N):.0f}, {size_N.mean():.0f}, {size_N.max()}"]
    cells += [f"{labels_N.min()}, {labels_N.mean():.1f}, {labels_N.max()}"]
    cells += [f"{population.label_entropy.mean():.2f}", f"{share_N.mean():.2f}", f"{majority:.2f} % ({protocol})"]
    return f"| {' | '.join(cells)} |"


def real(root: str) -> None:
    """Prints the table of real data. A data set that is missing in the folder is left out with a message."""
    print(
        "| configuration | stated | groups | images | labels | entropy in bits | majority share | majority baseline |"
    )
    print("| --- " * 8 + "|")
    for name in STATED:
        try:
            print(row(name, root))
        except (FileNotFoundError, RuntimeError) as error:
            print(f"{name}: {error}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=400, help="draws per line")
    parser.add_argument("--root", help="folder of the real data sets, whose table is printed instead")
    arguments = parser.parse_args()
    if arguments.root is not None:
        real(arguments.root)
        return
    number = arguments.draws
    pools = {
        "CIFAR-10": labels_of(10, 50_000),
        "10 classes, 60,000 images": labels_of(10, 60_000),
        "CIFAR-100": labels_of(100, 50_000),
    }
    print(f"Accepted draws, 100 clients, alpha 0.1, {number} draws")
    for name, labels in pools.items():
        print(f"  {name}: {acceptance(labels, 10, number):.1%} have at least 10 images everywhere")
    labels = pools["10 classes, 60,000 images"]
    print(f"  10 classes, 60,000 images: {acceptance(labels, 40, number):.1%} have at least 40 (PFLlib)")
    print("A client's data, 100 clients, alpha 0.1")
    for name, rule, labels in (
        ("ClassDirichlet, CIFAR-10", ClassDirichlet(0.1), pools["CIFAR-10"]),
        ("ClassDirichlet, CIFAR-100", ClassDirichlet(0.1), pools["CIFAR-100"]),
        ("ClientDirichlet (50, 350), CIFAR-10", ClientDirichlet(0.1, (50, 350)), pools["CIFAR-10"]),
    ):
        values = statistics(rule, labels, max(1, number // 10))
        print(f"  {name}: " + ", ".join(f"{key} {value:.3g}" for key, value in values.items()))
    print("Blocks of Pathological, 100 clients: clients x classes")
    for num_classes, per_client in ((10, 2), (10, 3), (10, 4), (100, 8), (100, 10)):
        print(f"  C {num_classes}, n {per_client}: {blocks(num_classes, per_client)}")
    print("Readings of n labels per client, 100 clients, seed 0: clients x classes")
    for num_classes, per_client in ((10, 3), (10, 4), (100, 8), (100, 10)):
        for line in readings(num_classes, per_client):
            print(f"  C {num_classes}, n {per_client}, {line}")


if __name__ == "__main__":
    main()
