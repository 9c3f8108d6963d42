"""Tests how a run ends whose updates are not finite."""

import csv
import json
from math import isnan

import pytest

from tests.helpers.commandline import FEDAVG, SMALL, SYNTHETIC, lcfl

pytestmark = pytest.mark.usefixtures("here")

HUGE_RATE = ("fit", *SYNTHETIC, *FEDAVG, *SMALL, "--model.optimizer=SGD", "--model.optimizer.lr=1e30")


def test_a_run_of_which_no_update_could_be_used_ends_with_an_error_also_if_it_is_resumed_at_its_end(tmp_path):
    wanted = (
        r"^logs/lcfl/version_0: nothing was learned, because no update could be used: 8 were not finite "
        r"\(set a smaller model\.optimizer\.lr, unless samples are not finite\)\.$"
    )
    for more in ([], ["--ckpt_path=last"]):
        with pytest.raises(ValueError, match=wanted):
            lcfl(*HUGE_RATE, *more)
        assert not (tmp_path / "logs/lcfl/version_0/summary.json").exists()
    assert (tmp_path / "logs/lcfl/version_0/checkpoints/round-000002.ckpt").is_dir()


def test_a_run_that_could_use_updates_is_resumed_also_if_all_later_ones_are_not_finite():
    with pytest.warns(UserWarning, match="4 of 4 clients is not finite"):
        run = lcfl(*HUGE_RATE, "--method.local_update.steps=1")  # whose loss is that of the initial model
    assert run.state.participated.sum() == 4
    with pytest.warns(UserWarning, match="4 of 4 clients is not finite"):
        assert lcfl(*HUGE_RATE, "--method.local_update.steps=1", "--trainer.rounds=3", "--ckpt_path=last").metrics


def test_a_run_does_not_go_on_after_twenty_rounds_of_which_no_update_could_be_used(tmp_path):
    """The first round succeeds, because the loss of a single step is that of the initial model."""
    wanted = (
        r"^logs/lcfl/version_0: the run does not go on, because in each of the last 20 rounds no update could be used: "
        r"80 were not finite \(set a smaller model\.optimizer\.lr, unless samples are not finite\)\.$"
    )
    with pytest.warns(UserWarning, match="4 of 4 clients is not finite"), pytest.raises(ValueError, match=wanted):
        lcfl(*HUGE_RATE, "--method.local_update.steps=1", "--trainer.rounds=50")
    with open(tmp_path / "logs/lcfl/version_0/metrics.csv") as file:
        failed = [float(row["train/failed_clients"]) for row in csv.DictReader(file)]
    assert failed == [0] + [4] * 20
    for more in ([], ["--method.local_update.lr_decay=0.9", "--trainer.rounds=25"]):  # ends there, or may recover
        with pytest.warns(UserWarning, match="not finite"):
            assert lcfl(*HUGE_RATE, "--method.local_update.steps=1", "--trainer.rounds=21", *more).metrics


def test_a_run_whose_clients_may_have_left_is_no_error():
    with pytest.warns(UserWarning, match="clients is not finite"):
        assert lcfl(*HUGE_RATE, "--data.leavers={0: 1}").metrics


def test_summary_of_a_diverged_run_is_valid_json(tmp_path):
    with pytest.warns(UserWarning, match=r"after_local/loss is not finite for \d+ of 20 clients"):
        run = lcfl(*HUGE_RATE, "--method.local_update.steps=1")
    text = (run.path / "summary.json").read_text()
    metrics = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))["metrics"]
    broken = [name for name, value in metrics.items() if value is None]
    assert "test/own_split/after_local/loss" in broken
    assert all(isnan(run.metrics[name]) for name in broken) and len(run.metrics) == len(metrics)
