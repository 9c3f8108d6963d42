"""Tests how finished runs are grouped, which comparisons are refused, and every number against hand calculations."""

import csv
import json
import os
from math import isnan, nan
from pathlib import Path

import pytest

from lcfl.cli.trial_notes import note_of
from lcfl.cli.trials import Trial
from lcfl.runs.comparison import check_same_setting, entries_of, rounds_to_peak, rows_of
from lcfl.runs.finished import find_runs
from tests.helpers.runs import made


def names(entries):
    return {entry.label: [run.seed for run in entry.runs] for entry in entries}


def test_seeds_of_one_experiment_are_one_entry(tmp_path):
    for name, seed in (("a-seed0", 0), ("a-seed1", 1), ("b", 0)):
        made(tmp_path, name, seed, method={"class": name[0]})
    assert names(entries_of(find_runs([tmp_path]))) == {"a": [0, 1], "b": [0]}


def test_what_a_run_says_is_worked_out_once(tmp_path):
    made(tmp_path, "a", 0)
    (run,) = find_runs([tmp_path])
    assert all(getattr(run, name) is getattr(run, name) for name in ("metrics", "settings", "test_sets", "protocols"))


def test_equal_names_are_distinguished_by_the_options_that_differ(tmp_path):
    for weight in (0.1, 0.5):
        made(tmp_path, "lcfl", 0, model={"cluster_weight": weight, "network": "x"})
    assert list(names(entries_of(find_runs([tmp_path])))) == ["lcfl cluster_weight=0.1", "lcfl cluster_weight=0.5"]


def test_equal_names_whose_difference_is_too_long_are_numbered_within_their_setting(tmp_path):
    paths = [made(tmp_path, "fedavg", 0, model={"network": "long" * 7 + end}, data="d" * 25) for end in "12"]
    made(tmp_path, "fedavg", 0, model={"network": "long" * 7}, data="e" * 25)
    with pytest.warns(UserWarning) as caught:
        entries = entries_of(find_runs([tmp_path]))
    assert [(entry.setting, entry.label) for entry in entries] == [(1, "fedavg"), (1, "fedavg #2"), (2, "fedavg")]
    assert [str(each.message).partition(":")[0] for each in caught] == [f"fedavg #2 is {paths[1]}"]


def test_options_are_left_out_of_a_label_if_the_method_is_enough(tmp_path):
    made(tmp_path, "fed-prox-optimizer.lr=1e-3-cluster_weight=0.1-seed0", 0, method={"class": "a"})
    made(tmp_path, "ifca-lr=0.1-seed0", 0, method={"class": "b"}, model={"lr": 0.1})
    made(tmp_path, "ifca-lr=0.2-seed0", 0, method={"class": "b"}, model={"lr": 0.2})
    entries = {entry.label: entry.options for entry in entries_of(find_runs([tmp_path]))}
    assert entries == {"fed-prox": "optimizer.lr=1e-3 cluster_weight=0.1", "ifca-lr=0.1": "", "ifca-lr=0.2": ""}


def test_a_run_is_found_by_its_path_or_by_a_folder_above(tmp_path):
    path = made(tmp_path, "a", 0)
    for given in (path, path.parent, tmp_path):
        assert [run.path for run in find_runs([given])] == [path]


def test_shorter_trials_of_a_sweep_are_left_out_once_it_has_complete_runs(tmp_path):
    def trial(name, seed=0, accuracies=(0.5, 0.6)):
        path = made(tmp_path / "sweep", name, seed, accuracies, method={"class": name})
        (path.parent / "trial.json").write_text("{}")
        return path

    shorter = [trial(Trial("fedavg", (("lr", value),), 0, 1).name, accuracies=[0.5]) for value in ("0.1", "0.2")]
    assert [run.path for run in find_runs([tmp_path])] == shorter
    complete = trial(Trial("fedavg", (("lr", "0.1"),), 0).name)
    alone = made(tmp_path, "own-rounds=1-seed0", 0, method={"class": "own"})  # of no sweep
    with pytest.warns(UserWarning, match=rf"2 shorter trials of a sweep are left out, such as {shorter[0]}\. To see"):
        assert [run.path for run in find_runs([tmp_path])] == [alone, complete]
    assert [run.path for run in find_runs([shorter[0], complete])] == [shorter[0], complete]


def test_a_trial_s_note_says_whether_it_is_shorter(tmp_path):
    """The name of a complete run, too, may end in a number of rounds: that of another option."""

    def trial(rounds, option="3"):
        each = Trial("fedavg", (("local_update.rounds", option),), 0, rounds)
        path = made(tmp_path, each.name, 0, method={"class": each.name})
        (path.parent / "trial.json").write_text(json.dumps(note_of([], rounds is not None)))
        return path

    shorter, complete, other = trial(2), trial(None), trial(None, "9")
    with pytest.warns(UserWarning, match=rf"1 shorter trials of a sweep are left out, such as {shorter}\."):
        assert {run.path for run in find_runs([tmp_path])} == {complete, other}


@pytest.mark.filterwarnings("ignore:.*is left out")
def test_the_trivial_baseline_is_a_mean_over_seeds(tmp_path):
    for seed, value in enumerate([0.25, 0.5]):
        file = made(tmp_path, f"a-seed{seed}", seed) / "summary.json"
        file.write_text(file.read_text().replace('/trivial/acc": 0.25', f'/trivial/acc": {value}'))
    rows, _ = rows_of(entries_of(find_runs([tmp_path])))
    assert rows[-1].label == "majority class" and rows[-1].value == 0.375


@pytest.mark.parametrize("point", [(), (("lr", "-1"),)])
def test_a_complete_run_does_not_hide_shorter_trials_of_a_method_whose_name_begins_alike(tmp_path, point):
    def trial(method, rounds=None):
        path = made(tmp_path, Trial(method, point, 0, rounds).name, 0, method={"class": method})
        (path.parent / "trial.json").write_text("{}")
        return path

    shorter, complete, other = trial("fed-a", 1), trial("fed-a"), trial("fed-b", 1)
    with pytest.warns(UserWarning, match=rf"1 shorter trials of a sweep are left out, such as {shorter}\."):
        assert [run.path for run in find_runs([tmp_path])] == [complete, other]


@pytest.mark.filterwarnings("ignore:.*is left out")
def test_the_last_version_of_a_repeated_run_counts(tmp_path):
    paths = [made(tmp_path, "a", 0) for _ in range(12)]
    assert [run.path for run in find_runs([tmp_path])] == [paths[-1]]


@pytest.mark.parametrize("newest", [0, 1, 2])
def test_the_newest_copy_of_a_repeated_run_counts_in_any_folder(tmp_path, newest):
    paths = [made(tmp_path / folder, "a", 0) for folder in "xyz"]
    for path in paths:
        os.utime(path / "summary.json", (1e9 + (path == paths[newest]),) * 2)
    with pytest.warns(UserWarning) as caught:
        (run,) = find_runs([tmp_path / folder for folder in "xyz"])
    assert run.path == paths[newest]
    dropped = {str(each.message).partition(" is left out: ")[0] for each in caught}
    assert dropped == {str(path) for path in paths if path != run.path}


@pytest.mark.filterwarnings("error")
def test_a_run_that_is_given_twice_counts_once(tmp_path, monkeypatch):
    made(tmp_path, "a", 0)
    monkeypatch.chdir(tmp_path)
    assert len(find_runs([tmp_path, tmp_path / "a", Path("a")])) == 1


def set_evaluated(path, number):
    """Writes the number of evaluated clients into the summary of a run."""
    summary = json.loads((path / "summary.json").read_text())
    (path / "summary.json").write_text(json.dumps(summary | {"evaluate_clients": number}))


def test_runs_that_evaluate_different_numbers_of_clients_are_separate_entries(tmp_path):
    for seed, number in ((0, None), (0, 2)):
        set_evaluated(made(tmp_path, "a", seed), number)
    made(tmp_path, "a", 1)  # as older versions wrote it, which evaluated all clients
    entries = entries_of(find_runs([tmp_path]))
    assert names(entries) == {"a evaluate_clients=all": [0, 1], "a evaluate_clients=2": [0]}
    with pytest.warns(UserWarning, match='evaluate_clients differs between these runs: "all", 2'):
        check_same_setting(entries)


def test_runs_with_different_protocols_are_separate_entries(tmp_path):
    for protocol in ("own_split", "label_view"):
        made(tmp_path, "a", 0, protocol=protocol)
    entries = entries_of(find_runs([tmp_path]))
    assert [entry.setting for entry in entries] == [1, 2]


@pytest.mark.parametrize("kinds", [[(), ("after_local",)], [("after_local",), ()]])
def test_kinds_of_model_that_not_all_seeds_have_are_left_out(tmp_path, kinds):
    for seed, at_end in enumerate(kinds):
        made(tmp_path, f"a-seed{seed}", seed, at_end=("personal", *at_end))
    with pytest.warns(UserWarning, match="a: after_local is left out, because not all seeds have it"):
        entries = entries_of(find_runs([tmp_path]))
    rows, _ = rows_of(entries)
    assert [(row.model, row.seeds) for row in rows] == [("global", 2), ("personal", 2), ("", 0)]


def test_an_unfinished_run_is_left_out_with_a_warning(tmp_path):
    (made(tmp_path, "a", 0) / "summary.json").unlink()
    with pytest.warns(
        UserWarning, match=r"version_0 is left out: it is not finished\. Resume it with --ckpt_path last\.$"
    ):
        assert find_runs([tmp_path]) == []


def test_a_folder_without_runs_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere: there is no run in it"):
        find_runs([tmp_path / "nowhere"])


@pytest.mark.parametrize(
    ("other", "what"),
    [
        ({"data": "d2"}, "data"),
        ({"partition": "p2"}, "partition"),
        ({"leavers": {"3": 5}}, "leavers"),
        ({"partition": "p2", "protocol": "label_view"}, "partition and protocols"),
    ],
)
def test_runs_with_different_data_or_protocols_are_refused(tmp_path, other, what):
    one, two = made(tmp_path, "a", 0), made(tmp_path, "b", 0, **other)
    with pytest.raises(ValueError, match=f"{one} and {two} differ in {what}\\. .*--mix"):
        check_same_setting(entries_of(find_runs([tmp_path])))


def test_an_unfair_comparison_gives_a_warning(tmp_path):
    made(tmp_path, "a", 0)
    made(tmp_path, "b", 0, accuracies=[0.5, 0.6, 0.7])
    with pytest.warns(UserWarning, match="rounds differs between these runs: 2, 3"):
        check_same_setting(entries_of(find_runs([tmp_path])))


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({"init_from": "weights"}, 'init_from differs between these runs: "weights", null'),
        ({"augmentation": "flips"}, 'augmentation differs between these runs: "flips", null'),
        ({"model": {"network": "MLP(32)"}}, "the network of a differs from that of b"),
    ],
)
def test_another_network_or_start_gives_a_warning(tmp_path, other, text):
    made(tmp_path, "a", 0, method={"class": "a"}, model={"network": "MLP(16)"})
    made(tmp_path, "b", 0, **({"method": {"class": "b"}, "model": {"network": "MLP(16)"}} | other))
    with pytest.warns(UserWarning, match=text):
        check_same_setting(entries_of(find_runs([tmp_path])))


def test_different_seeds_give_a_warning(tmp_path):
    for name, seeds in (("a", (0, 1)), ("b", (0,))):
        for seed in seeds:
            made(tmp_path, f"{name}-seed{seed}", seed, method={"class": name})
    with pytest.warns(UserWarning, match=r"^the seeds differ between these runs \(a: 0, 1; b: 0\); give all methods"):
        check_same_setting(entries_of(find_runs([tmp_path])))


def test_the_default_target_is_that_of_models_that_are_measured_during_training(tmp_path):
    path = made(tmp_path, "a", 0, at_end=("after_local",))
    summary = json.loads((path / "summary.json").read_text())
    summary["metrics"]["test/own_split/after_local/acc"] = 1.0
    (path / "summary.json").write_text(json.dumps(summary))
    rows, targets = rows_of(entries_of(find_runs([tmp_path])))
    assert targets == {(1, "own_split"): pytest.approx(0.9 * 0.6)}
    assert next(row for row in rows if row.model == "global").rounds_to_target == 2


def test_different_local_work_gives_a_warning(tmp_path):
    for name, work in (("a", {"epochs": 10}), ("b", {"steps": 5}), ("c", {"steps": 1, "epochs": None}), ("d", {})):
        made(tmp_path, name, 0, method={"local_update": {"class": "LocalTraining", **work}})
    with pytest.warns(UserWarning, match="^local work differs between these runs: 1 step, 10 epochs, 5 steps.$"):
        check_same_setting(entries_of(find_runs([tmp_path])))


@pytest.mark.filterwarnings("error")
def test_equal_or_unknown_local_work_gives_no_warning(tmp_path):
    for name, work in (("a", {"steps": 5, "lr_decay": 1.0}), ("b", {"steps": 5, "epochs": None}), ("c", {})):
        made(tmp_path, name, 0, method={"local_update": {"class": name, **work}})
    check_same_setting(entries_of(find_runs([tmp_path])))


def test_the_numbers_of_a_row(tmp_path):
    made(tmp_path, "a-seed0", 0, accuracies=[0.2, 0.5, 0.6, 0.8], clusters=3)
    made(tmp_path, "a-seed1", 1, accuracies=[0.5, 0.5, 0.5, 0.6], clusters=4)
    (row, baseline), targets = rows_of(entries_of(find_runs([tmp_path])), target=0.5)
    assert targets == {(1, "own_split"): 0.5}
    assert (row.setting, row.protocol, row.label, row.model, row.seeds) == (1, "own_split", "a", "global", 2)
    assert row.value == pytest.approx(0.7) and row.value_std == pytest.approx(0.1 * 2**0.5)
    assert row.worst10 == pytest.approx(0.35)
    assert row.rounds_to_target == 1.5 and row.bytes_to_target == pytest.approx(15e6)
    assert (row.clusters, row.total_bytes, row.seconds) == (3.5, 40e6, 8.0)
    assert (baseline.label, baseline.value, baseline.seeds) == ("majority class", 0.25, 0)


def test_a_target_that_a_seed_never_reaches_has_no_round(tmp_path):
    made(tmp_path, "a-seed0", 0, accuracies=[0.2, 0.9])
    made(tmp_path, "a-seed1", 1, accuracies=[0.2, 0.3])
    (row, _), targets = rows_of(entries_of(find_runs([tmp_path])))
    assert targets[1, "own_split"] == pytest.approx(0.9 * 0.6)
    assert isnan(row.rounds_to_target) and isnan(row.bytes_to_target)


def test_settings_are_numbered(tmp_path):
    made(tmp_path, "a", 0)
    made(tmp_path, "b", 0, data="d2")
    rows, targets = rows_of(entries_of(find_runs([tmp_path])))
    assert [(row.setting, row.label) for row in rows] == [
        (1, "a"),
        (1, "majority class"),
        (2, "b"),
        (2, "majority class"),
    ]
    assert list(targets) == [(1, "own_split"), (2, "own_split")]


def test_a_diverged_model_is_nan_and_not_an_error(tmp_path):
    path = made(tmp_path, "a", 0)
    summary = json.loads((path / "summary.json").read_text())
    summary["metrics"]["test/own_split/global/acc"] = None
    (path / "summary.json").write_text(json.dumps(summary))
    (row, _), _ = rows_of(entries_of(find_runs([tmp_path])), target=0.1)
    assert isnan(row.value)


def test_a_seed_that_diverged_has_no_deviation(tmp_path):
    for seed in (0, 1):
        path = made(tmp_path, "a", seed)
    summary = json.loads((path / "summary.json").read_text())
    summary["metrics"]["test/own_split/global/acc"] = None
    (path / "summary.json").write_text(json.dumps(summary))
    (row, _), _ = rows_of(entries_of(find_runs([tmp_path])), target=0.1)
    assert isnan(row.value) and isnan(row.value_std)


def test_seeds_that_were_stopped_early_are_one_entry(tmp_path):
    for seed, rounds in ((0, 2), (1, 5)):
        path = made(tmp_path, "a", seed)
        summary = json.loads((path / "summary.json").read_text()) | {"rounds": rounds, "planned_rounds": 9}
        (path / "summary.json").write_text(json.dumps(summary))
    assert names(entries_of(find_runs([tmp_path]))) == {"a": [0, 1]}


def test_rounds_count_from_one_without_warm_up_rounds(tmp_path):
    path = made(tmp_path, "a", 0, accuracies=[0.1, 0.2])
    with (path / "metrics.csv").open() as file:
        assert [row["round"] for row in csv.DictReader(file)] == ["-1", "0", "1"]
    (run,) = find_runs([path])
    assert run.curve("test/own_split/global/acc") == [(1, 10e6, 0.1), (2, 20e6, 0.2)]
    assert run.curve("test/own_split/personal/acc") == []
    assert nan not in run.metrics.values()


@pytest.mark.parametrize(
    ("accuracies", "rounds"), [([0.1, 0.5, 0.89, 1.0], 4), ([0.1, 0.9, 0.5, 1.0, 0.2], 2), ([0.0], 1), ([], nan)]
)
def test_rounds_to_nine_tenths_of_the_peak(accuracies, rounds):
    curve = [(number, 0.0, accuracy) for number, accuracy in enumerate(accuracies, start=1)]
    assert rounds_to_peak(curve) == pytest.approx(rounds, nan_ok=True)


def test_a_row_has_the_rounds_to_nine_tenths_of_the_peak(tmp_path):
    for seed, accuracies in ((0, [0.5, 0.8, 0.8]), (1, [0.79, 0.8, 0.1])):
        made(tmp_path, f"a-seed{seed}", seed, accuracies)
    rows, _ = rows_of(entries_of(find_runs([tmp_path])))
    assert rows[0].rounds_to_peak90 == 1.5 and isnan(rows[0].stability)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("summary.json", "{", r"summary\.json: not the summary of a run of lcfl, or damaged \(Expecting"),
        ("summary.json", '{"accuracy": 1}', r"summary\.json: .* \(it lacks 'identity'\)"),
        ("summary.json", "[1]", r"summary\.json: not the summary"),
        (
            "metrics.csv",
            "epoch,loss\n1,2\n",
            r"metrics\.csv: not the table of a run of lcfl, or damaged \(it lacks 'round'",
        ),
        ("metrics.csv", "round,loss\n0,garbage\n", r"metrics\.csv: .*\(could not convert string to float: 'garbage'\)"),
    ],
)
def test_what_is_damaged_or_of_another_package_is_left_out(tmp_path, name, text, says):
    good = made(tmp_path, "good", 0)
    (made(tmp_path, "other", 0) / name).write_text(text)
    with pytest.warns(UserWarning, match=rf"other/version_0 is left out: .*{says}"):
        assert [run.path for run in find_runs([tmp_path])] == [good]


def test_a_table_that_lacks_rounds_is_named(tmp_path):
    path = made(tmp_path, "a", 0, [0.5, 0.6, 0.7]) / "metrics.csv"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:3]))
    with pytest.warns(UserWarning, match=r"a/version_0/metrics\.csv lacks 2 rounds\."):
        find_runs([tmp_path])
