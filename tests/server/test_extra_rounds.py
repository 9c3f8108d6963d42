"""A clustering that never has enough extra rounds ends the run instead of keeping it forever."""

import numpy as np
import pytest

from lcfl.methods.aggregation import ClusterMean
from lcfl.methods.clustering import Clustering, ExtraRound
from lcfl.methods.exchange import ClusterModel
from lcfl.methods.local import LocalTraining
from lcfl.methods.method import Method
from lcfl.server import server
from tests.helpers.builders import blobs, blobs_module, fit


class Endless(Clustering):
    """Requests one extra round after the other."""

    has_extra_rounds = True

    def extra_round(self, state, sampled):
        return ExtraRound([0], LocalTraining(steps=1))


def test_endless_extra_rounds_end_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(server, "MOST_EXTRA_ROUNDS", 3)
    method = Method(LocalTraining(steps=1), ClusterModel(), ClusterMean("participants", "participants"), [Endless()])
    with pytest.raises(RuntimeError, match=r"Endless.extra_round: requested 3 rounds before round 0"):
        fit(blobs_module(), blobs(), method, tmp_path)


class Once(Clustering):
    """Has one client train before each training round."""

    has_extra_rounds = True

    def on_round_start(self, server, state):
        self.is_due = True

    def extra_round(self, state, sampled):
        is_due, self.is_due = self.is_due, False
        return ExtraRound([0], LocalTraining(steps=1)) if is_due else None


def test_the_loss_of_a_round_that_nobody_finishes_is_not_that_of_an_extra_round(tmp_path):
    method = Method(LocalTraining(steps=1), ClusterModel(), ClusterMean("participants", "participants"), [Once()])
    rows = fit(blobs_module(), blobs(), method, tmp_path, rounds=2, client_dropout=1 - 1e-9).rows
    assert len(rows) == 2 and not any("train/loss" in row for row in rows)
    assert all(row["comm/up_bytes"] > 0 and row["train/dropped_clients"] > 0 for row in rows)


class Drawing(Clustering):
    """Has two extra rounds before each training round, and draws from a global generator whom and what for."""

    has_extra_rounds = True

    def __init__(self):
        self.asked, self.drawn = 0, []

    def on_round_start(self, server, state):
        self.asked = 0

    def extra_round(self, state, sampled):
        self.drawn.append(np.random.randint(10**6))
        self.asked += 1
        return ExtraRound([0], LocalTraining(steps=1)) if self.asked <= 2 else None

    def on_extra_round_end(self, server, state, uploads):
        self.drawn.append(np.random.randint(10**6))


def test_extra_rounds_before_one_round_draw_other_numbers(tmp_path):
    drawing = Drawing()
    method = Method(LocalTraining(steps=1), ClusterModel(), ClusterMean("participants", "participants"), [drawing])
    fit(blobs_module(), blobs(), method, tmp_path, rounds=2)
    assert len(set(drawing.drawn)) == len(drawing.drawn) == 10
