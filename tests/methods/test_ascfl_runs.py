"""Tests of AS-CFL on the command line, with all its parts: equal bits on two ranks and after a resume."""

import pytest

from tests.helpers.fits import assert_same_run, fit, rows

PROXY = (
    "--data.proxy=60",
    "--trainer.clients_per_round=20",
    "--trainer.client_dropout=0.2",
    "--model.optimizer=SGD",
    "--model.optimizer.lr=0.1",
)
NOISE = "{class_path: GaussianNoise, init_args: {clip: 5.0, sigma: 0.001}}"
COMPRESSION = "{class_path: LowRankCompression, init_args: {energy: 0.95}}"
TRANSFORMS = ("-c", f"method: {{exchange: {{init_args: {{transforms: [{NOISE}, {COMPRESSION}]}}}}}}")
GROWN = "{class_path: GreedyIncentive, init_args: {incentive: false, candidates: 0.4, once: true}}"
MOVES = "{class_path: SplitAndMerge, init_args: {lower: 0.0, upper: 0.3, start: 2, cooldown: 2}}"
STRICT = "{class_path: GreedyIncentive, init_args: {theta: 0.99, margin: 0.0}}"
ALL = ("-c", f"method: {{clustering: [{STRICT}, {{class_path: UpdateEM}}, {{class_path: SplitAndMerge}}]}}")
COOLDOWN = ("-c", f"method: {{clustering: [{GROWN}, {MOVES}]}}")

pytestmark = pytest.mark.filterwarnings("ignore:data.proxy")


@pytest.fixture(autouse=True)
def accountant():
    pytest.importorskip("dp_accounting")


def counts(run):
    return [float(row["cluster/count"]) for row in rows(run) if int(row["round"]) >= 0]


def test_two_ranks_give_the_same_bits_as_one(tmp_path):
    words = (*PROXY, *TRANSFORMS, *ALL)
    one, two = (fit(tmp_path / str(ranks), "ascfl", ranks, 4, *words).path for ranks in (1, 2))
    assert_same_run(one, two)
    assert max(counts(one)) > 1
    with pytest.raises(AssertionError):
        assert_same_run(one, fit(tmp_path / "other", "ascfl", 1, 4, *PROXY, *ALL).path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return fit(tmp_path_factory.mktemp("whole"), "ascfl", 1, 9, *PROXY, *COOLDOWN).path


@pytest.mark.parametrize("first", [2, 3, 4, pytest.param(6, marks=pytest.mark.slow)])
def test_a_resume_before_or_within_a_cooldown_changes_no_bits(tmp_path, whole, first):
    found = counts(whole)
    assert found[2] > found[1] and found[2] == found[3] == found[4] != found[-1]  # a split in round 2, then a cooldown
    fit(tmp_path, "ascfl", 1, first, *PROXY, *COOLDOWN)
    assert_same_run(whole, fit(tmp_path, "ascfl", 1, 9, *PROXY, *COOLDOWN, "--ckpt_path=last").path)


def test_the_checkpoint_holds_the_state_of_transforms(tmp_path):
    one = fit(tmp_path / "whole", "lcfed", 1, 3, *TRANSFORMS).path
    fit(tmp_path / "parts", "lcfed", 1, 2, *TRANSFORMS)
    assert_same_run(one, fit(tmp_path / "parts", "lcfed", 1, 3, *TRANSFORMS, "--ckpt_path=last").path)
