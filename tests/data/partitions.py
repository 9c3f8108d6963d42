"""Shared code of the partition tests: strategies, labels, a data module and a generator with scripted draws."""

import numpy as np
from hypothesis import strategies as st

from lcfl.data.datasets import Synthetic
from lcfl.data.partition import (
    IID,
    ClassDirichlet,
    ClientDirichlet,
    CopyPerGroup,
    LabelRing,
    LabelSkew,
    OverlappingFractions,
    PartOfPool,
    Pathological,
    Quantity,
    Shards,
    Subsampled,
)
from tests.helpers.builders import blobs

CIFAR10 = np.repeat(np.arange(10), 5000)
BLOBS = Synthetic(num_classes=6, num_features=2, samples_per_class=40, test_per_class=20)


def module(partition=None, **options):
    return blobs(**{"dataset": BLOBS, "num_clients": 8, "partition": partition or Pathological(2), **options})


def counts_of(labels, shares):
    return np.stack([np.bincount(labels[share], minlength=labels.max() + 1) for share in shares.indices])


class Scripted:
    """A generator that returns given Dirichlet draws and whose permutations change nothing."""

    def __init__(self, *draws):
        self.draws = list(draws)

    def dirichlet(self, alpha):
        return np.array(self.draws.pop(0))

    def permutation(self, values):
        return np.arange(values) if isinstance(values, int) else values


# All partitions that draw, with arguments that pools of about 20 to 100 samples can often satisfy.
SIZES = st.one_of(st.none(), st.just((4, 9)))
FRACTIONS = st.sampled_from([(0.1, 0.6), (0.02, 0.02), (0.5, 1.0)])

RULES = {
    IID: st.builds(IID, st.one_of(st.none(), st.integers(1, 8))),
    Quantity: st.builds(Quantity, st.floats(0.05, 100), st.integers(1, 3)),
    ClassDirichlet: st.one_of(
        st.builds(ClassDirichlet, st.floats(0.05, 100), st.integers(1, 3), balance=st.booleans()),
        st.builds(ClassDirichlet, st.floats(0.05, 100), st.integers(1, 3), balance=st.just(False), fractions=FRACTIONS),
    ),
    ClientDirichlet: st.builds(ClientDirichlet, st.floats(0.01, 100), st.one_of(st.none(), st.just((1, 9)))),
    Pathological: st.one_of(
        st.builds(Pathological, st.integers(1, 4), SIZES),
        st.builds(Pathological, st.integers(1, 4), st.none(), st.just(False)),
    ),
    LabelSkew: st.builds(LabelSkew, st.integers(1, 4), st.sampled_from(["cyclic", "random"]), SIZES),
    LabelRing: st.builds(LabelRing, st.integers(1, 4), SIZES, st.floats(0, 50), st.integers(1, 3)),
    Shards: st.one_of(st.builds(Shards, st.integers(1, 4)), st.builds(Shards, st.integers(1, 4), st.just(True), SIZES)),
}
OVERLAPPING = {
    CopyPerGroup: st.builds(CopyPerGroup, st.integers(1, 4), st.one_of(st.none(), st.integers(1, 8))),
    OverlappingFractions: st.builds(OverlappingFractions, FRACTIONS, st.one_of(st.none(), st.floats(0.05, 100))),
}


def derived(rules):
    """Returns strategies for the partitions that are built on other partitions."""
    return {
        Subsampled: st.one_of(
            st.builds(Subsampled, rules, st.just((2, 5))), st.builds(Subsampled, rules, st.none(), FRACTIONS)
        ),
        PartOfPool: st.builds(PartOfPool, rules, st.integers(10, 60)),
    }


DISJOINT_PARTITIONS = st.one_of(*RULES.values(), *derived(st.one_of(*RULES.values())).values())
OVERLAPPING_PARTITIONS = st.one_of(*OVERLAPPING.values(), *derived(st.one_of(*OVERLAPPING.values())).values())
