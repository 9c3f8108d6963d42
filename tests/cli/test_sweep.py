"""Tests the plan of a sweep, and what it skips, resumes, refuses and chooses.

The runs come from a stand-in for `lcfl fit`.
"""

import json
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from lcfl.cli.sweep import Sweep
from lcfl.cli.trials import Grid, Trial, given_to, points_of
from lcfl.runs.directory import RunDirectory
from tests.helpers.pipes import closed_pipe

ROOT = Path(__file__).parents[2]
STAND_IN = f"""
import json, os, sys, time
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from tests.helpers.runs import made
options = dict(word.removeprefix("--").split("=", 1) for word in sys.argv[1:] if word.startswith("--"))
root, name, seed = Path(options["trainer.default_root_dir"]), options["trainer.name"], int(options["seed_everything"])
with (root / "calls").open("a") as calls:
    calls.write(name + " " + options.get("ckpt_path", "") + "\\n")
if options.get("killed") == name and "ckpt_path" not in options:
    (root / name / "version_0" / "checkpoints" / "round-000001.ckpt").mkdir(parents=True)
    os.kill(os.getpid(), 9)
while "until" in options and not Path(options["until"]).exists():
    time.sleep(0.02)
if "sleep" in options:
    time.sleep(float(options["sleep"]))
if options.get("trainer.fast_dev_run") == "true":
    sys.exit()
if "warn" in options:
    print("lcfl: warning: " + options["warn"])
if options.get("fail") in (name, "all"):
    (root / name / "version_0" / "checkpoints" / "round-000001.ckpt").mkdir(parents=True)
    sys.exit("lcfl: error: by hand")
accuracy = float(options.get("lr", 0.5))
if options.get("late_wins") == options.get("late", "") and "trainer.rounds" not in options:
    accuracy = 1.0
number = len(list((root / name).glob("version_*")))
if "ckpt_path" in options:
    os.rename(root / name / "version_0", root / name / "old")
path = made(root, name, seed, accuracies=[1 - accuracy])  # a choice by test data would choose the worst
summary = json.loads((path / "summary.json").read_text())
summary["metrics"]["val/own_split/global/acc"] = accuracy
summary["metrics"]["val/own_split/after_local/acc"] = 1 - accuracy  # and so would a choice by another kind of model
if "undefined" in options:
    summary["metrics"]["val/own_split/global/acc"] = None
if "no_validation" in options:
    summary["metrics"] = {{}}
if "report" in options:  # a metric whose smaller values are better
    metrics = {{key.replace("/acc", "/mae"): value for key, value in summary["metrics"].items()}}
    summary |= {{"metrics": metrics, "reported": {{"name": "mae", "larger_is_better": False}}}}
(path / "summary.json").write_text(json.dumps(summary))
"""


@pytest.fixture
def sweep(tmp_path):
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)
    said = []

    def make(*options, layers=()):
        made = Sweep(tmp_path / "out", layers, options, say=said.append, program=(sys.executable, str(script)))
        return made

    (tmp_path / "out").mkdir()
    make.said = said
    make.calls = lambda: (tmp_path / "out" / "calls").read_text().split("\n")[:-1]
    return make


def test_a_closed_pipe_does_not_end_a_sweep(sweep, monkeypatch):
    with closed_pipe() as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        (run,) = replace(sweep(), say=Sweep.say).run([Trial("fedavg", (), 0)])
    assert run.seed == 0


def test_a_grid_with_one_value_is_an_option_of_every_run(sweep):
    grids = [Grid("a", ("1", "2"), "lcfed"), Grid("b", ("x",), "lcfed"), Grid("c", ("y",))]
    assert points_of("lcfed", grids) == [(("a", "1"),), (("a", "2"),)]
    assert given_to("lcfed", grids) == ["--b=x", "--c=y"] and given_to("fedavg", grids) == ["--c=y"]
    made = replace(sweep("--d=0"), own={"lcfed": ["--b=x"]})
    trial = Trial("lcfed", (("a", "1"),), seed=0)
    assert trial.name == "lcfed-a=1-seed0" and made.command(trial)[2:5] == ["--d=0", "--b=x", "--a=1"]
    assert "--b=x" not in made.command(replace(trial, method="fedavg"))


def test_a_trial_has_a_command_and_a_name(sweep):
    trial = Trial("fedavg", (("model.optimizer.lr", "0.1"),), 3, rounds=7)
    assert trial.name == "fedavg-lr=0.1-rounds=7-seed3"
    words = sweep("--trainer.rounds=9", layers=["data.yaml"]).command(trial)
    assert words[:3] == ["-c", "data.yaml", "-c"] and words[3].endswith("configs/methods/fedavg.yaml")
    assert words[4:7] == ["--trainer.rounds=9", "--model.optimizer.lr=0.1", "--trainer.rounds=7"]
    assert words[7] == "--seed_everything=3" and words[9] == f"--trainer.name={trial.name}"


def test_an_unknown_method_is_refused(sweep):
    with pytest.raises(FileNotFoundError, match=r"lcfl has no configuration of that name; it has .*fedavg.*lcfed"):
        sweep().command(Trial("nothing", (), 0))


def test_finished_runs_are_not_run_again(sweep):
    trials = [Trial("fedavg", (), seed) for seed in (0, 1)]
    assert [run.seed for run in sweep().run(trials[:1])] == [0]
    runs = sweep().run(trials, jobs=2)
    assert [run.seed for run in runs] == [0, 1]
    assert sweep.calls() == ["fedavg-seed0 ", "fedavg-seed1 "]


def test_a_run_that_another_process_writes_is_left_alone(sweep, tmp_path):
    """A run outlives a sweep that is killed. Before its first checkpoint, it would be started anew."""
    (tmp_path / "out" / "fedavg-seed0" / "version_0").mkdir(parents=True)
    living = RunDirectory(tmp_path / "out" / "fedavg-seed0" / "version_0")
    assert sweep().run([Trial("fedavg", (), 0)]) == [None]
    assert living.path.is_dir() and sweep.said[-1].startswith("fedavg-seed0: left alone, because another process")
    living.close()
    assert [run.seed for run in sweep().run([Trial("fedavg", (), 0)])] == [0]


def test_two_sweeps_do_not_run_a_trial_twice(sweep, tmp_path):
    """A run takes seconds to claim its directory, and a run outlives a sweep that is killed."""
    begun, trials = threading.Event(), [Trial("fedavg", (), 0)]
    options = f"--until={tmp_path / 'go'}"
    first = replace(sweep(options), say=lambda text: begun.set())
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(first.run, trials)
        assert begun.wait(60)
        assert sweep(options).run(trials) == [None]
        assert sweep.said[-1].startswith("fedavg-seed0: left alone, because another process")
        with pytest.raises(ValueError, match=r"run by another command; --lr=0\.9 differs"):
            sweep(options, "--lr=0.9").run(trials)
        (tmp_path / "go").touch()
        assert [run.seed for run in done.result()] == [0]
    assert sweep.calls() == ["fedavg-seed0 "]


def test_a_failed_run_is_reported_and_resumed(sweep, tmp_path):
    trials = [Trial("fedavg", (), seed) for seed in (0, 1)]
    runs = sweep("--fail=fedavg-seed0").run(trials)
    assert runs[0] is None and runs[1].seed == 1
    assert any("fedavg-seed0: failed with status 1; see " in line for line in sweep.said)
    log, reason = next(line.partition("see ")[2] for line in sweep.said if "failed" in line).split("\n")
    assert reason == "  lcfl: error: by hand"
    assert "lcfl: error: by hand" in Path(log).read_text() and "lcfl fit -c " in Path(log).read_text()
    assert sweep("--fail=fedavg-seed0").run(trials)[0] is None
    assert sweep.calls()[-1] == f"fedavg-seed0 {tmp_path / 'out' / 'fedavg-seed0' / 'version_0'}"


def test_warnings_of_runs_are_repeated_once_per_method(sweep):
    sweep("--warn=it has no effect.").run(
        [Trial(method, (), seed) for method in ("fedavg", "local") for seed in (0, 1)]
    )
    warned = [line for line in sweep.said if "warning" in line]
    assert warned == [f"{name}-seed0: warning: it has no effect." for name in ("fedavg", "local")]


def test_runs_that_save_nothing_are_refused_and_do_not_block_later_runs(sweep):
    trials = [Trial("fedavg", (), seed) for seed in (0, 1)]
    with pytest.raises(
        ValueError, match=r"fedavg-seed0 succeeded but wrote no .*trainer\.fast_dev_run; use them with lcfl fit"
    ):
        sweep("--trainer.fast_dev_run=true").run(trials)
    assert [run.seed for run in sweep().run(trials)] == [0, 1]


def test_an_error_of_an_earlier_attempt_is_not_reported_again(sweep, tmp_path):
    trial = Trial("fedavg", (), "none")  # with this seed, the stand-in fails without an error of lcfl
    (tmp_path / "out" / f"{trial.name}.log").write_text("lcfl fit ...\nlcfl: error: long ago\n")
    assert sweep().run([trial]) == [None]
    assert sweep.said[-1].endswith(f"failed with status 1; see {tmp_path / 'out' / trial.name}.log")


def test_a_trial_with_different_options_is_refused(sweep, tmp_path):
    layer = tmp_path / "layer.yaml"
    layer.write_text("a: 1")
    trials = [Trial("fedavg", (), 0)]
    sweep("--lr=0.5", layers=[str(layer)]).run(trials)
    with pytest.raises(ValueError, match=r"run by another command; --lr=0\.5, --lr=0\.6 differs\. Give another"):
        sweep("--lr=0.6", layers=[str(layer)]).run(trials)
    with pytest.raises(ValueError, match="the order of the words differs"):
        sweep("--lr=0.5", "--b=1", layers=[str(layer)]).run([Trial("fedavg", (), 1)])
        sweep("--b=1", "--lr=0.5", layers=[str(layer)]).run([Trial("fedavg", (), 1)])
    layer.write_text("a: 2")
    with pytest.raises(ValueError, match=r"command; layer\.yaml differs"):
        sweep("--lr=0.5", layers=[str(layer)]).run(trials)


def test_a_changed_file_of_a_group_is_noticed(sweep, tmp_path):
    (tmp_path / "own").mkdir()
    data, layer, trials = tmp_path / "own" / "data.yaml", tmp_path / "layer.yaml", [Trial("fedavg", (), 0)]
    layer.write_text("data: own/data.yaml")
    for seed, (options, layers) in enumerate([((f"--data={data}",), ()), ((), (str(layer),))]):
        data.write_text("a: 1")
        trials = [Trial("fedavg", (), seed)]
        sweep(*options, layers=layers).run(trials)
        data.write_text("a: 2")
        with pytest.raises(ValueError, match=r"command; data\.yaml differs"):
            sweep(*options, layers=layers).run(trials)


def test_a_changed_layer_with_any_ending_is_noticed(sweep, tmp_path):
    layer, trials = tmp_path / "base.cfg", [Trial("fedavg", (), 0)]
    layer.write_text("a: 1")
    sweep(layers=[str(layer)]).run(trials)
    layer.write_text("a: 2")
    with pytest.raises(ValueError, match=r"command; base\.cfg differs"):
        sweep(layers=[str(layer)]).run(trials)


def test_an_option_may_be_too_long_for_the_name_of_a_file(sweep):
    assert [run.seed for run in sweep(f"--name={'a' * 5000}.yaml").run([Trial("fedavg", (), 0)])] == [0]


def test_names_that_would_not_do_for_folders_are_refused(sweep):
    alike = [Trial("fedavg", (("path", value),), 0) for value in ("a/b", "a_b")]
    with pytest.raises(ValueError, match="fedavg-path=a_b-seed0 would be the folder of several runs"):
        sweep().check(alike)
    with pytest.raises(ValueError, match="has 312 bytes, too many for a folder"):
        sweep().check([Trial("fedavg", (("path", "a" * 294),), 0)])


def test_options_of_a_run_that_never_began_can_be_corrected(sweep):
    trials = [Trial("fedavg", (), 0)]
    assert sweep("--lr=many").run(trials) == [None]
    assert [run.seed for run in sweep("--lr=0.6").run(trials)] == [0]
    with pytest.raises(ValueError, match="run by another command"):
        sweep("--lr=0.5").run(trials)


@pytest.mark.parametrize(("first", "is_safe"), [("'elsewhere'", True), ("os.getcwd()", False)])
def test_a_run_finds_modules_in_the_same_order_as_the_sweep(first, is_safe):
    """With ``python -m lcfl`` the current folder comes first, with ``lcfl`` it does not."""
    code = f"import os, sys; sys.path[0] = {first}; from lcfl.cli.sweep import Sweep; print(*Sweep.program)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert ("-P" in done.stdout.split()) is is_safe


def test_a_kept_run_of_older_code_is_named(sweep, tmp_path):
    (tmp_path / "own.py").write_text("")
    trial = Trial("fedavg", (), 0)
    (run,) = sweep().run([trial])
    file = run.path / "summary.json"
    summary = json.loads(file.read_text())
    summary["identity"]["code"] = {"own": {"file": str(tmp_path / "own.py"), "sha256": "of an earlier own.py"}}
    file.write_text(json.dumps(summary))
    sweep().run([trial])
    assert sweep.said[-2].startswith("fedavg-seed0: own.py has changed since this run, which is kept. Remove ")


def test_the_first_of_equal_points_is_chosen(sweep):
    """A mean of float32 differs in its last digits."""
    points = [(("lr", "0.86666666"),), (("lr", "0.86666667"),)]
    assert sweep().tune("fedavg", points, 0, None) == points[0]
    best = (("lr", "0.9"),)
    assert sweep().tune("local", [*points, best], 0, rounds=2, finalists=2) == best
    assert [call for call in sweep.calls() if "rounds=2" not in call][-1] == "local-lr=0.86666666-seed0 "
    small = [(("lr", "3e-8"),), (("lr", "4.9e-7"),)]
    assert sweep().tune("fedavg", small, 0, None) == small[1]


def test_a_refused_sweep_claims_no_trial(sweep, tmp_path):
    trials = [Trial("fedavg", (), seed) for seed in (0, 1)]
    sweep("--lr=0.5").run(trials[1:])
    with pytest.raises(ValueError, match=r"run by another command; --lr=0\.5, --lr=0\.6 differs"):
        sweep("--lr=0.6").run(trials)
    assert [run.seed for run in sweep("--lr=0.5").run(trials)] == [0, 1]


def test_a_trial_is_recognised_if_its_files_have_moved(sweep, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("./here", str(tmp_path / "there")):
        Path(folder).mkdir()
        for name in ("layer", "data"):
            Path(folder, f"{name}.yaml").write_text("a: 1")
        sweep(f"--data={folder}/data.yaml", layers=[f"{folder}/layer.yaml"]).run([Trial("fedavg", (), 0)])
    assert sweep.calls() == ["fedavg-seed0 "]


def test_the_best_point_on_validation_data_is_chosen(sweep):
    points = [(("lr", "0.2"),), (("lr", "0.7"),), (("lr", "0.4"),)]
    assert sweep().tune("fedavg", points, seed=5, rounds=2, jobs=2) == points[1]
    assert sorted(sweep.calls()) == [f"fedavg-lr={lr}-rounds=2-seed5 " for lr in (0.2, 0.4, 0.7)]
    assert sweep.said[-1] == "fedavg: lr=0.7 is the best of 3 points, 70.00 % on validation data"


def test_finalists_are_run_with_all_rounds(sweep):
    points = [(("late", each), ("lr", each)) for each in ("0.2", "0.7", "0.4", "0.6")]
    assert sweep("--late_wins=0.6").tune("fedavg", points, 0, rounds=2, finalists=2) == points[3]
    full = [call for call in sweep.calls() if "rounds=2" not in call]
    assert full == [f"fedavg-late={each}-lr={each}-seed0 " for each in (0.7, 0.6)]
    assert sweep.said[-1].endswith("is the best of 4 points, 100.00 % on validation data")


def test_a_finalist_that_fails_or_is_no_better_is_not_chosen(sweep):
    points = [(("late", each), ("lr", each)) for each in ("0.2", "0.7", "0.6")]
    made = sweep("--late_wins=0.6", "--fail=fedavg-late=0.6-lr=0.6-seed0")
    assert made.tune("fedavg", points, 0, rounds=2, finalists=2) == points[1]
    calls = sweep.calls()
    made.run([Trial("fedavg", points[1], 0)])
    assert sweep.calls() == calls  # the run of the first seed already exists
    tied = [(("a", each),) for each in "123"]
    assert sweep().tune("local", tied, 0, rounds=2, finalists=2) == tied[0]


@pytest.mark.parametrize("rounds", [None, 2])
def test_there_are_no_shorter_trials_if_all_points_are_finalists(sweep, rounds):
    points = [(("lr", "0.2"),), (("lr", "0.7"),)]
    assert sweep().tune("fedavg", points, 0, rounds, finalists=2) == points[1]
    assert sorted(sweep.calls()) == ["fedavg-lr=0.2-seed0 ", "fedavg-lr=0.7-seed0 "]


def test_a_point_that_fails_is_not_chosen(sweep):
    points = [(("lr", "0.2"),), (("lr", "0.7"),)]
    assert sweep("--fail=fedavg-lr=0.7-seed0").tune("fedavg", points, 0, None) == points[0]


def test_nothing_is_chosen_before_a_killed_trial_has_come_to_its_end(sweep):
    points = [(("lr", "0.2"),), (("lr", "0.7"),), (("lr", "0.4"),)]
    made = sweep("--killed=fedavg-lr=0.7-seed0")
    with pytest.raises(ValueError, match=r"fedavg-lr=0.7-seed0 did not come to an end, .* give the same command again"):
        made.tune("fedavg", points, 0, None)
    assert made.tune("fedavg", points, 0, None) == points[1]
    assert sweep.said[-1] == "fedavg: lr=0.7 is the best of 3 points, 70.00 % on validation data"


def test_the_number_of_points_without_a_result_is_said(sweep):
    sweep("--fail=fedavg-lr=0.7-seed0").tune("fedavg", [(("lr", "0.2"),), (("lr", "0.7"),)], 0, None)
    assert "lr=0.2 is the best of 2 points (1 of them without a result), 20.00 %" in sweep.said[-1]


def test_nothing_is_chosen_if_every_trial_fails(sweep):
    assert sweep("--fail=all").tune("fedavg", [(("lr", "0.2"),), (("lr", "0.7"),)], 0, None) is None


def test_tuning_without_the_reported_metric_is_an_error(sweep):
    with pytest.raises(ValueError, match="no trial of fedavg has the reported metric on validation data"):
        sweep("--undefined=true").tune("fedavg", [(("lr", "0.2"),), (("lr", "0.7"),)], 0, None)


def test_tuning_ends_after_the_first_trial_without_validation_data(sweep):
    with pytest.raises(ValueError, match=r"fedavg-lr=0.2-seed0 has no validation data, .* Set data\.val_fraction"):
        sweep("--no_validation=true").tune("fedavg", [(("lr", "0.2"),), (("lr", "0.7"),)], 0, None)
    assert sweep.calls() == ["fedavg-lr=0.2-seed0 "]


def test_one_point_needs_no_trial(sweep):
    assert sweep().tune("fedavg", [()], 0, None) == ()
    assert sweep.said == []


def test_a_sweep_that_is_stopped_stops_its_runs(tmp_path, sweep):
    sweep()
    code = (
        "import signal, sys; from pathlib import Path\n"
        "from lcfl.cli.sweep import Sweep; from lcfl.cli.trials import Trial\n"
        "signal.signal(signal.SIGTERM, signal.default_int_handler)\n"
        f"s = Sweep(Path({str(tmp_path / 'out')!r}), [], ['--sleep=60'], program=(sys.executable, "
        f"{str(tmp_path / 'stand_in.py')!r}))\n"
        "s.run([Trial('fedavg', (), seed) for seed in range(3)], jobs=2)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 300
    try:
        while not (tmp_path / "out" / "calls").is_file() or len(sweep.calls()) < 2:
            assert process.poll() is None and time.monotonic() < deadline, "the sweep did not start two runs"
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode != 0
    assert sum("stopped; see" in line for line in said.splitlines()) == 2
    assert len(sweep.calls()) == 2


def test_a_run_that_reports_an_error_is_better_if_it_is_smaller(sweep):
    points = [(("lr", "0.7"),), (("lr", "0.2"),), (("lr", "0.5"),)]
    assert sweep("--report=mae").tune("fedavg", points, 0, None) == (("lr", "0.2"),)
    assert sweep.said[-1] == "fedavg: lr=0.2 is the best of 3 points, 0.2000 on validation data"
    assert "validation 0.7000" in sweep.said[1]
