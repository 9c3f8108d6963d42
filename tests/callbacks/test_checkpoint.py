"""When a checkpoint is written, which checkpoints are kept, and which one is called the best."""

import json
from types import SimpleNamespace

import pytest

from lcfl.callbacks import Checkpoint
from lcfl.runs import checkpoint
from lcfl.runs.checkpoint import path_of, read
from lcfl.runs.checkpoint_lookup import drop_after, find, remove
from tests.helpers.checkpoints import IDENTITY, full_state

MONITOR = "val/own_split/personal/acc"


class Training:
    """As much of a server as the callback uses; `train` runs one round after another."""

    def __init__(self, run_dir, callback, rounds=12):
        self.run_dir, self.callback, self.rounds, self.stop_signal = run_dir, callback, rounds, 0
        self.state = full_state(0)
        self.state.callbacks = {}
        self.identity, self.told = IDENTITY, []
        self.schedule = SimpleNamespace(evaluate_every=1)
        self.remembered = SimpleNamespace(collect=self.collect)
        self.run_log = SimpleNamespace(tell_loggers=lambda method, tell: None)
        self.table = SimpleNamespace(columns=[MONITOR], column=lambda name: [0.5], sync=lambda: None)
        callback.forget()
        callback.on_fit_start(self)

    def collect(self, state):
        state.callbacks = {"Checkpoint": self.callback.state_dict()}

    @property
    def is_done(self):
        return self.state.round >= self.rounds

    def call(self, hook, path):
        self.told.append((hook, path.name))

    def train(self, *scores, metric=MONITOR):
        """Runs a round for each score; None is a round without an evaluation."""
        for score in scores:
            self.state.round += 1
            self.callback.on_round_logged(self, self.state, {} if score is None else {metric: score})
        return self

    def resume(self, callback, number=None):
        """Continues with another callback from the checkpoint of round `number`, or from the newest if None."""
        folder = self.run_dir / "checkpoints"
        self.state = read(path_of(folder, self.saved[-1] if number is None else number)).state
        drop_after(folder, self.state.round)
        callback.load_state_dict(self.state.callbacks["Checkpoint"])
        callback.on_fit_start(self)
        self.callback = callback
        return self

    def end(self):
        self.callback.on_fit_end(self, self.state)
        return self

    @property
    def choice(self):
        """The content of ``best.json``; None if it does not exist."""
        file = self.run_dir / "checkpoints" / "best.json"
        return json.loads(file.read_text()) if file.exists() else None

    @property
    def saved(self):
        """The rounds that have a checkpoint now."""
        return sorted(int(path.name[6:12]) for path in (self.run_dir / "checkpoints").glob("round-*.ckpt"))


@pytest.fixture
def training(tmp_path):
    """``training(**options)``: a `Training` with a `Checkpoint` of these options."""
    return lambda rounds=12, **options: Training(tmp_path, Checkpoint(**options), rounds)


# when a checkpoint is written


def test_every_n_rounds_and_at_the_end(training):
    run = training(every_n_rounds=5, keep_last=None).train(*[None] * 12).end()
    assert run.saved == [5, 10, 12]
    assert run.told == [("on_checkpoint", f"round-{number:06d}.ckpt") for number in run.saved]  # 12 only once


def test_a_signal_saves_the_round(training):
    run = training(every_n_rounds=5).train(None, None)
    run.stop_signal = 15
    assert run.train(None).saved == [3]


def test_a_run_that_needs_no_round_has_a_checkpoint_too(training):
    assert training(rounds=0).end().saved == [0]


def test_state_of_the_callback_is_in_the_checkpoint(training):
    run = training(every_n_rounds=1, monitor=MONITOR).train(0.5)
    saved = read(run.run_dir / "checkpoints" / "round-000001.ckpt")
    assert saved.identity == IDENTITY
    best = {"round": 1, "monitor": MONITOR, "mode": "max", "score": 0.5}
    assert saved.state.callbacks["Checkpoint"] == {"best": best}


# which checkpoints are kept


@pytest.mark.parametrize(("keep_last", "expected"), [(1, [12]), (2, [10, 12]), (9, [2, 4, 6, 8, 10, 12])])
def test_newest_checkpoints_are_kept(training, keep_last, expected):
    assert training(every_n_rounds=2, keep_last=keep_last).train(*[None] * 12).saved == expected


@pytest.mark.parametrize(("mode", "best"), [("max", 3), ("min", 2)])
def test_best_checkpoint_is_kept_and_named(training, mode, best):
    scores = [0.5, 0.1, 0.9, 0.2, None, 0.9, 0.1, None, None, None, None, None]  # an equal score later is not better
    run = training(every_n_rounds=5, monitor=MONITOR, mode=mode).train(*scores)
    assert run.saved == [best, 10, 12]
    assert run.choice == {
        "checkpoint": f"round-{best:06d}.ckpt",
        "round": best,
        "monitor": MONITOR,
        "mode": mode,
        "score": scores[best - 1],
    }


def test_without_a_monitor_nothing_is_best(training):
    run = training(every_n_rounds=1).train(0.5, 0.9, 0.1)
    assert run.saved == [2, 3]
    assert run.choice is None


# resumed and repeated runs


def test_a_resumed_run_knows_the_best_of_the_first(training, tmp_path):
    run = training(every_n_rounds=1, keep_last=1, monitor=MONITOR).train(0.5, 0.9, 0.1)
    run.resume(Checkpoint(every_n_rounds=1, keep_last=1, monitor=MONITOR))
    assert run.train(0.6).saved == [2, 4]
    assert run.train(0.95).saved == [5]


@pytest.mark.parametrize(
    ("options", "metric", "scores"),
    [
        ({"monitor": "val/own_split/personal/loss"}, "val/own_split/personal/loss", (0.3, 0.2)),
        ({"monitor": "val/own_split/personal/loss", "mode": "min"}, "val/own_split/personal/loss", (2.3, 2.4)),
        ({"monitor": MONITOR, "mode": "min"}, MONITOR, (0.95, 0.96)),
    ],
)
def test_the_best_by_another_monitor_or_mode_is_forgotten(training, options, metric, scores):
    run = training(every_n_rounds=1, keep_last=1, monitor=MONITOR).train(0.5, 0.9, 0.1)
    run.resume(Checkpoint(every_n_rounds=1, keep_last=1, **options))
    assert run.choice is None  # the checkpoint that it named is no longer kept
    run.train(*scores, metric=metric)
    assert run.saved == [4, 5]
    assert (run.choice["checkpoint"], run.choice["score"]) == ("round-000004.ckpt", scores[0])


def test_without_a_monitor_the_best_of_the_first_run_stays(training):
    run = training(every_n_rounds=1, keep_last=1, monitor=MONITOR).train(0.5, 0.9, 0.1)
    run.resume(Checkpoint(every_n_rounds=1, keep_last=1)).train(0.95)
    assert run.saved == [2, 4] and run.choice["round"] == 2


def test_best_json_of_a_resumed_run_is_that_of_an_uninterrupted_one():
    callback, best = Checkpoint(monitor=MONITOR), {"round": 3, "monitor": MONITOR, "mode": "max", "score": 0.5}
    callback.load_state_dict({"best": best})
    assert json.dumps(callback.best) == json.dumps(best)  # with the keys in the same order


def test_best_saved_without_a_mode_stays_the_best(training):
    run = training(every_n_rounds=1, keep_last=1, monitor=MONITOR).train(0.5, 0.9, 0.1)
    callback = Checkpoint(every_n_rounds=1, keep_last=1, monitor=MONITOR)
    callback.load_state_dict({"best": {"round": 2, "monitor": MONITOR, "score": 0.9}})
    run.callback = callback
    assert run.train(0.6).saved == [2, 4] and run.choice["round"] == 2


def test_best_of_a_run_killed_before_writing_it_is_named_on_resume(training, monkeypatch):
    run = training(every_n_rounds=1, keep_last=1, monitor=MONITOR).train(0.5, 0.4)

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("lcfl.callbacks.checkpoint.write_json", killed)
        run.train(0.9)
    assert run.choice["round"] == 1
    run.resume(Checkpoint(every_n_rounds=1, keep_last=1, monitor=MONITOR)).train(0.1)
    assert run.saved == [3, 4]
    assert (run.choice["checkpoint"], run.choice["score"]) == ("round-000003.ckpt", 0.9)


def test_best_after_resuming_from_an_older_checkpoint_is_of_its_rounds(training):
    run = training(every_n_rounds=1, keep_last=None, monitor=MONITOR).train(0.5, 0.4, 0.9)
    run.resume(Checkpoint(every_n_rounds=1, monitor=MONITOR), 2)
    assert (run.saved, run.choice["round"]) == ([1, 2], 1)


def test_best_whose_checkpoint_was_removed_is_not_named(training):
    run = training(every_n_rounds=1, keep_last=1, monitor=MONITOR).train(0.9, 0.4)
    remove(path_of(run.run_dir / "checkpoints", 1))
    assert run.resume(Checkpoint(every_n_rounds=1, keep_last=1, monitor=MONITOR)).choice is None


def test_a_new_run_of_the_same_object_starts_anew(tmp_path):
    callback = Checkpoint(every_n_rounds=1, monitor=MONITOR)
    Training(tmp_path / "version_0", callback).train(0.9)
    again = Training(tmp_path / "version_1", callback, rounds=1).train(0.1).end()
    assert again.saved == [1]
    assert find("best", tmp_path.parent, tmp_path.name).parent.parent.name == "version_1"


def test_every_run_of_the_same_object_has_its_own_direction(tmp_path):
    callback = Checkpoint(every_n_rounds=1, monitor=MONITOR)
    for version, larger_is_better, best in ((0, False, 0.4), (1, True, 0.9)):
        run = Training(tmp_path / f"version_{version}", callback, rounds=2)
        callback.check_monitor({MONITOR: larger_is_better}, "unused")
        assert run.train(0.9, 0.4).choice["score"] == best


# settings


@pytest.mark.parametrize("name", ["every_n_rounds", "keep_last"])
def test_counts_are_at_least_one(name):
    with pytest.raises(ValueError, match=f"got {name}=0; it must be at least 1"):
        Checkpoint(**{name: 0})


def test_a_monitor_has_a_name():
    with pytest.raises(ValueError, match=r"^Checkpoint: got an empty monitor; name a metric such as "):
        Checkpoint(monitor="")


def test_a_checkpoint_that_finds_no_room_says_what_is_left(tmp_path, monkeypatch):
    training = Training(tmp_path, Checkpoint(every_n_rounds=1)).train(0.5)

    def full(path, content, indent=None):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_json", full)
    with pytest.raises(OSError, match=r"No space left on device: round 2 is not in .*; earlier checkpoints"):
        training.train(0.5)
    assert training.saved == [1]
