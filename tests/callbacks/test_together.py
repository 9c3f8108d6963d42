"""Callbacks used together: no callback undoes what another one stores or decides."""

import json

import numpy as np
import pytest

from lcfl.callbacks import Checkpoint, EarlyStopping
from lcfl.core.callback import Callback
from lcfl.federation.federation import Federation
from tests.helpers.builders import blobs, blobs_module, lcfed

MONITOR = "val/own_split/personal/acc"


class Counter(Callback):
    """Counts the rounds that it has seen."""

    def __init__(self):
        self.seen = 0

    def on_round_logged(self, server, state, row):
        self.seen += 1

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


def run(tmp_path, rounds, *callbacks, ckpt_path=None):
    federation = Federation(
        rounds=rounds,
        evaluate_every=1,
        accelerator="cpu",
        devices=1,
        logger=False,
        callbacks=list(callbacks),
        enable_progress_bar=False,
        default_root_dir=tmp_path,
    )
    return federation.fit(blobs_module(), blobs(), lcfed(), ckpt_path)


@pytest.mark.parametrize("checkpoint_first", [True, False])
def test_checkpoint_contains_the_states_of_other_callbacks_after_its_round(tmp_path, checkpoint_first):
    def callbacks():
        both = [Checkpoint(every_n_rounds=1), Counter()]
        return both if checkpoint_first else both[::-1]

    run(tmp_path, 2, *callbacks())
    resumed = run(tmp_path, 5, *callbacks(), ckpt_path="last")
    assert resumed.state.callbacks["Counter"] == {"seen": 6}  # the warm-up round and five more


def test_callback_state_that_cannot_be_read_back_ends_a_run_at_its_first_checkpoint(tmp_path):
    class Array(Counter):
        def state_dict(self):
            return {"seen": np.full(1, self.seen)}

    with pytest.raises(ValueError, match=r"Array\.state_dict\(\)\['seen'\] holds a numpy\.ndarray"):
        run(tmp_path, 3, Checkpoint(every_n_rounds=2), Array())
    table = (tmp_path / "lcfl" / "version_0" / "metrics.csv").read_text().splitlines()
    assert len(table) == 2  # the header and the warm-up round, after which a checkpoint is due


def test_numpy_scalars_of_a_callback_survive_a_resume(tmp_path):
    class Scalar(Counter):
        def state_dict(self):
            return {"seen": np.float64(self.seen)}

    run(tmp_path, 2, Checkpoint(every_n_rounds=1), Scalar())
    resumed = run(tmp_path, 5, Checkpoint(every_n_rounds=1), Scalar(), ckpt_path="last")
    assert resumed.model("global") is not None
    assert {"seen": 6} in resumed.state.callbacks.values()


def test_a_second_stopper_does_not_undo_the_stop_of_the_first(tmp_path):
    stops_first = EarlyStopping(MONITOR, patience=1, min_delta=2.0)
    never_stops = EarlyStopping(MONITOR, patience=100)
    assert run(tmp_path, 6, stops_first, never_stops).state.round == 2


def test_summary_of_a_shorter_run_is_removed_while_it_is_extended(tmp_path):
    class Breaks(Callback):
        def on_round_start(self, server, state):
            if state.round == 3:
                raise KeyError("on purpose")

    first = run(tmp_path, 2)
    assert json.loads((first.path / "summary.json").read_text())["rounds"] == 2
    with pytest.raises(KeyError, match="on purpose"):
        run(tmp_path, 4, Breaks(), ckpt_path="last")
    assert not (first.path / "summary.json").exists()


class Remembering(Callback):
    """Counts in a public attribute, which `forget` makes."""

    shapes_result = True

    def forget(self):
        self.seen = []

    def on_aggregated(self, server, state):
        self.seen.append(state.round)


def test_what_forget_makes_is_no_setting_that_has_changed_when_a_run_is_resumed(tmp_path):
    run(tmp_path, 1, Remembering())
    run(tmp_path, 2, Remembering(), ckpt_path="last")
    run(tmp_path, 3, Remembering(), ckpt_path="last")  # the identity in the second checkpoint is the same


def test_a_test_leaves_what_callbacks_have_collected(tmp_path):
    remembering = Remembering()
    run(tmp_path, 2, remembering)
    federation = Federation(2, accelerator="cpu", devices=1, callbacks=[remembering], default_root_dir=tmp_path)
    federation.test(blobs_module(), blobs(), lcfed())
    assert remembering.seen == [0, 1]
