"""Tests what ``lcfl sweep`` refuses, and one complete sweep (slow, because it has four processes)."""

import pytest

from lcfl.cli.commands import sweep
from tests.helpers.commandline import SYNTHETIC, here  # noqa: F401


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--methods=fedavg", "--seeds=a"], "got --seeds a; allowed are whole numbers separated by commas"),
        (["--methods=fedavg", "--jobs=0"], "got --jobs 0; at least 1"),
        (["--methods=fedavg", "--finalists=0"], "got --finalists 0; at least 1"),
        (["--methods="], "got --methods ''; name at least one"),
        (["--methods=fedavg,configs/methods/fedavg.yaml"], "would have the same name in folders and tables; rename"),
        (["--methods=fedavg", "--seeds=0,-1"], "got --seeds 0,-1; a seed is at least 0"),
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
