"""Tests of FedClust in runs with failing uploads, and of its figure. Resumed runs are in test_clustered_fits.py."""

from functools import partial

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import lcfl.federation.session
from lcfl.callbacks import Monitor
from lcfl.federation.federation import Federation
from tests.helpers.bits import assert_same_state
from tests.helpers.builders import blobs, blobs_module, fit
from tests.methods.clustering.test_one_shot import fedclust
from tests.server.test_dropouts import assert_not_reporting_is_like_failing, dropping, faulty, spoil


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
