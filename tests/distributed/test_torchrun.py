"""Ranks that are started by torchrun, as scripts or by spawning give the same bits and files as one process."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch

from lcfl.distributed import launch
from tests.helpers.bits import assert_same_state
from tests.helpers.commandline import LCFED, SYNTHETIC, lcfl
from tests.helpers.fits import newest_state
from tests.helpers.flower import free_port

pytestmark = pytest.mark.usefixtures("here")

OPTIONS = (
    *SYNTHETIC,
    *LCFED,
    "--trainer.rounds=3",
    "--trainer.clients_per_round=5",
    "--trainer.evaluate_every=0",
    "--trainer.logger=false",
    "--method.clustering.init_args.num_clusters=4",
    "--method.clustering.init_args.dimension=10",
)
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
JOB = {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "1"}
ENDLESS = ("--trainer.rounds=1000000", "--trainer.callbacks=Checkpoint", "--trainer.callbacks.every_n_rounds=1000000")
SECONDS = 300  # a process that takes longer hangs, also on a busy machine
KILLED = "forcefully exiting"  # torchrun's message about a rank that has not ended 30 s after the signal


def start_python(*words):
    """Starts Python with these words. TMPDIR is set because torchrun leaves an empty folder for logs behind."""
    pipe, environ = subprocess.PIPE, os.environ | {"TMPDIR": os.getcwd()}
    command = [sys.executable, *map(str, words)]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, env=environ)


def finish(process):
    """Returns status, standard output and standard error. If the ranks hang, torchrun is told to end them."""
    try:
        stdout, stderr = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        process.terminate()
        raise
    return process.returncode, stdout, stderr


def run_python(*words):
    """Runs Python with these words to its end and returns its standard output and standard error."""
    status, stdout, stderr = finish(start_python(*words))
    assert status == 0, stdout + stderr
    return stdout, stderr


def state_of(root):
    """Returns the last state of the only run below `root`."""
    (run,) = (Path(root) / "lcfl").iterdir()
    return newest_state(run)


@pytest.fixture
def single():
    """The root of the same run in one process."""
    lcfl("fit", *OPTIONS, "--trainer.devices=1", "--trainer.default_root_dir=one")
    return "one"


def fit_as_rank(rank, port, parent):
    """Runs one of two ranks with the environment that torchrun gives it. Its output goes to a file."""
    os.environ.update(JOB, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank))
    launch._die_with(parent)
    torch.set_num_threads(1)  # a forked process that computes with several threads may hang
    with open(f"rank{rank}.txt", "w") as file, redirect_stdout(file):
        lcfl("fit", *OPTIONS, "--trainer.default_root_dir=two")


def test_two_ranks_of_torchrun_give_the_same_bits_and_directory_as_one_process(single, deadline):
    """The ranks are forked, because imports would take seconds."""
    fork, port = multiprocessing.get_context("fork"), free_port()
    ranks = [fork.Process(target=fit_as_rank, args=(rank, port, os.getpid())) for rank in (0, 1)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert [rank.exitcode for rank in ranks] == [0, 0]
    first, second = (Path(f"rank{rank}.txt").read_text() for rank in (0, 1))
    assert "2 x cpu" in first and "majority class" in first
    assert "majority class" not in second
    assert_same_state(state_of(single), state_of("two"))


@pytest.mark.slow
def test_two_machines_give_the_same_bits_as_one_process(single):
    """Two agents of torchrun meet over the network, as in docs/howto/machines.md, but here on one machine."""
    port = free_port()
    words = ("-m", "lcfl", "fit", *OPTIONS, "--trainer.default_root_dir=two")
    agent = ("-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1", "--master_addr=127.0.0.1")
    machines = [start_python(*agent, f"--master_port={port}", f"--node_rank={number}", *words) for number in (0, 1)]
    outcomes = [finish(machine) for machine in machines]
    assert [status for status, *_ in outcomes] == [0, 0], outcomes
    first, second = (stdout for _, stdout, _ in outcomes)
    assert "2 x cpu" in first and "majority class" in first
    assert "majority class" not in second
    assert_same_state(state_of(single), state_of("two"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "words"),
    [
        (TORCHRUN, ()),
        ((), ("--trainer.devices=2", "--trainer.strategy=ddp")),
        ((), ("--trainer.devices=2", "--trainer.strategy=ddp_spawn")),
    ],
    ids=["torchrun", "ddp", "ddp_spawn"],
)
def test_ranks_that_start_python_anew_give_the_same_bits_as_one_process(single, launcher, words):
    words = ("--trainer.default_root_dir=two", *words)
    stdout, stderr = run_python(*launcher, "-m", "lcfl", "fit", *OPTIONS, *words)
    assert "2 x cpu" in stdout and stdout.count("majority class") == 1
    assert "Traceback" not in stderr
    assert_same_state(state_of(single), state_of("two"))


@pytest.mark.slow
def test_lcfl_test_runs_under_torchrun(single):
    words = ("--trainer.default_root_dir=one", "--ckpt_path=last")
    stdout, stderr = run_python(*TORCHRUN, "-m", "lcfl", "test", *OPTIONS, *words)
    assert stdout.count("majority class") == 1 and "Traceback" not in stderr
    assert len(list(Path("one/lcfl").iterdir())) == 1


BROKEN = """
import os
from lcfl.data.datasets import Synthetic
from lcfl.models import MLP

class OnlyThere(Synthetic):
    def load(self):
        if os.environ["RANK"] == "{rank}":
            raise KeyError("on purpose")
        return super().load()

class Mortal(MLP):
    steps = 0

    def forward(self, inputs):  # the compiled engine would only trace it once
        Mortal.steps += 1
        if os.environ["RANK"] == "{rank}" and Mortal.steps == 200:
            os._exit(9)
        return super().forward(inputs)
"""


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "words",
    [
        ("--data.dataset=broken.OnlyThere",),
        ("--model.network=broken.Mortal", "--model.network.in_features=16", "--trainer.engine=sequential"),
    ],
    ids=["during setup", "in a round"],
)
def test_a_rank_that_fails_ends_the_other_at_once(rank, words):
    Path("broken.py").write_text(BROKEN.format(rank=rank))
    status, stdout, stderr = finish(start_python(*TORCHRUN, "-m", "lcfl", "fit", *OPTIONS, *ENDLESS, *words))
    assert status != 0, stdout
    assert ("on purpose" in stderr) == ("broken.OnlyThere" in words[0]), stderr
    assert KILLED not in stderr


@pytest.mark.slow
def test_a_signal_to_torchrun_saves_the_last_complete_round():
    process = start_python(*TORCHRUN, "-m", "lcfl", "fit", *OPTIONS, *ENDLESS)
    table, deadline = Path("logs/lcfl/version_0/metrics.csv"), time.monotonic() + SECONDS
    while not table.is_file() or table.read_text().count("\n") < 4:
        assert process.poll() is None and time.monotonic() < deadline, finish(process)
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    status, _, stderr = finish(process)
    assert status != 0 and KILLED not in stderr
    saved = newest_state(table.parent).round
    assert saved >= 2
    assert len(table.read_text().splitlines()) == saved + 2  # a header, the warm-up round, and every complete round


@pytest.mark.parametrize(
    ("option", "named"),
    [
        ("--trainer.devices=3", ["trainer.devices: got 3", "started with 2", "auto"]),
        ("--trainer.num_nodes=2", ["trainer.num_nodes: got 2", "started with 1", "auto"]),
        ("--trainer.strategy=ddp_fork", ["trainer.strategy: got ddp_fork", "already started", "auto or ddp"]),
    ],
)
def test_options_that_disagree_with_torchrun_are_refused(monkeypatch, option, named):
    for name, value in JOB.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError) as error:
        lcfl("fit", *OPTIONS, option)
    assert not [word for word in named if word not in str(error.value)], str(error.value)
    assert not Path("logs").exists()
