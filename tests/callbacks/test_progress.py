"""`Progress`: its output, read back from standard output or from a simulated terminal."""

import io
import os
import re
import signal
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning.fabric.loggers import TensorBoardLogger
from rich.console import Console

from lcfl.callbacks import Checkpoint, Progress, progress
from lcfl.callbacks.progress import evaluation_table, evaluation_tables, is_line_due
from lcfl.core.callback import Callback
from lcfl.core.metric_names import Reported
from lcfl.data.datamodule import FederatedDataModule
from lcfl.data.datasets import Synthetic
from lcfl.data.partition import Pathological
from lcfl.federation.federation import Federation
from lcfl.methods.aggregation import GlobalMean
from lcfl.methods.exchange import FullModel
from lcfl.methods.local import LocalTraining
from lcfl.methods.method import Method
from lcfl.models import MLP
from lcfl.models.module import FederatedModule
from lcfl.runs.metrics_table import MetricsTable
from lcfl.server.metrics import ClientMetrics, Evaluation
from tests.helpers.pipes import closed_pipe

METRICS = {
    "val/own_split/global/acc": 0.75,
    "test/own_split/global/acc": 0.7625,
    "test/own_split/global/acc_std": 0.2269,
    "test/own_split/global/acc_worst10": 0.45,
    "test/own_split/global/acc_weighted": 0.7711,
    "test/own_split/after_local/acc": 1.0,
    "test/own_split/personal/acc": 0.9876,
    "test/label_view/personal/acc": 0.25,
    "test/own_split/trivial/acc": 0.5,
    "test/label_view/trivial/acc": float("nan"),
    "test/own_split/global/loss": 0.1,
}


class Interrupt(Callback):
    """Presses Ctrl-C during the second round."""

    def on_uploads(self, state):
        if state.round == 1:
            os.kill(os.getpid(), signal.SIGINT)


def fit(root, *callbacks, ckpt_path=None, **options):
    data = FederatedDataModule(
        Synthetic(num_classes=4, num_features=4, samples_per_class=20, test_per_class=4), Pathological(2), 4
    )
    module = FederatedModule(partial(MLP, 4, [4], 4), partial(torch.optim.SGD, lr=0.05))
    method = Method(LocalTraining(steps=1), FullModel(), GlobalMean())
    options = {"rounds": 4, "evaluate_every": 2, "clients_per_round": 2, "devices": 1, "logger": False, **options}
    federation = Federation(callbacks=list(callbacks), default_root_dir=root, **options)
    return federation.fit(module, data, method, ckpt_path)


def table_of(rows):
    table = MetricsTable(Path("not_written.csv"))
    table.rows = rows
    return table


def fake(rounds=100, evaluate_every=0, **changes):
    server = SimpleNamespace(
        run_dir=Path("logs/lcfl/version_0"),
        fabric=SimpleNamespace(world_size=2, device=torch.device("cpu")),
        identity={"engine": "compiled", "precision": "32-true"},
        data=SimpleNamespace(num_clients=20, num_initial_clients=20, population=SimpleNamespace(faulty={})),
        schedule=SimpleNamespace(rounds=rounds, clients_per_round=8, evaluate_every=evaluate_every),
        layout=SimpleNamespace(num_parameters=4778954, num_embedding=544),
        module=SimpleNamespace(reported=Reported(), frozen_layout=None),
        method=SimpleNamespace(warmup_rounds=lambda num_clients: [None]),
        table=table_of([]),
        state=SimpleNamespace(round=-1, total_bytes=0),
        privacy_guarantee=lambda: None,
        is_done=False,
        stop_signal=0,
        loggers=[],
        callbacks=[],
    )
    vars(server).update(changes)
    return server


def play(server, until, metrics=None, accuracy=0.9123, every=0):
    watcher, state = Progress(), server.state
    watcher.on_fit_start(server, state)
    if state.round < 0:
        state.total_bytes = 3_000_000
        watcher.on_extra_round_end(server, state, uploads=[None] * 20)
        state.round += 1
        watcher.on_round_logged(server, state, row={})
    while state.round < until:
        watcher.on_round_start()
        state.round += 1
        state.total_bytes += 1_000_000
        if every and state.round % every == 0:
            values = ClientMetrics(np.arange(1), np.array([accuracy]), np.ones(1, dtype=int))
            names = ("val/own_split/personal/acc", "test/own_split/personal/loss", "test/own_split/personal/acc")
            watcher.on_evaluated(Evaluation(dict.fromkeys(names[:2], values) | {names[2]: values}))
        server.is_done = state.round >= server.schedule.rounds
        watcher.on_round_logged(server, state, row={"cluster/count": 5.0})
    server.is_interrupted = metrics is None
    watcher.on_fit_end(server, state, metrics or {})


def rendered(table, width=80):
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    return console.file.getvalue()


def test_a_run_from_start_to_summary(tmp_path, capsys):
    run = fit(tmp_path, logger=TensorBoardLogger(tmp_path, "my runs", "version_0"))
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert (
        lines[0]
        == f"{run.path}: 1 x cpu, compiled, 32-true, 4 clients, 2 per round, 40 parameters (20 in the embedding)"
    )
    assert [line.split("  ")[0] for line in lines if line.startswith("round ")] == [f"round {n}/4" for n in range(1, 5)]
    assert "resumed" not in out
    accuracy = run.metrics["test/own_split/global/acc"]
    assert f"round 4/4  test own_split global {accuracy:.3f}  " in out
    row = next(line for line in lines if " global " in line and "round" not in line).split()
    names = ("acc", "acc_std", "acc_worst10", "acc_weighted")
    expected = [run.metrics[f"test/own_split/global/{name}"] for name in names] + [
        run.metrics["val/own_split/global/acc"]
    ]
    assert row == ["own_split", "global", *(f"{100 * value:.2f}" for value in expected)]
    majority = next(line for line in lines if "majority class" in line).split()
    assert majority == ["majority", "class", f"{100 * run.metrics['test/own_split/trivial/acc']:.2f}"]
    assert f"4 rounds, {run.state.total_bytes / 1e6:.1f} MB sent and received" in lines
    assert f"logs: {run.path}" in lines
    assert lines[-1] == f"tensorboard --logdir '{tmp_path}/my runs'"


def test_stopped_run_prints_how_to_resume_it_and_resumes(tmp_path, capsys):
    assert fit(tmp_path, Interrupt()).signal == signal.SIGINT
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == "stopped by SIGINT after 2 of 4 rounds; resume it with --ckpt_path last"
    fit(tmp_path, ckpt_path="last")
    out = capsys.readouterr().out
    assert "resumed: 2 of 4 rounds are done" in out
    assert "round 2/4" not in out and "round 3/4" in out
    assert "4 rounds, 0.0 MB sent and received" in out and "tensorboard" not in out


@pytest.mark.parametrize(
    ("done", "should_stop", "said"),
    [
        (7, False, "resumed: 7 of 9 rounds are done"),
        (9, False, "resumed after 9 rounds: trainer.rounds is 9, so it is only evaluated"),
        (146, False, "resumed after 146 rounds: trainer.rounds is 9, so it is only evaluated"),
        (7, True, "resumed after 7 rounds: it was stopped early, so it is only evaluated"),
    ],
)
def test_resumed_run_prints_what_is_left(capsys, done, should_stop, said):
    state = SimpleNamespace(round=done, total_bytes=0)
    server = fake(rounds=9, state=state, is_done=should_stop or done >= 9)
    Progress().on_fit_start(server, state)
    assert capsys.readouterr().out.splitlines()[-1] == said


def test_plain_lines(capsys):
    play(fake(evaluate_every=50), until=40, every=20)
    lines = capsys.readouterr().out.splitlines()
    expected = (
        "logs/lcfl/version_0: 2 x cpu, compiled, 32-true, 20 clients, 8 per round, 4,778,954 parameters "
        "(544 in the embedding)"
    )
    assert lines[:2] == [expected, "warm-up round: 20 clients, 3.0 MB"]
    frozen = SimpleNamespace(frozen_layout=SimpleNamespace(num_parameters=11176512))
    assert progress.start_line(fake(module=frozen)) == f"{expected}, 11,176,512 frozen"
    assert lines[2].startswith("round  10/100  clusters 5  13.0 MB  0.0")
    assert lines[5].startswith("round  40/100  test own_split personal 0.912  clusters 5  43.0 MB  0.0")
    assert lines[5].endswith(" s/round")
    no_checkpoint = "it cannot be resumed, because trainer.enable_checkpointing is false"
    assert lines[6] == f"stopped by signal 0 after 40 of 100 rounds; {no_checkpoint}"


@pytest.mark.parametrize("is_terminal", [False, True])
@pytest.mark.parametrize("devices", [1, 2])
def test_a_closed_pipe_loses_lines_and_not_the_run(monkeypatch, tmp_path, devices, is_terminal):
    with closed_pipe() as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        if is_terminal:
            monkeypatch.setenv("FORCE_COLOR", "1")
            monkeypatch.setenv("TERM", "xterm")
        run = fit(tmp_path, Progress(), devices=devices)
        stream.flush()  # as at the end of a process
    assert run.metrics and run.state.round == 4


@pytest.mark.parametrize("per_round", [1, 2])
def test_extra_rounds_have_no_more_lines_than_rounds(capsys, per_round):
    server = fake()
    watcher = Progress()
    watcher.on_fit_start(server, server.state)
    for number in range(100):
        server.state.round = number
        for _ in range(per_round):
            watcher.on_extra_round_end(server, server.state, uploads=[None] * 20)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("extra round")]
    numbers = [int(line.removeprefix("extra round before round ").partition(":")[0]) for line in lines]
    assert numbers == [number for number in (0, *range(9, 100, 10)) for _ in range(per_round)]


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, 0])
def test_last_round_always_has_a_line(signal_number, capsys):
    server = fake(stop_signal=signal_number, callbacks=[Checkpoint()])
    play(server, until=3)
    out = capsys.readouterr().out
    assert ("round   3/100" in out) == bool(signal_number)
    assert ("stopped by SIGTERM after 3 of 100 rounds; resume it with --ckpt_path last" in out) == bool(signal_number)


@pytest.mark.parametrize("rounds", [1, 7, 10, 19, 100, 1234])
@pytest.mark.parametrize("evaluate_every", [0, 1, 3, 10, 5000])
def test_there_are_never_many_lines(rounds, evaluate_every):
    due = [number for number in range(1, rounds + 1) if is_line_due(number, rounds, evaluate_every)]
    assert due[-1] == rounds and min(rounds, 5) <= len(due) <= 21


def test_cost_of_the_projection_on_clients_is_printed(capsys):
    rows = [{"round": "-1", "comm/client_projection_bytes": "2500000.0"}, {"round": "0"}]
    rows.append({"round": "1", "comm/client_projection_bytes": ""})
    rows.append({"round": "2", "comm/client_projection_bytes": "500000.0"})
    play(fake(rounds=2, table=table_of(rows)), until=2, metrics=METRICS)
    out = capsys.readouterr().out
    assert (
        "2 rounds, 5.0 MB sent and received\n3.0 MB more if the clients computed the projection (8.0 MB in total)\n"
        in out
    )


def test_faulty_clients_and_updates_that_were_not_used_are_printed(capsys):
    unused = {"train/refused_clients": "2.0", "train/failed_clients": "4.0"}
    server = fake(rounds=2, table=table_of([unused, {**unused, "train/failed_clients": "3.0"}]))
    server.data.population.faulty = dict.fromkeys([1, 5, 7, 8])
    play(server, until=2, metrics=METRICS)
    said = "4 of 20 clients are faulty and are not measured\n7 updates were not finite and were left out\n"
    said += "4 updates beyond trainer.max_update_norm were refused\n"
    assert said in capsys.readouterr().out


def test_run_that_ended_early_is_marked(capsys):
    server = fake(rounds=9)
    play(server, until=3, metrics={"val/own_split/global/acc": 0.5})
    assert "3 rounds (stopped early, 9 planned), 6.0 MB" in capsys.readouterr().out


def test_table_of_test_metrics():
    lines = [line.split() for line in rendered(evaluation_table(METRICS, "test")).splitlines()]
    assert ["protocol", "model", "mean", "std", "worst", "10", "%", "weighted", "val"] in lines
    rows = lines[lines.index(next(line for line in lines if line[:1] == ["own_split"])) :]
    assert [row for row in rows if row] == [
        ["own_split", "personal", "98.76"],
        ["global", "76.25", "22.69", "45.00", "77.11", "75.00"],
        ["after_local", "100.00"],
        ["majority", "class", "50.00"],
        ["label_view", "personal", "25.00"],
        ["majority", "class"],
    ]


def test_table_of_validation_metrics():
    text = rendered(evaluation_table(METRICS, "val"))
    assert text.startswith("val accuracy") and "75.00" in text and "76.25" not in text and "worst 10 %" in text
    assert text.split("weighted")[1].split()[0] != "val"


def test_names_are_wrapped_before_numbers_are_cut():
    summaries = ("", "_std", "_worst10", "_weighted")
    metrics = {f"test/own_split/after_local/r2{end}": -1.928e16 for end in summaries}
    metrics["val/own_split/after_local/r2"] = -1.928e16
    text = rendered(evaluation_table(metrics, "test", "r2"))
    assert text.count("-1.928e+16") == 5 and "after_local" not in text and "…" not in text


def test_every_metric_that_was_added_has_a_table():
    added = {"f1": 0.5, "f1_std": 0.25, "f1_worst10": 0.125, "top2": 1234.5678}
    metrics = METRICS | {f"test/own_split/global/{name}": value for name, value in added.items()}
    accuracy, *tables = map(rendered, evaluation_tables(metrics, "test"))
    assert accuracy == rendered(evaluation_table(METRICS, "test"))
    assert [text.split()[:2] for text in tables] == [["test", "f1"], ["test", "top2"]]
    assert "global   0.5000   0.2500       0.1250\n" in re.sub(" +\n", "\n", tables[0])
    assert "majority" not in tables[0] and "1235" in tables[1]


def test_an_empty_table_is_no_error():
    assert "mean" in rendered(evaluation_table({}, "test"))


@pytest.mark.parametrize("protocols", [("own_split", "global_plain"), ("own_split", "label_proportional")])
def test_tables_and_bars_fit_into_80_columns(protocols):
    kinds = ("personal", "cluster", "global", "after_local", "trivial")
    names = [
        f"test/{protocol}/{kind}/acc{end}"
        for protocol in protocols
        for kind in kinds
        for end in ("", "_std", "_worst10", "_weighted")
    ]
    text = rendered(evaluation_table(dict.fromkeys([*names, "val/own_split/personal/acc"], 1.0), "test"))
    assert "…" not in text and "majority class" in text and max(map(len, text.splitlines())) <= 80
    status = "test 0.912  10 clusters  1,234.5 MB  0.21 s/round  0:01:23 left"
    text = rendered(progress.bar(40, 100, status))
    assert text.count("\n") == 1 and status in text and text.startswith("round 40/100 ━")


@pytest.mark.parametrize("width", [60, 72])
def test_a_bar_is_left_in_few_columns(width):
    status = ("test 0.912", "10 clusters", "1,234.5 MB", "0.21 s/round", "0:01:23 left")
    text = rendered(progress.bar(40, 100, *status, width=width), width)
    assert text.count("\n") == 1 and "…" not in text
    assert text.startswith("round 40/100 ━") and "test 0.912" in text and "0:01:23 left" in text
    assert ("1,234.5 MB" in text) == (width == 72)


def test_a_notebook_has_one_live_line(monkeypatch, capsys):
    monkeypatch.setattr(progress, "in_notebook", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")  # as Jupyter does
    monkeypatch.setattr(progress, "REFRESH_S", 0.0)
    play(fake(rounds=4), until=4, metrics=METRICS)
    out = capsys.readouterr().out
    assert "\x1b" not in out and "━ warm-up" not in out
    lines = out.split("\n")
    live = next(line for line in lines if "\r" in line)
    assert [text.split("  ")[0] for text in live.split("\r")[1:]] == [f"round {n}/4" for n in range(1, 5)]
    assert sum("\r" in line for line in lines) == 1


def test_live_bar_on_a_terminal(monkeypatch):
    terminal = io.StringIO()
    options = {
        "file": terminal,
        "force_terminal": True,
        "width": 80,
        "color_system": None,
        "_environ": {"TERM": "xterm"},
    }
    monkeypatch.setattr(progress, "make_console", lambda: Console(**options))
    monkeypatch.setattr(progress, "REFRESH_S", 0.0)
    play(fake(rounds=4), until=4, metrics=METRICS, every=2)
    out = terminal.getvalue()
    assert "warm-up round: 20 clients, 3.0 MB" in out
    for number, mega in ((1, 4), (2, 5), (3, 6), (4, 7)):
        assert f"round {number}/4 " in out and f"5 clusters  {mega}.0 MB" in out
    assert "test 0.912  5 clusters  7.0 MB  0.00" in out and "0:00:00 left" in out
    assert out.rindex("\x1b[?25h") > out.rindex("\x1b[?25l")  # the cursor is visible again
    assert out.index("test accuracy over clients") > out.rindex("round 4/4")


def test_an_exception_leaves_no_hidden_cursor_and_no_redirected_stream(monkeypatch):
    terminal = io.StringIO()
    console = Console(file=terminal, force_terminal=True, width=80, _environ={"TERM": "xterm"})
    monkeypatch.setattr(progress, "make_console", lambda: console)
    streams = sys.stdout, sys.stderr
    server = fake()
    Progress().on_fit_start(server, server.state)
    assert (sys.stdout, sys.stderr) == streams
    assert terminal.getvalue().rindex("\x1b[?25h") > terminal.getvalue().rindex("\x1b[?25l")
