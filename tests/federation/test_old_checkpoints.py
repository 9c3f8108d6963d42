"""Runs of lcfl 0.1.0, whose classes lived elsewhere, can be resumed, opened and compared like runs of this version.

They use the quickstart's data, a hidden layer of eight units and five clients per round. ``went_on.csv`` is the
result of two more rounds with 0.1.0 itself.
"""

import csv
import shutil
from pathlib import Path

import pytest

import lcfl
from lcfl.cli import federated_cli
from lcfl.runs.comparison import entries_of
from lcfl.runs.finished import find_runs
from tests.helpers.commandline import CONFIGS

RUNS = Path(__file__).parent / "version_0_1_0"
OPTIONS = {
    "lcfed": ["--method.clustering.dimension=2", "--method.clustering.num_clusters=3"],
    "fednova": ["--method.aggregation.momentum=0.5"],
}


def rows(path):
    with path.open() as file:
        return [
            {name: float(value) for name, value in row.items() if value and not name.startswith("time/")}
            for row in csv.DictReader(file)
        ]


def fit(folder, method, *more):
    files = ["-c", str(CONFIGS / "quickstart.yaml"), "-c", str(CONFIGS / "methods" / f"{method}.yaml")]
    trainer = {
        "rounds": 6,
        "clients_per_round": 5,
        "evaluate_every": 2,
        "devices": 1,
        "engine": "sequential",
        "logger": "false",
        "enable_progress_bar": "false",
        "default_root_dir": folder,
        "name": method,
    }
    words = [f"--trainer.{name}={value}" for name, value in trainer.items()]
    return federated_cli.main(["fit", *files, *OPTIONS[method], "--model.network.hidden=[8]", *words, *more])


@pytest.mark.parametrize("method", OPTIONS)
def test_old_run_resumes_with_the_same_metrics(tmp_path, method):
    shutil.copytree(RUNS / method, tmp_path / method)
    run = fit(tmp_path, method, "--ckpt_path=last")
    expected = rows(RUNS / method / "went_on.csv")
    assert [row["round"] for row in expected][-2:] == [4, 5]
    found = rows(run.path / "metrics.csv")
    assert len(found) == len(expected)
    for row, other in zip(found, expected, strict=True):
        assert row == pytest.approx(other, rel=1e-3)  # another processor may round differently


def test_changed_setting_is_still_refused(tmp_path):
    shutil.copytree(RUNS / "fednova", tmp_path / "fednova")
    with pytest.raises(ValueError, match=r"method\.aggregation\.momentum: the checkpoint has 0\.5, this run 0\.25"):
        fit(tmp_path, "fednova", "--ckpt_path=last", "--method.aggregation.momentum=0.25")


def test_models_of_an_old_run_are_loaded_with_its_configuration():
    run = lcfl.load(RUNS / "lcfed" / "version_0")
    assert run.metrics["test/own_split/personal/acc"] > 0
    assert run.metrics["test/own_split/trivial/acc"] > 0  # 0.1.0 called it majority
    assert sum(each.numel() for each in run.model("personal", client=3).parameters()) == 64 * 8 + 8 + 8 * 10 + 10


def test_old_run_is_compared_with_a_run_of_this_version(tmp_path):
    old = shutil.copytree(RUNS / "fednova", tmp_path / "old")
    new = fit(tmp_path / "new", "fednova", "--trainer.rounds=4", "--seed_everything=1")
    (entry,) = entries_of(find_runs([old, new.path]))
    assert len(entry.runs) == 2, "they differ in nothing but the seed"
