"""A monitored metric: of validation data, known before the first round, NaN never the best."""

from math import inf, nan
from types import SimpleNamespace

import pytest

from lcfl.callbacks import Checkpoint, EarlyStopping
from lcfl.callbacks.monitored import Monitored
from lcfl.federation import Federation
from tests.builders import blobs, blobs_module, lcfed

ACC = "val/own_split/personal/acc"


NAMES = [ACC, f"{ACC}_worst10", "test/own_split/personal/acc"]


def server(evaluate_every=1):
    return SimpleNamespace(is_evaluated=lambda row: "time/eval_s" in row or evaluate_every == 0)


def monitored(name=ACC, mode="max"):
    return Monitored("Checkpoint", name, mode)


def test_test_data_decide_nothing():
    with pytest.raises(
        ValueError, match=r"got monitor=test/a/b/acc; test data .* Use its validation twin, val/a/b/acc"
    ):
        monitored("test/a/b/acc")


def test_another_mode():
    with pytest.raises(ValueError, match="Checkpoint: got mode='most'; allowed are max and min"):
        monitored(mode="most")


@pytest.mark.parametrize("name", [ACC, f"{ACC}_worst10", "train/loss", "cluster/anything"])
def test_known_names_and_those_that_only_a_row_can_tell(name):
    monitored(name).check(NAMES)


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["val/own_split/cluster/acc", "test/x/y/acc"], f"no metric {ACC}; there are val/own_split/cluster/acc"),
        ([], r"never measured during a run with trainer\.evaluate_every=0"),
        (["test/own_split/personal/acc"], r"needs validation data.*data\.val_fraction"),
    ],
)
def test_a_metric_that_is_never_measured(names, text):
    with pytest.raises(ValueError, match=text):
        monitored().check(names)


def test_larger_scores_are_better():
    assert monitored().score({ACC: 0.5}, server()) == 0.5
    assert monitored(mode="min").score({ACC: 0.5}, server()) == -0.5
    assert monitored().score({ACC: nan}, server()) == monitored(mode="min").score({ACC: nan}, server()) == -inf
    assert monitored().score({"train/loss": 1.0}, server()) is None


def test_a_row_that_should_have_it():
    full = {"train/loss": 1.0, "time/eval_s": 0.1}
    with pytest.raises(ValueError, match="no metric cluster/kount; there are time/eval_s, train/loss"):
        monitored("cluster/kount").score(full, server())
    with pytest.raises(ValueError, match="no metric cluster/kount"):
        monitored("cluster/kount").score({"a": 1.0}, server(evaluate_every=0))
    assert monitored("train/loss").score({"time/eval_s": 0.1}, server()) is None


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
    one = SimpleNamespace(**vars(server()), is_done=False, stop_signal=0)
    callback.on_fit_start(one, state)
    for state.round, value in enumerate(rows, start=1):
        callback.on_round_logged(one, state, {ACC: value})
    assert written == [(2, True)]
    assert callback.best == {"round": 2, "monitor": ACC, "mode": "max", "score": 0.5}
