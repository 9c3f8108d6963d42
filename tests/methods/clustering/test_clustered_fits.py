"""Tests of clustered methods in runs that are stopped and go on with another number of ranks."""

import os
import signal
from dataclasses import replace
from functools import cache, partial

import pytest

from lcfl.callbacks import Checkpoint
from lcfl.core.callback import Callback
from lcfl.data.transforms import GaussianNoise as NoisyInputs
from lcfl.data.transforms import LabelPermutation
from lcfl.federation.federation import Federation
from lcfl.methods.aggregation import ClusterMean, ServerMomentum
from lcfl.methods.clustering import ChoiceBeforeTraining, GreedyIncentive, SplitAndMerge, UpdateEM
from lcfl.methods.exchange import CentreAndEmbedding, ClusterModel
from lcfl.methods.exchange.transforms import GaussianNoise, LowRankCompression
from lcfl.methods.local import LocalTraining
from lcfl.methods.method import Method
from tests.helpers.bits import assert_same_state
from tests.helpers.builders import blobs, blobs_module, lcfed
from tests.helpers.clustered import SAMPLES, cfl, cgpfl, cgpfl_prox, clove, fedgroup, fesem, fl_hc, ifca, pacfl
from tests.helpers.fits import assert_same_run, fit, rows
from tests.methods.clustering.test_one_shot import fedclust
from tests.methods.test_ascfl import ascfl

pytestmark = pytest.mark.filterwarnings("ignore:ClientChoice. after 1 redraws", "ignore:GreedyIncentive")

SPLITS = {"eps1": 9.0, "eps2": 0.0, "min_round": 1, "stale_max": 20, "min_size": 4}


def transforms():
    pytest.importorskip("dp_accounting")
    return [GaussianNoise(clip=5.0, sigma=0.001), LowRankCompression(energy=0.95)]


def all_stages():
    return ascfl(GreedyIncentive(theta=0.99, margin=0.0), UpdateEM(), SplitAndMerge(), transforms=transforms())


def cooling_down():
    """Forms clusters in round 0. A split in round 3 is followed by two rounds without a move."""
    grown = GreedyIncentive(incentive=False, candidates=0.7, once=True)
    return ascfl(grown, SplitAndMerge(lower=0.0, upper=0.3, start=2, cooldown=2))


def compressed():
    return replace(lcfed(), exchange=CentreAndEmbedding(transforms=transforms()))


def with_momentum():
    return replace(lcfed(), aggregation=ClusterMean(optimizer=ServerMomentum()))


# For each method: options with which something happens within six rounds, and the rounds after which a run is stopped.
# Zero is after the warm-up round. All stops but the first one are marked slow.
METHODS = {
    "ifca": (partial(ifca, max_redraws=1, min_share=1.0), (1, 3)),
    "clove": (partial(clove, stable_rounds=2), (2, 4)),
    "fesem": (fesem, (1, 3)),
    "fedgroup": (partial(fedgroup, 3, clients_per_group=2), (0, 3)),
    "pacfl": (pacfl, (0, 3)),
    "cgpfl": (cgpfl, (3,)),
    "cgpfl_prox": (cgpfl_prox, (3,)),
    "fl_hc": (partial(fl_hc, 3), (4, 3)),
    "cfl": (partial(cfl, **SPLITS), (4, 1, 5)),
    "fedclust": (partial(fedclust, num_clusters=4), (0, 3)),
    "ascfl": (all_stages, (2,)),
    "ascfl, cooldown": (cooling_down, (4, 3, 5)),
    "lcfed, transforms": (compressed, (2, 0)),
    "lcfed, client transforms": (lcfed, (2,)),
    "lcfed, momentum": (with_momentum, (2,)),
}
DATA = {
    "ascfl, cooldown": {"num_clients": 16},
    "ascfl": {"proxy": 60},
    "lcfed, client transforms": {"client_transforms": [LabelPermutation(), NoisyInputs(0.1)]},
}


def run(root, method, rounds=6, path=None, devices=1, callbacks=()):
    options = {"accelerator": "cpu", "devices": devices, "default_root_dir": root, "name": "run", "logger": False}
    options |= {"enable_progress_bar": False, "callbacks": [Checkpoint(every_n_rounds=9), *callbacks]}
    module = blobs_module(cluster_weight=0.5 if method == "cgpfl_prox" else 0.0)
    data = blobs(**{"num_clients": 12, **DATA.get(method, {})})
    federation = Federation(rounds=rounds, clients_per_round=0.75, client_dropout=0.2, evaluate_every=2, **options)
    return federation.fit(module, data, METHODS[method][0](), path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Provides ``whole(method)``: an undisturbed run by one process, made once per method."""
    return cache(lambda method: run(tmp_path_factory.mktemp(method), method))


def assert_same_result(one, other):
    assert_same_state(one.state, other.state)
    assert one.metrics == other.metrics and rows(one.path) == rows(other.path)
    assert one.state.num_clusters > 1


QUICK = {"ascfl", "fedclust", "fedgroup", "ifca", "lcfed, transforms"}


@pytest.mark.parametrize(
    ("method", "first"),
    [
        pytest.param(method, first, marks=[pytest.mark.slow] if place or method not in QUICK else [])
        for method, (_, stops) in METHODS.items()
        for place, first in enumerate(stops)
    ],
)
def test_a_run_that_begins_on_two_ranks_and_ends_on_one_has_the_same_bits(tmp_path, whole, method, first):
    begun = run(tmp_path, method, first, devices=2)
    resumed = run(tmp_path, method, path="last")
    assert resumed.path == begun.path
    assert_same_result(resumed, whole(method))


def test_a_run_that_was_stopped_before_its_warm_up_round_can_be_resumed(tmp_path, whole):
    class Stop(Callback):
        def on_fit_start(self, state):
            os.kill(os.getpid(), signal.SIGTERM)

    stopped = run(tmp_path, "fedclust", callbacks=[Stop()])
    assert stopped.signal == signal.SIGTERM and stopped.state.round == -1
    resumed = run(tmp_path, "fedclust", path="last")
    assert_same_result(resumed, whole("fedclust"))
    vectors = resumed.state.callbacks["OneShotHierarchical"]["vectors"]
    assert vectors.shape == (12, 136) and vectors.any(dim=1).all()


def chosen_before():
    return Method(LocalTraining(steps=3), ClusterModel(), SAMPLES, [ChoiceBeforeTraining(4)])


@pytest.mark.parametrize("made", [clove, partial(fedgroup, 3, clients_per_group=2), chosen_before])
def test_the_same_objects_go_on_after_a_round_that_failed(tmp_path, made):
    """The extra round of the round that failed is run again."""

    class Failing(Callback):
        def on_uploads(self, state):
            if state.round == 1 and failing:
                raise RuntimeError(failing.pop())

    def go_on(name, path=None):
        options = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_progress_bar": False, "name": name}
        callbacks = [Failing(), Checkpoint(every_n_rounds=1)]
        federation = Federation(4, 0.5, evaluate_every=0, default_root_dir=tmp_path, callbacks=callbacks, **options)
        return federation.fit(blobs_module(), blobs(12), method, path)

    method, failing = made(), []
    whole = go_on("whole").state
    method, failing = made(), ["it failed"]
    with pytest.raises(RuntimeError, match="it failed"):
        go_on("parts")
    resumed = go_on("parts", "last").state
    assert_same_state(resumed, whole)
    assert resumed.total_bytes == whole.total_bytes


@pytest.mark.parametrize("made", [fl_hc, fesem, pacfl, cfl, ifca, clove])
def test_the_same_objects_begin_anew_in_a_second_run(tmp_path, made):
    method, checkpoint = made(), Checkpoint(every_n_rounds=1, monitor="val/own_split/cluster/acc")
    runs = []
    for name in ("first", "second"):
        options = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_progress_bar": False, "name": name}
        federation = Federation(3, 0.5, evaluate_every=1, default_root_dir=tmp_path, callbacks=[checkpoint], **options)
        fitted = federation.fit(blobs_module(), blobs(12), method)
        runs.append((fitted.state, (tmp_path / name / "version_0" / "checkpoints" / "best.json").read_text()))
    (first, best), (second, again) = runs
    assert_same_state(second, first)
    assert again == best


def test_no_cluster_is_split_in_a_cooldown(whole):
    """Without the cooldown, a cluster would be split in round 4."""
    counts = [float(row["cluster/count"]) for row in rows(whole("ascfl, cooldown").path)]
    assert counts == [2, 2, 2, 3, 3, 3]


@pytest.mark.slow
@pytest.mark.parametrize("method", [name for name in METHODS if "," not in name])
def test_its_shipped_configuration_gives_the_same_bits_too(tmp_path, method):
    whole = fit(tmp_path / "whole", method, 1, 3).path
    fit(tmp_path / "parts", method, 2, 1)
    assert_same_run(whole, fit(tmp_path / "parts", method, 1, 3, "--ckpt_path=last").path)
