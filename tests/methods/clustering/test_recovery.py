"""Tests that every clustered method finds two groups of clients with disjoint labels, and four, and averages buffers.

That LCFed, FedAC, FedClust and PACFL find four groups is in their own tests.
"""

import pytest

from lcfl.data.partition import Pathological
from lcfl.methods.local import LocalTraining
from tests.helpers.builders import blobs, blobs_module, fedac, fit, lcfed
from tests.helpers.clustered import (
    ALWAYS,
    cfl,
    cfl_fixed,
    cgpfl,
    cgpfl_prox,
    clove,
    fedgroup,
    fesem,
    fl_hc,
    ifca,
    normed_module,
    pacfl,
)
from tests.methods.clustering.runs import are_the_groups
from tests.methods.clustering.test_one_shot import fedclust

# CFL's thresholds are shares of round 0's largest update. Half of the clients take part in a round.
LATER = {"eps1": 0.6, "eps2": 0.2, "relative": True, "min_round": 3, "gamma_max": 0.6, "stale_max": 9}


@pytest.mark.parametrize(
    ("method", "first", "mu"),  # the first round that ends with the groups, and the pull
    [
        (lcfed(2), 0, 0.1),
        (fedac(2), 1, 0.1),
        (pacfl(num_vectors=2, num_clusters=2), 0, 0.0),
        (fedclust({"steps": 3}, num_clusters=2), 0, 0.0),
        (fedgroup(2, 20, clients_per_group=2), 0, 0.0),
        (fl_hc(2, LocalTraining(steps=10), num_clusters=2), 2, 0.0),
        (fesem(2, steps=10), 3, 0.0),
        (cgpfl(2, steps=10), 3, 0.0),
        (cgpfl_prox(2, steps=10), 3, 0.5),
        (ifca(2, 20, 1.0, steps=10), 3, 0.0),
        (clove(2, steps=10), 3, 0.0),
        (cfl(10, **LATER), 8, 0.0),
    ],
    ids=[
        "lcfed",
        "fedac",
        "pacfl",
        "fedclust",
        "fedgroup",
        "fl_hc",
        "fesem",
        "cgpfl",
        "cgpfl_prox",
        "ifca",
        "clove",
        "cfl",
    ],
)
def test_two_groups_are_found_and_stay(tmp_path, method, first, mu):
    module, data = blobs_module(0.1, cluster_weight=mu), blobs(12, partition=Pathological(4))
    watch = fit(module, data, method, tmp_path, rounds=first + 5, clients_per_round=6)
    for row in watch.rows[first:]:
        assert (row["cluster/ari"], row["cluster/count"]) == (1, 2)
    assert (watch.state.assignment[watch.state.participated] >= 0).all() and watch.state.participated.sum() > 10


BY_COSINE = {"metric": "cosine", "linkage": "average", "threshold": 0.5, "num_clusters": None}


@pytest.mark.parametrize(
    ("method", "rounds", "clients_per_round", "mu"),
    [
        (ifca(4, 20, 1.0, steps=10), 5, 1.0, 0.0),
        (clove(4, steps=10), 5, 1.0, 0.0),
        (cfl_fixed(2, steps=10), 3, 4, 0.0),
        (cfl(10, **LATER, min_size=3), 20, 1.0, 0.0),
        (fesem(4, steps=10), 5, 6, 0.0),
        (cgpfl(4, steps=10), 5, 6, 0.0),
        (cgpfl_prox(4, steps=10), 5, 6, 0.5),
        (fl_hc(2, LocalTraining(steps=10), num_clusters=4), 3, 4, 0.0),
        (fl_hc(2, LocalTraining(steps=10), **BY_COSINE), 3, 4, 0.0),
        (fedgroup(4, 20, clients_per_group=2), 6, 6, 0.0),  # eight clients form the groups, and four join them later
    ],
    ids=["ifca", "clove", "cfl_fixed", "cfl", "fesem", "cgpfl", "cgpfl_prox", "fl_hc", "fl_hc, cosine", "fedgroup"],
)
def test_four_groups_are_found(tmp_path, method, rounds, clients_per_round, mu):
    module = blobs_module(0.1, cluster_weight=mu)
    watch = fit(module, blobs(12), method, tmp_path, rounds=rounds, clients_per_round=clients_per_round)
    assert are_the_groups(watch.state.assignment)


@pytest.mark.parametrize(
    ("method", "batches"),  # that each client's model has seen by the end: three steps in each of three rounds
    [
        (fesem(4), {9}),
        (clove(2), {0, 3, 6, 9}),
        (cfl(**ALWAYS), {9}),
        (pacfl(), {9}),
        (fl_hc(1, num_clusters=3), {9}),  # the round of the clustering does not count
        (fedgroup(4), {14}),  # and five steps of pre-training
        (cgpfl(3), {45}),  # five inner steps in every step
        (cgpfl_prox(3), {9}),
        (ifca(2), {0, 3, 6, 9}),  # no client may have chosen a model in some rounds
    ],
    ids=["fesem", "clove", "cfl", "pacfl", "fl_hc", "fedgroup", "cgpfl", "cgpfl_prox", "ifca"],
)
def test_batch_normalisation_counts_the_batches_of_every_round(tmp_path, method, batches):
    watch = fit(normed_module(), blobs(12), method, tmp_path, rounds=3)
    assert watch.state.centres.isfinite().all() and watch.state.num_clusters > 1
    counter = watch.server.layout.integer_slices()[0]
    counts = set(watch.state.centres[:, counter].flatten().tolist())
    assert counts <= batches and max(counts) == max(batches)
