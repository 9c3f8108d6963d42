"""When a checkpoint is written, which ones stay, and which one is called the best."""

import json

import pytest

from lcfl.callbacks import Checkpoint
from lcfl.checkpoint import find, read
from tests.checkpoints import IDENTITY, full_state

MONITOR = "val/own_split/personal/acc"


class Training:
    """As much of a server as the callback sees; `train` is one round after the other."""

    def __init__(self, run_dir, callback, rounds=12):
        self.run_dir, self.callback, self.rounds, self.stop_signal = run_dir, callback, rounds, 0
        self.state = full_state(0)
        self.state.callbacks = {}
        self.identity, self.told = IDENTITY, []
        callback.on_fit_start(self, self.state)

    @property
    def is_done(self):
        return self.state.round >= self.rounds

    def collect_callback_states(self):
        self.state.callbacks = {"Checkpoint": self.callback.state_dict()}

    def is_evaluated(self, row):
        return bool(row)

    def call(self, hook, path):
        self.told.append((hook, path.name))

    def train(self, *scores):
        """A round for each score; None is a round without an evaluation."""
        for score in scores:
            self.state.round += 1
            self.callback.on_round_logged(self, self.state, {} if score is None else {MONITOR: score})
        return self

    def end(self):
        self.callback.on_fit_end(self, self.state)
        return self

    @property
    def saved(self):
        """The rounds that have a checkpoint now."""
        return sorted(int(path.name[6:12]) for path in (self.run_dir / "checkpoints").glob("round-*.ckpt"))


@pytest.fixture
def training(tmp_path):
    """``training(**options)``: with a `Checkpoint` of these options."""
    return lambda rounds=12, **options: Training(tmp_path, Checkpoint(**options), rounds)


# when


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


def test_what_it_remembers_is_in_the_checkpoint(training):
    run = training(every_n_rounds=1, monitor=MONITOR).train(0.5)
    saved = read(run.run_dir / "checkpoints" / "round-000001.ckpt")
    assert saved.identity == IDENTITY
    assert saved.state.callbacks["Checkpoint"] == {"best": {"round": 1, "monitor": MONITOR, "score": 0.5}}


# which ones stay


@pytest.mark.parametrize(("keep_last", "expected"), [(1, [12]), (2, [10, 12]), (9, [2, 4, 6, 8, 10, 12])])
def test_the_newest_stay(training, keep_last, expected):
    assert training(every_n_rounds=2, keep_last=keep_last).train(*[None] * 12).saved == expected


@pytest.mark.parametrize(("mode", "best"), [("max", 3), ("min", 2)])
def test_the_best_stays_too_and_is_found_by_name(training, mode, best):
    scores = [0.5, 0.1, 0.9, 0.2, None, 0.9, 0.1, None, None, None, None, None]  # as good later is not better
    run = training(every_n_rounds=5, monitor=MONITOR, mode=mode).train(*scores)
    assert run.saved == [best, 10, 12]
    choice = json.loads((run.run_dir / "checkpoints" / "best.json").read_text())
    assert choice == {
        "checkpoint": f"round-{best:06d}.ckpt",
        "round": best,
        "monitor": MONITOR,
        "score": scores[best - 1],
    }


def test_without_a_monitor_nothing_is_best(training):
    run = training(every_n_rounds=1).train(0.5, 0.9, 0.1)
    assert run.saved == [2, 3]
    assert not (run.run_dir / "checkpoints" / "best.json").exists()


# a second run


def test_a_resumed_run_knows_the_best_of_the_first(training, tmp_path):
    first = training(every_n_rounds=1, keep_last=1, monitor=MONITOR).train(0.5, 0.9, 0.1)
    second = Checkpoint(every_n_rounds=1, keep_last=1, monitor=MONITOR)
    second.load_state_dict(first.state.callbacks["Checkpoint"])
    second.on_fit_start(first, first.state)
    first.callback = second
    assert first.train(0.6).saved == [2, 4]
    assert first.train(0.95).saved == [5]


def test_a_new_run_of_the_same_object_starts_anew(tmp_path):
    callback = Checkpoint(every_n_rounds=1, monitor=MONITOR)
    Training(tmp_path / "version_0", callback).train(0.9)
    again = Training(tmp_path / "version_1", callback, rounds=1).train(0.1).end()
    assert again.saved == [1]
    assert find("best", tmp_path.parent, tmp_path.name).parent.parent.name == "version_1"


# settings


@pytest.mark.parametrize("name", ["every_n_rounds", "keep_last"])
def test_counts_are_at_least_one(name):
    with pytest.raises(ValueError, match=f"got {name}=0; it must be at least 1"):
        Checkpoint(**{name: 0})
