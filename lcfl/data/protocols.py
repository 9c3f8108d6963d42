"""Test protocols: which images each client is tested on. One pure function each, collected by name.

Contract of all of them: no test set holds an image that any client trains or validates on.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from lcfl.data.partition.base import Indices

__all__ = ["PROTOCOLS", "Split", "label_view", "own_split"]


@dataclass(frozen=True, eq=False)
class Split:
    """Each client's share after its own split; a protocol adds test sets to it.

    Args:
        train: per client the indices it trains on.
        val: per client the indices it validates on, possibly none.
        held_out: per client the indices of its share that it neither trains nor validates on, possibly none.
        official: the official test images that no client holds in any role, ascending.
        targets: [S] label of every image.
    """

    train: list[Indices]
    val: list[Indices]
    held_out: list[Indices]
    official: Indices
    targets: Indices


def own_split(split: Split) -> list[Indices]:
    """The held-out part of each client's own share: its own label proportions (PFLlib, pFedMe)."""
    return split.held_out


def label_view(split: Split) -> list[Indices]:
    """All official test images of every label that the client trains or validates on (pacfl, so FedClust; 19.9).

    One training image of a label is enough. Clients share test images; images that a client holds are left out.
    """
    labels = split.targets[split.official]
    return [
        split.official[np.isin(labels, split.targets[np.concatenate([train, val])])]
        for train, val in zip(split.train, split.val, strict=True)
    ]


PROTOCOLS: dict[str, Callable[[Split], list[Indices]]] = {"own_split": own_split, "label_view": label_view}
