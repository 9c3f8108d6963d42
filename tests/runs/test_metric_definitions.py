"""Tests that a metric which means something else under the same name is noticed, when runs are resumed or compared."""

import json

import pytest
import torch
from torchmetrics import MeanAbsoluteError, MeanSquaredError
from torchmetrics.classification import MulticlassF1Score

from lcfl import Federation
from lcfl.runs.checkpoint import CheckpointError
from lcfl.runs.comparison import entries_of, reported_by
from lcfl.runs.finished import find_runs
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


def test_a_resumed_run_measures_the_same_under_the_same_name_and_may_measure_more(tmp_path):
    def fit(rounds, metrics, ckpt_path="last"):
        federation = Federation(rounds, default_root_dir=tmp_path, accelerator="cpu", devices=1, logger=False)
        return federation.fit(blobs_module(metrics=metrics), blobs(), fedavg(), ckpt_path=ckpt_path)

    fit(1, {"f1": MulticlassF1Score(8)}, None)
    with pytest.raises(CheckpointError, match=r"metrics\.f1\.average: the checkpoint has 'macro', this run 'micro'"):
        fit(2, {"f1": MulticlassF1Score(8, average="micro")})
    fit(2, {"f1": MulticlassF1Score(8), "more": MulticlassF1Score(8, average="micro")})
    assert fit(3, None).state.round == 3


@pytest.mark.parametrize("reported", ["loss", "error"])
def test_runs_whose_reported_metric_means_something_else_are_not_compared(tmp_path, reported):
    report = {"name": reported, "larger_is_better": False}
    for number, (loss, metric) in enumerate([("L1Loss()", MeanAbsoluteError()), ("MSELoss()", ROOT)]):
        metrics = describe_metrics(blobs_module(metrics={"error": metric}))
        file = made(tmp_path, f"a-seed{number}", number, model={"loss": loss}, metrics=metrics) / "summary.json"
        summary = json.loads(file.read_text().replace("global/acc", f"global/{reported}"))
        file.write_text(json.dumps(summary | {"reported": report}))
    entries = entries_of(find_runs([tmp_path]))
    assert len(entries) == 2  # and not two seeds of one
    option = "loss" if reported == "loss" else r"metrics\.error"
    with pytest.raises(ValueError, match=rf"report {reported}, but model\.{option} differs"):
        reported_by(entries)
