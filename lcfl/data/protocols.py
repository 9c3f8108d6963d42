"""Test protocols: which images each client is tested on. One pure function each, collected by name.

Contract of all of them: no test set holds an image that any client trains or validates on.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from lcfl.core import rng
from lcfl.data.partition.base import Indices

__all__ = ["PLAIN", "PROTOCOLS", "Split", "global_test", "label_proportional", "label_view", "own_split"]

# Protocols whose images everybody sees as they are in the data set, not through its own transforms.
PLAIN = frozenset({"global_plain"})


@dataclass(frozen=True, eq=False)
class Split:
    """Each client's share after its own split; a protocol adds test sets to it.

    Args:
        train: per client the indices it trains on.
        val: per client the indices it validates on, possibly none.
        held_out: per client the indices of its share that it neither trains nor validates on, possibly none.
        official: the official test images that no client holds in any role, ascending.
        targets: [S] label of every image.
        seed: of what a protocol draws, the data's own.
    """

    train: list[Indices]
    val: list[Indices]
    held_out: list[Indices]
    official: Indices
    targets: Indices
    seed: int = 0


def own_split(split: Split) -> list[Indices]:
    """The held-out part of each client's own share: its own label proportions (PFLlib, pFedMe)."""
    return split.held_out


def label_view(split: Split) -> list[Indices]:
    """All official test images of every label that the client trains or validates on (pacfl, so FedClust).

    One training image of a label is enough. Clients share test images; images that a client holds are left out.
    """
    labels = split.targets[split.official]
    return [
        split.official[np.isin(labels, split.targets[np.concatenate([train, val])])]
        for train, val in zip(split.train, split.val, strict=True)
    ]


def label_proportional(split: Split) -> list[Indices]:
    """The largest random part of the official test images that has the label proportions of what the client learns.

    If the client trains and validates on n_l images of label l and a_l official test images of it are free, it is
    tested on floor(n_l t) of them, with t the smallest a_l / n_l. Labels without a free test image are left out.
    Drawn from the stream (seed, "label_proportional", client).
    """
    labels = split.targets[split.official]
    num_classes = int(split.targets.max()) + 1
    free = np.bincount(labels, minlength=num_classes)
    tests = []
    for client, parts in enumerate(zip(split.train, split.val, strict=True)):
        learnt = np.where(free > 0, np.bincount(split.targets[np.concatenate(parts)], minlength=num_classes), 0)
        order = rng.generator(split.seed, "label_proportional", client).permutation(len(labels))
        counts = _proportional(learnt, free)
        chosen = [order[labels[order] == label][: counts[label]] for label in np.flatnonzero(counts)]
        tests.append(np.sort(split.official[np.concatenate([order[:0], *chosen])]))
    return tests


def global_test(split: Split) -> list[Indices]:
    """All official test images for everybody (AS-CFL, section 4.1).

    Under the protocol ``global`` a client sees them through its own transforms, under ``global_plain`` as they are.
    """
    return [split.official] * len(split.train)


def _proportional(wanted: Indices, available: Indices) -> Indices:
    """[C] the largest counts <= available that are proportional to ``wanted``, rounded down."""
    present = np.flatnonzero(wanted)
    if len(present) == 0:
        return np.zeros_like(wanted)
    scarcest = present[np.argmin(available[present] / wanted[present])]
    # In integers: a float quotient can round a whole number down to the one below.
    counts: Indices = wanted * available[scarcest] // wanted[scarcest]
    return counts


PROTOCOLS: dict[str, Callable[[Split], list[Indices]]] = {
    "own_split": own_split,
    "label_view": label_view,
    "label_proportional": label_proportional,
    "global": global_test,
    "global_plain": global_test,
}
