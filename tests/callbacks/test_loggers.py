"""What loggers receive of a run: its configuration, its rounds, its figures, and how it ended."""

import csv
import multiprocessing
import os
import signal
import time

import pytest
from lightning.fabric.loggers import CSVLogger, TensorBoardLogger
from lightning.fabric.loggers.logger import Logger
from tensorboard.summary.writer.record_writer import RecordWriter

from lcfl import Callback, Federation
from lcfl.callbacks import Checkpoint, LabelSimilarity
from lcfl.data.datasets import Synthetic
from lcfl.data.partition import IID
from tests.helpers.builders import blobs, blobs_module, fedavg
from tests.helpers.fits import scalars


class Recorder(Logger):
    """Records what it receives."""

    name, version = "told", 0

    def __init__(self):
        self.words = []

    def log_hyperparams(self, params):
        self.params = params
        self.words.append(("configuration", params["seed"], params["model"]["optimizer"]["lr"]))

    def log_metrics(self, metrics, step=None):
        self.last = metrics
        self.words.append(step)

    def finalize(self, status):
        self.words.append(status)


class Fails(Callback):
    def on_aggregated(self, state):
        if state.round == 2:
            raise ArithmeticError("on purpose")


class Stops(Callback):
    def on_round_start(self, state):
        if state.round == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def fit(root, loggers, *callbacks, **arguments):
    federation = Federation(
        3,
        accelerator="cpu",
        devices=1,
        evaluate_every=0,
        enable_progress_bar=False,
        logger=loggers,
        callbacks=list(callbacks),
        default_root_dir=root,
        seed=4,
    )
    return federation.fit(blobs_module(lr=0.05), blobs(), fedavg(), **arguments)


class Broken(Recorder):
    """Fails when it is finalized."""

    def finalize(self, status):
        raise OSError("connection lost")


def test_failing_finalize_hides_no_error_and_skips_no_other_logger(tmp_path):
    recorder = Recorder()
    with pytest.raises(ArithmeticError, match="on purpose") as raised:
        fit(tmp_path, [Broken(), recorder], Fails())
    assert recorder.words[-1] == "failed" and raised.value.__notes__ == ["Broken.finalize: connection lost"]


class Offline(Recorder):
    """Fails whenever it writes."""

    def log_metrics(self, metrics, step=None):
        raise OSError("connection lost")

    def save(self):
        raise OSError("connection lost")


def test_a_failing_logger_ends_no_run_and_costs_no_checkpoint(tmp_path):
    recorder = Recorder()
    with pytest.warns(UserWarning, match=r"Offline\.log_metrics failed after 1 rounds \(OSError: connection lost\)"):
        run = fit(tmp_path, [Offline(), recorder], Checkpoint(every_n_rounds=1))
    assert recorder.words[-2:] == [3, "success"]
    assert (run.path / "checkpoints" / "round-000003.ckpt").is_dir()


class Writer(Recorder):
    """Has a writer of histograms whose disk is full."""

    @property
    def experiment(self):
        return self

    def add_histogram(self, *arguments, **options):
        raise OSError("no space left")


def test_a_logger_that_cannot_write_histograms_ends_no_run(tmp_path):
    writer = Writer()
    with pytest.warns(UserWarning, match=r"Writer\.add_histogram failed after 3 rounds \(OSError: no space left\)"):
        fit(tmp_path, [writer])
    assert writer.words[-2:] == [3, "success"]


FIRST = ("configuration", 4, 0.05)


def test_logger_receives_a_complete_run(tmp_path):
    logger = Recorder()
    run = fit(tmp_path, logger)
    assert logger.words == [FIRST, 0, 1, 2, 3, "success"]
    assert logger.last == run.metrics
    assert logger.params["run"] == "lcfl/version_0" and logger.params["data"]["dataset"]["class"] == "Synthetic"
    assert logger.params["final_models"] == ["global", "after_local"] and logger.params["evaluate_clients"] == 12


def test_a_run_without_any_evaluated_sample_is_complete(tmp_path, capsys):
    logger, data = Recorder(), blobs(dataset=Synthetic(samples_per_class=2), partition=IID())
    federation = Federation(1, evaluate_clients=1, devices=1, logger=[logger], default_root_dir=tmp_path)
    with pytest.warns(UserWarning, match="none of the evaluated clients has samples"):
        run = federation.fit(blobs_module(), data, fedavg())
    assert (run.path / "summary.json").is_file() and logger.words[-1] == "success"
    assert "stopped" not in capsys.readouterr().out


def test_logger_receives_a_stopped_run_and_its_resumption(tmp_path):
    logger = Recorder()
    assert fit(tmp_path, logger, Stops()).signal == signal.SIGTERM
    assert logger.words == [FIRST, 0, 1, "failed"]
    fit(tmp_path, logger, ckpt_path="last")
    assert logger.words == [FIRST, 0, 1, "failed", 2, 3, "success"]


def test_failed_run_writes_the_rounds_that_a_logger_buffers(tmp_path):
    recorder, buffered = Recorder(), CSVLogger(tmp_path / "curves")
    with pytest.raises(ArithmeticError, match="on purpose"):
        fit(tmp_path, [recorder, buffered], Fails())
    assert recorder.words == [FIRST, 0, 1, "failed"]
    with open(os.path.join(buffered.log_dir, "metrics.csv")) as file:
        assert [row["step"] for row in csv.DictReader(file)] == ["0", "1"]


def test_tensorboard_has_all_rounds_of_a_checkpoint_before_the_checkpoint_exists(tmp_path, monkeypatch):
    class Reads(Callback):
        def on_checkpoint(self, server, state):
            steps.append([step for step, _ in scalars(server.run_dir)["train/loss"]])

    def write(self, data, fast=RecordWriter.write):
        time.sleep(0.01)  # as on a busy disk
        fast(self, data)

    steps = []
    monkeypatch.setattr(RecordWriter, "write", write)
    fit(tmp_path, True, Checkpoint(every_n_rounds=1), Reads())
    assert steps == [[0], [0, 1], [0, 1, 2]]


def test_user_defined_tensorboard_logger_has_the_configuration(tmp_path):
    fit(tmp_path, TensorBoardLogger(tmp_path / "curves"))
    events = b"".join(path.read_bytes() for path in (tmp_path / "curves").rglob("events.*"))
    assert b"model/optimizer/lr" in events and b"hp_metric" in events


def test_tensorboard_of_the_run_directory_has_hparams_and_curves_of_metrics_only(tmp_path):
    run = fit(tmp_path, True)
    events = b"".join(path.read_bytes() for path in run.path.glob("events.*"))
    assert b"train/loss" in events and b"hp_metric" not in events
    assert b"_hparams_/session_start_info" in events and b"model/optimizer/lr" in events
    assert b"config/text_summary" in events and b"```yaml" in events


class Mlflow(Recorder):
    """Takes files, as Lightning's MLFlowLogger does through ``MlflowClient.log_artifact``."""

    run_id = "r"

    def __init__(self):
        super().__init__()
        self.experiment, self.files = self, set()

    def log_artifact(self, run_id, local_path, artifact_path=None):
        assert run_id == "r" and os.path.getsize(local_path) > 0
        self.files.add((artifact_path, os.path.basename(local_path)))

    def log_figure(self, run_id, figure, artifact_file):
        raise AssertionError("takes the files in place of figures")


class Wandb(Recorder):
    """Takes pictures, as Lightning's WandbLogger does, and must be finished."""

    def __init__(self):
        super().__init__()
        self.experiment, self.pictures = self, {}

    def log_image(self, key, images, step=None):
        assert isinstance(images, list) and all(hasattr(image, "savefig") for image in images)
        self.pictures[key] = step

    def finish(self, exit_code=None):
        self.words.append(exit_code)


def test_pictures_and_configuration_reach_each_logger_in_its_own_way(tmp_path, pictures):
    mlflow, wandb = Mlflow(), Wandb()
    run = fit(tmp_path, [mlflow, wandb, Recorder()], LabelSimilarity())
    drawn = {path.name for path in (run.path / "figures").iterdir()}
    assert "label_similarity.png" in drawn and len(drawn) == 4
    assert mlflow.files == {(None, "config.yaml"), *(("figures", name) for name in drawn)}
    steps = {f"figures/{os.path.splitext(name)[0]}": 0 if name == "partition.png" else 2 for name in drawn}
    assert wandb.pictures == steps
    assert wandb.words == [FIRST, 0, 1, 2, 3, "success"]  # in this process W&B finishes when Python exits


def test_a_logger_is_finished_in_a_rank_that_another_process_started(tmp_path, monkeypatch):
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: "as in a rank")
    logger = Wandb()
    fit(tmp_path, logger)
    assert logger.words[-2:] == ["success", 0]
    with pytest.raises(ArithmeticError, match="on purpose"):
        fit(tmp_path, logger, Fails())
    assert logger.words[-2:] == ["failed", 1]
