"""A run that was killed, stopped or ended early and then resumed gives the bits of one that was not."""

import csv
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lcfl import checkpoint, cli

CONFIGS = Path(__file__).parent.parent / "configs"
ROUNDS = 8


def arguments(root, method="lcfed", devices=1, rounds=ROUNDS, *more):
    words = ["fit", "-c", f"{CONFIGS}/data/synthetic.yaml", "-c", f"{CONFIGS}/methods/{method}.yaml"]
    words += [f"--trainer.default_root_dir={root}", "--trainer.name=run", f"--trainer.rounds={rounds}"]
    words += ["--trainer.clients_per_round=8", "--trainer.evaluate_every=2", f"--trainer.devices={devices}"]
    words += [
        "--trainer.callbacks=Checkpoint",
        "--trainer.callbacks.every_n_rounds=1",
        "--trainer.enable_progress_bar=false",
    ]
    return [*words, *more]


def main(words):
    """``lcfl`` in this process; LightningCLI warns when pytest's own arguments are in sys.argv."""
    before, sys.argv = sys.argv, ["lcfl"]
    try:
        return cli.main(words)
    finally:
        sys.argv = before


def fit(root, *args, **kwargs):
    return main(arguments(root, *args, **kwargs))


def newest_run(root):
    return max((Path(root) / "run").glob("version_*"), key=lambda path: int(path.name.removeprefix("version_")))


def all_tensors(run):
    """Every tensor of the newest checkpoint, by name."""
    state = checkpoint.read(checkpoint.newest([run])).state
    tensors = {
        name: getattr(state, name) for name in ("initial", "global_model", "centres", "assignment", "participated")
    }
    tensors |= {"projection": state.projection, "codes": state.codes}
    tensors |= {f"client {i}": state.clients[i].model for i in state.clients}
    tensors |= {f"consumed {i}": torch.tensor(state.clients[i].consumed) for i in state.clients}
    tensors["counters"] = torch.tensor([state.round, state.total_bytes])
    return tensors


def rows(run):
    """metrics.csv without its times."""
    with open(run / "metrics.csv", newline="") as file:
        return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in csv.DictReader(file)]


def scalars(run):
    """TensorBoard's scalars without times, as a reader sees them: tag -> steps and values."""
    reader = EventAccumulator(str(run), size_guidance={"scalars": 0})
    reader.Reload()
    tags = [tag for tag in reader.Tags()["scalars"] if not tag.startswith("time/")]
    return {tag: [(event.step, event.value) for event in reader.Scalars(tag)] for tag in tags}


def test_a_tensorboard_logger_of_ones_own_shows_no_step_twice(tmp_path):
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


def assert_same_run(left, right):
    one, other = all_tensors(left), all_tensors(right)
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        if tensor is None:
            assert other[name] is None, name
        else:
            assert torch.equal(tensor, other[name]), name
    assert rows(left) == rows(right)
    for tag, events in scalars(right).items():
        steps = [step for step, _ in events]
        assert len(steps) == len(set(steps)), f"{tag} has doubled steps: {steps}"
    assert scalars(left) == scalars(right)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """Runs that nobody disturbed, by method, and how long each took in seconds."""
    made = {}

    def of(method):
        if method not in made:
            begin = time.perf_counter()
            made[method] = fit(tmp_path_factory.mktemp(method), method).path, time.perf_counter() - begin
        return made[method]

    return of


@pytest.mark.parametrize("method", ["lcfed", "lcfed_plus", "fedavg", "local"])
@pytest.mark.parametrize("first", [1, 5])
def test_resumed_run_has_the_bits_of_one_in_one_go(tmp_path, reference, method, first):
    fit(tmp_path, method, rounds=first)
    run = fit(tmp_path, method, 1, ROUNDS, "--ckpt_path=last")
    assert run.path == newest_run(tmp_path)
    assert run.path.name == "version_0"
    assert_same_run(reference(method)[0], run.path)
    assert run.metrics.items() >= {"test/own_split/majority/acc": 0.5}.items()


@pytest.mark.parametrize("local", ["steps: 5, epochs: null", "steps: null, epochs: 1"])
def test_a_run_without_short_last_batches_resumes_to_the_same_bits(tmp_path, local):
    """Clients have 54 samples: 5 batches of 10 a pass, so steps cross the end of a pass in any round."""
    words = ("--data.drop_last=true", "-c", f"method: {{local_update: {{init_args: {{{local}}}}}}}")
    whole = fit(tmp_path / "whole", "fedavg", 1, 4, *words).path
    fit(tmp_path / "parts", "fedavg", 1, 3, *words)
    parts = fit(tmp_path / "parts", "fedavg", 1, 4, *words, "--ckpt_path=last").path
    assert_same_run(whole, parts)
    with pytest.raises(AssertionError):
        assert_same_run(whole, fit(tmp_path / "kept", "fedavg", 1, 4, *words[1:]).path)


def started(args):
    """``lcfl <args>`` in a new process group; the leader's process number. Forked: an import would take seconds."""
    child = os.fork()
    if child == 0:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        status = 1
        try:
            main(args)
            status = 0
        except SystemExit as leaving:
            status = leaving.code
        finally:
            os._exit(status)
    return child


def killed_fit(delay, args):
    """Starts ``lcfl fit`` and kills all its processes after `delay` seconds; whether it was still running."""
    child = started(args)
    time.sleep(delay)
    ended, status = os.waitpid(child, os.WNOHANG)
    if ended:
        assert status == 0, "the run ended with an error before it was killed"
        return False
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return True


def killed_and_resumed(root, reference, moment):
    """One trial: a run killed at a random moment, up to three times, resumed with another number of ranks."""
    random.seed(moment)
    path, duration = reference("lcfed")
    ranks = [1, 2]
    for _ in range(random.randint(1, 3)):
        random.shuffle(ranks)
        resume = ["--ckpt_path=last"] if list(Path(root).glob("run/*/checkpoints/round-*.ckpt")) else []
        killed_fit(random.uniform(0.1, 1.2) * duration, arguments(root, "lcfed", ranks[0], ROUNDS, *resume))
    resume = ["--ckpt_path=last"] if list(Path(root).glob("run/*/checkpoints/round-*.ckpt")) else []
    run = fit(root, "lcfed", ranks[1], ROUNDS, *resume)
    assert_same_run(path, run.path)


@pytest.mark.parametrize("moment", range(3))
def test_killed_run_goes_on_as_if_nothing_had_happened(tmp_path, reference, moment):
    killed_and_resumed(tmp_path, reference, moment)


@pytest.mark.slow
@pytest.mark.parametrize("moment", range(3, 33))
def test_killed_at_any_of_thirty_moments(tmp_path, reference, moment):
    killed_and_resumed(tmp_path, reference, moment)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("devices", [1, 2])
def test_signal_saves_the_last_complete_round_and_resumes(tmp_path, reference, number, devices):
    more = ["--trainer.callbacks.every_n_rounds=1000000"]
    child = started(arguments(tmp_path, "lcfed", devices, 1_000_000, *more))
    table = tmp_path / "run" / "version_0" / "metrics.csv"
    deadline = time.monotonic() + 60
    while not table.is_file() or table.read_text().count("\n") < 4:
        assert time.monotonic() < deadline, "the run did not get to its third round"
        time.sleep(0.01)
    os.kill(child, number)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 128 + number
    saved = checkpoint.read(checkpoint.newest([tmp_path / "run" / "version_0"])).state.round
    assert saved >= 2
    assert len(table.read_text().splitlines()) == saved + 2  # a head, the opening round, and every complete round
    run = fit(tmp_path, "lcfed", 1, saved + 2, "--ckpt_path=last")
    assert run.state.round == saved + 2


def test_another_configuration_is_refused_and_named(tmp_path):
    fit(tmp_path, rounds=1)
    with pytest.raises(
        checkpoint.CheckpointError, match=r"method.clustering.0.num_clusters: the checkpoint has 10.* 3"
    ):
        fit(tmp_path, "lcfed", 1, 2, "--ckpt_path=last", "--method.clustering.num_clusters=3")
    with pytest.raises(checkpoint.CheckpointError, match="seed: the checkpoint has 0, this run 5"):
        fit(tmp_path, "lcfed", 1, 2, "--ckpt_path=last", "--seed_everything=5")
    with pytest.raises(checkpoint.CheckpointError, match="partition"):
        fit(tmp_path, "lcfed", 1, 2, "--ckpt_path=last", "--data.seed=5")
    with pytest.raises(checkpoint.CheckpointError, match="drop_last: the checkpoint has False, this run True"):
        fit(tmp_path, "lcfed", 1, 2, "--ckpt_path=last", "--data.drop_last=true")


def test_damaged_newest_checkpoint_is_passed_over(tmp_path, reference):
    run = fit(tmp_path, rounds=5).path
    state = run / "checkpoints" / "round-000005.ckpt" / "state.pt"
    content = bytearray(state.read_bytes())
    content[len(content) // 2] ^= 1
    state.write_bytes(content)
    with pytest.warns(UserWarning, match="passed over.*does not match its SHA-256"):
        resumed = fit(tmp_path, "lcfed", 1, ROUNDS, "--ckpt_path=last")
    assert_same_run(reference("lcfed")[0], resumed.path)


def test_missing_checkpoint_says_where_it_looked(tmp_path):
    with pytest.raises(checkpoint.CheckpointError, match="no run of that name"):
        fit(tmp_path, "lcfed", 1, 1, "--ckpt_path=last")
    with pytest.raises(checkpoint.CheckpointError, match="elsewhere: there is no checkpoint"):
        fit(tmp_path, "lcfed", 1, 1, f"--ckpt_path={tmp_path}/elsewhere")


def test_checkpoint_by_path_goes_on_in_its_own_run(tmp_path, reference):
    first = fit(tmp_path, rounds=3).path
    fit(tmp_path, rounds=1)  # a newer run of the same name
    resumed = fit(tmp_path, "lcfed", 1, ROUNDS, f"--ckpt_path={first}/checkpoints/round-000003.ckpt")
    assert resumed.path.resolve() == first.resolve()
    assert_same_run(reference("lcfed")[0], resumed.path)


def test_second_writer_of_a_run_is_refused(tmp_path):
    from lcfl.run import RunDirectory

    path = fit(tmp_path, rounds=1).path
    holder = RunDirectory(path)
    try:
        with pytest.raises(ValueError, match="another process is writing this run"):
            fit(tmp_path, "lcfed", 1, 2, "--ckpt_path=last")
    finally:
        holder.close()


def test_going_on_from_an_older_checkpoint_abandons_the_later_ones(tmp_path, reference):
    keep = ["--trainer.callbacks.keep_last=null"]
    run = fit(tmp_path, "lcfed", 1, 6, *keep).path
    fit(tmp_path, "lcfed", 1, 4, *keep, f"--ckpt_path={run}/checkpoints/round-000003.ckpt")
    assert sorted(path.name for path in (run / "checkpoints").glob("round-*")) == [
        f"round-{number:06d}.ckpt" for number in range(5)
    ]
    resumed = fit(tmp_path, "lcfed", 1, ROUNDS, "--ckpt_path=last")
    assert_same_run(reference("lcfed")[0], resumed.path)


def test_checkpoint_outside_its_run_is_refused_and_nothing_written(tmp_path):
    run = fit(tmp_path, rounds=1).path
    moved = tmp_path / "elsewhere" / "round-000001.ckpt"
    shutil.copytree(run / "checkpoints" / "round-000001.ckpt", moved)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(checkpoint.CheckpointError, match="lies outside a run directory"):
        fit(tmp_path, "lcfed", 1, 2, f"--ckpt_path={moved}")
    assert sorted(tmp_path.rglob("*")) == before


def test_run_directory_stands_for_its_newest_checkpoint(tmp_path):
    run = fit(tmp_path, rounds=2).path
    assert checkpoint.find(str(run), tmp_path, "another") == run / "checkpoints" / "round-000002.ckpt"


def test_evaluation_asks_only_for_what_it_uses(tmp_path):
    run = fit(tmp_path, "lcfed", 1, 2, "--trainer.precision=bf16-mixed").path
    words = arguments(tmp_path, "lcfed", 1, 2, f"--ckpt_path={run}")[1:]
    assert main(["test", *words])["test/own_split/personal/acc"] > 0
    with pytest.raises(checkpoint.CheckpointError, match="precision: the checkpoint has 'bf16-mixed'"):
        main(["fit", *words])
    with pytest.raises(checkpoint.CheckpointError, match=r"model\.cluster_weight"):
        main(["test", *words, "--model.cluster_weight=0.125"])
