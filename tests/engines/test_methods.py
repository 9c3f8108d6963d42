"""Every method gives the same federation with either engine, up to rounding; and which engine a run has."""

import json

import pytest
import torch

from lcfl import checkpoint
from lcfl.engines import choose
from tests.builders import blobs, blobs_module
from tests.commandline import CONFIGS
from tests.fits import fit, newest_run, newest_state, rows

ENGINES = ("sequential", "compiled")
METHODS = sorted(path.stem for path in (CONFIGS / "methods").glob("*.yaml"))
UNEQUAL = ["--data.partition.init_args.sizes=[21,64]", "--model.optimizer.init_args.momentum=0.5"]


def close(one, other):
    """Equal up to rounding wherever there is a number; tensors, and text as it is."""
    if isinstance(one, torch.Tensor):
        return torch.allclose(one.double(), other.double(), rtol=1e-3, atol=1e-4)
    return one == other or float(one) == pytest.approx(float(other), rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_three_rounds_of_every_method(tmp_path, method):
    runs = [fit(tmp_path / name, method, 1, 3, *UNEQUAL, f"--trainer.engine={name}").path for name in ENGINES]
    for one, other in zip(*map(rows, runs), strict=True):
        assert one.keys() == other.keys()
        assert [name for name in one if not close(one[name], other[name])] == []
    states = [newest_state(run) for run in runs]
    for name in ("global_model", "participated"):
        assert close(*(getattr(state, name) for state in states)), name
    # Which of two clusters comes first may hang on a last digit.
    clients = range(states[0].num_clients)
    assert close(*(torch.stack([state.centre_of(client) for client in clients]) for state in states))
    together = [state.assignment[:, None] == state.assignment for state in states]
    assert torch.equal(*together)
    for client in states[0].clients:
        models = [state.clients[client].model for state in states]
        assert models[0] is None or close(*models)
    assert float(rows(runs[0])[-1]["train/loss"]) > 0
    assert [json.loads((run / "summary.json").read_text())["identity"]["engine"] for run in runs] == list(ENGINES)


def test_auto_takes_the_compiled_engine_where_it_can():
    assert choose("auto", blobs_module(), blobs(), "cpu", "32-true") == "compiled"


def test_auto_says_once_why_it_cannot(caplog):
    with caplog.at_level("INFO"):
        assert choose("auto", blobs_module(), blobs(), "cpu", "bf16-mixed") == "sequential"
    assert caplog.text.count("Engine sequential, because compiled is not for this: it computes in float32") == 1


def test_an_engine_that_cannot_be_used_or_does_not_exist_is_refused():
    with pytest.raises(ValueError, match=r"trainer\.engine: got compiled, but it computes in float32 on a CPU"):
        choose("compiled", blobs_module(), blobs(), "cpu", "bf16-mixed")
    with pytest.raises(ValueError, match="got 'fast'; allowed are auto, sequential, compiled"):
        choose("fast", blobs_module(), blobs(), "cpu", "32-true")


def test_a_resumed_run_keeps_its_engine_and_refuses_another(tmp_path):
    fit(tmp_path, "fedavg", 1, 2, "--trainer.engine=sequential")
    fit(tmp_path, "fedavg", 1, 3, "--ckpt_path=last")
    saved = checkpoint.read(checkpoint.newest([newest_run(tmp_path)]))
    assert (saved.identity["engine"], saved.state.round) == ("sequential", 3)
    with pytest.raises(checkpoint.CheckpointError, match="engine"):
        fit(tmp_path, "fedavg", 1, 4, "--ckpt_path=last", "--trainer.engine=compiled")
