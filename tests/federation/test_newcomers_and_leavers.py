"""Newcomers, which are kept out of the federation, and leavers, which leave it."""

import json
from functools import partial

import numpy as np
import pytest
import torch

from lcfl.callbacks import Checkpoint
from lcfl.core.callback import Callback
from lcfl.federation.federation import Federation
from lcfl.methods.clustering import ClusterNumberTuning
from lcfl.methods.local import LocalTraining
from lcfl.runs import checkpoint
from tests.helpers.bits import assert_same_state, same
from tests.helpers.builders import (
    alone,
    blobs,
    blobs_module,
    dealt,
    fedac,
    fedavg,
    fit,
    lcfed,
    linear_module,
    loaded,
    two_sided,
)
from tests.methods.clustering.test_one_shot import fedclust
from tests.methods.test_ascfl import ascfl


class Seen(Callback):
    """Records by round every client that uploaded anything, and every client that was evaluated."""

    def __init__(self):
        self.uploaded, self.evaluated = {}, {}

    def on_extra_round_end(self, state, uploads):
        self.uploaded[state.round] = [upload.client for upload in uploads]

    on_uploads = on_extra_round_end

    def on_evaluated(self, state, evaluation):
        clients = {client for metric in evaluation.by_name.values() for client in metric.clients.tolist()}
        self.evaluated[state.round - 1] = sorted(clients)


def tuned_fedac():
    return fedac(tuning=ClusterNumberTuning("silhouette", start=0))


def quiet(root):
    files = {"default_root_dir": root, "name": "run", "logger": False, "enable_progress_bar": False}
    return {"evaluate_every": 0, "accelerator": "cpu", "devices": 1, **files}


METHODS = {
    "fedavg": fedavg,
    "lcfed": lcfed,
    "fedac": tuned_fedac,
    "ascfl": partial(ascfl, incentive=False),
    "fedclust": partial(fedclust, num_clusters=4),
}


# newcomers


@pytest.mark.parametrize(("number", "expected"), [(0, 0), (3, 3), (0.25, 3), (0.99, 11), (0.0, 0)])
def test_a_count_or_a_fraction_of_newcomers(number, expected):
    data = blobs(12, newcomers=number)
    assert len(set(data.newcomer_clients)) == expected and data.num_initial_clients == 12 - expected
    assert list(data.newcomer_clients) == sorted(data.newcomer_clients)
    assert set(data.newcomer_clients) <= set(range(12))
    assert data.newcomer_clients is data.newcomer_clients, "they are drawn once"


def test_newcomers_depend_on_the_data_seed_and_are_in_the_fingerprint(tmp_path):
    data = loaded(blobs(12, newcomers=3))
    assert data.newcomer_clients == blobs(12, newcomers=3).newcomer_clients == data.population.newcomers
    assert len({blobs(12, newcomers=3, seed=seed).newcomer_clients for seed in range(8)}) > 4
    plain = loaded(blobs(12)).population
    assert data.population.fingerprint != plain.fingerprint
    assert all(map(np.array_equal, data.population.train, plain.train))
    data.write(tmp_path / "partition.json")
    assert json.loads((tmp_path / "partition.json").read_text())["newcomers"] == list(data.newcomer_clients)
    assert "12 clients, 3 of them newcomers" in data.population.summary()
    assert data.random_like().newcomer_clients == data.newcomer_clients


@pytest.mark.parametrize("name", METHODS)
def test_newcomers_never_take_part(tmp_path, name):
    data, seen = blobs(12, newcomers=4), Seen()
    watch = fit(blobs_module(), data, METHODS[name](), tmp_path, 5, 0.5, [seen], evaluate_every=2)
    out = set(data.newcomer_clients)
    assert all(len(sampled) == 4 for sampled in watch.sampled.values()), "half of the 8 others"
    assert set().union(*seen.uploaded.values()) == set(range(12)) - out
    assert all(clients == sorted(set(range(12)) - out) for clients in seen.evaluated.values())
    assert not watch.state.participated[list(out)].any() and not set(watch.state.clients) & out
    assert not watch.state.active[list(out)].any() and int(watch.state.active.sum()) == 8


def test_federation_with_a_newcomer_equals_the_federation_without_it(tmp_path):
    """With whole batches and all clients in each round, only the order of sums depends on the clients' numbers."""
    inputs, targets, train, test = two_sided(4)
    (newcomer,) = blobs(4, newcomers=1).newcomer_clients
    others = [client for client in range(4) if client != newcomer]
    runs = []
    for method in (fedavg(steps=2), lcfed(2, LocalTraining(steps=2), dimension=2)):
        module = linear_module(0.3, cluster_weight=0.2)
        for clients, number in ((range(4), 1), (others, 0)):
            data = dealt(
                inputs, targets, [train[i] for i in clients], test=[test[i] for i in clients], newcomers=number
            )
            if number:
                object.__setattr__(data.population, "newcomers", data.newcomer_clients)
            runs.append(fit(module, data, method, tmp_path, rounds=3, evaluate_every=1))
        with_it, without = runs[-2:]
        torch.testing.assert_close(with_it.state.global_model, without.state.global_model, rtol=0, atol=1e-6)
        for place, client in enumerate(others):
            torch.testing.assert_close(
                with_it.state.centre_of(client), without.state.centre_of(place), atol=1e-6, rtol=0
            )
        assert with_it.metrics == pytest.approx(without.metrics, abs=1e-6)
        assert [row["comm/up_bytes"] for row in with_it.rows] == [row["comm/up_bytes"] for row in without.rows]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"newcomers": 12},
            r"data.newcomers: got 12 of 12 clients; .* counts from 0 to 11, fractions in \[0, 1\), and li",
        ),
        ({"newcomers": [0, 12]}, "data.newcomers: there is no client '12'; there are the numbers 0 to 11"),
        ({"newcomers": [3, "3"]}, "data.newcomers: got 2 of 12 clients; name each one once, and leave at least one"),
        ({"newcomers": list(range(12))}, "data.newcomers: got 12 of 12 clients; name each one once, and leave at"),
        ({"newcomers": ["alice"]}, "data.newcomers: there is no client 'alice'; there are the numbers 0 to 11"),
        ({"newcomers": -1}, "got -1 of 12"),
        ({"newcomers": 1.0}, "got 1.0 of 12"),
        ({"newcomers": float("nan")}, "data.newcomers: got newcomers=nan; it must be a number"),
        ({"leavers": {12: 3}}, "data.leavers: there is no client '12'; there are the numbers 0 to 11"),
        ({"leavers": {3: -1}}, "data.leavers: got client 3, round -1"),
        ({"leavers": {"alice": 3}}, "data.leavers: there is no client 'alice'; there are the numbers 0 to 11"),
        ({"leavers": {3: 1.5}}, "data.leavers: got client 3, round 1.5; .* and round numbers from 0"),
        ({"leavers": dict.fromkeys(range(12), 1)}, "all 12 clients leave; at least one must stay"),
    ],
)
def test_impossible_newcomers_and_leavers_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        blobs(12, **options)


def test_a_newcomer_cannot_leave():
    (newcomer,) = blobs(12, newcomers=1).newcomer_clients
    with pytest.raises(ValueError, match=f"got client {newcomer}, round 2; .* except newcomers"):
        blobs(12, newcomers=1, leavers={newcomer: 2})


def test_a_round_cannot_have_more_clients_than_the_federation(tmp_path):
    with pytest.raises(ValueError, match=r"got 9 for data.num_clients=12 without 4 newcomers; .* counts from 1 to 8"):
        fit(blobs_module(), blobs(12, newcomers=4), fedavg(), tmp_path, clients_per_round=9)


# leavers


def test_other_sampled_clients_stay_sampled_when_a_client_leaves(tmp_path):
    plain = fit(blobs_module(), blobs(12), alone(), tmp_path, 12, 4).sampled
    leaver = max(range(12), key=lambda client: sum(client in plain[number] for number in range(3, 12)))
    left = fit(blobs_module(), blobs(12, leavers={leaver: 3}), alone(), tmp_path, 12, 4).sampled
    replaced = 0
    for number in range(12):
        if number < 3 or leaver not in plain[number]:
            assert left[number] == plain[number]
        else:
            assert len(left[number]) == 4 and leaver not in left[number]
            assert set(plain[number]) - {leaver} < set(left[number])
            replaced += 1
    assert replaced >= 2
    assert any(leaver in plain[number] for number in range(3))


def test_every_remaining_client_can_replace_a_leaver(tmp_path):
    sampled = fit(blobs_module(), blobs(6, leavers={0: 0, 1: 0, 2: 0}), alone(), tmp_path, 30, 2).sampled
    assert all(len(clients) == 2 and min(clients) >= 3 for clients in sampled.values())
    assert np.bincount(np.concatenate(list(sampled.values())), minlength=6)[3:].min() >= 10
    few = fit(blobs_module(), blobs(6, leavers={0: 0, 1: 1, 2: 0, 4: 2}), alone(), tmp_path, 3, 4).sampled
    assert few == {0: [1, 3, 4, 5], 1: [3, 4, 5], 2: [3, 5]}


def test_leaver_changes_nothing_for_other_clients(tmp_path):
    """With Local and all clients in each round, no client's run depends on the others."""
    plain, left = (
        fit(blobs_module(), blobs(8, leavers=leavers), alone(), tmp_path, 5).state for leavers in ({}, {2: 3})
    )
    for client in set(range(8)) - {2}:
        assert same(plain.clients[client], left.clients[client])
    assert 2 in plain.clients and 2 not in left.clients
    assert torch.equal(left.clients[2].model, left.initial), "forgotten"


@pytest.mark.parametrize("name", METHODS)
def test_leavers_are_in_no_mean_and_no_evaluation(tmp_path, name):
    seen = Seen()
    leavers = {1: 0, 2: 3}
    watch = fit(blobs_module(), blobs(12, leavers=leavers), METHODS[name](), tmp_path, 6, 1.0, [seen], evaluate_every=1)
    for number in range(6):
        there = [i for i in range(12) if leavers.get(i, 99) > number]
        assert watch.sampled[number] == there == seen.uploaded[number] == seen.evaluated[number]
    state = watch.state
    assert not state.participated[[1, 2]].any() and torch.nonzero(~state.active).flatten().tolist() == [1, 2]
    if name in ("lcfed", "fedac"):
        for cluster in state.assignment[state.active].unique().tolist():
            members = [i for i in range(12) if state.assignment[i] == cluster and i not in leavers]
            models = torch.stack([state.clients[i].model for i in members])
            torch.testing.assert_close(state.centres[cluster], models.mean(dim=0))
    if name == "lcfed":
        stored = torch.stack([state.clients[i].model for i in range(12) if i not in leavers])
        torch.testing.assert_close(state.global_model, stored.mean(dim=0))


def test_warmup_rounds_come_before_any_client_leaves(tmp_path):
    seen = Seen()
    fit(blobs_module(), blobs(8, leavers={1: 0}), lcfed(), tmp_path, 1, 1.0, [seen])
    assert seen.uploaded[-1] == list(range(8)) and 1 not in seen.uploaded[0]


def test_cluster_metrics_ignore_clients_that_have_left(tmp_path):
    """There are four groups of three clients, and a whole group leaves."""
    groups = loaded(blobs(12)).population.groups
    leavers = {int(client): 2 for client in np.flatnonzero(groups == 3)}
    rows = fit(blobs_module(), blobs(12, leavers=leavers), lcfed(), tmp_path, 4).rows
    assert [row["cluster/count"] for row in rows] == [4, 4, 3, 3]
    assert all(row["cluster/ari"] == 1 for row in rows)


def test_resumed_run_knows_which_clients_have_left(tmp_path):
    def run(root, rounds, path=None):
        federation = Federation(rounds, 3, callbacks=[Checkpoint(every_n_rounds=1)], **quiet(root))
        return federation.fit(blobs_module(), blobs(8, newcomers=1, leavers=leavers), lcfed(), path)

    leavers = {0: 2} if 0 not in blobs(8, newcomers=1).newcomer_clients else {1: 2}
    whole = run(tmp_path / "whole", 5).state
    for at in (1, 2, 3):
        folder = tmp_path / f"at{at}"
        run(folder, at)
        assert_same_state(run(folder, 5, "last").state, whole)


def test_changed_leavers_or_newcomers_are_refused_on_resume(tmp_path):
    def run(path=None, **options):
        return Federation(2, 3, **quiet(tmp_path)).fit(blobs_module(), blobs(8, **options), fedavg(), path)

    run()
    with pytest.raises(checkpoint.CheckpointError, match=r"leavers: the checkpoint has None, this run \{'1': 1\}"):
        run("last", leavers={1: 1})
    with pytest.raises(checkpoint.CheckpointError, match=r"newcomers: the checkpoint has None, this run \[\d\]"):
        run("last", newcomers=1)


def test_newcomers_and_leavers_without_an_effect_are_a_warning(tmp_path):
    with pytest.warns(UserWarning, match=r"data.newcomers: got 0.1, which is none of 5 clients, so it has no effect"):
        blobs(5, newcomers=0.1)
    with pytest.warns(UserWarning, match=r"data.leavers: clients 0, 2 would leave after the last round, .* 1 rounds"):
        fit(blobs_module(), blobs(5, leavers={0: 1, 1: 0, 2: 7}), fedavg(), tmp_path)
