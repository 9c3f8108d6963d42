"""Tests that every file in configs/data is complete, can be parsed and fits its network."""

import importlib
import inspect
import re
from pathlib import Path

import jsonargparse
import numpy as np
import pytest
import torch
import yaml

import lcfl.data.datasets
import lcfl.data.faults
import lcfl.data.partition
import lcfl.data.transforms
from lcfl.core import rng
from lcfl.data.datamodule import FederatedDataModule
from lcfl.data.datasets import RandomLike
from lcfl.data.owners import Owners
from lcfl.data.partition import Pool
from tests.helpers.builders import loaded

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "configs" / "data").glob("*.yaml"))


def class_of(path):
    module, name = path.rsplit(".", 1)
    return getattr(importlib.import_module(module), name)


def instantiated(data):
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(FederatedDataModule, "data", fail_untyped=False)
    return parser.instantiate(parser.parse_object({"data": data})).data


def built(path):
    content = yaml.safe_load(path.read_text())
    if content["data"]["num_clients"] is None:
        content["data"]["num_clients"] = 12  # otherwise the files are read for their owners
    return instantiated(content["data"]), content["model"]["network"]


def documented(page, first):
    """Returns class name -> arguments from the YAML block of a page that begins with ``first``."""
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / page).read_text(), flags=re.DOTALL)
    return yaml.safe_load(next(block for block in blocks if block.startswith(first)))


def concrete(module, base):
    made = {name: getattr(module, name) for name in module.__all__}
    return {name for name, each in made.items() if isinstance(each, type) and issubclass(each, base) and each != base}


def test_every_data_set_of_lcfl_has_a_file():
    named = {yaml.safe_load(path.read_text())["data"]["dataset"]["class_path"].rpartition(".")[2] for path in FILES}
    given = {
        "FederatedDataset",
        "TorchvisionImages",
        "RandomLike",
        "LEAF",
        "Datasets",
        "HuggingFace",
        "Tensors",
        "Folders",
        *("Reader", "ImageFiles", "Arrays", "Table"),  # read files for Folders
    }  # these need user-defined data or serve trial runs
    assert named == set(lcfl.data.datasets.__all__) - given


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_file_sets_all_options_of_data_and_network(path):
    assert path.read_text().startswith("# ")
    content = yaml.safe_load(path.read_text())
    assert list(content) == ["data", "model"] and list(content["model"]) == ["network"]
    assert list(content["data"]) == list(inspect.signature(FederatedDataModule).parameters)
    for entry in (content["data"]["dataset"], content["data"]["partition"], content["model"]["network"]):
        assert set(entry.get("init_args", {})) == set(inspect.signature(class_of(entry["class_path"])).parameters)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_network_and_partition_fit_the_data(path):
    data, network = built(path)
    examples = RandomLike(data.dataset, num_samples=data.dataset.num_classes).load()
    model = class_of(network["class_path"])(**network["init_args"])
    assert model(examples.batch(np.arange(2), torch.device("cpu"))[0]).shape == (2, data.dataset.num_classes)
    labels = np.arange({100: 50_000, 2400: 60_000}.get(data.num_clients, 1600)) % data.dataset.num_classes
    owners = Owners.of_column(np.arange(len(labels)) % 30, len(labels))
    pool = Pool.of_owners(len(labels), labels, owners, keeps_parts=True)
    shares = data.partition(pool, data.num_clients, rng.generator(data.seed, "partition"))
    assert len(shares.indices) == data.num_clients
    known = lcfl.data.partition.Pathological | lcfl.data.partition.CopyPerGroup
    assert (shares.groups is not None) == isinstance(data.partition, known)


@pytest.mark.parametrize(("name", "groups"), [("synthetic", [5, 5, 5, 5]), ("digits", [10, 10])])
def test_files_that_need_no_download_have_known_groups(name, groups):
    data, _ = built(next(path for path in FILES if path.stem == name))
    loaded(data)
    assert np.bincount(data.population.groups).tolist() == groups
    assert min(map(len, data.population.val)) >= 5 and data.population.sizes.min() >= 50


def test_every_partition_is_documented_and_known_by_its_short_name():
    found = set()
    for page in (ROOT / "docs" / "partitions").glob("*.md"):
        given = yaml.safe_load(re.search(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL)[1])["data"]["partition"]
        name = given["class_path"].rpartition(".")[2]
        options = {"dataset": {"class_path": "Digits"}, "partition": given | {"class_path": name}, "num_clients": 20}
        made = instantiated(options).partition
        assert type(made).__name__ == name
        found.add(name)
    assert found == concrete(lcfl.data.partition, lcfl.data.partition.Partition)


def test_the_documented_partition_of_ascfl_is_that_of_its_files():
    (row,) = re.findall(r"^\| AS-CFL \| (.*)", (ROOT / "docs" / "partitions.md").read_text(), re.MULTILINE)
    for path in FILES:
        if "ascfl" in path.stem:
            partition = yaml.safe_load(path.read_text())["data"]["partition"]["init_args"]
            assert f"fractions: {partition['fractions']}" in row
            assert f"balance: {str(partition['base']['init_args']['balance']).lower()}" in row.partition("with")[0]


def test_every_client_transform_is_documented_and_known_by_its_short_name():
    lines = documented("client_transforms.md", "Rotation:")
    assert set(lines) == concrete(lcfl.data.transforms, lcfl.data.transforms.ClientTransform)
    for name, init_args in lines.items():
        transforms = [{"class_path": name, "init_args": init_args}]
        (made,) = instantiated(
            {
                "dataset": {"class_path": "Digits"},
                "partition": {"class_path": "IID"},
                "client_transforms": transforms,
            }
        ).client_transforms
        assert type(made).__name__ == name and set(inspect.signature(type(made)).parameters) == set(init_args)


def test_every_fault_is_in_the_table_of_its_page_with_its_options():
    table = (ROOT / "docs/howto/robust.md").read_text().partition("## Faults")[2]
    rows = dict(re.findall(r"^\| `(\w+)` \|.*\| (.*)\|$", table, re.MULTILINE))
    assert rows.keys() == concrete(lcfl.data.faults, lcfl.data.faults.ClientFault) - {"DataFault", "UpdateFault"}
    for name, options in rows.items():
        known = list(inspect.signature(getattr(lcfl.data.faults, name)).parameters)
        assert known == ["clients", "rounds", *re.findall(r"`(\w+)`", options)]
