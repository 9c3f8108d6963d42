"""Monitored metrics: they use validation data, are checked before the first round, and NaN is never the best."""

import json
import warnings
from functools import partial
from math import inf, nan
from types import SimpleNamespace

import pytest
import torch

from lcfl.callbacks import Checkpoint, EarlyStopping
from lcfl.callbacks.monitored_metric import MonitoredMetric
from lcfl.core.callback import Callback
from lcfl.federation.federation import Federation
from lcfl.models import MLP
from lcfl.models.module import FederatedModule
from tests.helpers.builders import blobs, blobs_module, fedavg, lcfed
from tests.helpers.fits import rows

ACC = "val/own_split/personal/acc"


NAMES = dict.fromkeys([ACC, f"{ACC}_worst10", "test/own_split/personal/acc"], True)


def server(evaluate_every=1, columns=(), is_done=True):
    return SimpleNamespace(
        schedule=SimpleNamespace(evaluate_every=evaluate_every),
        state=SimpleNamespace(round=1),
        table=SimpleNamespace(columns=["round", *columns], column=lambda name: [0.5] * (name in columns)),
        is_done=is_done,
    )


def monitored(name=ACC, mode="max"):
    return MonitoredMetric("Checkpoint", name, mode)


def test_metric_of_test_data_is_refused():
    with pytest.raises(
        ValueError, match=r"got monitor=test/a/b/acc; test data .* Use its validation twin, val/a/b/acc"
    ):
        monitored("test/a/b/acc")


@pytest.mark.parametrize("kind", [Checkpoint, EarlyStopping])
def test_unknown_mode_is_refused(kind):
    with pytest.raises(ValueError, match=f"{kind.__name__}: got mode='most'; allowed are max, min and null"):
        kind(mode="most")


@pytest.mark.parametrize("name", [ACC, f"{ACC}_worst10", "train/loss", "cluster/anything"])
def test_known_names_and_names_outside_evaluations_pass_the_check(name):
    assert monitored(name).among(NAMES, "unused").name == name


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["val/own_split/cluster/acc", "test/x/y/acc"], f"no metric {ACC}; the metrics are val/own_split/cluster/acc"),
        ([], r"never measured during this run\. Set trainer\.evaluate_every"),
        (["test/own_split/personal/acc"], r"needs validation data.*data\.val_fraction"),
    ],
)
def test_metric_that_is_never_measured_is_refused(names, text):
    with pytest.raises(ValueError, match=text):
        monitored().among(dict.fromkeys(names, True), ACC)


def test_without_a_name_and_a_mode_the_reported_metric_is_watched_in_its_direction():
    metrics = {"val/own_split/personal/mae": False, "val/own_split/personal/r2": True}
    found = MonitoredMetric("Checkpoint", None, None).among(metrics, "val/own_split/personal/mae")
    assert (found.name, found.mode) == ("val/own_split/personal/mae", "min")
    named = MonitoredMetric("Checkpoint", "val/own_split/personal/r2", None).among(metrics, "unused")
    assert named.mode == "max"
    assert MonitoredMetric("Checkpoint", "train/loss", "min").among(metrics, "unused").mode == "min"


def test_larger_scores_are_better():
    assert monitored().score({ACC: 0.5}, server()) == 0.5
    assert monitored(mode="min").score({ACC: 0.5}, server()) == -0.5
    assert monitored().score({ACC: nan}, server()) == monitored(mode="min").score({ACC: nan}, server()) == -inf
    assert monitored().score({"train/loss": 1.0}, server()) is None


def test_row_that_should_have_the_metric_is_refused():
    full = {"train/loss": 1.0, "time/eval_s": 0.1}
    with pytest.raises(ValueError, match="no metric cluster/kount; the metrics are time/eval_s, train/loss"):
        monitored("cluster/kount").score(full, server())
    with pytest.raises(ValueError, match="no metric cluster/kount"):
        monitored("cluster/kount").score({"a": 1.0}, server(evaluate_every=0))
    assert monitored("train/loss").score({"time/eval_s": 0.1}, server()) is None


def test_row_may_lack_a_metric_of_clients_that_have_left():
    assert monitored(ACC).score({"train/loss": 1.0, "time/eval_s": 0.1}, server()) is None


def test_row_that_may_lack_the_metric_is_skipped():
    full = {"train/loss": 1.0, "time/eval_s": 0.1}
    assert monitored("cluster/kount").score(full, server(columns=["cluster/kount"])) is None  # an earlier round had it
    for name in ("ari", "stability", "granularity", "granularity_03", "threshold", "mean_update_1"):
        assert monitored(f"cluster/{name}").score(full | {"cluster/count": 2.0}, server()) is None
        with pytest.raises(ValueError, match=f"no metric cluster/{name}"):  # the method does not cluster
            monitored(f"cluster/{name}").score(full, server())


def test_unknown_user_defined_metric_is_a_warning():
    full = {"train/loss": 1.0, "time/eval_s": 0.1}
    with pytest.warns(UserWarning, match="Checkpoint: no round so far has had monitor=train/my"):
        assert monitored("train/my").score(full, server()) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert monitored("train/my").score({"time/eval_s": 0.1}, server()) is None  # no client trained
        assert monitored("train/my").score({"train/loss": 1.0}, server()) is None  # not evaluated
        assert monitored("train/my").score(full, server(columns=["train/my"])) is None


def test_warning_at_the_end_names_a_metric_that_no_round_had():
    with pytest.warns(UserWarning, match=r"no round had monitor=train/my.*; the rounds had a, train/loss\."):
        monitored("train/my").warn_if_never_seen(server(columns=["train/loss", "a"]))
    diverged = server(columns=["train/my", "a"])
    diverged.table.column = lambda name: [nan, nan]
    with pytest.warns(UserWarning, match=r"monitor=train/my was NaN in every round, so .*; the rounds had a\."):
        monitored("train/my").warn_if_never_seen(diverged)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monitored("train/my").warn_if_never_seen(server(columns=["train/my"]))
        monitored("train/my").warn_if_never_seen(server(is_done=False))  # stopped by a signal


def run(tmp_path, callbacks, module=None, method=None, ckpt_path=None, **options):
    federation = Federation(
        default_root_dir=tmp_path,
        devices=1,
        logger=False,
        enable_progress_bar=False,
        callbacks=callbacks,
        **{"evaluate_every": 1, **options},
    )
    return federation.fit(module or blobs_module(), blobs(), method or lcfed(2), ckpt_path)


@pytest.mark.parametrize(("loss", "expected"), [(0.5, None), (nan, -inf)])
def test_nan_decides_only_if_models_have_diverged(loss, expected):
    """Otherwise the metric is not defined for the clients' samples."""
    assert monitored().score({ACC: nan, "val/own_split/personal/loss": loss}, server()) == expected


def test_a_resumed_run_knows_its_best_by_a_loss_whose_mode_was_not_given(tmp_path):
    module = blobs_module(report="loss")
    path = run(tmp_path, Checkpoint(keep_last=1, monitor="val/own_split/personal/loss"), module, rounds=4).path
    named = json.loads((path / "checkpoints" / "best.json").read_text())
    assert named["mode"] == "min"
    callback = Checkpoint(keep_last=1, monitor="val/own_split/personal/loss")
    run(tmp_path, callback, module, ckpt_path="last", rounds=4)
    assert json.loads((path / "checkpoints" / "best.json").read_text()) == named


@pytest.mark.parametrize("kind", [Checkpoint, EarlyStopping])
def test_stability_is_available_from_the_second_round_on(tmp_path, kind):
    callback = kind(monitor="cluster/stability")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*monitor=")
        done = run(tmp_path, [callback], rounds=3)
        run(tmp_path, [callback], rounds=3, fast_dev_run=True)
    assert done.state.round == 3
    assert done.state.callbacks[kind.__name__]["best"] is not None


@pytest.mark.parametrize("name", ["cluster/count", "cluster/stability"])
def test_warmup_round_without_cluster_metrics_is_skipped(tmp_path, name):
    callback = EarlyStopping(monitor=name)
    run(tmp_path, [callback], rounds=2, evaluate_every=0)
    assert callback.state_dict()["best"] is not None


class Logs(FederatedModule):
    """A module whose training step logs a metric."""

    def training_step(self, batch, batch_idx):
        self.log("train/my", 1.0)
        return super().training_step(batch, batch_idx)


def test_metric_of_a_step_is_missing_in_rounds_without_reports(tmp_path):
    module = Logs(partial(MLP, 16, [16], 8), partial(torch.optim.SGD, lr=0.05))
    callback = Checkpoint(monitor="train/my")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*monitor=")
        done = run(tmp_path, [callback], module, fedavg(), rounds=6, clients_per_round=1, client_dropout=0.5)
    has_it = [bool(row["train/my"]) for row in rows(done.path)]
    assert not has_it[0] and any(has_it)
    assert callback.best["round"] == has_it.index(True) + 1


@pytest.mark.parametrize("kind", [Checkpoint, EarlyStopping])
def test_misspelt_user_defined_metric_is_a_warning_in_the_first_round_and_at_the_end(tmp_path, kind):
    class Spread(Callback):
        def on_aggregated(self, server):
            server.log("spread", 1.0)

    with pytest.warns(UserWarning, match="monitor=spraed") as said:
        run(tmp_path, [Spread(), kind(monitor="spraed")], rounds=3)
    first, *_, last = [str(each.message) for each in said if "monitor=" in str(each.message)]
    assert first.startswith(f"{kind.__name__}: no round so far has had monitor=spraed")
    assert last.startswith(f"{kind.__name__}: no round had monitor=spraed") and ", spread, " in last


@pytest.mark.parametrize("kind", [Checkpoint, EarlyStopping])
def test_a_misspelt_metric_ends_a_run_before_its_first_round(tmp_path, kind):
    callback = kind(monitor="val/own_split/personal/accuracy")
    federation = Federation(
        2, default_root_dir=tmp_path, devices=1, logger=False, enable_progress_bar=False, callbacks=[callback]
    )
    with pytest.raises(
        ValueError, match=rf"{kind.__name__}: there is no metric .*accuracy; .*{ACC}, {ACC}_std, .*loss"
    ):
        federation.fit(blobs_module(), blobs(), lcfed(2))
    assert list(tmp_path.iterdir()) == []


def test_nan_is_never_the_best():
    callback = Checkpoint(monitor=ACC)
    rows = iter([nan, 0.5, nan, 0.4])

    state, written = SimpleNamespace(round=0, callbacks={}), []
    callback._write = lambda server, state, is_better: written.append((state.round, is_better))
    one = SimpleNamespace(**vars(server(is_done=False)), stop_signal=0)
    callback.forget()
    for state.round, value in enumerate(rows, start=1):
        callback.on_round_logged(one, state, {ACC: value})
    assert written == [(2, True)]
    assert callback.best == {"round": 2, "monitor": ACC, "mode": "max", "score": 0.5}
