"""Test protocols, which define the samples that each client is tested on.

Each protocol is a pure function, and ``PROTOCOLS`` collects them by name. All protocols obey one contract: no test set
holds a sample that any client trains on or validates on.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from lcfl.core import rng
from lcfl.core.metric_names import BACKDOOR
from lcfl.data.partition.base import Indices
from lcfl.data.views import View, seen_labels

__all__ = [
    "BACKDOOR",
    "PROTOCOLS",
    "UNTRANSFORMED",
    "Split",
    "global_test",
    "label_proportional",
    "label_view",
    "own_split",
    "tests_by_protocol",
]

# Protocols whose samples all clients see unchanged, without their client transforms.
UNTRANSFORMED = frozenset({"global_plain"})


@dataclass(frozen=True, eq=False)
class Split:
    """The clients' shares after they have been split. A protocol derives test sets from it.

    Args:
        train: for each client, the indices it trains on.
        val: for each client, the indices it validates on, possibly none.
        held_out: for each client, the indices of its share that it neither trains nor validates on, possibly none.
        official: the official test samples that no client trains or validates on, in ascending order. Some of them may
            be a client's own test samples.
        labels: [S] class of every sample; None if targets are not classes.
        seed: seed of a protocol's draws; ``data.seed``.
    """

    train: list[Indices]
    val: list[Indices]
    held_out: list[Indices]
    official: Indices
    labels: Indices | None
    seed: int = 0

    def classes(self, protocol: str) -> Indices:
        """Returns the class of every sample ``[S]``.

        Raises:
            ValueError: if targets are not classes, with the protocol that needs them.
        """
        if self.labels is None:
            raise ValueError(
                f"the protocol {protocol} chooses test samples by their class, but the targets of this data set are "
                "not classes; use data.protocols: [own_split] or [global]"
            )
        return self.labels


def own_split(split: Split) -> list[Indices]:
    """Returns the held-out part of each client's share, which has the client's label proportions (PFLlib, pFedMe)."""
    return split.held_out


def label_view(split: Split) -> list[Indices]:
    """Returns all official test samples of every label that the client trains or validates on (pacfl, so FedClust).

    One training sample of a label is enough. Clients share test samples. Samples that a client holds are left out.
    """
    classes = split.classes("label_view")
    official = classes[split.official]

    @functools.cache  # clients with the same labels share an array, which takes memory once and is scored once
    def samples_of(labels: tuple[int, ...]) -> Indices:
        return split.official[np.isin(official, labels)]

    held = (classes[np.concatenate(parts)] for parts in zip(split.train, split.val, strict=True))
    return [samples_of(tuple(np.unique(each).tolist())) for each in held]


def label_proportional(split: Split) -> list[Indices]:
    """Draws the largest part of the official test samples that has the client's label proportions.

    The label proportions are those of the samples that the client trains and validates on. If these include n_l samples
    of label l, and a_l official test samples of this label are free, the client is tested on floor(n_l t) free samples,
    where t is the smallest a_l / n_l. Labels without a free test sample are left out. The draws come from the stream
    (seed, "label_proportional", client).
    """
    classes = split.classes("label_proportional")
    labels = classes[split.official]
    num_classes = int(classes.max()) + 1
    free = np.bincount(labels, minlength=num_classes)
    tests = []
    for client, parts in enumerate(zip(split.train, split.val, strict=True)):
        learnt = np.where(free > 0, np.bincount(classes[np.concatenate(parts)], minlength=num_classes), 0)
        order = rng.generator(split.seed, "label_proportional", client).permutation(len(labels))
        counts = _proportional(learnt, free)
        chosen = [order[labels[order] == label][: counts[label]] for label in np.flatnonzero(counts)]
        tests.append(np.sort(split.official[np.concatenate([order[:0], *chosen])]))
    return tests


def global_test(split: Split) -> list[Indices]:
    """Returns all official test samples for every client (AS-CFL, section 4.1).

    Under the protocol ``global`` a client sees them through its client transforms, under ``global_plain`` unchanged.
    """
    return [split.official] * len(split.train)


def _proportional(learnt: Indices, available: Indices) -> Indices:
    """Returns the largest counts [C] <= ``available`` that are proportional to ``learnt``, rounded down."""
    present = np.flatnonzero(learnt)
    if len(present) == 0:
        return np.zeros_like(learnt)
    scarcest = present[np.argmin(available[present] / learnt[present])]
    # In integers, because a floating-point quotient can be just below a whole number and be rounded down too far.
    counts: Indices = learnt * available[scarcest] // learnt[scarcest]
    return counts


PROTOCOLS: dict[str, Callable[[Split], list[Indices]]] = {
    "own_split": own_split,
    "label_view": label_view,
    "label_proportional": label_proportional,
    "global": global_test,
    "global_plain": global_test,
}


def tests_by_protocol(
    split: Split, names: Sequence[str], views: Sequence[tuple[View, ...]] | None, pool: str, target: int | None = None
) -> dict[str, list[Indices]]:
    """Returns the test samples of each client by protocol.

    Args:
        split: the clients' shares and the official test samples.
        names: the protocols. `BACKDOOR` takes the samples of the first one that do not have the class `target`.
        views: for each client, the views that it sees its samples through; None if clients see the samples unchanged.
        pool: ``data.pool``, for errors.
        target: the class that a backdoor makes models predict; None without a backdoor.

    Raises:
        ValueError: if a protocol leaves every client without test samples.
    """
    tests: dict[str, list[Indices]] = {name: PROTOCOLS[name](split) for name in names if name != BACKDOOR}
    if target is not None:
        assert split.labels is not None, "a backdoor needs classes"
        first = names[0]
        seen = [()] * len(split.train) if views is None or first in UNTRANSFORMED else views
        labels = [seen_labels(split.labels[own], each) for own, each in zip(tests[first], seen, strict=True)]
        tests[BACKDOOR] = [own[label != target] for own, label in zip(tests[first], labels, strict=True)]
    for name, lists in tests.items():
        if not any(map(len, lists)):
            needs = (
                "official test samples that no client holds: use data.pool: train, or a partition that does not use "
                "all samples"
            )
            if name == "own_split":
                needs = (
                    "shares of at least two samples, or clients with test samples of their own. With official test "
                    "samples, data.protocols: [global] needs neither"
                )
            raise ValueError(
                f"the protocol {name} leaves every client without test samples with data.pool {pool}. It needs {needs}."
            )
    return tests
