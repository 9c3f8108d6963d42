"""A fleet of real processes, with TLS and keys: SuperLink, SuperNodes, and the app that ``lcfl fleet app`` writes."""

import time

import pytest
import torch

import lcfl
from lcfl.cli import federated_cli
from lcfl.cli.commands import fleet
from lcfl.cli.commands.fleet import write_app
from lcfl.runs import checkpoint
from tests.helpers.commandline import CONFIGS

pytest.importorskip("flwr")
from tests.helpers.flower import Federation, node_key

pytestmark = pytest.mark.slow

METHODS = ("lcfed", "fedper")
NUM_NODES, ROUNDS = 3, 4
SERVER = ("global_model", "centres", "assignment", "participated", "codes", "projection", "total_bytes", "round")
CLUSTERS = ("--method.clustering.init_args.num_clusters=2", "--method.clustering.init_args.dimension=2")


def settings(method):
    words = ["-c", str(CONFIGS / "data/synthetic.yaml"), "-c", str(CONFIGS / "methods" / f"{method}.yaml")]
    words += [f"--data.num_clients={NUM_NODES}", f"--trainer.rounds={ROUNDS}", "--trainer.clients_per_round=1.0"]
    words += ["--trainer.evaluate_every=2", "--trainer.logger=false", "--trainer.name=run", "--trainer.devices=1"]
    words += ["--trainer.callbacks=Checkpoint", "--trainer.callbacks.every_n_rounds=1"]
    return [*words, *(CLUSTERS if method == "lcfed" else ())]


@pytest.fixture(params=METHODS)
def pair(request, here):
    """Provides the app of a run, and the same run as a simulation."""
    words = settings(request.param)
    simulation = federated_cli.main(["fit", *words, "--trainer.default_root_dir=simulation"])
    write_app(here / "app", words)
    return here, simulation


@pytest.fixture
def federation(here):
    with Federation(here / "federation") as made:
        made.superlink()
        for place in range(NUM_NODES):
            made.node(f"node{place}", **own(here, place))
        yield made


def own(here, place):
    return {"data": here / "app/config.yaml", "state": here / f"state{place}", "client": place}


def assert_same(here, simulation):
    """Asserts that the only run of the fleet has the models and final metrics of the simulation."""
    (path,) = (here / "runs/run").iterdir()
    run = lcfl.load(path)
    for name in SERVER:
        a, b = getattr(run.state, name), getattr(simulation.state, name)
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, name
    assert run.metrics == simulation.metrics


def saved(here):
    """Returns the rounds after which the only run of the fleet has been saved."""
    paths = (here / "runs/run").glob("version_*/checkpoints/round-*.ckpt")
    return [checkpoint.read_manifest(path)["round"] for path in paths]


def test_nodes_with_keys_give_the_bits_of_a_simulation_and_a_stranger_is_not_let_in(pair, federation):
    here, simulation = pair
    node_key(federation.folder / "stranger.key")  # a key that nobody registers
    federation.node("stranger", **own(here, 0))
    log = federation.run_to_its_end(here / "app", root=here / "runs", **{"min-answers": 1.0})
    assert "3 of 3 clients are there" in log, log
    assert_same(here, simulation)
    words = [str(here / "app/config.yaml"), f"--app={here}/app", "--client=1", f"--state={here}/state1"]
    fleet.main(["export", *words, "--model=personal", f"--out={here}/node1.pt"])
    weights, expected = torch.load(here / "node1.pt"), simulation.model("personal", client=1).state_dict()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert federation.processes["stranger"].poll() not in (None, 0)
    assert f"{NUM_NODES} clients" in log


@pytest.mark.parametrize("seed", [0])
def test_killed_node_server_and_superlink_change_no_bit(pair, federation, seed):
    """Each is killed with SIGKILL at a random moment after a round; the run is resumed with ``ckpt-path=auto``.

    A node that is let in again before the server has seen that it was away never answers, and Flower reports this only
    when the request has expired. The deadline makes it expire within the time that is waited for a round.
    """
    here, simulation = pair
    moment = torch.Generator().manual_seed(seed)
    config = {"root": here / "runs", "min-answers": 1.0, "ckpt-path": "auto", "deadline": 120.0}

    def after(rounds):
        federation.wait(lambda: max(saved(here), default=-1) >= rounds, f"round {rounds}")
        time.sleep(4 * float(torch.rand(1, generator=moment)))

    federation.run(here / "app", **config)
    after(1)
    federation.kill("node1")
    federation.restart_node("node1", **own(here, 1))
    after(2)
    federation.kill("superlink", b"flwr-serverapp")
    federation.kill("run")
    federation.run(here / "app", **config)
    after(3)
    federation.kill("superlink")  # and the ServerApp with it, as if the machine had lost its power
    federation.kill("run")
    federation.superlink()
    federation.run_to_its_end(here / "app", **config)
    assert_same(here, simulation)
