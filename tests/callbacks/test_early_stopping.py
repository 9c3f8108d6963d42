"""A run ends after `patience` evaluations without improvement, and not before."""

from types import SimpleNamespace

import pytest

from lcfl.callbacks import EarlyStopping

MONITOR = "val/own_split/personal/acc"
SERVER = SimpleNamespace(schedule=SimpleNamespace(evaluate_every=1))


def stopped_after(callback, scores, state=None):
    """Returns after how many rounds the run stopped, or None; a score of None is a round without an evaluation."""
    state = state or SimpleNamespace(callbacks={}, should_stop=False)
    if not state.callbacks:
        callback.forget()
    for number, score in enumerate(scores, start=1):
        callback.on_round_logged(SERVER, state, {"train/loss": 1.0} | ({} if score is None else {MONITOR: score}))
        if state.should_stop:
            return number
    return None


@pytest.mark.parametrize(
    ("options", "scores", "expected"),
    [
        ({"patience": 2}, [0.5, 0.6, 0.6, 0.4], 4),  # an equal score is not better
        ({"patience": 2}, [0.5, 0.4, 0.6, 0.5, 0.7, 0.6], None),
        ({"patience": 1}, [0.5, None, None, 0.5], 4),  # only evaluations count
        ({"patience": 1, "min_delta": 0.25}, [0.5, 0.75, 0.8], 2),  # an improvement must exceed min_delta
        ({"patience": 1, "min_delta": 0.25}, [0.25, 0.75, 0.9], 3),
        ({"patience": 2}, [float("nan"), float("nan"), 0.5, float("nan"), 0.4], 5),
        ({"patience": 1, "mode": "min"}, [0.5, 0.4, 0.3, 0.35], 4),
        ({"patience": 1, "mode": "min", "min_delta": 0.25}, [1.0, 0.5, 0.375], 3),
    ],
)
def test_patience_runs_out(options, scores, expected):
    assert stopped_after(EarlyStopping(MONITOR, **options), scores) == expected


def test_resumed_run_continues_to_count():
    first, second = EarlyStopping(MONITOR, patience=3), EarlyStopping(MONITOR, patience=3)
    assert stopped_after(first, [0.9, 0.5]) is None
    second.load_state_dict(first.state_dict())
    resumed = SimpleNamespace(callbacks={"EarlyStopping": first.state_dict()}, should_stop=False)
    assert stopped_after(second, [0.8, 0.8, 0.8], resumed) == 2


def test_a_new_run_of_the_same_object_starts_anew():
    callback = EarlyStopping(MONITOR, patience=1)
    assert stopped_after(callback, [0.9, 0.8]) == 2
    assert stopped_after(callback, [0.5, 0.6, 0.6]) == 3


@pytest.mark.parametrize("options", [{"patience": 0}, {"min_delta": -0.1}])
def test_settings_that_make_no_sense_are_refused(options):
    with pytest.raises(ValueError, match=r"got patience=.*, min_delta=.*; allowed are >= 1 and >= 0"):
        EarlyStopping(MONITOR, **options)


def test_without_a_monitor_it_waits_for_the_reported_metric_in_its_direction():
    callback = EarlyStopping(patience=1)
    callback.check_monitor({MONITOR: False, "val/own_split/personal/r2": True}, MONITOR)
    assert stopped_after(callback, [0.5, 0.4, 0.3, 0.35]) == 4
    assert callback.monitor is None, "what is saved with the run says what was given"


def test_every_run_of_the_same_object_has_its_own_reported_metric():
    callback = EarlyStopping(patience=1)
    callback.check_monitor({"val/own_split/cluster/mae": False}, "val/own_split/cluster/mae")
    callback.check_monitor({MONITOR: True}, MONITOR)
    assert stopped_after(callback, [0.5, 0.6, 0.55]) == 3
