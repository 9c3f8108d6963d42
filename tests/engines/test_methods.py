"""Every method gives the same federation with every engine, up to rounding. Tests of the choice of the engine."""

import json
from functools import partial

import pytest
import torch
import yaml
from lightning.fabric import Fabric
from torch import nn
from torchvision.ops import Permute

from lcfl.engines import CompiledEngine, choose_engine, make_engine
from lcfl.models import ResNet9
from lcfl.models.module import FederatedModule
from lcfl.runs import checkpoint, checkpoint_lookup
from tests.engines.networks import NETWORKS
from tests.engines.pairs import data_of
from tests.helpers.builders import blobs, blobs_module, loaded
from tests.helpers.commandline import CONFIGS
from tests.helpers.fits import fit, newest_run, newest_state, rows

METHODS = sorted(path.stem for path in (CONFIGS / "methods").glob("*.yaml"))
ENGINES = ("compiled", "stacked")
# The kinds of local update; the engines with several clients at once share their code. All others are marked slow.
QUICK = {"compiled": {"fednova", "ifca", "lcfed", "per_fedavg"}, "stacked": {"ifca", "per_fedavg"}}
UNEQUAL = ["--data.partition.init_args.sizes=[21,64]", "--model.optimizer.init_args.momentum=0.5"]


def close(one, other):
    """Returns whether tensors or numbers are equal up to rounding, or texts are equal."""
    if isinstance(one, torch.Tensor):
        return torch.allclose(one.double(), other.double(), rtol=1e-3, atol=1e-4)
    return one == other or float(one) == pytest.approx(float(other), rel=1e-3, abs=1e-4)


def engines_and_methods():
    for engine in ENGINES:
        for method in METHODS:
            marks = [] if method in QUICK[engine] else [pytest.mark.slow]
            yield pytest.param(engine, method, marks=marks)


@pytest.fixture(scope="module")
def sequential(tmp_path_factory):
    """``sequential(method)`` is the directory of three rounds with the sequential engine, which are run once."""
    made = {}

    def of(method):
        if method not in made:
            root = tmp_path_factory.mktemp(method)
            made[method] = fit(root, method, 1, 3, *UNEQUAL, "--trainer.engine=sequential").path
        return made[method]

    return of


def assert_agree(runs):
    """Checks that two runs have the same rows, server models and client models, up to rounding."""
    for one, other in zip(*map(rows, runs), strict=True):
        assert one.keys() == other.keys()
        assert [name for name in one if not close(one[name], other[name])] == []
    states = [newest_state(run) for run in runs]
    for name in ("global_model", "participated"):
        assert close(*(getattr(state, name) for state in states)), name
    # The order of two clusters may depend on the last digit.
    clients = range(states[0].num_clients)
    assert close(*(torch.stack([state.centre_of(client) for client in clients]) for state in states))
    together = [state.assignment[:, None] == state.assignment for state in states]
    assert torch.equal(*together)
    for client in states[0].clients:
        models = [state.clients[client].model for state in states]
        assert models[0] is None or close(*models)
    assert float(rows(runs[0])[-1]["train/loss"]) > 0


@pytest.mark.parametrize(("engine", "method"), list(engines_and_methods()))
def test_three_rounds_of_every_method(tmp_path, sequential, engine, method):
    runs = [sequential(method), fit(tmp_path, method, 1, 3, *UNEQUAL, f"--trainer.engine={engine}").path]
    assert_agree(runs)
    names = [json.loads((run / "summary.json").read_text())["identity"]["engine"] for run in runs]
    assert names == ["sequential", engine]


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "method"), [(engine, method) for engine in ENGINES for method in METHODS])
def test_one_step_of_every_method(tmp_path, engine, method):
    amount = yaml.safe_load((CONFIGS / f"methods/{method}.yaml").read_text())["method"]["local_update"]["init_args"]
    once = ["--method.local_update.init_args.epochs=1", "--data.batch_size=64"]
    if amount["steps"]:
        once = ["--method.local_update.init_args.steps=1"]
    words = [*UNEQUAL, *once, "--trainer.evaluate_every=1"]
    assert_agree(
        [fit(tmp_path / name, method, 1, 1, *words, f"--trainer.engine={name}").path for name in ("sequential", engine)]
    )


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_exact_meta_gradients(tmp_path, engine):
    words = [*UNEQUAL, "--method.local_update.init_args.hessian=true"]
    names = ("sequential", engine)
    assert_agree([fit(tmp_path / name, "per_fedavg", 1, 3, *words, f"--trainer.engine={name}").path for name in names])


def test_stacks_on_two_ranks_agree_with_those_on_one(tmp_path):
    """The stacks differ, so bits may differ, but nothing else. Every client has its own noise on its samples."""
    noise = ["--data.client_transforms+=GaussianNoise", "--data.client_transforms.sigma=0.5"]
    words = [*noise, "--trainer.engine=stacked"]
    assert_agree([fit(tmp_path / str(devices), "lcfed", devices, 3, *UNEQUAL, *words).path for devices in (1, 2)])


@pytest.mark.parametrize(("network", "shape"), [NETWORKS["strided"], NETWORKS["CNN"], (ResNet9, (3, 32, 32))])
@pytest.mark.parametrize("batch_size", [10, 20, 32])
def test_auto_takes_the_compiled_engine_on_a_cpu(network, shape, batch_size):
    data = data_of(shape, 8)
    data.batch_size = batch_size
    assert choose_engine("auto", FederatedModule(network), data, "cpu", "32-true").name == "compiled"


def test_a_rank_does_not_trace_the_network_again(monkeypatch):
    """A trace would copy memory that forked ranks share."""
    module, data = blobs_module(), loaded(blobs())
    chosen = choose_engine("compiled", module, data, "cpu", "32-true")
    monkeypatch.delattr("lcfl.engines.compiled.trace")
    engine = make_engine(chosen, Fabric(accelerator="cpu", devices=1), module, data)
    assert type(engine) is CompiledEngine


class Tokens(nn.Sequential):
    """Layers for each pixel."""

    def __init__(self, width, number):
        layers = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(number)]
        super().__init__(nn.Conv2d(3, width, 1), Permute([0, 2, 3, 1]), *layers, nn.Flatten(), nn.LazyLinear(4))
        self(torch.zeros(1, 3, 2, 2))


@pytest.mark.parametrize(
    ("width", "number", "engine"), [(8, 5, "compiled"), (128, 4, "compiled"), (128, 5, "sequential")]
)
def test_auto_does_not_take_the_compiled_engine_for_wide_linear_layers_of_tokens(caplog, width, number, engine):
    data, module = data_of((3, 2, 2), 8), FederatedModule(partial(Tokens, width, number), cut=None)
    assert choose_engine("auto", module, data, "cpu", "32-true").name == engine
    assert ("wide linear layers of tokens" in caplog.text) == (engine == "sequential")
    assert choose_engine("compiled", module, data, "cpu", "32-true").name == "compiled"


def test_auto_takes_the_stacked_engine_on_a_gpu_only():
    assert choose_engine("auto", blobs_module(), blobs(), "cuda", "bf16-mixed").name == "stacked"
    assert choose_engine("stacked", blobs_module(), blobs(), "cpu", "32-true").name == "stacked"


def test_auto_warns_once_why_it_takes_the_sequential_engine(caplog):
    with caplog.at_level("WARNING"):  # what Python shows of a logger without a handler
        assert choose_engine("auto", blobs_module(), blobs(), "cpu", "16-mixed").name == "sequential"
        assert choose_engine("auto", blobs_module(), blobs(), "cuda", "16-mixed").name == "sequential"
    assert (
        caplog.text.count(
            "Engine sequential, because compiled does not suit this run: it computes on a CPU, in 32-true"
        )
        == 1
    )
    assert caplog.text.count("Engine sequential, because stacked does not suit this run: 16-mixed") == 1


def test_unsuitable_and_unknown_engines_are_refused():
    with pytest.raises(ValueError, match=r"trainer\.engine: got compiled, but it computes on a CPU"):
        choose_engine("compiled", blobs_module(), blobs(), "cuda", "32-true")
    with pytest.raises(ValueError, match=r"trainer\.engine: got stacked, but 16-mixed needs a loss scale"):
        choose_engine("stacked", blobs_module(), blobs(), "cuda", "16-mixed")
    with pytest.raises(ValueError, match="got 'fast'; allowed are auto, sequential, compiled and stacked"):
        choose_engine("fast", blobs_module(), blobs(), "cpu", "32-true")


def test_a_resumed_run_keeps_its_engine_and_refuses_another(tmp_path):
    fit(tmp_path, "fedavg", 1, 2, "--trainer.engine=sequential")
    fit(tmp_path, "fedavg", 1, 3, "--ckpt_path=last")
    saved = checkpoint.read(checkpoint_lookup.newest([newest_run(tmp_path)]))
    assert (saved.identity["engine"], saved.state.round) == ("sequential", 3)
    with pytest.raises(checkpoint.CheckpointError, match="engine"):
        fit(tmp_path, "fedavg", 1, 4, "--ckpt_path=last", "--trainer.engine=compiled")
