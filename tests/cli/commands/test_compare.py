"""Tests what ``lcfl compare`` prints, writes and refuses, and that it reads the runs of `fit`."""

import csv
import json
import re
import sys
from math import nan

import pytest

from lcfl import __main__
from lcfl.cli.commands import compare
from lcfl.core.metric_names import Reported
from lcfl.runs.comparison import Row
from lcfl.runs.finished import find_runs
from tests.helpers.commandline import FEDAVG, SMALL, SYNTHETIC, here, lcfl  # noqa: F401
from tests.helpers.pipes import closed_pipe
from tests.helpers.runs import made


def runs(root):
    for seed in (0, 1):
        made(root, f"fedavg-seed{seed}", seed, accuracies=[0.3, 0.5 + 0.1 * seed])
        made(root, f"lcfed-seed{seed}", seed, accuracies=[0.4, 0.8], clusters=4, method={"class": "lcfed"})


def test_the_table_has_accuracies_and_costs(tmp_path, capsys):
    runs(tmp_path)
    compare.main([str(tmp_path)])
    said = capsys.readouterr().out
    for words in (
        ["test accuracy in %, own_split; rounds and MB to reach 72.00 %"],
        ["fedavg", "global", "55.00 ± 7.07", "27.50"],
        ["lcfed", "global", "80.00 ± 0.00", "40.00", "2", "20"],
        ["majority class", "25.00"],
        ["lcfed", "2", "4.0", "20", "0.07"],
    ):
        assert any(all(word in line for word in words) for line in said.splitlines()), words


def test_a_closed_pipe_loses_the_table_and_not_the_files(tmp_path, monkeypatch):
    runs(tmp_path)
    with closed_pipe() as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        compare.main([str(tmp_path), "--out", str(tmp_path / "out")])
    assert (tmp_path / "out" / "comparison.csv").is_file()


def test_a_backdoor_has_success_and_no_target(tmp_path, capsys):
    for seed in (0, 1):
        made(tmp_path, f"fedavg-seed{seed}", seed, accuracies=[0.3, 0.5], protocol="backdoor")
    compare.main([str(tmp_path), "--out", str(tmp_path / "out"), "--target=0.2"])
    said = capsys.readouterr().out
    title, header = said.splitlines()[:2]
    assert title.split() == ["backdoor", "success", "in", "%"]
    assert header.split() == ["method", "model", "success", "worst", "10", "%"]
    assert "accuracy" not in (tmp_path / "out" / "comparison.md").read_text()
    (row, _) = csv.DictReader((tmp_path / "out" / "comparison.csv").open())
    assert row["rounds_to_target"] == row["rounds_to_peak90"] == "nan" and row["acc"] == "0.5"
    compare.main([str(tmp_path), "--wide"])
    assert capsys.readouterr().out.startswith("backdoor success in % ")


def test_a_pipe_gets_full_names_and_a_narrow_terminal_gets_all_columns(tmp_path, capsys, monkeypatch):
    name = "lcfed_plus-lr=0.05-cluster_weight=1-global_weight=0.5"
    made(tmp_path, f"{name}-seed0", 0, accuracies=[0.4, 0.8], clusters=4)
    made(tmp_path, "lcfed_plus-lr=0.02-seed0", 0, method={"class": "lcfed"})
    compare.main([str(tmp_path)])
    assert any(line.startswith(f"{name}  ") for line in capsys.readouterr().out.splitlines())

    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    compare.main([str(tmp_path)])
    lines = re.sub(r"\x1b\[\d+m", "", capsys.readouterr().out).splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert all(any(word in line for line in lines) for word in ("accuracy", "worst 10 %", "ARI", "minutes", "of peak"))


def test_brackets_in_names_and_folders_stay(tmp_path, capsys):
    for name in ("tuned [a]", "tuned [b]"):
        made(tmp_path, name, 0, accuracies=[0.4, 0.8], method={"class": name})
    compare.main([str(tmp_path), "--mix", f"--out={tmp_path}/out [/x]"])
    said = capsys.readouterr().out
    assert all(text in said for text in ("tuned [a]", "tuned [b]", f"written to {tmp_path}/out [/x]"))


def test_wide_has_a_line_per_method(tmp_path, capsys):
    runs(tmp_path)
    compare.main([str(tmp_path), "--wide"])
    lines = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    table = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    assert table[:2] == [["test accuracy in %, own_split"], ["method", "global"]]
    assert table[3:] == [["fedavg", "55.00 ± 7.07"], ["lcfed", "80.00 ± 0.00"], ["majority class", "25.00"]]


@pytest.mark.parametrize("flags", [[], ["--wide"]])
def test_options_that_labels_leave_out_have_a_separate_column(tmp_path, capsys, flags):
    made(tmp_path, "fedavg", 0)
    made(tmp_path, "lcfed-lr=0.05-cluster_weight=1-seed0", 0, method={"class": "lcfed"})
    compare.main([str(tmp_path), *flags, f"--out={tmp_path / 'out'}"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert any(line[:1] == ["lcfed"] and line[-2:] == ["lr=0.05", "cluster_weight=1"] for line in lines)
    assert any(line[:1] == ["fedavg"] and line[-1] != "options" for line in lines)
    with (tmp_path / "out" / "comparison.csv").open() as file:
        assert [row["options"] for row in csv.DictReader(file)] == ["", "lr=0.05 cluster_weight=1", ""]
    assert "| lcfed | 60.00 | lr=0.05 cluster_weight=1 |" in (tmp_path / "out" / "comparison.md").read_text()


def test_columns_are_kinds_of_model_and_missing_models_stay_empty():
    rows = [
        Row(1, "own_split", label, kind, 1, acc, nan)
        for label, kind, acc in [("lcfed", "cluster", 0.7), ("lcfed", "personal", 0.6), ("fedavg", "after_local", 0.5)]
    ]
    rows.append(Row(1, "own_split", "majority class", "", 0, 0.25, nan))
    assert compare.by_model(rows, Reported()) == [
        ["method", "personal", "cluster", "after_local"],
        ["lcfed", "60.00", "70.00", ""],
        ["fedavg", "", "", "50.00"],
        ["majority class", "25.00", "", ""],
    ]


def test_added_metrics_have_columns_and_a_run_without_accuracy_is_left_out(tmp_path, capsys):
    for seed, f1 in ((0, 0.25), (1, 0.75)):
        path = made(tmp_path / "logs", f"fedavg-seed{seed}", seed) / "summary.json"
        summary = json.loads(path.read_text())
        summary["metrics"] |= {"test/own_split/global/f1": f1, "test/own_split/global/f1_std": 0.1}
        path.write_text(json.dumps(summary))
    made(tmp_path / "logs", "lcfed", 0, method={"class": "lcfed"})
    old = made(tmp_path / "old", "fedavg", 0) / "summary.json"
    old.write_text(old.read_text().replace("/acc", "/f1"))
    with pytest.warns(UserWarning, match="left out: it has no test acc"):
        compare.main([str(tmp_path / "logs"), str(tmp_path / "old"), f"--out={tmp_path / 'out'}"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert any(line[-4:] == ["20", "0.5000", "±", "0.3536"] for line in lines)
    with (tmp_path / "out" / "comparison.csv").open() as file:
        assert [(row["f1"], row["f1_std"][:6]) for row in csv.DictReader(file)] == [
            ("0.5", "0.3535"),
            ("nan", "nan"),
            ("nan", "nan"),
        ]
    with (
        pytest.warns(UserWarning, match="left out"),
        pytest.raises(ValueError, match="has a test of its reported metric"),
    ):
        compare.main([str(tmp_path / "old")])


def test_out_writes_tables_curves_and_pictures(tmp_path, capsys):
    runs(tmp_path / "logs")
    out = tmp_path / "out"
    compare.main([str(tmp_path / "logs"), "--target=0.6", f"--out={out}"])
    assert {path.name for path in out.iterdir()} == {
        "comparison.csv",
        "comparison.md",
        "curves.csv",
        "accuracy_over_rounds_own_split.png",
        "accuracy_over_bytes_own_split.png",
    }
    with (out / "comparison.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["label"], row["seeds"]) for row in rows] == [("fedavg", "2"), ("lcfed", "2"), ("majority class", "0")]
    assert float(rows[1]["acc"]) == 0.8 and rows[0]["rounds_to_target"] == "nan"
    with (out / "curves.csv").open() as file:
        points = list(csv.DictReader(file))
    assert {(point["label"], point["seed"]) for point in points} == {
        (label, seed) for label in ("fedavg", "lcfed") for seed in "01"
    }
    (run,) = find_runs([tmp_path / "logs" / "lcfed-seed1"])
    of_lcfed = [point for point in points if (point["label"], point["seed"]) == ("lcfed", "1")]
    expected = run.curve("test/own_split/global/acc")
    assert [(int(p["rounds"]), float(p["bytes"]), float(p["acc"])) for p in of_lcfed] == expected
    assert {(point["setting"], point["protocol"], point["model"]) for point in points} == {("1", "own_split", "global")}
    text = (out / "comparison.md").read_text()
    assert "| lcfed | global | 80.00 ± 0.00 | 40.00 | 2 | 20 |" in text
    assert str(out) in capsys.readouterr().out


def test_a_picture_shows_the_rounds_that_all_seeds_measured():
    often = [(5, 10.0, 0.1), (10, 20.0, 0.2), (15, 30.0, 0.3), (20, 40.0, 0.4)]
    rarely = [(10, 21.0, 0.5), (20, 42.0, 0.6), (30, 63.0, 0.7)]
    assert compare.in_common([often, rarely]) == [[often[1], often[3]], rarely[:2]]
    assert compare.in_common([often]) == [often]
    assert compare.in_common([often, []]) == [[], []]


@pytest.mark.filterwarnings("ignore:fedavg #2 is")
def test_runs_with_the_same_name_are_distinguished_everywhere(tmp_path, capsys):
    for accuracy, network in ((0.5, "Gelu"), (0.7, "Tanh")):
        made(tmp_path / "logs", "fedavg", 0, [0.3, accuracy], model={"network": f"{network}, too long for a label"})
    out = tmp_path / "out"
    for flag, num_tables in (("--wide", 1), (f"--out={out}", 2)):
        compare.main([str(tmp_path / "logs"), flag])
        lines = [line.split() for line in capsys.readouterr().out.splitlines()]
        of_fedavg = [line[1] == "#2" for line in lines if line[:1] == ["fedavg"]]
        assert of_fedavg == [False, True] * num_tables
    assert {"| fedavg | 50.00 |", "| fedavg #2 | 70.00 |"} <= set((out / "comparison.md").read_text().splitlines())
    assert [(label, accuracy) for _, label, accuracy in ends(out)] == [("fedavg", 0.5), ("fedavg #2", 0.7)]


def test_each_setting_has_separate_curves(tmp_path, capsys):
    for accuracy, data in ((0.5, "d" * 25), (0.7, "e" * 25)):
        made(tmp_path / "logs", "fedavg", 0, [0.3, accuracy], data=data)
    out = tmp_path / "out"
    compare.main([str(tmp_path / "logs"), "--mix", f"--out={out}"])
    assert ends(out) == [("1", "fedavg", 0.5), ("2", "fedavg", 0.7)]


def ends(out):
    """Returns setting, label and accuracy of the second round of every curve."""
    with (out / "curves.csv").open() as file:
        points = [point for point in csv.DictReader(file) if point["rounds"] == "2"]
    return [(point["setting"], point["label"], float(point["acc"])) for point in points]


def test_different_settings_need_mix(tmp_path, capsys):
    made(tmp_path, "a", 0)
    made(tmp_path, "b", 0, data="other")
    with pytest.raises(ValueError, match="--mix"):
        compare.main([str(tmp_path)])
    compare.main([str(tmp_path), "--mix"])
    said = capsys.readouterr().out
    assert "setting 1, own_split" in said and "setting 2, own_split" in said


@pytest.mark.parametrize("target", ["60", "0", "-0.5", "nan"])
def test_a_target_that_is_no_accuracy_is_refused(tmp_path, target):
    made(tmp_path, "a", 0)
    with pytest.raises(ValueError, match=f"got --target {float(target)}; an accuracy is above 0 and at most 1"):
        compare.main([str(tmp_path), f"--target={target}"])


def test_a_target_that_is_no_number_is_refused(capsys):
    with pytest.raises(SystemExit):
        compare.main(["logs", "--target=many"])
    assert "argument --target: invalid float value" in capsys.readouterr().err


def regression(path, seed, value, **identity):
    """Makes a finished run that reports a mean absolute error."""
    folder = made(path, f"fedavg-seed{seed}", seed, **identity)
    summary = json.loads((folder / "summary.json").read_text())
    metrics = {name.replace("/acc", "/mae"): value for name in summary["metrics"]}
    summary |= {"metrics": metrics, "reported": {"name": "mae", "larger_is_better": False}}
    (folder / "summary.json").write_text(json.dumps(summary))
    curve = (folder / "metrics.csv").read_text().replace("/acc", "/mae")
    (folder / "metrics.csv").write_text(curve)


def test_a_run_is_compared_by_the_metric_that_it_reports(tmp_path, capsys):
    for seed, value in ((0, 12.5), (1, 13.5)):
        regression(tmp_path, seed, value)
    compare.main([str(tmp_path), f"--out={tmp_path / 'out'}", "--target=11"])
    said = capsys.readouterr().out
    assert "test mae, own_split; rounds and MB to reach 11" in said and "13 ± 0.7071" in said and "trivial" in said
    with (tmp_path / "out" / "comparison.csv").open() as file:
        first, *_ = csv.DictReader(file)
    assert (first["mae"], first["mae_std"][:6]) == ("13.0", "0.7071")
    assert (tmp_path / "out" / "mae_over_rounds_own_split.png").is_file()


def test_the_default_target_of_a_loss_lies_above_its_best_value(tmp_path, capsys):
    regression(tmp_path, 0, 9.0)
    compare.main([str(tmp_path)])
    assert "rounds and MB to reach 10" in capsys.readouterr().out


def test_runs_that_report_different_metrics_are_not_compared(tmp_path):
    regression(tmp_path / "one", 0, 12.5)
    made(tmp_path / "two", "lcfed", 0, method={"class": "lcfed"})
    for more in ([], ["--mix"]):
        with pytest.raises(ValueError, match=r"reports mae and .* reports acc\. .* set model\.report"):
            compare.main([str(tmp_path / "one"), str(tmp_path / "two"), *more])


def test_runs_of_which_none_is_finished_are_refused(tmp_path):
    (made(tmp_path, "a", 0) / "summary.json").unlink()
    with pytest.warns(UserWarning, match="not finished"), pytest.raises(ValueError, match="none of these runs"):
        compare.main([str(tmp_path)])


def test_an_error_is_one_line_and_does_not_need_torch(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(SystemExit) as caught:
        __main__.main(["compare", str(tmp_path)])
    assert str(caught.value).startswith(f"lcfl: error: {tmp_path}: there is no run in it")


@pytest.mark.usefixtures("here")
def test_it_reads_the_runs_of_fit(capsys):
    run = lcfl("fit", *SYNTHETIC, *FEDAVG, *SMALL, "--trainer.name=mine")
    capsys.readouterr()
    compare.main(["logs"])
    said = capsys.readouterr().out
    accuracy = f"{100 * run.metrics['test/own_split/global/acc']:.2f}"
    assert any("mine" in line and "global" in line and accuracy in line for line in said.splitlines())
    assert f"{100 * run.metrics['test/own_split/trivial/acc']:.2f}" in said


@pytest.mark.usefixtures("here")
def test_runs_without_rounds_and_with_sampled_clients_can_be_compared(capsys):
    for number in ("1.0", "2", "20"):
        lcfl("fit", *SYNTHETIC, *FEDAVG, *SMALL, "--trainer.rounds=0", f"--trainer.evaluate_clients={number}")
    capsys.readouterr()
    with pytest.warns(UserWarning) as caught:
        compare.main(["logs", "--out=out"])
    said = [str(each.message) for each in caught]
    assert said == [
        "logs/lcfl/version_0 is left out: logs/lcfl/version_2 has the same settings and seed and is newer.",
        'evaluate_clients differs between these runs: "all", 2.',
    ]
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[1] for line in lines if line[:1] == ["lcfl"]] == ["evaluate_clients=all", "evaluate_clients=2"] * 2
