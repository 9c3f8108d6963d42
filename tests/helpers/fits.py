"""Small runs by ``lcfl fit`` with a checkpoint every round, and whether two of them came out the same."""

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
from tests.helpers.commandline import CONFIGS

ROUNDS = 8
OWN = {"lg_fedavg": ("--method.exchange.global_layers=1",)}  # these networks have two, and to share both is FedAvg


def arguments(root, method="lcfed", devices=1, rounds=ROUNDS, *more):
    words = ["fit", "-c", f"{CONFIGS}/data/synthetic.yaml", "-c", f"{CONFIGS}/methods/{method}.yaml"]
    words += [f"--trainer.default_root_dir={root}", "--trainer.name=run", f"--trainer.rounds={rounds}"]
    words += ["--trainer.clients_per_round=8", "--trainer.evaluate_every=2", f"--trainer.devices={devices}"]
    words += ["--trainer.callbacks=Checkpoint", "--trainer.callbacks.every_n_rounds=1"]
    return [*words, "--trainer.enable_progress_bar=false", *OWN.get(method, ()), *more]


def main(words):
    """``lcfl`` in this process; pictures, which nobody looks at here, are not even built."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["lcfl"])  # LightningCLI warns of pytest's own arguments
        for drawing in ("_draw", "_draw_partition", "_draw_accuracies"):
            patch.setattr(Monitor, drawing, lambda self, *args: None)
        return federated_cli.main(words)


def fit(root, *args, **options):
    return main(arguments(root, *args, **options))


@pytest.fixture(scope="session")
def reference(tmp_path_factory):
    """Of a method a run by one process that nobody disturbed, and the seconds that it took; made once."""
    made = {}

    def of(method):
        if method not in made:
            begin = time.perf_counter()
            made[method] = fit(tmp_path_factory.mktemp(method), method).path, time.perf_counter() - begin
        return made[method]

    return of


@pytest.fixture
def started():
    """``started(args)``: ``lcfl <args>`` in a new process group; the leader's process number.

    Forked: an import would take seconds. What still runs when the test ends is killed.
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
    """Of the newest checkpoint in a run directory."""
    return checkpoint.read(checkpoint_lookup.newest([run])).state


def rows(run):
    """metrics.csv without its times."""
    with open(run / "metrics.csv", newline="") as file:
        return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in csv.DictReader(file)]


def scalars(run):
    """TensorBoard's scalars without times, as a reader sees them: tag -> steps and values."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(run), size_guidance={"scalars": 0})
    reader.Reload()
    tags = [tag for tag in reader.Tags()["scalars"] if not tag.startswith("time/")]
    return {tag: [(event.step, event.value) for event in reader.Scalars(tag)] for tag in tags}


def assert_same_run(left, right):
    """Models and everything else in the state, table and curves."""
    assert_same_state(newest_state(left), newest_state(right))
    assert rows(left) == rows(right)
    curves = scalars(right)
    assert len(curves) > 10
    for tag, events in curves.items():
        steps = [step for step, _ in events]
        assert len(steps) == len(set(steps)), f"{tag} has doubled steps: {steps}"
    assert scalars(left) == curves
