"""Tests that every clustered method finds two groups of clients with disjoint labels.

The tests of each method check that it finds four groups.
"""

import pytest

from lcfl.data.partition import Pathological
from lcfl.methods.local import LocalTraining
from tests.helpers.builders import blobs, blobs_module, fedac, fit, lcfed
from tests.helpers.clustered import cfl, cgpfl, cgpfl_prox, fedgroup, fesem, fl_hc, ifca, pacfl

# CFL's thresholds are shares of round 0's largest update. Half of the clients take part in a round.
LATER = {"eps1": 0.6, "eps2": 0.2, "relative": True, "min_round": 3, "gamma_max": 0.6, "stale_max": 9}


@pytest.mark.parametrize(
    ("method", "first", "mu"),  # the first round that ends with the groups, and the pull
    [
        (lcfed(2), 0, 0.1),
        (fedac(2), 1, 0.1),
        (pacfl(num_vectors=2, num_clusters=2), 0, 0.0),
        (fedgroup(2, 20, clients_per_group=2), 0, 0.0),
        (fl_hc(2, LocalTraining(steps=10), num_clusters=2), 2, 0.0),
        (fesem(2, steps=10), 3, 0.0),
        (cgpfl(2, steps=10), 3, 0.0),
        (cgpfl_prox(2, steps=10), 3, 0.5),
        (ifca(2, 20, 1.0, steps=10), 3, 0.0),
        (cfl(10, **LATER), 8, 0.0),
    ],
    ids=["lcfed", "fedac", "pacfl", "fedgroup", "fl_hc", "fesem", "cgpfl", "cgpfl_prox", "ifca", "cfl"],
)
def test_two_groups_are_found_and_stay(tmp_path, method, first, mu):
    module, data = blobs_module(0.1, cluster_weight=mu), blobs(12, partition=Pathological(4))
    watch = fit(module, data, method, tmp_path, rounds=first + 5, clients_per_round=6)
    for row in watch.rows[first:]:
        assert (row["cluster/ari"], row["cluster/count"]) == (1, 2)
    assert (watch.state.assignment[watch.state.participated] >= 0).all() and watch.state.participated.sum() > 10
