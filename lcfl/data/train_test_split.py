"""Splits each client's share into training, validation and test samples. Shapes: S samples in all."""

import numpy as np

from lcfl.core import rng
from lcfl.data.partition.base import Indices

__all__ = ["split_disjoint", "split_share", "split_overlapping"]

# For each client, the indices it trains on, validates on and is tested on.
Roles = tuple[list[Indices], list[Indices], list[Indices]]


def split_disjoint(
    shares: list[Indices], targets: Indices, test_fraction: float, val_fraction: float, seed: int
) -> Roles:
    """Splits shares that do not overlap, each by a separate stream (seed, "split", client).

    Args:
        shares: the indices of each client.
        targets: [S] label of every sample.
        test_fraction: part of a share that is held out for testing, 0 for none. If it is not 0, a client with two or
            more samples is tested on at least one and keeps at least one.
        val_fraction: part of the remaining samples that is held out for validation.
        seed: seed of the split.

    Returns:
        For each client, the indices it trains on, validates on and is tested on, each in ascending order.
    """
    train, val, held_out = [], [], []
    for client, share in enumerate(shares):
        generator = rng.generator(seed, "split", client)
        rest, test = share, share[:0]
        if test_fraction > 0:
            number = min(max(round(test_fraction * len(share)), 1), len(share) - 1)
            rest, test = split_share(share, targets[share], number, generator)
        rest, validation = split_share(rest, targets[rest], round(val_fraction * len(rest)), generator)
        train.append(rest)
        val.append(validation)
        held_out.append(test)
    return train, val, held_out


def split_overlapping(
    shares: list[Indices], targets: Indices, test_fraction: float, val_fraction: float, seed: int
) -> Roles:
    """Splits shares that overlap, giving each sample the same role for all clients.

    No client is therefore tested on a sample that another client trains on. All samples that clients hold are split as
    one share, by the stream (seed, "split"), so a client with few samples may have none for some role. Arguments and
    result are those of `split_disjoint`.
    """
    generator = rng.generator(seed, "split")
    rest = np.unique(np.concatenate(shares))
    role = np.zeros(len(targets), dtype=np.int64)
    for number, fraction in ((2, test_fraction), (1, val_fraction)):
        rest, cut = split_share(rest, targets[rest], round(fraction * len(rest)), generator)
        role[cut] = number
    train, val, held_out = ([share[role[share] == number] for share in shares] for number in range(3))
    return train, val, held_out


def split_share(
    share: Indices, labels: Indices, number: int, generator: np.random.Generator
) -> tuple[Indices, Indices]:
    """Cuts ``number`` samples off a share, stratified by label if every label has at least two samples.

    In a stratified cut label l gives number * n_l / n samples, rounded so that the total is ``number`` (largest
    remainders first, ties at random). Otherwise the samples are drawn without regard to labels.

    Args:
        share: [n] indices.
        labels: [n] labels of these indices.
        number: number of samples to cut off, 0 to n.
        generator: source of all draws.

    Returns:
        The indices that remain and those that were cut off, each in ascending order.
    """
    order = generator.permutation(len(share))
    present, positions, counts = np.unique(labels[order], return_inverse=True, return_counts=True)
    if number == 0 or counts.min() < 2:
        chosen = order[:number]
    else:
        quota, remainder = np.divmod(number * counts, len(share))
        shuffled = generator.permutation(len(present))
        quota[shuffled[np.argsort(-remainder[shuffled], kind="stable")][: number - quota.sum()]] += 1
        chosen = np.concatenate([order[positions == position][:count] for position, count in enumerate(quota)])
    cut = np.zeros(len(share), dtype=bool)
    cut[chosen] = True
    return np.sort(share[~cut]), np.sort(share[cut])
