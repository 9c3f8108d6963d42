"""What the tests of clusterings check in runs: twelve clients in four groups, and models."""

import numpy as np
from sklearn.metrics import adjusted_rand_score

from tests.helpers.bits import same


def are_the_groups(assignment):
    """Returns whether the assignment gives the groups of ``blobs(12)``, which have three clients each."""
    return adjusted_rand_score(np.repeat(range(4), 3), assignment) == 1


def assert_same_models(history, other):
    """Checks that the centres and global models of every round are equal to the last bit."""
    for left, right in zip(history, other, strict=True):
        assert same(left.centres, right.centres) and same(left.global_model, right.global_model)
