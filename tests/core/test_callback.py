"""The documented, known and called hooks are the same, and any other hook is an error."""

import ast
import re
from pathlib import Path
from typing import ClassVar

import pytest
import torch

import lcfl
from lcfl.callbacks import Checkpoint
from lcfl.core.callback import HOOKS, Callback, check_hooks
from lcfl.core.schema import Array, Forms
from lcfl.server.round_row import RoundRow
from tests.helpers.builders import blobs, blobs_module, fedavg, fit


def documented():
    """Returns hooks and their arguments from the table in the docstring of Callback."""
    rows = re.findall(r"^\s*(on_\w+)\s{2,}(server[\w, ]*)", Callback.__doc__, re.MULTILINE)
    return {name: set(re.findall(r"\w+", arguments)) for name, arguments in rows}


def called():
    """Returns hooks and their arguments from every ``call("on_...", ...)`` in the package."""
    found = {}
    for path in Path(lcfl.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not node.args or not isinstance(node.func, ast.Attribute):
                continue
            name = getattr(node.args[0], "value", None)
            if node.func.attr == "call" and isinstance(name, str) and name.startswith("on_"):
                found.setdefault(name, []).append({keyword.arg for keyword in node.keywords})
    return found


def test_every_hook_is_documented():
    assert documented() == {name: {"server", "state", *arguments} for name, arguments in HOOKS.items()}
    assert list(documented()) == list(HOOKS)


def test_every_hook_is_called_with_its_documented_arguments():
    calls = called()
    assert set(calls) == set(HOOKS)
    for name, arguments in documented().items():
        for passed in calls[name]:
            assert {"server", "state"} | passed == arguments, name


class Logs(Callback):
    def on_aggregated(self, server):
        server.log("mine", 1.0)

    on_evaluated = on_aggregated


class LogsAfterTheRow(Logs):
    def on_round_logged(self, server):
        server.log("mine", 2.0)


class LogsAtTheEnd(Logs):
    def on_fit_end(self, server):
        server.log("mine", 2.0)


def test_values_logged_at_an_evaluation_are_in_the_row_or_in_the_final_metrics(tmp_path):
    class Counts(Callback):
        def on_evaluated(self, server, state):
            server.log("evaluated_after", state.round)

    watch = fit(blobs_module(), blobs(), fedavg(), tmp_path, rounds=3, evaluate_every=2, callbacks=[Counts()])
    assert [row.get("evaluated_after", "") for row in watch.server.table.rows] == ["", "2.0", ""]
    assert watch.metrics["evaluated_after"] == 3.0


@pytest.mark.parametrize("kind", [LogsAfterTheRow, LogsAtTheEnd])
def test_logging_after_the_row_is_written_is_an_error(tmp_path, kind):
    with pytest.raises(ValueError, match=r"server\.log\('mine'\): too late, because the round's row .* Log in on"):
        fit(blobs_module(), blobs(), fedavg(), tmp_path, callbacks=[kind()])
    assert "mine" in (tmp_path / "run" / "version_0" / "metrics.csv").read_text().splitlines()[0]


def test_nothing_comes_too_late_after_an_error_while_the_row_is_written():
    row = RoundRow()
    with pytest.raises(KeyError), row.written():
        raise KeyError
    row.log("mine", 2.0)
    assert row.take() == {"mine": 2.0}


@pytest.mark.parametrize(
    "name", ["round", "train/loss", "train/failed_clients", "comm/up_bytes", "time/mine", "val/mine", "cluster/moved"]
)
def test_names_that_lcfl_logs_are_refused(tmp_path, name):
    class Replaces(Callback):
        def on_uploads(self, server):
            server.log(name, 1.0)

    with pytest.raises(
        ValueError, match=rf"server\.log\('{name}'\): lcfl logs this name, .* itself; give another one, such as my/"
    ):
        fit(blobs_module(), blobs(4), fedavg(), tmp_path, callbacks=[Replaces()])


@pytest.mark.parametrize("value", ["text", None, torch.zeros(2)])
def test_only_numbers_can_be_logged(value):
    got = type(value).__name__
    with pytest.raises(ValueError, match=rf"^server\.log\('mine'\): got {got}; a metric must be one number\.$"):
        RoundRow().log("mine", value)


def test_a_misspelt_hook_is_an_error_with_a_suggestion():
    class Typo(Callback):
        def on_round_ended(self, state):
            pass

    with pytest.raises(ValueError, match=r"Typo\.on_round_ended is not a hook .* you mean on_round_end\?") as caught:
        check_hooks([Callback(), Typo()])
    assert all(hook in str(caught.value) for hook in HOOKS)


def test_an_unknown_hook_that_resembles_no_other_is_an_error_without_a_suggestion():
    class Strange:
        def on_zzz(self):
            pass

    with pytest.raises(ValueError, match=r"Strange\.on_zzz") as caught:
        check_hooks([Strange()])
    assert "Did you mean" not in str(caught.value)


def test_real_hooks_and_private_names_pass():
    everything = {name: lambda self, **more: None for name in (*HOOKS, "_on_secret", "one")}
    check_hooks([type("Full", (Callback,), everything)()])


def test_a_hook_that_requires_an_unknown_argument_is_an_error():
    class Curious(Callback):
        def on_round_end(self, server, models, number=3):
            pass

    with pytest.raises(ValueError, match=r"Curious\.on_round_end requires models; .* any of server, state, uploads\."):
        check_hooks([Curious()])


def test_the_key_is_the_name_of_the_class():
    class Mine(Callback):
        pass

    assert Callback().key == "Callback"
    assert Mine().key == "test_the_key_is_the_name_of_the_class.<locals>.Mine"


def test_a_callback_keeps_no_state_by_default():
    callback = Callback()
    assert callback.state_dict() == {}
    assert callback.load_state_dict({"a": 1}) is None
    assert not callback.shapes_result


class Keeps(Callback):
    remembers: ClassVar[Forms] = {"best": (float, None), "mean": (Array(("S",)), None)}

    def __init__(self, **kept):
        for name, value in kept.items():
            setattr(self, f"_{name}", value)


@pytest.mark.parametrize(
    ("kept", "words"),
    [
        ({"best": 0.5, "mean": torch.zeros(408)}, None),
        ({"best": None, "mean": None}, None),
        ({"best": 3, "mean": None}, r"Keeps\.best: got 3; it must be"),
        (
            {"best": None, "mean": torch.zeros(5)},
            r"Keeps\.mean: got torch.float32 of shape \[5\]; it must .*\[408\]",
        ),
    ],
)
def test_what_is_remembered_is_checked_when_it_is_saved(tmp_path, kept, words):
    options = {"callbacks": [Keeps(**kept), Checkpoint()]}
    if words is None:
        fit(blobs_module(), blobs(4), fedavg(), tmp_path, **options)
        return
    with pytest.raises(ValueError, match=words):
        fit(blobs_module(), blobs(4), fedavg(), tmp_path, **options)


def test_what_is_remembered_must_exist_before_the_first_round(tmp_path):
    class First(Callback):
        def on_round_start(self):
            pytest.fail("a round has begun")

    with pytest.raises(
        ValueError, match=r"Keeps: remembers names 'mean', but there is no self\._mean. Set it in forget"
    ):
        fit(blobs_module(), blobs(4), fedavg(), tmp_path, callbacks=[Keeps(best=None), First()])
