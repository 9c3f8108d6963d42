"""Tests that configs/papers has a file for every cell of a table, with the paper's settings, and that it runs."""

import re
import shlex

import pytest
import yaml

from tests.helpers.commandline import CONFIGS, DATA, PAPERS, files, lcfl, printed

# paper and table -> data set -> partitions, in the order of the printed tables
LCFED_PARTITIONS = {
    "mnist": ["dirichlet-0.1", "pathological-3", "pathological-4"],
    "cifar10": ["dirichlet-0.1", "pathological-3", "pathological-4"],
    "cifar100": ["dirichlet-0.1", "pathological-8", "pathological-10"],
}
FEDCLUST_DATA = ("cifar10", "cifar100", "fmnist", "svhn")
TABLES = {
    "fedac-table1": {"cifar10": ["dirichlet-0.1", "pathological-3"], "cifar100": ["dirichlet-0.1", "pathological-8"]},
    "lcfed-table1": LCFED_PARTITIONS,
    "ascfl-table3": {name: [f"dirichlet-0.{alpha}" for alpha in (4, 6, 8)] for name in ("mnist", "emnist")},
    "fedclust-table1": {name: ["label-skew-20"] for name in FEDCLUST_DATA},
    "fedclust-table2": {name: ["label-skew-30"] for name in FEDCLUST_DATA},
    "fedclust-table3": {name: ["dirichlet-0.1"] for name in FEDCLUST_DATA},
    "fedclust-table6": {name: ["label-skew-20"] for name in FEDCLUST_DATA},
}
# The settings in each paper: rounds, clients, clients per round, learning rate, batch size, local work
STATED = {
    "fedac": (1000, 100, 25, 0.01, 32, ("steps", 5)),
    "lcfed": (None, 100, None, 0.01, 32, ("steps", 5)),
    "ascfl": (100, 20, 1.0, 0.1, 32, ("epochs", 10)),
    "fedclust": (200, 100, 10, None, 10, ("epochs", 10)),
}
BEST = {
    "cifar10": 2,
    "cifar100": 2,
    "svhn": 2,
    "fmnist": 4,
}  # numbers of clusters in the runs of Table 1, from FedClust Fig. 4
QUICK = (
    "ascfl-table3-mnist-dirichlet-0.4",
    "fedclust-table1-svhn-label-skew-20",
    "fedclust-table2-fmnist-label-skew-30",
    "fedclust-table3-cifar10-dirichlet-0.1",
    "fedclust-table6-cifar10-label-skew-20",
)
SMALL = ("--model.network=LeNet5", "--data.num_clients=12", "--trainer.fast_dev_run=true", "--trainer.devices=1")


def paper(path):
    return path.stem.partition("-")[0]


def content(path):
    return yaml.safe_load(path.read_text())


def arguments_in_comment(path):
    """Returns the arguments of the ``lcfl fit`` command for another column in a file's comment, if there is one."""
    found = re.search(r"^#   lcfl fit (.*\n(#       .*\n)*)", path.read_text(), re.MULTILINE)
    words = shlex.split(found[1].replace("\n#", " ")) if found else []
    return [str(CONFIGS.parent / word) if word.startswith("configs/") else word for word in words]


def test_every_cell_of_the_tables_has_a_file():
    cells = {f"{table}-{data}-{each}" for table, of in TABLES.items() for data, kinds in of.items() for each in kinds}
    assert cells == {path.stem for path in PAPERS}


@pytest.mark.parametrize("path", PAPERS, ids=lambda path: path.stem)
def test_a_file_has_data_of_configs_data_and_the_method_of_configs_methods(path):
    given = content(path)
    assert list(given) == ["trainer", "method", "data", "model"]
    assert given["trainer"]["name"] == path.stem
    assert any(given["data"] | {"newcomers": 0} == content(data)["data"] for data in DATA)
    own = content(CONFIGS / "methods" / f"{paper(path)}.yaml")
    if path.stem.startswith("fedclust-table1"):
        options = own["method"]["clustering"][0]["init_args"]
        options |= {"choose": None, "num_clusters": BEST[path.stem.split("-")[2]]}
    assert given["method"] == own["method"]
    assert own["model"].items() <= given["model"].items()


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("path", PAPERS, ids=lambda path: path.stem)
def test_the_configuration_has_the_settings_of_the_paper(capsys, path):
    rounds, num_clients, sampled, rate, batch_size, (unit, number) = STATED[paper(path)]
    rounds, sampled = (50, 0.1) if "table6" in path.stem else (rounds or 1000, sampled or 25)
    words = arguments_in_comment(path) or ["-c", str(path)]
    assert str(path) in words
    for config in (content(path), printed(capsys, *words)):
        assert (config["trainer"]["rounds"], config["trainer"]["clients_per_round"]) == (rounds, sampled)
        assert (config["data"]["num_clients"], config["data"]["batch_size"]) == (num_clients, batch_size)
        assert config["model"]["optimizer"]["init_args"]["lr"] == rate or rate is None
        work = config["method"]["local_update"]["init_args"]
        assert {key: work[key] for key in ("steps", "epochs")} == {"steps": None, "epochs": None} | {unit: number}


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[] if path.stem in QUICK else pytest.mark.slow) for path in PAPERS],
    ids=lambda path: path.stem,
)
def test_a_file_runs(tmp_path, path):
    fewer = ["--data.newcomers=2"] if content(path)["data"]["newcomers"] else []
    run = lcfl("fit", "-c", path, *SMALL[1:], *fewer)
    assert run.state.round == 1
    protocol = content(path)["data"]["protocols"][0]
    assert any(key.startswith(f"test/{protocol}/") for key in run.metrics)
    assert not files(tmp_path)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("name", ["lcfed-table1-cifar10-pathological-4", "fedac-table1-cifar10-dirichlet-0.1"])
def test_a_file_with_a_large_network_runs_with_a_small_one(name):
    run = lcfl("fit", "-c", CONFIGS / "papers" / f"{name}.yaml", *SMALL)
    assert run.state.round == 1 and "test/own_split/personal/acc" in run.metrics


@pytest.mark.usefixtures("here")
def test_a_method_on_top_gives_another_column_of_the_table(capsys):
    path, fedavg = CONFIGS / "papers" / "lcfed-table1-cifar10-pathological-3.yaml", CONFIGS / "methods" / "fedavg.yaml"
    config = printed(capsys, "-c", path, "-c", fedavg)
    alone = printed(capsys, "-c", CONFIGS / "data" / "cifar10.yaml", "-c", fedavg)
    assert config["method"] == alone["method"] and config["model"]["cluster_weight"] == 0
    assert config["trainer"]["rounds"] == 1000
