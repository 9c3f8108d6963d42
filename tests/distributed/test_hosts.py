"""Runs on several hosts that torchrun starts as in docs/howto/machines.md, also if one of them is lost."""

import os
import re
import sys
import time
from pathlib import Path

import pytest

from lcfl.distributed.connections import LINK_TIMEOUT
from tests.helpers.fits import ROUNDS, arguments, assert_same_run, main, newest_run
from tests.helpers.hosts import hosts  # noqa: F401 - fixture

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("here")]

SECONDS = 300  # a process that takes longer hangs, also on a busy machine
AT_ONCE, SILENT = 30, LINK_TIMEOUT + 30  # seconds until all have ended: if the system tells them, and if not
FIXED = "--master_addr=first", "--master_port=29500"
RESTARTED = "--rdzv_backend=c10d", "--rdzv_endpoint=first:29500", "--rdzv_id=job", "--max-restarts=3"
SENT = ROUNDS * 4 * 808 * 4  # bytes of the models of 8 rounds and 4 clients

# At its 80th step, in the middle of a round, a rank waits or kills itself, but only once.
HALTING = """
import os, signal, time
from pathlib import Path
from lcfl.models import MLP

class Halting(MLP):
    steps = 0

    def forward(self, inputs):  # the compiled engine would only trace it once
        Halting.steps += 1
        if Halting.steps == 80:
            halt(Path("halts-" + os.environ.get("RANK", "")))
        return super().forward(inputs)

def halt(file):
    if file.is_file():
        how = file.read_text()
        file.unlink()
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        Path("halted").touch()
        while not Path("go").exists():
            time.sleep(0.01)
"""
NETWORK = "--model.network=halting.Halting", "--model.network.in_features=16", "--model.network.num_classes=8"


def words(root, devices, *more):
    return arguments(root, "lcfed", devices, ROUNDS, *NETWORK, "--trainer.engine=sequential", *more)


@pytest.fixture
def single():
    """The directory of the same run in one process."""
    Path("halting.py").write_text(HALTING)
    return main(words("one", 1)).path


class Job:
    """An agent of torchrun on each host, whose output goes to a file."""

    def __init__(self, made, *more, agent=FIXED, per_host=1, nodes=None):
        self.begin = time.monotonic()
        self.files = {name: Path(f"{name}.txt") for name in made.names}
        self.agents = {}
        environ = os.environ | {"TMPDIR": os.getcwd(), "OMP_NUM_THREADS": "1", "LCFL_DEBUG": ""}
        if agent == RESTARTED:
            environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        for number, name in enumerate(made.names):
            torchrun = [f"--nnodes={nodes or len(made.names)}", f"--nproc_per_node={per_host}", *agent]
            torchrun += [f"--node_rank={number}"] * (agent == FIXED)
            command = [sys.executable, "-m", "torch.distributed.run", *torchrun, "-m", "lcfl"]
            with self.files[name].open("w") as file:
                command += words("two", "auto", *more)
                self.agents[name] = made.start(name, *command, stdout=file, stderr=file, env=environ)

    def wait_for(self, path):
        """Waits until a rank has made a file, and starts the clock of `end`."""
        while not Path(path).exists():
            assert all(agent.poll() is None for agent in self.agents.values()), self.said()
            assert time.monotonic() < self.begin + SECONDS, self.said()
            time.sleep(0.01)
        self.begin = time.monotonic()

    def end(self, but=()):
        """Waits for all agents; returns their statuses and the seconds that they took."""
        rest = [agent for name, agent in self.agents.items() if name not in but]
        statuses = [agent.wait(max(0.1, self.begin + SECONDS - time.monotonic())) for agent in rest]
        return statuses, time.monotonic() - self.begin

    def said(self):
        return {name: file.read_text() for name, file in self.files.items()}

    def errors(self, name):
        """Returns lcfl's lines about errors on a host. A traceback is only that of torchrun itself."""
        text = self.files[name].read_text()
        before, _, after = text.partition("Traceback")
        assert not after or "ChildFailedError" in after, text
        return re.findall(r"lcfl: error: (.+)", before)


def complete(made, *more, **options):
    """Runs a job to its end and returns the run directory, of which there is only one."""
    job = Job(made, *more, **options)
    statuses, _ = job.end()
    assert not any(statuses), job.said()
    (run,) = Path("two/run").iterdir()
    return run


@pytest.mark.parametrize("number", [2, 4])
def test_hosts_give_the_same_bits_as_one_process(single, hosts, number):  # noqa: F811
    made = hosts(number)
    assert_same_run(single, complete(made))
    received, sent = made.transferred("second")
    assert min(received, sent) > SENT * 2 / number


def test_delay_and_loss_change_no_bit(single, hosts):  # noqa: F811
    assert_same_run(single, complete(hosts(2, delay=0.02, loss=0.01)))


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("how", ["killed", "unplugged"])
def test_if_a_host_is_lost_all_end_and_the_run_is_resumed(single, hosts, how, victim):  # noqa: F811
    made = hosts(2)
    lost, other = made.names[victim], made.names[1 - victim]
    Path("halts-1").write_text("waits")  # rank 0 then waits for rank 1
    job = Job(made)
    job.wait_for("halted")
    if how == "killed":
        made.kill(lost)
    else:
        made.unplug(lost)
    Path("go").touch()
    statuses, seconds = job.end()
    assert all(statuses) and seconds < (AT_ONCE if how == "killed" else SILENT), job.said()
    (line,) = job.errors(other)
    assert re.match(rf"rank {victim} was lost, or the link to it \(.+\)\. .* can be resumed", line), line
    if how == "unplugged":
        (line,) = job.errors(lost)
        assert line.startswith(f"rank {1 - victim} was lost, or the link to it"), line
    assert_same_run(single, complete(hosts(2), "--ckpt_path=last"))


def test_a_cable_that_is_soon_back_is_no_error(single, hosts):  # noqa: F811
    made = hosts(2)
    Path("halts-1").write_text("waits")
    job = Job(made)
    job.wait_for("halted")
    made.unplug("second")
    Path("go").touch()
    time.sleep(10)
    made.plug("second")
    statuses, _ = job.end()
    assert not any(statuses), job.said()
    assert_same_run(single, newest_run("two"))


SENDING = """
import sys
import torch, torch.distributed as dist
from lcfl.distributed.connections import NetworkConnection, open_files, watch_links

rank, sender = map(int, sys.argv[1:])
before = open_files()
dist.init_process_group("gloo", "tcp://first:29500", rank=rank, world_size=2)
watch_links(open_files() - before)
link = NetworkConnection(1 - rank, dist.group.WORLD)
link.send(torch.zeros(10**8)) if rank == sender else link.receive()
"""


@pytest.mark.parametrize("sender", [0, 1])
def test_a_message_that_is_cut_off_ends_its_other_end(hosts, sender):  # noqa: F811
    Path("sending.py").write_text(SENDING)
    made = hosts(2, rate=1e8)  # the message would take half a minute
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    script, files = (sys.executable, "sending.py"), {name: Path(f"{name}.txt") for name in made.names}
    ends = []
    for rank, name in enumerate(made.names):
        with files[name].open("w") as file:
            ends.append(made.start(name, *script, rank, sender, stderr=file, env=environ))
    begin = time.monotonic()
    while made.transferred(made.names[1 - sender])[0] < 10**7:
        assert time.monotonic() < begin + SECONDS, [file.read_text() for file in files.values()]
        time.sleep(0.01)
    begin = time.monotonic()
    made.kill("second")
    assert ends[0].wait(SECONDS) == 1 and time.monotonic() < begin + AT_ONCE
    said = files["first"].read_text()
    assert "lcfl: error: a rank was lost, or the link to it, while this one waited for rank 1." in said
    assert "Traceback" not in said


@pytest.mark.parametrize("rank", range(4))
def test_torchrun_resumes_the_run_if_a_rank_is_killed(single, hosts, rank):  # noqa: F811
    Path(f"halts-{rank}").write_text("killed")
    run = complete(hosts(2), "--ckpt_path=auto", agent=RESTARTED, per_host=2)
    assert not Path(f"halts-{rank}").exists()
    assert_same_run(single, run)


def test_the_hosts_that_are_left_can_complete_the_run(single, hosts):  # noqa: F811
    made = hosts(2)
    Path("halts-1").write_text("waits")
    job = Job(made, "--ckpt_path=auto", agent=RESTARTED, nodes="1:2")
    job.wait_for("halted")
    made.kill("second")
    assert job.end(but=["second"])[0] == [0], job.said()
    assert_same_run(single, newest_run("two"))
