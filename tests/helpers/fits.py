"""Small runs by ``lcfl fit`` with a checkpoint every round, and checks that two runs had the same result."""

import csv
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from lcfl.callbacks import Monitor
from lcfl.cli import federated_cli
from lcfl.runs import checkpoint, checkpoint_lookup
from tests.helpers.bits import assert_same_state
from tests.helpers.commandline import CONFIGS, NEEDS

ROUNDS = 8
# These networks have two layers, and sharing both would be FedAvg.
OWN = NEEDS | {"lg_fedavg": ("--method.exchange.global_layers=1",)}


def arguments(root, method="lcfed", devices=1, rounds=ROUNDS, *more):
    words = ["fit", "-c", f"{CONFIGS}/data/synthetic.yaml", "-c", f"{CONFIGS}/methods/{method}.yaml"]
    words += [f"--trainer.default_root_dir={root}", "--trainer.name=run", f"--trainer.rounds={rounds}"]
    words += ["--trainer.clients_per_round=8", "--trainer.evaluate_every=2", f"--trainer.devices={devices}"]
    words += ["--trainer.callbacks=Checkpoint", "--trainer.callbacks.every_n_rounds=1"]
    return [*words, "--trainer.enable_progress_bar=false", *OWN.get(method, ()), *more]


def main(words):
    """Runs ``lcfl`` in this process without building pictures, which no test looks at here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["lcfl"])  # LightningCLI warns about the arguments of pytest
        for drawing in ("_draw", "_draw_partition", "_draw_accuracies"):
            patch.setattr(Monitor, drawing, lambda self, *args: None)
        return federated_cli.main(words)


def fit(root, *args, **options):
    return main(arguments(root, *args, **options))


@pytest.fixture(scope="session")
def reference(tmp_path_factory):
    """Provides an undisturbed run of a method by one process, which is made only once, and its duration in seconds."""
    made = {}

    def of(method):
        if method not in made:
            begin = time.perf_counter()
            made[method] = fit(tmp_path_factory.mktemp(method), method).path, time.perf_counter() - begin
        return made[method]

    return of


@pytest.fixture
def started():
    """Provides ``started(args)``, which runs ``lcfl <args>`` in a new process group and returns its leader's number.

    The process is forked, because imports would take seconds. Processes that still run when the test ends are killed.
    """
    children = []

    def start(args):
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
        children.append(child)
        return child

    yield start
    for child in children:
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)


def newest_run(root):
    return max((Path(root) / "run").glob("version_*"), key=lambda path: int(path.name.removeprefix("version_")))


def newest_state(run):
    """Returns the state of the newest checkpoint in a run directory."""
    return checkpoint.read(checkpoint_lookup.newest([run])).state


def rows(run):
    """Returns the rows of metrics.csv without their times."""
    with open(run / "metrics.csv", newline="") as file:
        return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in csv.DictReader(file)]


def scalars(run):
    """Returns TensorBoard's scalars without times, as a reader sees them: tag -> steps and values."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(run), size_guidance={"scalars": 0})
    reader.Reload()
    tags = [tag for tag in reader.Tags()["scalars"] if not tag.startswith("time/")]
    return {tag: [(event.step, event.value) for event in reader.Scalars(tag)] for tag in tags}


def assert_same_run(left, right):
    """Asserts that two runs have the same models, the same rest of the state, the same table and the same curves."""
    assert_same_state(newest_state(left), newest_state(right))
    assert rows(left) == rows(right)
    curves = scalars(right)
    assert len(curves) > 10
    for tag, events in curves.items():
        steps = [step for step, _ in events]
        assert len(steps) == len(set(steps)), f"{tag} has doubled steps: {steps}"
    assert scalars(left) == curves
