"""Tests that a metric which means something else under the same name is noticed, when runs are resumed or compared."""

import json

import pytest
import torch
from torchmetrics import MeanAbsoluteError, MeanMetric, MeanSquaredError
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score

from lcfl import Federation
from lcfl.cli.sweep import Sweep
from lcfl.runs.checkpoint import CheckpointError
from lcfl.runs.comparison import entries_of, reported_by
from lcfl.runs.finished import FinishedRun, find_runs
from lcfl.runs.identity import describe_metrics
from tests.helpers.builders import blobs, blobs_module, fedavg
from tests.helpers.runs import made

ROOT = MeanSquaredError(squared=False)


def test_a_metric_is_described_by_its_class_and_arguments_and_not_by_what_it_sums_up():
    assert describe_metrics(blobs_module()) == {}
    one, same, other = (
        describe_metrics(blobs_module(metrics={"f1": MulticlassF1Score(8, average=average)}))
        for average in ("macro", "macro", "micro")
    )
    assert one == same != other and set(one) == {"acc", "f1"}
    metric = MeanSquaredError(squared=False)
    before = describe_metrics(blobs_module(metrics={"error": metric}))
    metric.update(torch.tensor([1.0]), torch.tensor([3.0]))
    assert before == describe_metrics(blobs_module(metrics={"error": metric}))
    assert before != describe_metrics(blobs_module(metrics={"error": MeanSquaredError()}))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (MulticlassAUROC(8, thresholds=5), MulticlassAUROC(8, thresholds=7)),
        (MeanMetric(nan_strategy="warn"), MeanMetric(nan_strategy="ignore")),
        (MeanMetric(nan_strategy=0.0), MeanMetric(nan_strategy=1.0)),
    ],
)
def test_metrics_with_other_arguments_are_told_apart(one, other):
    found = [describe_metrics(blobs_module(metrics={"m": each}, larger_is_better=True)) for each in (one, other)]
    assert found[0] != found[1]
    json.dumps(found)


def test_seeds_of_which_one_measures_more_are_one_entry(tmp_path):
    made(tmp_path, "a-seed0", 0)
    made(tmp_path, "a-seed1", 1, metrics=describe_metrics(blobs_module(metrics={"f1": MulticlassF1Score(8)})))
    (entry,) = entries_of(find_runs([tmp_path]))
    assert [run.seed for run in entry.runs] == [0, 1]
    assert reported_by([entry]).name == "acc"


def test_equal_runs_with_other_metrics_under_one_name_are_both_kept(tmp_path):
    for number, metric in enumerate([MeanAbsoluteError(), ROOT]):
        metrics = describe_metrics(blobs_module(metrics={"acc": metric}, larger_is_better=True))
        made(tmp_path, f"run{number}", 0, metrics=metrics)
    runs = find_runs([tmp_path])
    assert len(runs) == 2
    with pytest.raises(ValueError, match=r"report acc, but model\.metrics\.acc differs"):
        reported_by(entries_of(runs))


def test_a_resumed_run_measures_the_same_under_the_same_name_and_may_measure_more(tmp_path):
    def fit(rounds, metrics, ckpt_path="last"):
        federation = Federation(rounds, default_root_dir=tmp_path, accelerator="cpu", devices=1, logger=False)
        return federation.fit(blobs_module(metrics=metrics), blobs(), fedavg(), ckpt_path=ckpt_path)

    fit(1, {"f1": MulticlassF1Score(8)}, None)
    with pytest.raises(CheckpointError, match=r"metrics\.f1\.average: the checkpoint has 'macro', this run 'micro'"):
        fit(2, {"f1": MulticlassF1Score(8, average="micro")})
    fit(2, {"f1": MulticlassF1Score(8), "more": MulticlassF1Score(8, average="micro")})
    assert fit(3, None).state.round == 3


def test_another_accuracy_is_not_that_of_lcfl(tmp_path):
    """lcfl's accuracy has no description if it is the only metric."""
    macro = {"acc": MulticlassAccuracy(8)}
    described = [{}, {"f1": MulticlassF1Score(8)}, {"acc": MulticlassAccuracy(8, average="micro")}, macro]
    for seed, metrics in enumerate(described):
        identity = {"metrics": found} if (found := describe_metrics(blobs_module(metrics=metrics))) else {}
        made(tmp_path, f"a-seed{seed}", seed, **identity)
    runs = find_runs([tmp_path])
    assert reported_by(entries_of(runs[:3])).name == "acc"
    with pytest.raises(
        ValueError, match=r"a-seed0/version_0 and .*a-seed3/version_0 report acc, but model\.metrics\.acc"
    ):
        reported_by(entries_of(runs))


def test_a_run_with_the_accuracy_of_lcfl_does_not_go_on_with_another_one(tmp_path):
    def fit(rounds, metrics, ckpt_path="last"):
        federation = Federation(rounds, default_root_dir=tmp_path, accelerator="cpu", devices=1, logger=False)
        return federation.fit(blobs_module(metrics=metrics), blobs(), fedavg(), ckpt_path=ckpt_path)

    fit(1, None, None)
    with pytest.raises(CheckpointError, match=r"metrics\.acc"):
        fit(2, {"acc": MulticlassAccuracy(8)})
    fit(2, {"f1": MulticlassF1Score(8)})
    assert fit(3, None).state.round == 3


def test_an_added_metric_that_means_something_else_is_named(tmp_path):
    for seed, average in enumerate(["macro", "macro", "micro"]):
        metrics = describe_metrics(blobs_module(metrics={"f1": MulticlassF1Score(8, average=average)}))
        made(tmp_path, f"a-seed{seed}", seed, metrics=metrics)
    entries = entries_of(find_runs([tmp_path]))
    with pytest.warns(
        UserWarning, match=r"^model\.metrics\.f1 differs .* a-?.*seed0/version_0 and .*seed2/version_0, so"
    ):
        reported_by(entries)


@pytest.mark.parametrize("reported", ["loss", "error"])
def test_runs_whose_reported_metric_means_something_else_are_not_compared(tmp_path, reported):
    report = {"name": reported, "larger_is_better": False}
    for number, (loss, metric) in enumerate([("L1Loss()", MeanAbsoluteError()), ("MSELoss()", ROOT)]):
        metrics = describe_metrics(blobs_module(metrics={"error": metric}))
        file = made(tmp_path, f"a-seed{number}", number, model={"loss": loss}, metrics=metrics) / "summary.json"
        summary = json.loads(file.read_text().replace("global/acc", f"global/{reported}"))
        file.write_text(json.dumps(summary | {"reported": report}))
    entries = entries_of(find_runs([tmp_path]))
    option = "loss" if reported == "loss" else r"metrics\.error"
    with pytest.raises(ValueError, match=rf"report {reported}, but model\.{option} differs"):
        reported_by(entries)


def test_a_sweep_does_not_choose_between_losses(tmp_path, monkeypatch):
    runs = []
    for loss in ("L1Loss()", "MSELoss()"):
        file = made(tmp_path, loss, 0, model={"loss": loss}) / "summary.json"
        summary = json.loads(file.read_text()) | {"reported": {"name": "loss", "larger_is_better": False}}
        summary["metrics"] = {"val/own_split/global/loss": 0.5, "test/own_split/global/loss": 0.5}
        file.write_text(json.dumps(summary))
        runs.append(FinishedRun.read(file.parent))
    monkeypatch.setattr(Sweep, "run", lambda *_, **options: runs)
    points = [(("model.loss", loss),) for loss in ("L1Loss", "MSELoss")]
    sweep = Sweep(tmp_path / "sweep", [], [], say=print)
    with pytest.raises(ValueError, match=r"report loss, but model\.loss differs"):
        sweep.tune("fedavg", points, 0, None)
    monkeypatch.setattr(Sweep, "run", lambda *_, **options: [runs[0], runs[0]])
    assert sweep.tune("fedavg", points, 0, None) == points[0]
