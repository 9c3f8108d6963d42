"""How a client's share is cut into what it trains on, validates on and is tested on. Shapes: S images in all."""

import numpy as np

from lcfl.core import rng
from lcfl.data.partition.base import Indices

__all__ = ["split_apart", "split_share", "split_together"]

# Per client the indices to train on, to validate on, and to be tested on.
Roles = tuple[list[Indices], list[Indices], list[Indices]]


def split_apart(shares: list[Indices], targets: Indices, test_fraction: float, val_fraction: float, seed: int) -> Roles:
    """Every client's share by a stream of its own, (seed, "split", client), for shares that do not overlap.

    Args:
        shares: per client its indices.
        targets: [S] label of every image.
        test_fraction: part of a share that is held out for testing, 0 for none. Else a client with two samples or
            more is tested on at least one and keeps at least one.
        val_fraction: part of the others that is held out for validation.
        seed: of the split.

    Returns:
        Per client the indices to train on, to validate on, and to be tested on, each ascending.
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


def split_together(
    shares: list[Indices], targets: Indices, test_fraction: float, val_fraction: float, seed: int
) -> Roles:
    """One role per sample for all clients, for shares that overlap: nobody is tested on what another one trains on.

    The samples that some client holds are cut as one share, by the stream (seed, "split"); a client with few samples
    may be left without some role. Arguments and result are those of ``split_apart``.
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
    """Cuts ``number`` samples off a share: stratified where every label has two samples or more, else plainly.

    Stratified: label l gives number * n_l / n samples, rounded so that the total is ``number`` (largest remainders
    first, ties at random).

    Args:
        share: [n] indices.
        labels: [n] their labels.
        number: how many to cut off, 0 to n.
        generator: source of every draw.

    Returns:
        What stays and what was cut off, each ascending.
    """
    order = generator.permutation(len(share))
    present, positions, counts = np.unique(labels[order], return_inverse=True, return_counts=True)
    if number == 0 or counts.min() < 2:
        chosen = order[:number]
    else:
        quota, remainder = np.divmod(number * counts, len(share))
        shuffled = generator.permutation(len(present))
        quota[shuffled[np.argsort(-remainder[shuffled], kind="stable")][: number - quota.sum()]] += 1
        chosen = np.concatenate([order[positions == each][:count] for each, count in enumerate(quota)])
    cut = np.zeros(len(share), dtype=bool)
    cut[chosen] = True
    return np.sort(share[~cut]), np.sort(share[cut])
