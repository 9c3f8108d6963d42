"""Facts about partitions, from class counts alone.

    python benchmarks/partitions.py --draws 4000

No image is read: a partition looks at labels only, and the labels of CIFAR-10, CIFAR-100 and MNIST-sized sets are
balanced. Prints what docs/partitions.md says.
"""

import argparse
from collections.abc import Iterator

import numpy as np

from lcfl import rng
from lcfl.data.partition import ClassDirichlet, ClientDirichlet, Pathological, Shares
from lcfl.data.partition.base import Indices, Partition


def labels_of(num_classes: int, num_samples: int) -> Indices:
    """Balanced labels."""
    return np.repeat(np.arange(num_classes), num_samples // num_classes)


def draws(partition: Partition, labels: Indices, num_clients: int, number: int) -> Iterator[Shares | None]:
    """Partitions by different seeds; None where one is refused."""
    for seed in range(number):
        try:
            yield partition(labels, num_clients, rng.generator(seed, "partition"))
        except ValueError:
            yield None


def counts_of(labels: Indices, shares: Shares) -> Indices:
    """[N, C] labels of each client."""
    return np.stack([np.bincount(labels[share], minlength=labels.max() + 1) for share in shares.indices])


def acceptance(labels: Indices, min_samples: int, number: int) -> float:
    """Which part of the draws of NIID-Bench's Dirichlet(0.1) over 100 clients meets the minimum."""
    rule = ClassDirichlet(0.1, min_samples=min_samples, max_tries=1)
    return float(np.mean([shares is not None for shares in draws(rule, labels, 100, number)]))


def statistics(rule: Partition, labels: Indices, number: int) -> dict[str, float]:
    """Means over draws of what a client's data look like."""
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
    """The groups of 100 clients under the pathological partition."""
    labels = labels_of(num_classes, 50_000)
    shares = Pathological(per_client)(labels, 100, rng.generator(0, "partition"))
    assert shares.groups is not None
    first = [int(np.flatnonzero(shares.groups == group)[0]) for group in range(shares.groups.max() + 1)]
    sizes = np.bincount(shares.groups)
    owned = [len(np.unique(labels[shares.indices[client]])) for client in first]
    return ", ".join(f"{size} x {classes}" for size, classes in zip(sizes, owned, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=400, help="draws per line")
    number = parser.parse_args().draws
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
        found = statistics(rule, labels, max(1, number // 10))
        print(f"  {name}: " + ", ".join(f"{key} {value:.3g}" for key, value in found.items()))
    print("Blocks of Pathological, 100 clients: clients x classes")
    for num_classes, per_client in ((10, 2), (10, 3), (10, 4), (100, 8), (100, 10)):
        print(f"  C {num_classes}, n {per_client}: {blocks(num_classes, per_client)}")


if __name__ == "__main__":
    main()
