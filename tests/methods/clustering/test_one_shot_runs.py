"""Tests of FedClust in whole runs: resumed before and after its clustering, on two ranks, and with failing uploads."""

import os
import signal
from functools import partial

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import lcfl.federation.session
from lcfl.callbacks import Checkpoint, Monitor
from lcfl.core.callback import Callback
from lcfl.federation.federation import Federation
from tests.helpers.bits import assert_same_state
from tests.helpers.builders import blobs, blobs_module, fit
from tests.helpers.fits import assert_same_run, newest_run
from tests.helpers.fits import fit as command
from tests.methods.clustering.test_one_shot import fedclust
from tests.server.test_dropouts import assert_not_reporting_is_like_failing, dropping, faulty, spoil


class StopAt(Callback):
    """Requests a stop before the warm-up round (-1) or after round `number`."""

    def __init__(self, number):
        self.number = number

    def on_fit_start(self, state):
        if state.round == self.number == -1:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_round_logged(self, state):
        if state.round == self.number:
            os.kill(os.getpid(), signal.SIGTERM)


def run(root, path=None, callbacks=(), devices=1, restart=True):
    options = {"accelerator": "cpu", "devices": devices, "default_root_dir": root, "name": "run"}
    options |= {"logger": False, "enable_progress_bar": False, "callbacks": [Checkpoint(every_n_rounds=9), *callbacks]}
    federation = Federation(rounds=4, clients_per_round=5, evaluate_every=2, **options)
    return federation.fit(blobs_module(), blobs(12), fedclust(num_clusters=4, restart=restart), path)


@pytest.mark.parametrize("restart", [True, False])
@pytest.mark.parametrize("at", [-1, 0, 2])
def test_a_run_can_be_resumed_before_and_after_the_clustering(tmp_path, at, restart):
    whole = run(tmp_path / "whole", restart=restart)
    stopped = run(tmp_path / "parts", callbacks=[StopAt(at)], restart=restart)
    assert stopped.signal == signal.SIGTERM and stopped.state.round == at
    resumed = run(tmp_path / "parts", "last", restart=restart)
    assert resumed.path == stopped.path
    assert_same_state(resumed.state, whole.state)
    assert resumed.metrics == whole.metrics
    vectors = resumed.state.callbacks["OneShotHierarchical"]["vectors"]
    assert vectors.shape == (12, 136) and vectors.any(dim=1).all()


def test_two_ranks_give_the_same_bits_as_one(tmp_path):
    one, two = (run(tmp_path / str(devices), devices=devices) for devices in (1, 2))
    assert_same_state(one.state, two.state)
    assert one.metrics == two.metrics


def test_the_shipped_configuration_resumes_to_the_same_bits_on_another_number_of_ranks(tmp_path):
    few = ("--method.local_update.init_args.epochs=1",)
    whole = command(tmp_path / "whole", "fedclust", 1, 4, *few)
    command(tmp_path / "parts", "fedclust", 2, 2, *few)
    parts = command(tmp_path / "parts", "fedclust", 1, 4, *few, "--ckpt_path=last")
    assert parts.path == newest_run(tmp_path / "parts")
    assert_same_run(whole.path, parts.path)
    assert whole.metrics["test/own_split/cluster/acc"] > whole.metrics["test/own_split/global/acc"] + 0.2


def test_a_failed_warm_up_counts_as_a_dropout(tmp_path, monkeypatch):
    def train():
        return fit(blobs_module(), blobs(12), fedclust(num_clusters=4), tmp_path, 3, 5)

    with monkeypatch.context() as patch, pytest.warns(UserWarning, match=r"round -1: .* \(4\); .* left out"):
        patch.setattr(lcfl.federation.session, "Worker", faulty(4, -1, spoil("model", float("nan"))))
        broken = train()
    with monkeypatch.context() as patch:
        patch.setattr(lcfl.federation.session, "Server", dropping(4, -1))
        dropped = train()
    assert_same_state(broken.state, dropped.state, but=["total_bytes"])
    sizes = broken.state.assignment[[i for i in range(12) if i != 4]].bincount()
    assert sizes[broken.state.assignment[4]] == sizes.max()


def test_not_reporting_is_like_failing(tmp_path, monkeypatch):
    run = partial(fit, blobs_module(), blobs(12), fedclust(num_clusters=4), tmp_path, 4, 7)
    assert_not_reporting_is_like_failing(run, monkeypatch)


def test_an_upload_that_fails_in_training_does_not_change_its_cluster(tmp_path, monkeypatch):
    def train(rounds):
        return fit(blobs_module(), blobs(12), fedclust(num_clusters=12), tmp_path, rounds)

    before = train(1).state
    monkeypatch.setattr(lcfl.federation.session, "Worker", faulty(4, 1, spoil("model", float("inf"))))
    with pytest.warns(UserWarning, match=r"round 1: .* \(4\)"):
        after = train(2).state
    for client in range(12):
        assert torch.equal(before.centre_of(client), after.centre_of(client)) == (client == 4)


def test_the_proximity_matrix_is_drawn_once(tmp_path, pictures):
    options = {"accelerator": "cpu", "devices": 1, "default_root_dir": tmp_path, "enable_progress_bar": False}
    federation = Federation(rounds=1, evaluate_every=1, callbacks=[Monitor(figure_every=9)], **options)
    path = federation.fit(blobs_module(), blobs(12), fedclust(num_clusters=4)).path
    assert (path / "figures" / "distances.png").stat().st_size > 1000
    events = EventAccumulator(str(path), {"images": 0}).Reload()
    assert [event.step for event in events.Images("figures/distances")] == [0]
