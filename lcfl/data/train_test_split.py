"""Splits each client's share into training, validation and test samples. Shapes: S samples in all."""

import numpy as np

from lcfl.core import rng
from lcfl.data.partition.base import ClientShares, Indices
from lcfl.data.protocols import Split
from lcfl.data.samples import Samples

__all__ = ["split_disjoint", "split_overlapping", "split_share", "split_shares"]

# For each client, the indices it trains on, validates on and is tested on.
Roles = tuple[list[Indices], list[Indices], list[Indices]]


def split_shares(shares: ClientShares, samples: Samples, test_fraction: float, val_fraction: float, seed: int) -> Split:
    """Splits the share of each client, as `split_disjoint` or `split_overlapping` does.

    Args:
        shares: the indices of each client.
        samples: all samples.
        test_fraction: part of a share that is held out for testing, 0 for none.
        val_fraction: part of the remaining samples that is held out for validation.
        seed: seed of the split.

    Raises:
        ValueError: for a client's own test sample that does not exist, and for a client without training samples.
    """
    for client, own in enumerate(shares.test or ()):
        if len(own) and own.max() >= len(samples):
            raise ValueError(
                f"data.partition: the test sample {own.max()} of client {client} does not exist; the data set has "
                f"{len(samples)} samples"
            )
    split = split_overlapping if shares.overlapping else split_disjoint
    roles = split(shares, samples.labels, test_fraction, val_fraction, seed)
    for client, lengths in enumerate(zip(*(map(len, lists) for lists in roles), strict=True)):
        if lengths[0] == 0:
            name = "" if shares.names is None else f" ({shares.names[client]})"
            raise ValueError(
                f"client {client}{name} is left without training samples: its share has {sum(lengths)}, of which "
                f"{lengths[2]} are for testing and {lengths[1]} for validation; lower data.val_fraction or "
                "data.num_clients"
            )
    held = np.concatenate(shares.indices)
    official = np.setdiff1d(np.arange(samples.num_train, len(samples)), held)
    return Split(*roles, official, samples.labels, seed)


def split_disjoint(
    shares: ClientShares, labels: Indices | None, test_fraction: float, val_fraction: float, seed: int
) -> Roles:
    """Splits shares that do not overlap, each by a separate stream (seed, "split", client).

    A client that brings test or validation samples of its own keeps them, and nothing else is held out for that role.

    Args:
        shares: the indices of each client.
        labels: [S] class of every sample; None if targets are not classes.
        test_fraction: part of a share that is held out for testing, 0 for none. If it is not 0, a client with two or
            more samples is tested on at least one and keeps at least one.
        val_fraction: part of the remaining samples that is held out for validation.
        seed: seed of the split.

    Returns:
        For each client, the indices it trains on, validates on and is tested on, each in ascending order.
    """
    train, val, held_out = [], [], []
    for client, share in enumerate(shares.indices):
        generator = rng.generator(seed, "split", client)
        validation, test = (share[:0] if own is None else own[client] for own in (shares.val, shares.test))
        rest = np.setdiff1d(share, validation)
        if test_fraction > 0 and len(test) == 0:
            number = max(min(max(round(test_fraction * len(rest)), 1), len(rest) - 1), 0)
            rest, test = split_share(rest, _of(labels, rest), number, generator)
        if len(validation) == 0:
            rest, validation = split_share(rest, _of(labels, rest), round(val_fraction * len(rest)), generator)
        train.append(rest)
        val.append(validation)
        held_out.append(test)
    return train, val, held_out


def split_overlapping(
    shares: ClientShares, labels: Indices | None, test_fraction: float, val_fraction: float, seed: int
) -> Roles:
    """Splits shares that overlap, giving each sample the same role for all clients.

    No client is therefore tested on a sample that another client trains on. All samples that clients hold are split as
    one share, by the stream (seed, "split"), so a client with few samples may have none for some role. Arguments and
    result are those of `split_disjoint`.
    """
    generator = rng.generator(seed, "split")
    rest = np.unique(np.concatenate(shares.indices))
    role = np.zeros(rest[-1] + 1, dtype=np.int64)
    for number, fraction in ((2, test_fraction), (1, val_fraction)):
        rest, cut = split_share(rest, _of(labels, rest), round(fraction * len(rest)), generator)
        role[cut] = number
    train, val, held_out = ([share[role[share] == number] for share in shares.indices] for number in range(3))
    return train, val, held_out


def split_share(
    share: Indices, labels: Indices | None, number: int, generator: np.random.Generator
) -> tuple[Indices, Indices]:
    """Cuts ``number`` samples off a share, stratified by label if every label has at least two samples.

    In a stratified cut label l gives number * n_l / n samples, rounded so that the total is ``number`` (largest
    remainders first, ties at random). Otherwise the samples are drawn without regard to labels.

    Args:
        share: [n] indices.
        labels: [n] class of each of these samples; None if targets are not classes.
        number: number of samples to cut off, 0 to n.
        generator: source of all draws.

    Returns:
        The indices that remain and those that were cut off, each in ascending order.
    """
    order = generator.permutation(len(share))
    classes = np.zeros(len(share), dtype=np.int64) if labels is None else labels[order]
    present, positions, counts = np.unique(classes, return_inverse=True, return_counts=True)
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


def _of(labels: Indices | None, share: Indices) -> Indices | None:
    return None if labels is None else labels[share]
