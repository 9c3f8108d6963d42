"""Tests what ``lcfl sweep`` refuses, and sweeps with real runs (slow, because each has four processes)."""

import sys
from functools import partial

import pytest

from lcfl.cli.commands import sweep
from lcfl.cli.sweep import Sweep
from tests.helpers.commandline import SMALL, SYNTHETIC, here  # noqa: F401


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--methods=fedavg", "--seeds=a"], "got --seeds a; allowed are whole numbers separated by commas"),
        (["--methods=fedavg", "--jobs=0"], "got --jobs 0; at least 1"),
        (["--methods=fedavg", "--finalists=0"], "got --finalists 0; at least 1"),
        (["--methods="], "got --methods ''; name at least one"),
        (["--methods=fedavg,configs/methods/fedavg.yaml"], "would have the same name in folders and tables; rename"),
        (["--methods=fedavg", "--seeds=0,-1"], "got --seeds 0,-1; a seed is from 0 to 4294967295"),
        (["--methods=fedavg", "--seeds=0,4294967296"], "got --seeds 0,4294967296; a seed is from 0"),
        (["--methods=fedavg", "--tuning_rounds=0"], "got --tuning_rounds 0; at least 1"),
        (["--methods=fedavg", "--grid=lcfed:a=1"], "--grid names lcfed, which --methods fedavg does not"),
        (["--methods=fedavg", "--grid=a"], "--grid a; allowed are"),
        (
            ["--methods=fedavg", "--seed_everything=7"],
            "got --seed_everything, which it gives every .* --seeds",
        ),
        (["--methods=fedavg", "--trainer.name", "x"], "got --trainer.name, .* use --out"),
    ],
)
def test_invalid_options_are_refused(words, text):
    with pytest.raises(ValueError, match=text):
        sweep.main(words)


def test_an_unknown_method_is_refused():
    with pytest.raises(FileNotFoundError, match="there is no file nothing"):
        sweep.main(["--methods=nothing"])


def test_finalists_of_full_length_trials_give_a_warning():
    with (
        pytest.warns(UserWarning, match="--finalists 2 has no effect, because every trial has all rounds"),
        pytest.raises(FileNotFoundError),
    ):
        sweep.main(["--methods=nothing", "--finalists=2"])


@pytest.mark.parametrize(
    "words", [["--model={report: loss}"], ["--model.report=loss"], ["-c", "{model: {report: loss}}"]]
)
def test_the_target_of_another_metric_may_be_above_1(words, monkeypatch):
    monkeypatch.setattr(Sweep, "check", lambda *of: (_ for _ in ()).throw(ZeroDivisionError))
    with pytest.raises(ZeroDivisionError):
        sweep.main(["--methods=fedavg", "--target=1.5", *words])
    with pytest.raises(ValueError, match=r"got --target 1\.5; an accuracy is above 0"):
        sweep.main(["--methods=fedavg", "--target=1.5"])


@pytest.mark.usefixtures("here")
def test_all_configurations_are_checked_before_the_first_run(tmp_path, recwarn):
    words = [*map(str, SYNTHETIC), "--methods=fedavg,lcfed,lg_fedavg", "--grid=fedavg:data.batch_size=8,a"]
    words += ["--grid=lcfed:method.clustering.num_clusters=30", "--grid=lg_fedavg:method.exchange.global_layers=9"]
    with pytest.raises(
        ValueError, match=r"^sweep: 3 of 4 configurations are refused, so nothing was started:"
    ) as error:
        sweep.main(words)
    _, *lines = str(error.value).splitlines()
    assert lines[0] == "  fedavg-batch_size=a-seed0: data.batch_size: expected a whole number, got a"
    assert lines[1].startswith("  lcfed-seed0: method.clustering: LowRankCosine got num_clusters=30")
    assert lines[2].startswith("  lg_fedavg-seed0: method.exchange: SharedLayers: got 9 layers")
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("here")
def test_the_last_line_says_that_all_runs_failed(monkeypatch, recwarn):
    failing = (sys.executable, "-c", "raise SystemExit(1)")
    monkeypatch.setattr(sweep, "Sweep", partial(Sweep, program=failing))
    words = [*map(str, SYNTHETIC), "--methods=fedavg,local", "--grid=fedavg:trainer.rounds=1,2", "--seeds=0,1"]
    with pytest.raises(
        ValueError, match=r"^sweep: all 4 runs have no result: local-seed0, local-seed1, every trial of fedavg;"
    ):
        sweep.main(words)


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_a_trial_that_learned_nothing_is_not_chosen_also_if_the_sweep_is_repeated(tmp_path):
    options = [*map(str, (*SYNTHETIC, *SMALL)), "--model.optimizer=SGD", "--trainer.evaluate_every=0"]
    said = []
    points = [(("model.optimizer.lr", rate),) for rate in ("0.01", "1e30")]
    for _ in range(2):
        assert Sweep(tmp_path, [], options, say=said.append).tune("fedavg", points, 0, None, jobs=2) == points[0]
    failed = [each for each in said if each.startswith("fedavg-lr=1e30-seed0: failed with status 1")]
    assert len(failed) == 2 and all("nothing was learned, because no update could be used" in each for each in failed)


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_a_complete_sweep(tmp_path, capsys, recwarn):
    words = [str(word) for word in SYNTHETIC]
    words += ["--methods=fedavg,local", "--grid=fedavg:model.optimizer.init_args.lr=0.0001,0.1", "--tuning_rounds=1"]
    words += [
        "--model.optimizer=SGD",
        "--model.optimizer.lr=0.1",
        "--trainer.rounds=2",
        "--trainer.clients_per_round=8",
    ]
    words += ["--trainer.devices=1", "--trainer.logger=false", "--jobs=2", "--out=out"]
    sweep.main(words)
    said = capsys.readouterr().out
    assert "fedavg: model.optimizer.init_args.lr=0.1 is the best of 2 points" in said
    assert any(line.startswith("fedavg ") and "global" in line for line in said.splitlines())
    assert any(line.startswith("fedavg ") and line.rstrip().endswith(" lr=0.1") for line in said.splitlines())
    assert any(line.startswith("local ") and "personal" in line for line in said.splitlines())
    assert any("different numbers of trials for tuning: fedavg 2, local 1" in str(each.message) for each in recwarn)
    names = {path.name for path in (tmp_path / "out").iterdir() if path.is_dir()}
    tuned = {f"fedavg-lr={lr}-rounds=1-seed0" for lr in ("0.0001", "0.1")}
    assert names == {*tuned, "fedavg-lr=0.1-seed0", "local-seed0", "comparison"}
    sweep.main(words)
    assert "started" not in capsys.readouterr().out
