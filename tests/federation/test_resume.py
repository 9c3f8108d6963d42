"""A resumed run gives the same bits as an uninterrupted one, and is refused if it could not."""

import shutil

import pytest

from lcfl.core.files import write_json
from lcfl.engines import kernels
from lcfl.runs import checkpoint, checkpoint_lookup
from lcfl.runs.directory import RunDirectory
from tests.helpers.checkpoints import flip_a_bit
from tests.helpers.fits import ROUNDS, arguments, assert_same_run, fit, main, newest_run, rows, scalars

OTHERS = ["lcfed_plus", "fedac", "local", "fedprox", "fednova", "fedper", "lg_fedavg", "per_fedavg"]
OTHERS += ["feddyn", "fedadam", "fedavgm", "ditto", "pfedme"]
OTHERS += ["apfl", "fedala", "fedamp", "fedrep", "fedbabu", "fedbn", "clove", "cfl_fixed", "fedlc"]
OTHERS += ["fedyogi", "fedadagrad"]
SLOW = [("lcfed", 1), ("fedavg", 1), *((method, first) for method in OTHERS for first in (1, 5))]


@pytest.fixture(scope="module")
def five_rounds(tmp_path_factory):
    """A LCFed run that ended after five rounds and kept every checkpoint."""
    return fit(tmp_path_factory.mktemp("five"), "lcfed", 1, 5, "--trainer.callbacks.keep_last=null").path


@pytest.fixture
def ended(tmp_path, five_rounds):
    """A copy of that run, which a test may resume or damage."""
    return shutil.copytree(five_rounds, tmp_path / "run" / "version_0")


@pytest.mark.parametrize(
    ("method", "first"),
    [
        ("lcfed", 0),  # after the warm-up rounds alone
        ("lcfed", 5),
        ("fedavg", 5),  # clients keep nothing
        ("scaffold", 5),  # clients and the aggregation remember something
        *(pytest.param(method, first, marks=pytest.mark.slow) for method, first in SLOW),
    ],
)
def test_resumed_run_has_the_bits_of_an_uninterrupted_one(tmp_path, reference, method, first):
    fit(tmp_path, method, rounds=first)
    run = fit(tmp_path, method, 1, ROUNDS, "--ckpt_path=last")
    assert run.path == newest_run(tmp_path)
    assert run.path.name == "version_0"
    assert_same_run(reference(method)[0], run.path)
    assert run.metrics.items() >= {"test/own_split/trivial/acc": 0.5}.items()


@pytest.mark.parametrize("ckpt_path", ["last", "logs/run/version_0", "{absolute}"])
def test_a_resumed_run_has_the_path_that_it_had_as_a_new_one(tmp_path, monkeypatch, ckpt_path):
    monkeypatch.chdir(tmp_path)
    new = fit("logs", "fedavg", rounds=1).path
    resumed = fit("logs", "fedavg", 1, 2, f"--ckpt_path={ckpt_path.format(absolute=new.absolute())}").path
    assert (str(new), str(resumed)) == ("logs/run/version_0",) * 2


REFRESHED = "{class_path: RefreshedLowRankCosine, init_args: {num_clusters: 4, dimension: 5, refresh_every: 3}}"
TUNING = "{class_path: ClusterNumberTuning, init_args: {criterion: ratio, lower: 0.9, upper: 9.0, cooldown: 2}}"
TUNED = ("-c", f"method: {{clustering: [{REFRESHED}, {TUNING}]}}")


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """An uninterrupted FedAC run whose clusters merge."""
    return fit(tmp_path_factory.mktemp("tuned"), "fedac", 1, 9, *TUNED).path


@pytest.mark.parametrize("first", [pytest.param(4, marks=pytest.mark.slow), 5, pytest.param(6, marks=pytest.mark.slow)])
def test_fedac_resumes_before_within_and_after_a_cooldown_and_a_refresh(tmp_path, tuned, first):
    counts = [float(row["cluster/count"]) for row in rows(tuned) if int(row["round"]) >= 0]
    assert len(set(counts)) > 1  # clusters do merge
    fit(tmp_path, "fedac", 1, first, *TUNED)
    assert_same_run(tuned, fit(tmp_path, "fedac", 1, 9, *TUNED, "--ckpt_path=last").path)


SPLIT = ("-c", f"method: {{clustering: [{REFRESHED.replace('4', '1', 1)}, {TUNING.replace('ratio', 'silhouette')}]}}")


@pytest.fixture(scope="module")
def split(tmp_path_factory):
    """An uninterrupted FedAC run whose only cluster is split, and its halves again."""
    return fit(tmp_path_factory.mktemp("split"), "fedac", 1, 8, *SPLIT).path


@pytest.mark.parametrize("first", [4, pytest.param(5, marks=pytest.mark.slow)])
def test_fedac_resumes_just_after_a_split_and_within_its_cooldown(tmp_path, split, first):
    counts = [float(row["cluster/count"]) for row in rows(split) if int(row["round"]) >= 0]
    assert counts == [1, 1, 1, 2, 2, 2, 3, 3]  # split in round 3, two rounds of cooldown, split again
    fit(tmp_path, "fedac", 1, first, *SPLIT)
    assert_same_run(split, fit(tmp_path, "fedac", 1, 8, *SPLIT, "--ckpt_path=last").path)


@pytest.mark.parametrize(
    "local", ["steps: 5, epochs: null", pytest.param("steps: null, epochs: 1", marks=pytest.mark.slow)]
)
def test_a_run_without_short_last_batches_resumes_to_the_same_bits(tmp_path, local):
    """Clients have 54 samples, i.e. 5 batches of 10 per pass, so steps cross the end of a pass in any round."""
    words = ("--data.drop_last=true", "-c", f"method: {{local_update: {{init_args: {{{local}}}}}}}")
    whole = fit(tmp_path / "whole", "fedavg", 1, 4, *words).path
    fit(tmp_path / "parts", "fedavg", 1, 3, *words)
    parts = fit(tmp_path / "parts", "fedavg", 1, 4, *words, "--ckpt_path=last").path
    assert_same_run(whole, parts)
    with pytest.raises(AssertionError):
        assert_same_run(whole, fit(tmp_path / "kept", "fedavg", 1, 4, *words[1:]).path)


STRAGGLERS = "method: {local_update: {init_args: {steps: null, epochs: 3, stragglers: 0.5}}}"
HESSIAN = ["--method.local_update.hessian=true", "--method.local_update.outer_momentum=0.5"]


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("fednova", ["--method.aggregation.momentum=0.5", "--model.cluster_weight=0.1"]),
        pytest.param("fednova", ["-c", STRAGGLERS], marks=pytest.mark.slow),
        pytest.param("per_fedavg", HESSIAN, marks=pytest.mark.slow),
        pytest.param("local", ["--method.exchange.full_budget=true"], marks=pytest.mark.slow),
    ],
)
def test_state_of_options_survives_a_resume_and_is_the_same_on_two_ranks(tmp_path, method, words):
    whole = fit(tmp_path / "whole", method, 1, 2, *words).path
    fit(tmp_path / "parts", method, 2, 1, *words)
    assert_same_run(whole, fit(tmp_path / "parts", method, 1, 2, *words, "--ckpt_path=last").path)
    with pytest.raises(AssertionError):
        assert_same_run(whole, fit(tmp_path / "without", method, 1, 2).path)


def test_another_configuration_is_refused_and_every_difference_named(tmp_path, ended):
    words = ["--method.clustering.num_clusters=3", "--seed_everything=5", "--data.seed=5", "--data.drop_last=true"]
    with pytest.raises(checkpoint.CheckpointError) as error:
        fit(tmp_path, "lcfed", 1, 6, "--ckpt_path=last", *words)
    for difference in (
        "method.clustering.0.num_clusters: the checkpoint has 10, this run 3",
        "seed: the checkpoint has 0, this run 5",
        "partition: the checkpoint has",
        "drop_last: the checkpoint has False, this run True",
    ):
        assert f"\n  {difference}" in str(error.value)


def test_a_limit_on_updates_is_neither_added_nor_dropped(tmp_path):
    fit(tmp_path, "fedavg", 1, 1, "--trainer.max_update_norm=9")
    with pytest.raises(checkpoint.CheckpointError, match=r"max_update_norm: the checkpoint has 9\.0, this run None"):
        fit(tmp_path, "fedavg", 1, 2, "--ckpt_path=last")
    fit(tmp_path / "none", "fedavg", 1, 1)
    with pytest.raises(checkpoint.CheckpointError, match=r"max_update_norm: the checkpoint has None, this run 9\.0"):
        fit(tmp_path / "none", "fedavg", 1, 2, "--ckpt_path=last", "--trainer.max_update_norm=9")


def test_resumed_run_may_change_evaluate_clients_and_reports_it(tmp_path, ended):
    run = fit(tmp_path, "lcfed", 1, 6, "--ckpt_path=last", "--trainer.evaluate_clients=3")
    assert run.summary()["rounds"] == 6 and run.summary()["evaluate_clients"] == 3


def test_resume_without_the_engine_of_the_run_is_refused(tmp_path, ended, monkeypatch):
    def unavailable():
        raise kernels.Unavailable("there is no C++ compiler")

    monkeypatch.setattr(kernels, "load", unavailable)
    with pytest.raises(ValueError, match=r"no C\+\+ compiler; .*ckpt was trained with this engine, so resume where"):
        fit(tmp_path, "lcfed", 1, 6, "--ckpt_path=last")


def test_damaged_newest_checkpoint_is_passed_over(tmp_path, ended, reference):
    flip_a_bit(ended / "checkpoints" / "round-000005.ckpt" / "state.pt")
    with pytest.warns(UserWarning, match="skipped.*does not match its SHA-256"):
        resumed = fit(tmp_path, "lcfed", 1, ROUNDS, "--ckpt_path=last")
    assert_same_run(reference("lcfed")[0], resumed.path)


@pytest.mark.parametrize("ckpt_path", ["last", "auto", "best", "run directory", "checkpoint"])
def test_a_resumed_run_reads_every_part_once(tmp_path, ended, monkeypatch, ckpt_path):
    newest = ended / "checkpoints" / "round-000005.ckpt"
    write_json(ended / "checkpoints" / "best.json", {"checkpoint": newest.name})
    paths = {"run directory": ended, "checkpoint": newest}
    read, deserialized = [], checkpoint.deserialized
    monkeypatch.setattr(checkpoint, "deserialized", lambda content: read.append(len(content)) or deserialized(content))
    fit(tmp_path, "lcfed", 1, 5, f"--ckpt_path={paths.get(ckpt_path, ckpt_path)}")
    assert read == list(checkpoint.read_manifest(newest)["bytes"].values())


def test_missing_checkpoint_error_names_where_it_looked(tmp_path):
    with pytest.raises(checkpoint.CheckpointError, match="no run of that name"):
        fit(tmp_path, "lcfed", 1, 1, "--ckpt_path=last")
    with pytest.raises(checkpoint.CheckpointError, match="elsewhere: there is no checkpoint"):
        fit(tmp_path, "lcfed", 1, 1, f"--ckpt_path={tmp_path}/elsewhere")


def test_an_older_checkpoint_is_resumed_in_its_own_run_and_later_ones_are_removed(tmp_path, ended, reference):
    shutil.copytree(ended, tmp_path / "run" / "version_1")  # a newer run of the same name
    resumed = fit(tmp_path, "lcfed", 1, 4, f"--ckpt_path={ended}/checkpoints/round-000003.ckpt")
    assert resumed.path == ended
    saved = sorted(path.name for path in (ended / "checkpoints").glob("round-*"))
    assert saved == [f"round-{number:06d}.ckpt" for number in (3, 4)]
    fit(tmp_path, "lcfed", 1, ROUNDS, f"--ckpt_path={ended}")
    assert_same_run(reference("lcfed")[0], ended)


def test_a_resumed_run_removes_what_a_killed_process_was_writing(tmp_path, ended):
    (ended / ".metrics.csv.12345").write_text("round")
    (ended / "checkpoints" / ".round-000002.ckpt.old").mkdir()
    (ended / "checkpoints" / ".round-000005.ckpt.old").mkdir()
    (ended / "checkpoints" / ".round-000005.ckpt.old" / "half").touch()
    fit(tmp_path, "lcfed", 1, 6, f"--ckpt_path={ended}/checkpoints/round-000004.ckpt")
    assert [path.name for path in ended.rglob(".*")] == [".lock"]


def test_second_writer_of_a_run_is_refused(tmp_path, ended):
    holder = RunDirectory(ended)
    try:
        with pytest.raises(ValueError, match="another process is writing this run"):
            fit(tmp_path, "lcfed", 1, 6, "--ckpt_path=last")
    finally:
        holder.close()


def test_last_is_looked_up_again_under_the_lock(tmp_path, ended, monkeypatch):
    """Between the first look-up and the lock another process may write and remove checkpoints."""
    older = ended / "checkpoints" / "round-000004.ckpt"
    monkeypatch.setattr(checkpoint_lookup, "find", lambda *of: older)
    newer = (ended / "checkpoints" / "round-000005.ckpt").stat().st_ino
    fit(tmp_path, "lcfed", 1, 6, "--ckpt_path=last")
    assert (ended / "checkpoints" / "round-000005.ckpt").stat().st_ino == newer  # not removed and written again


def test_auto_starts_a_run_and_resumes_it(tmp_path, reference):
    runs = [fit(tmp_path, "lcfed", 1, rounds, "--ckpt_path=auto").path for rounds in (2, ROUNDS)]
    assert runs == [tmp_path / "run" / "version_0"] * 2
    assert_same_run(reference("lcfed")[0], runs[0])


def test_auto_does_not_start_a_run_that_another_process_has_just_begun(tmp_path):
    holder = RunDirectory.claim(tmp_path, "run")
    try:
        with pytest.raises(ValueError, match="another process is writing this run"):
            fit(tmp_path, "lcfed", 1, 1, "--ckpt_path=auto")
    finally:
        holder.close()
    assert fit(tmp_path, "lcfed", 1, 1, "--ckpt_path=auto").path.name == "version_1"


def test_auto_does_not_start_anew_if_every_checkpoint_is_damaged(tmp_path):
    run = fit(tmp_path, "lcfed", 1, 1).path
    for part in run.glob("checkpoints/*/state.pt"):
        part.write_bytes(b"")
    with (
        pytest.warns(UserWarning, match="skipped: .*round-000001"),
        pytest.raises(
            checkpoint.CheckpointError, match=r"ckpt_path=auto: .* no complete checkpoint .* give no checkpoint"
        ),
    ):
        fit(tmp_path, "lcfed", 1, 1, "--ckpt_path=auto")
    assert [path.name for path in run.parent.iterdir()] == ["version_0"]


def test_checkpoint_outside_its_run_is_refused_and_nothing_written(tmp_path, ended):
    moved = shutil.move(ended / "checkpoints" / "round-000005.ckpt", tmp_path / "elsewhere" / "round-000005.ckpt")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(checkpoint.CheckpointError, match="lies outside a run directory"):
        fit(tmp_path, "lcfed", 1, 6, f"--ckpt_path={moved}")
    assert sorted(tmp_path.rglob("*")) == before
    (ended / "config.yaml").unlink()
    with pytest.raises(checkpoint.CheckpointError, match=r"version_0 has no config\.yaml, which every run"):
        fit(tmp_path, "lcfed", 1, 6, "--ckpt_path=last")


def test_a_table_that_lacks_rounds_is_named(tmp_path, ended):
    (ended / "metrics.csv").unlink()
    with pytest.warns(UserWarning, match=r"metrics\.csv lacks 5 of the 5 rounds before the checkpoint"):
        fit(tmp_path, "lcfed", 1, 6, "--ckpt_path=last")


def test_evaluation_compares_only_the_settings_that_it_uses(tmp_path):
    run = fit(tmp_path, "lcfed", 1, 1, "--trainer.precision=bf16-mixed").path
    words = arguments(tmp_path, "lcfed", 1, 2, f"--ckpt_path={run}")[1:]
    assert main(["test", *words])["test/own_split/personal/acc"] > 0
    with pytest.raises(checkpoint.CheckpointError, match="precision: the checkpoint has 'bf16-mixed'"):
        main(["fit", *words])
    for option, value in (  # on which the models after_local depend
        ("model.cluster_weight", "0.125"),
        ("model.optimizer.lr", "0.125"),
        ("data.batch_size", "3"),
        ("data.drop_last", "true"),
        ("seed_everything", "9"),
    ):
        named = {"seed_everything": "seed"}.get(option, option.removeprefix("data."))
        with pytest.raises(checkpoint.CheckpointError, match=rf"\n  {named}: the checkpoint has .*, this run"):
            main(["test", *words, f"--{option}={value}"])


def test_user_defined_tensorboard_logger_shows_no_step_twice(tmp_path):
    logger = [
        "--trainer.logger=lightning.fabric.loggers.TensorBoardLogger",
        f"--trainer.logger.root_dir={tmp_path / 'curves'}",
        "--trainer.logger.version=0",
    ]
    fit(tmp_path, "fedavg", 1, 4, *logger)
    shutil.rmtree(newest_run(tmp_path) / "checkpoints" / "round-000004.ckpt")
    fit(tmp_path, "fedavg", 1, 6, *logger, "--ckpt_path=last")
    curves = scalars(next((tmp_path / "curves").glob("*/version_0")))
    assert [step for step, _ in curves["train/loss"]] == list(range(6))
    assert [value for _, value in curves["train/loss"]] == pytest.approx(
        [float(row["train/loss"]) for row in rows(newest_run(tmp_path)) if int(row["round"]) >= 0]
    )
