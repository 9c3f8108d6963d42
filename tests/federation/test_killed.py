"""A run that was killed at any moment, or stopped by a signal, resumes as if nothing had happened."""

import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.helpers.fits import ROUNDS, arguments, assert_same_run, fit, newest_state


def killed_fit(started, delay, args):
    """Starts ``lcfl fit`` and kills all its processes after `delay` seconds, if they are still running."""
    child = started(args)
    time.sleep(delay)
    ended, status = os.waitpid(child, os.WNOHANG)
    if ended:
        assert status == 0, "the run ended with an error before it was killed"
    else:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)


def resume(root):
    """Returns the option that resumes a run, if there is a checkpoint to resume from."""
    return ["--ckpt_path=last"] if list(Path(root).glob("run/*/checkpoints/round-*.ckpt")) else []


@pytest.mark.parametrize("moment", [0, *(pytest.param(moment, marks=pytest.mark.slow) for moment in range(1, 33))])
def test_killed_run_resumes_as_if_nothing_had_happened(tmp_path, reference, started, moment):
    """The run is killed at random moments, up to three times, and resumed with another number of ranks."""
    random.seed(moment)
    path, duration = reference("lcfed")
    ranks = [1, 2]
    for _ in range(random.randint(1, 3)):
        random.shuffle(ranks)
        args = arguments(tmp_path, "lcfed", ranks[0], ROUNDS, *resume(tmp_path))
        killed_fit(started, random.uniform(0.1, 1.2) * duration, args)
    run = fit(tmp_path, "lcfed", ranks[1], ROUNDS, *resume(tmp_path))
    assert_same_run(path, run.path)


@pytest.mark.parametrize(
    ("devices", "number"),
    [
        (1, signal.SIGINT),
        (2, signal.SIGTERM),
        pytest.param(1, signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(2, signal.SIGINT, marks=pytest.mark.slow),
    ],
)
def test_signal_saves_the_last_complete_round_and_resumes(tmp_path, started, devices, number):
    more = ["--trainer.callbacks.every_n_rounds=1000000"]
    child = started(arguments(tmp_path, "lcfed", devices, 1_000_000, *more))
    table = tmp_path / "run" / "version_0" / "metrics.csv"
    deadline = time.monotonic() + 300
    while not table.is_file() or table.read_text().count("\n") < 4:
        assert time.monotonic() < deadline, "the run did not get to its third round"
        assert os.waitpid(child, os.WNOHANG) == (0, 0), "the run ended before its third round"
        time.sleep(0.01)
    os.kill(child, number)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 128 + number
    saved = newest_state(tmp_path / "run" / "version_0").round
    assert saved >= 2
    assert len(table.read_text().splitlines()) == saved + 2  # a header, the warm-up round, and every complete round
    run = fit(tmp_path, "lcfed", 1, saved + 2, "--ckpt_path=last")
    assert run.state.round == saved + 2
