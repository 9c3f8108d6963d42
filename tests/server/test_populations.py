"""Large populations: whole runs with mapped models, running sums and evaluations of some clients."""

import os
import signal
import time
from functools import partial

import numpy as np
import pytest
import torch

from lcfl.callbacks import Checkpoint
from lcfl.core.callback import Callback
from lcfl.core.model_sums import ModelSums
from lcfl.data.partition import ClassDirichlet
from lcfl.federation.federation import Federation
from lcfl.methods.aggregation import ClusterMean, cluster_mean
from lcfl.runs import checkpoint_lookup
from lcfl.server.schedule import Schedule
from tests.federation.test_newcomers_and_leavers import quiet, tuned_fedac
from tests.helpers.bits import assert_same_state
from tests.helpers.builders import blobs, blobs_module, fedavg, fedper, fit, lcfed
from tests.helpers.clustered import Evaluations, fesem
from tests.helpers.fits import ROUNDS, arguments, assert_same_run, newest_run, newest_state
from tests.helpers.fits import fit as command

METHODS = {"lcfed": lcfed, "fedac": tuned_fedac, "fesem": fesem, "fedper": fedper, "fedavg": fedavg}


class Recomputed(Callback):
    """Compares the sums of every round with sums that are recomputed from the same models."""

    def __init__(self):
        self.rounds, self.refreshed = [], []

    def on_aggregated(self, server, state):
        sums = state.clients.sums
        anew = ModelSums.from_models(sums.group, len(sums.total), server.layout.size, state.clients.move_models)
        assert (sums.total - anew.total).abs().max() <= sums.error.max()
        self.rounds.append(state.round)
        if torch.equal(sums.total, anew.total) and torch.equal(sums.error, anew.error):
            self.refreshed.append(state.round)


@pytest.fixture
def refresh_every_four(monkeypatch):
    monkeypatch.setattr(cluster_mean, "REFRESH_EVERY", 4)


# mapped files


@pytest.mark.parametrize(
    "method", ["lcfed", *(pytest.param(name, marks=pytest.mark.slow) for name in METHODS if name != "lcfed")]
)
def test_mapped_files_and_memory_give_the_same_bits(tmp_path, method):
    data = {"newcomers": 2, "leavers": {3: 2}}
    states = [
        fit(
            blobs_module(), blobs(**data), METHODS[method](), tmp_path / store, 5, 0.5,
            client_store=store, evaluate_every=2,
        ).state
        for store in ("memory", "mapped")
    ]  # fmt: skip
    assert_same_state(*states)


def test_mapped_files_end_with_the_run_and_a_resumed_run_has_the_bits_of_an_uninterrupted_one(tmp_path):
    def run(rounds, root, store, ckpt_path=None, devices=1):
        federation = Federation(
            rounds,
            0.5,
            callbacks=[Checkpoint(every_n_rounds=2)],
            client_store=store,
            **quiet(root) | {"devices": devices},
        )
        return federation.fit(blobs_module(), blobs(leavers={3: 4}), lcfed(), ckpt_path)

    once = run(5, tmp_path / "once", "memory").state
    first = run(4, tmp_path / "twice", "mapped")
    assert {path.name for path in (tmp_path / "twice").iterdir()} == {"run"}
    names = {path.name for path in first.path.iterdir()}
    assert {name for name in names if "client" in name} == {"clients.csv"}
    twice = run(5, tmp_path / "twice", "mapped", "last", devices=2)
    assert_same_state(once, twice.state)


def test_an_unknown_store_is_refused():
    with pytest.raises(ValueError, match=r"Federation: got client_store='disk'; allowed are memory and mapped"):
        Federation(client_store="disk")


def test_killed_run_leaves_no_file_that_is_read_again(tmp_path, reference, started):
    """It is resumed with mapped files and compared with a run that had its models in memory."""
    once, _ = reference("lcfed")
    child = started(arguments(tmp_path, "lcfed", 1, 1000, "--trainer.client_store=mapped"))
    while not list(tmp_path.glob("run/*/checkpoints/round-000003.ckpt")):
        assert os.waitpid(child, os.WNOHANG) == (0, 0), "it ended by itself"
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    cut = newest_run(tmp_path)
    names = [{path.name for path in run.iterdir() if "tfevents" not in path.name} for run in (cut, once)]
    assert names[0] <= names[1]
    for path in cut.glob("checkpoints/round-*"):
        if path.name > "round-000003.ckpt":
            checkpoint_lookup.remove(path)
    command(tmp_path, "lcfed", 1, ROUNDS, "--trainer.client_store=mapped", "--ckpt_path=last")
    assert_same_run(once, cut)


# sums


@pytest.mark.parametrize(
    "method",
    [
        lcfed,
        tuned_fedac,
        pytest.param(partial(fesem, over="stored", mean=ClusterMean()), id="fesem", marks=pytest.mark.slow),
    ],
)
def test_sums_of_a_run_stay_within_their_bound_and_are_exact_when_recomputed(tmp_path, method, refresh_every_four):
    watched = Recomputed()
    data = blobs(newcomers=1, leavers={3: 2, 8: 6})
    fit(blobs_module(), data, method(), tmp_path, 9, 0.4, [watched])
    assert watched.rounds == list(range(9)) and set(watched.refreshed) >= {0, 4, 8}


@pytest.fixture(scope="module")
def nine_rounds(tmp_path_factory):
    """A LCFed run whose sums are recomputed in rounds 0, 4 and 8."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster_mean, "REFRESH_EVERY", 4)
        return command(tmp_path_factory.mktemp("nine"), "lcfed", 1, 9).path


@pytest.mark.parametrize(
    ("rounds", "ranks"),
    [(6, 1), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((6, 2), (4, 1), (4, 2)))],
)
def test_run_resumed_between_two_refreshes_has_the_bits_of_an_uninterrupted_one(
    tmp_path, nine_rounds, refresh_every_four, rounds, ranks
):
    command(tmp_path, "lcfed", ranks, rounds)
    resumed = command(tmp_path, "lcfed", ranks, 9, "--ckpt_path=last").path
    assert_same_run(nine_rounds, resumed)
    sums = newest_state(resumed).clients.sums
    assert sums is not None and sums.error.max() > 0


def test_moves_of_clients_that_did_not_train_are_reported(tmp_path):
    class Swap(Callback):
        """Swaps two clusters, so that all clients that have taken part move, whether they trained or not."""

        shapes_result = True

        def on_round_end(self, state):
            if state.round == 2:
                state.assignment = torch.where(state.participated, 1 - state.assignment, state.assignment)

    watched = Recomputed()
    watch = fit(blobs_module(), blobs(), lcfed(2), tmp_path, 3, 0.25, [Swap(), watched])
    row, before = watch.rows[2], watch.history[-2]
    assert row["cluster/moved"] == int((before.assignment != watch.state.assignment).sum())
    untrained = sorted(set(range(12)) - set(watch.sampled[2]))
    assert row["cluster/moved_untrained"] == int((before.assignment != watch.state.assignment)[untrained].sum())
    assert row["cluster/moved_untrained"] > 0 and watched.rounds == [0, 1, 2]


# evaluation of some clients


def schedule(number, **options):
    return Schedule(10, 5, 1, num_evaluated=number, **options)


def test_evaluated_clients_stay_the_same_until_they_leave():
    active = torch.ones(50, dtype=torch.bool)
    chosen = schedule(10).sample_evaluated(3, active)
    assert len(chosen) == 10 and chosen == sorted(set(chosen)) and chosen != list(range(10))
    assert schedule(10).sample_evaluated(3, active) == chosen != schedule(10).sample_evaluated(4, active)
    assert set(schedule(20).sample_evaluated(3, active)) > set(chosen)
    active[chosen[4]] = False
    others = schedule(10).sample_evaluated(3, active)
    assert len(others) == 10 and set(chosen) - set(others) == {chosen[4]}
    assert schedule(None).sample_evaluated(3, active) == [client for client in range(50) if client != chosen[4]]
    assert schedule(10, most_clients=2).sample_evaluated(3, active) == others[:2]


def test_clients_that_left_are_replaced_from_the_rest_of_the_stream():
    active = torch.ones(30, dtype=torch.bool)
    drawn = schedule(None).sample(1, 0, active)
    active[drawn[:2]] = False
    again = schedule(None).sample(1, 0, active)
    assert set(again) > set(drawn[2:]) and len(again) == 5 and not set(again) & set(drawn[:2])


def evaluated(root, evaluate_clients):
    """Returns a run, and the clients that each of its evaluations measured."""
    found = Evaluations()
    options = {"evaluate_every": 2, "evaluate_clients": evaluate_clients}
    data = blobs(partition=ClassDirichlet(1.0))  # so that the shares of the most frequent classes differ
    watch = fit(blobs_module(), data, lcfed(), root, 4, 0.5, [found], **options)
    return watch, {tuple(metric.clients) for each in found.found for metric in each.by_name.values()}


@pytest.fixture(scope="module")
def all_evaluated(tmp_path_factory):
    return evaluated(tmp_path_factory.mktemp("all"), 1.0)


@pytest.mark.parametrize(("wanted", "number"), [(4, 4), (0.25, 3)])
def test_evaluate_clients_measures_that_many_and_changes_nothing_else(tmp_path, all_evaluated, wanted, number):
    watch, (clients,) = evaluated(tmp_path, wanted)
    everybody, measured = all_evaluated
    assert len(clients) == number and measured == {tuple(range(12))}
    assert_same_state(watch.state, everybody.state, but=("callbacks",))
    majority = watch.server.data.population.majority_accuracy("own_split", watch.server.data.samples.labels)
    assert watch.metrics["test/own_split/trivial/acc"] == pytest.approx(np.mean(majority[list(clients)]))


@pytest.mark.parametrize("wanted", [0, 13, 1.5, 0.0])
def test_evaluate_clients_out_of_range_is_refused(tmp_path, wanted):
    with pytest.raises(ValueError, match=rf"trainer.evaluate_clients: got .*{wanted}.*allowed are"):
        fit(blobs_module(), blobs(), fedavg(), tmp_path, evaluate_clients=wanted)


def test_both_options_reach_the_trainer_from_the_command_line(here, built):
    trainer = built("--trainer.client_store=mapped", "--trainer.evaluate_clients=3")["trainer"]
    assert (trainer.client_store, trainer.evaluate_clients) == ("mapped", 3)
