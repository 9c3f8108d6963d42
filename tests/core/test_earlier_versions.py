"""Class paths of lcfl 0.1.0 are refused with the new path, and what 0.1.0 wrote down is read under the new names."""

from importlib import import_module

import pytest

import lcfl.methods
import lcfl.models
from lcfl.cli import federated_cli
from lcfl.core.earlier_versions import MOVED, RENAMED_CLASSES, current_path, public_name, with_current_names
from tests.helpers.commandline import CONFIGS


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("lcfl.local.LocalTraining", "lcfl.LocalTraining"),
        ("lcfl.local.update.LocalTraining", "lcfl.LocalTraining"),
        ("lcfl.exchange.Reference", "lcfl.GlobalReference"),
        ("lcfl.networks.LeNet5", "lcfl.models.LeNet5"),
        ("lcfl.networks.split", "lcfl.models.split"),
        ("lcfl.upload.GaussianNoise", "lcfl.GaussianNoise"),
    ],
)
def test_an_old_class_path_has_a_new_one_that_exists(old, new):
    assert current_path(old) == new
    module, _, name = new.rpartition(".")
    assert getattr(import_module(module), name) is not None


@pytest.mark.parametrize("path", ["lcfl.data.partition.IID", "lcfl.callbacks.Checkpoint", "torch.optim.SGD", "local"])
def test_every_other_path_stays(path):
    assert current_path(path) == path


def test_new_paths_are_never_longer():
    names = {*lcfl.methods.__all__, *lcfl.models.__all__} - {*RENAMED_CLASSES.values()}
    for package, now in MOVED.items():
        assert all(len(f"{now}.{name}") < len(f"{package}.{name}") for name in names)


def test_a_description_names_classes_without_their_modules():
    assert public_name("lcfl.methods.exchange.global_model.FullModel") == public_name(
        "lcfl.exchange.one_model.FullModel"
    )
    assert public_name("lcfl.exchange.clusters.Choice") == "ClusterChoice"
    assert public_name("my.FullModel") == "my.FullModel"
    old = {"method": {"clustering": [{"class": "lcfl.clustering.lowrank.LowRankCosine", "dimension": 3}]}, "seed": 0}
    new = {"method": {"clustering": [{"class": "LowRankCosine", "dimension": 3}]}, "seed": 0}
    assert with_current_names(old) == new


@pytest.mark.parametrize(
    ("words", "old", "new"),
    [
        (["--method.exchange=lcfl.exchange.Reference"], "lcfl.exchange.Reference", "lcfl.GlobalReference"),
        (
            ["--method.clustering=[lcfl.clustering.LowRankCosine]"],
            "lcfl.clustering.LowRankCosine",
            "lcfl.LowRankCosine",
        ),
        (["-c", "model: {network: {class_path: lcfl.networks.MLP}}"], "lcfl.networks.MLP", "lcfl.models.MLP"),
        (
            ["-c", "method: {local_update: {class_path: lcfl.local.LocalTraining, init_args: {steps: 5}}}"],
            "lcfl.local.LocalTraining",
            "lcfl.LocalTraining",
        ),
    ],
)
def test_the_command_refuses_an_old_class_path_with_the_new_one(words, old, new, capsys):
    with pytest.raises(SystemExit):
        federated_cli.main(["fit", "-c", str(CONFIGS / "quickstart.yaml"), *words])
    assert f"{old} is an import path of lcfl 0.1; its name is now {new}." in capsys.readouterr().err
