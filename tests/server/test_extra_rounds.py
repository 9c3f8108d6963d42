"""A clustering that never has enough extra rounds ends the run instead of keeping it forever."""

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
