"""Tests that every file in configs/ is complete, can be layered, and runs."""

import importlib
import inspect
import itertools

import pytest
import yaml

from lcfl.federation.effects import warn_of_missing_weights
from lcfl.federation.federation import Federation
from lcfl.methods.aggregation import BlendedClusterMean, GlobalMean, ServerAdam
from lcfl.methods.exchange import FullModel
from lcfl.methods.local import LocalTraining
from lcfl.methods.method import Method
from tests.helpers import clustered
from tests.helpers.builders import (
    alone,
    apfl,
    ditto,
    fedala,
    fedamp,
    fedavg,
    fedbabu,
    fedbn,
    feddyn,
    fedlc,
    fednova,
    fedper,
    fedprox,
    fedrep,
    lg_fedavg,
    linear_module,
    per_fedavg,
    scaffold,
)
from tests.helpers.commandline import (
    CONFIGS,
    DATA,
    ELSE,
    KIND_OF_METHOD,
    KINDS,
    METHODS,
    NEEDS,
    PAPERS,
    QUICKSTART,
    files,
    lcfl,
    printed,
)

EVERY = sorted(CONFIGS.rglob("*.yaml"))
# Data files of different kinds: images, images and texts with owners, rotations, sensors. All others are marked slow.
TRIED = ("cifar10", "emnist_ascfl", "femnist", "medmnist_path", "mnist_ifca", "shakespeare", "synthetic", "ucihar")

FIVE, BLENDED = LocalTraining(steps=5), BlendedClusterMean("participants", "participants", "uniform")
BASELINES = {
    "fedavg": fedavg(steps=5),
    "local": alone(steps=5),
    "fedprox": fedprox(steps=5),
    "fednova": fednova(steps=5),
    "ditto": ditto(steps=5),
    "apfl": apfl(steps=5),
    "fedala": fedala(steps=5),
    "fedamp": fedamp(steps=5),
    "fedlc": fedlc(steps=5),
    "scaffold": scaffold(steps=5),
    "feddyn": feddyn(steps=5),
    "fedadam": Method(LocalTraining(steps=5), FullModel(), GlobalMean(optimizer=ServerAdam(0.1))),
    "fedper": fedper(steps=5),
    "fedrep": fedrep(steps=5, head_steps=10),
    "fedbabu": fedbabu(steps=5),
    "fedbn": fedbn(steps=5),
    "lg_fedavg": lg_fedavg(2, steps=5),
    "per_fedavg": per_fedavg(steps=5),
    "fesem": clustered.fesem(steps=5),
    "fedgroup": clustered.fedgroup(5, 50, steps=5),
    "fl_hc": clustered.fl_hc(10, FIVE),
    "cgpfl": clustered.cgpfl(mean=BLENDED, steps=5),
    "cgpfl_prox": clustered.cgpfl_prox(mean=BLENDED, steps=5),
    "ifca": clustered.ifca(max_redraws=10, steps=5),
    "clove": clustered.clove(steps=5),
    "cfl_fixed": clustered.cfl_fixed(20, steps=5),
    "cfl": clustered.cfl(5, eps1=0.1, eps2=0.4, relative=True, min_round=20, stale_max=50),
    "pacfl": clustered.pacfl(FIVE),
}
PULLS = {"fedprox": 0.01, "feddyn": 0.1, "ditto": 0.5, "fedamp": 1.0, "cgpfl_prox": 0.5}  # mu


def pairs():
    """Returns all pairs of data and method.

    A method of each kind with the smallest data, and data of `TRIED` with FedAvg are fast. All other pairs are slow.
    """
    parameters = []
    for data, method in itertools.product(DATA, METHODS):
        fast = data.stem == "synthetic" and method.stem in KINDS
        fast = fast or (data.stem in TRIED and method.stem == "fedavg")
        marks = [] if fast else [pytest.mark.slow]
        parameters.append(pytest.param(data, method, id=f"{data.stem}-{method.stem}", marks=marks))
    return parameters


def name(path):
    return str(path.relative_to(CONFIGS).with_suffix(""))


def classes(content):
    """Yields every mapping with a class_path, at any depth."""
    if isinstance(content, dict):
        if "class_path" in content:
            yield content
        content = list(content.values())
    if isinstance(content, list):
        for item in content:
            yield from classes(item)


def test_the_tests_cover_every_file_of_the_folder():
    assert {name(path) for path in EVERY} == {name(path) for path in [QUICKSTART, *DATA, *METHODS, *PAPERS]}
    assert {"lcfed", "lcfed_plus", "fedavg", "local"} <= {path.stem for path in METHODS}


@pytest.mark.parametrize("path", EVERY, ids=name)
def test_a_file_starts_with_a_comment_and_sets_every_argument_of_its_classes(path):
    text = path.read_text()
    assert text.startswith("# ") and max(map(len, text.splitlines())) <= 128
    found = list(classes(yaml.safe_load(text)))
    assert found
    for entry in found:
        module, _, made = entry["class_path"].rpartition(".")
        allowed = set(inspect.signature(getattr(importlib.import_module(module), made)).parameters)
        given = set(entry.get("init_args", {}))
        if module.startswith("torch."):  # the arguments differ between versions of torch
            assert given >= {"lr", "momentum", "weight_decay"} and given <= allowed
        else:
            assert given == allowed, entry["class_path"]


def test_a_network_has_the_same_arguments_in_all_files_of_a_data_set():
    """Most of these files are only run by slow tests."""
    found = {}
    for path in DATA:
        content = yaml.safe_load(path.read_text())
        network, dataset = content["model"]["network"], str(content["data"]["dataset"])
        expected = found.setdefault((dataset, network["class_path"]), network["init_args"])
        assert network["init_args"] == expected, path


@pytest.mark.parametrize("path", METHODS, ids=name)
def test_a_method_sets_its_four_parts_and_no_callbacks(path):
    content = yaml.safe_load(path.read_text())
    assert set(content["method"]) == {"local_update", "exchange", "aggregation", "clustering"}
    assert "callbacks" not in content.get("trainer", {}) and set(content) <= {"trainer", "method", "model"}
    assert set(content["model"]) == {"cluster_weight", "global_weight"}


def part(entry):
    """Builds the object of a mapping with a class_path. Arguments that are empty lists keep their default."""
    if not (isinstance(entry, dict) and "class_path" in entry):
        return entry
    module, _, made = entry["class_path"].rpartition(".")
    arguments = {key: part(value) for key, value in entry.get("init_args", {}).items() if value != []}
    return getattr(importlib.import_module(module), made)(**arguments)


@pytest.mark.parametrize("method", BASELINES)
def test_a_baseline_equals_the_composition_that_other_tests_check(method):
    """The tests against numpy and those of invariants build it without the file."""
    content = yaml.safe_load((CONFIGS / f"methods/{method}.yaml").read_text())
    parts = content["method"]
    singles = [part(parts[key]) for key in ("local_update", "exchange", "aggregation")]
    assert Method(*singles, [part(entry) for entry in parts["clustering"]]) == BASELINES[method]
    assert content["model"] == {"cluster_weight": PULLS.get(method, 0.0), "global_weight": 0.0}


@pytest.mark.filterwarnings("error:model.cluster_weight")
@pytest.mark.parametrize("path", [QUICKSTART, *METHODS], ids=name)
def test_what_a_method_pulls_towards_has_a_weight_in_its_file(path):
    content = yaml.safe_load(path.read_text())
    singles = [part(content["method"][key]) for key in ("local_update", "exchange", "aggregation")]
    weights = {key: value for key, value in content["model"].items() if key.endswith("_weight")}
    warn_of_missing_weights(Method(*singles), linear_module(**weights))


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("method", KIND_OF_METHOD)
def test_the_quickstart_below_a_method_has_the_method_of_that_file(capsys, method):
    layered, expected = printed(capsys, "-c", QUICKSTART, "-c", method), yaml.safe_load(method.read_text())
    assert layered["method"] == expected["method"]
    assert layered["model"].items() >= expected["model"].items()
    assert layered["trainer"]["name"] == "quickstart"


@pytest.mark.usefixtures("here")
def test_the_quickstart_above_a_method_is_the_quickstart(capsys):
    """The quickstart names all parts of its method."""
    alone = printed(capsys, "-c", QUICKSTART)
    for kind in KINDS:
        assert printed(capsys, "-c", CONFIGS / f"methods/{kind}.yaml", "-c", QUICKSTART) == alone, kind


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(("data", "method"), pairs())
def test_data_and_method_layer_in_either_order(capsys, data, method):
    config = printed(capsys, "-c", data, "-c", method)
    assert config == printed(capsys, "-c", method, "-c", data)
    expected = yaml.safe_load(data.read_text())
    assert config["model"]["network"] == expected["model"]["network"]
    given = {key: config["data"][key] for key in expected["data"]}
    assert {**given, "dataset": None} == {**expected["data"], "dataset": None}
    assert config["data"]["dataset"]["class_path"] == expected["data"]["dataset"]["class_path"]


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(("data", "method"), pairs())
def test_fast_dev_run_of_data_with_method_needs_and_writes_no_files(tmp_path, monkeypatch, data, method):
    ran = []
    launch = Federation._launch
    monkeypatch.setattr(Federation, "_launch", lambda self, *args: ran.append(args) or launch(self, *args))
    words = [
        "--data.num_clients=12",
        "--trainer.fast_dev_run=true",
        "--trainer.devices=1",
    ]  # all are evaluated
    can_norm = "batch_norm" in yaml.safe_load(data.read_text())["model"]["network"]["init_args"]
    run = lcfl("fit", "-c", data, "-c", method, *words, *(NEEDS if can_norm else ELSE).get(method.stem, ()))
    assert len(ran) == 1 and run.state.round == 1 and int(run.state.participated.sum()) == 2
    protocol = yaml.safe_load(data.read_text())["data"]["protocols"][0]
    assert any(key.startswith(f"test/{protocol}/") for key in run.metrics)
    assert not files(tmp_path) and not run.path.exists()


@pytest.mark.usefixtures("here")
def test_clustering_beats_the_global_model_in_the_quickstart():
    run = lcfl("fit", "-c", QUICKSTART, "--trainer.rounds=40", "--trainer.devices=1", "--trainer.logger=false")
    accuracy = {
        kind: run.metrics[f"test/own_split/{kind}/acc"] for kind in ("personal", "cluster", "global", "trivial")
    }
    assert min(accuracy["personal"], accuracy["cluster"]) > 0.9
    assert max(accuracy["global"], accuracy["trivial"]) < 0.8
    assert str(run.path) == "logs/quickstart/version_0"
