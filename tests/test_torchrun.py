"""Ranks that are started anew, by torchrun, as scripts or spawned: the bits and the files of one process."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lcfl import checkpoint
from tests.commandline import LCFED, SYNTHETIC, here, lcfl  # noqa: F401

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


def started(*words):
    """Runs Python with these words to its end; what it printed on standard output and on standard error."""
    done = subprocess.run(
        [sys.executable, *map(str, words)], capture_output=True, text=True, timeout=110, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, done.stderr


def tensors(root):
    """The tensors of the last checkpoint of the only run below `root`, by name."""
    (run,) = (Path(root) / "lcfl").iterdir()
    state = checkpoint.read(checkpoint.newest([run])).state
    found = {f"client {client}": state.clients[client].model for client in state.clients}
    names = ("initial", "centres", "global_model", "assignment", "participated", "projection", "codes")
    return found | {name: getattr(state, name) for name in names}


def assert_equal_bits(root, other):
    ours, theirs = tensors(root), tensors(other)
    assert list(ours) == list(theirs) and len(ours) > 10
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


@pytest.fixture
def single():
    """The root of the same run by one process."""
    lcfl("fit", *OPTIONS, "--trainer.devices=1", "--trainer.default_root_dir=one")
    return "one"


def test_two_processes_of_torchrun_give_the_bits_and_the_directory_of_one(single):
    shown, said = started(*TORCHRUN, "-m", "lcfl", "fit", *OPTIONS, "--trainer.default_root_dir=two")
    assert "2 x cpu" in shown and shown.count("majority class") == 1
    assert "Traceback" not in said
    assert_equal_bits(single, "two")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "ddp_spawn"])
def test_scripts_and_spawned_ranks_give_the_bits_of_one(single, strategy):
    words = ("--trainer.default_root_dir=two", "--trainer.devices=2", f"--trainer.strategy={strategy}")
    shown, said = started("-m", "lcfl", "fit", *OPTIONS, *words)
    assert "2 x cpu" in shown and shown.count("majority class") == 1
    assert "Traceback" not in said
    assert_equal_bits(single, "two")


@pytest.mark.slow
def test_torchrun_evaluates_too(single):
    words = ("--trainer.default_root_dir=one", "--ckpt_path=last")
    shown, said = started(*TORCHRUN, "-m", "lcfl", "test", *OPTIONS, *words)
    assert shown.count("majority class") == 1 and "Traceback" not in said
    assert len(list(Path("one/lcfl").iterdir())) == 1


@pytest.mark.parametrize(
    ("option", "named"),
    [
        ("--trainer.devices=3", ["trainer.devices: got 3", "started with 2", "auto"]),
        ("--trainer.num_nodes=2", ["trainer.num_nodes: got 2", "started with 1", "auto"]),
        ("--trainer.strategy=ddp_fork", ["trainer.strategy: got ddp_fork", "already started", "auto or ddp"]),
    ],
)
def test_options_that_disagree_with_torchrun_are_refused(monkeypatch, option, named):
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError) as error:
        lcfl("fit", *OPTIONS, option)
    assert not [word for word in named if word not in str(error.value)], str(error.value)
    assert not Path("logs").exists()
