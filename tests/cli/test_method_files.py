"""Tests `lcfl.read_method`, which reads a method from its configuration file."""

import numpy as np
import pytest
import yaml

import lcfl as package
from lcfl.cli.federated_cli import instantiate
from lcfl.runs.identity import describe
from tests.helpers.commandline import KIND_OF_METHOD, METHODS

NETWORK = {"class_path": "lcfl.models.MLP", "init_args": {"in_features": 16, "num_classes": 8}}


@pytest.mark.parametrize("path", KIND_OF_METHOD)
def test_a_method_is_the_one_that_the_command_line_builds(path, tmp_path):
    content = yaml.safe_load(path.read_text())
    content["model"] = {"class_path": "lcfl.FederatedModule", "init_args": {"network": NETWORK, **content["model"]}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(content))
    module, expected = instantiate(tmp_path / "config.yaml")
    method, weights = package.read_method(path.stem)
    assert describe(method) == describe(expected)
    assert weights == {"cluster_weight": module.cluster_weight, "global_weight": module.global_weight}


def test_options_replace_the_values_in_the_file():
    options = {
        "method.clustering.0.num_clusters": np.int64(3),
        "method.local_update.steps": None,
        "method.local_update.epochs": 2,
        "method.exchange.transforms": [{"class_path": "lcfl.LowRankCompression", "init_args": {"energy": 0.9}}],
        "method.aggregation": "lcfl.BlendedClusterMean",
        "model.cluster_weight": 1,
    }
    method, weights = package.read_method("lcfed", options)
    assert (method.clustering[0].num_clusters, method.clustering[0].dimension) == (3, 50)
    assert (method.local_update.steps, method.local_update.epochs) == (None, 2)
    assert type(method.exchange.transforms[0]) is package.LowRankCompression
    assert type(method.aggregation) is package.BlendedClusterMean
    assert weights == {"cluster_weight": 1.0, "global_weight": 0.5}


def test_a_file_of_the_user_is_read(tmp_path):
    (tmp_path / "own.yaml").write_text(METHODS[0].read_text())
    assert describe(package.read_method(str(tmp_path / "own.yaml"))) == describe(package.read_method(METHODS[0].stem))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("ifca", {"method.clustering.0.num_cluster": 3}, "no argument 'num_cluster'. Did you mean num_clusters?"),
        ("ifca", {"method.clustering.0.num_clusters": "x"}, "expected a whole number, got x"),
        ("ifca", {"method.clustering.0.num_clusters": None}, "num_clusters: got num_clusters=null"),
        ("ifca", {"model.cluster_weigt": 1}, "Did you mean model.cluster_weight?"),
        ("ifca", {"method.exchange": "lcfl.FullModel"}, "ClientChoice reads cluster from the uploads"),
    ],
)
def test_a_wrong_option_is_explained(name, options, message):
    with pytest.raises(ValueError) as caught:
        package.read_method(name, options)
    assert message in str(caught.value)


def test_other_options_of_the_model_are_refused_with_where_to_give_them(tmp_path):
    (tmp_path / "own.yaml").write_text(METHODS[0].read_text() + "  buffer_policy: local\n")
    with pytest.raises(ValueError, match="give other options to FederatedModule"):
        package.read_method(str(tmp_path / "own.yaml"))


def test_the_methods_are_named_for_one_that_is_unknown():
    with pytest.raises(FileNotFoundError, match=r"there is no file ifcaa.*ifca, late_clusters"):
        package.read_method("ifcaa")


def test_the_package_imports_its_modules_when_they_are_first_used():
    assert package.callbacks.EarlyStopping.__module__ == "lcfl.callbacks.early_stopping"
    assert {"callbacks", "data", "Run"} <= set(dir(package)) and not hasattr(package, "core.rng")
    with pytest.raises(AttributeError, match="no attribute 'callback_s'"):
        _ = package.callback_s
