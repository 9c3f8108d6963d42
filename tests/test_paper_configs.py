"""Tests that configs/papers has a file for every cell of a table, with the paper's settings, and that it runs."""

import itertools

import pytest
import yaml

from tests.helpers.commandline import CONFIGS, DATA, METHODS, PAPERS, content, files, lcfl, printed

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
}  # numbers of clusters at a label skew of 20 %, as in Tables 1 and 6, from FedClust Fig. 4
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


def test_every_cell_of_the_tables_has_a_file():
    cells = {f"{table}-{data}-{each}" for table, of in TABLES.items() for data, kinds in of.items() for each in kinds}
    assert cells == {path.stem for path in PAPERS}


@pytest.mark.parametrize("path", PAPERS, ids=lambda path: path.stem)
def test_a_file_has_data_of_configs_data_and_the_method_of_configs_methods(path):
    given = content(path)
    assert list(given) == ["trainer", "method", "data", "model", "methods"]
    assert given["trainer"]["name"] == path.stem
    assert any(given["data"] | {"newcomers": 0} == content(data)["data"] for data in DATA)
    own = content(CONFIGS / "methods" / f"{paper(path)}.yaml")
    if path.stem.startswith(("fedclust-table1", "fedclust-table6")):
        options = own["method"]["clustering"][0]["init_args"]
        options |= {"choose": None, "num_clusters": BEST[path.stem.split("-")[2]]}
    assert given["method"] == own["method"]
    assert own["model"].items() <= given["model"].items()


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("path", PAPERS, ids=lambda path: path.stem)
def test_the_configuration_has_the_settings_of_the_paper(capsys, path):
    rounds, num_clients, sampled, rate, batch_size, (unit, number) = STATED[paper(path)]
    rounds, sampled = (50, 0.1) if "table6" in path.stem else (rounds or 1000, sampled or 25)
    config = printed(capsys, "-c", path)
    assert (config["trainer"]["rounds"], config["trainer"]["clients_per_round"]) == (rounds, sampled)
    assert (config["data"]["num_clients"], config["data"]["batch_size"]) == (num_clients, batch_size)
    assert config["model"]["optimizer"]["init_args"]["lr"] == rate or rate is None
    work = config["method"]["local_update"]["init_args"]
    assert {key: work[key] for key in ("steps", "epochs")} == {"steps": None, "epochs": None} | {unit: number}


# For each paper, the methods of its tables and what the paper states for each: K, steps, epochs, learning rate,
# momentum and further arguments by name. A dash is a setting that the method does not have or the paper does not state.
# LCFed, section IV-A: K = 10, SGD with 0.01, 5 local iterations.
# FedAC, section 5.1: the same without K; section 5.2: each clustered baseline has its own K; Fig. 4: 10 is optimal.
# AS-CFL, section 4.1 and Algorithm 1: SGD with 0.1 x 0.99^t, 10 epochs or ceil(B / n_i).
# FedClust, section 5.1, Hyperparameters Settings: 10 epochs; 0.01 (0.1, 0.01 or 0.001 for FedAvg, FedProx, FedNova and
# CFL); momentum 0.9 or 0.5; alpha, beta, eps1, eps2, p, global layers. IFCA's K fits Table 5. FedClust's K is Fig. 4's.
COLUMNS = """
lcfed     lcfed       10  5   -   0.01  0
lcfed     fedavg      -   5   -   0.01  0
lcfed     fedper      -   5   -   0.01  0
lcfed     fesem       10  5   -   0.01  0
lcfed     fedgroup    10  5   -   0.01  0
lcfed     cgpfl       10  5   -   0.01  0     inner_steps=1 inner_lr=0.01 outer_lr=0.01
lcfed     ifca        10  5   -   0.01  0
fedac     fedac       10  5   -   0.01  0     lower=0.2 upper=0.8 criterion=ratio literal=true
fedac     fedavg      -   5   -   0.01  0
fedac     fedper      -   5   -   0.01  0
fedac     fesem       10  5   -   0.01  0
fedac     fedgroup    10  5   -   0.01  0
fedac     fl_hc       10  5   -   0.01  0
fedac     cgpfl       10  5   -   0.01  0     inner_steps=1 inner_lr=0.01 outer_lr=0.01
fedac     ifca        10  5   -   0.01  0
ascfl     ascfl       -   -   10  0.1   0     lr_decay=0.99 fill_batch=true
ascfl     cfl         -   -   10  0.1   0     lr_decay=0.99 fill_batch=true
ascfl     cfl_fixed   4   -   10  0.1   0     lr_decay=0.99 fill_batch=true
ascfl     ifca        4   -   10  0.1   0     lr_decay=0.99 fill_batch=true
ascfl     fedavg      -   -   10  0.1   0     lr_decay=0.99 fill_batch=true
fedclust  fedclust    -   -   10  0.01  0.5   lr_decay=1.0 fill_batch=false
fedclust  local       -   -   10  0.01  0.5   lr_decay=1.0
fedclust  fedavg      -   -   10  0.01  0.9   lr_decay=1.0
fedclust  fedprox     -   -   10  0.01  0.9   lr_decay=1.0
fedclust  fednova     -   -   10  0.01  0.9   lr_decay=1.0
fedclust  lg_fedavg   -   -   10  0.01  0.5   global_layers=2
fedclust  per_fedavg  -   -   10  0.01  0.5   inner_lr=0.01 outer_lr=0.001 outer_momentum=0.5
fedclust  cfl         -   -   10  0.01  0.5   relative=false eps1=0.4 eps2=0.6
fedclust  ifca        2   -   10  0.01  0.5   lr_decay=1.0
fedclust  pacfl       4   -   10  0.01  0.5   num_vectors=3
"""
ROWS = [line.split() for line in COLUMNS.strip().splitlines()]


def settings(config):
    """Returns all arguments of the parts of a method and of the optimizer, and K as ``num_clusters``."""
    parts = [*config["method"]["clustering"], *(config["method"][part] for part in ("local_update", "exchange"))]
    found = {}
    for part in [*parts, config["model"]["optimizer"]]:
        found |= part["init_args"]
    return found


def shown(value):
    return "-" if value is None else yaml.safe_dump(value).split("\n")[0]


def cells():
    """Yields a case for every file and method of its table; all but one file of each paper are slow."""
    first = {}
    for path, (of, method, *stated) in itertools.product(PAPERS, ROWS):
        if of == paper(path):
            slow = first.setdefault(of, path) != path
            marks = [pytest.mark.slow] if slow else []
            yield pytest.param(path, method, stated, id=f"{path.stem}-{method}", marks=marks)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(("path", "method", "stated"), [*cells()])
def test_a_method_on_top_has_the_settings_of_the_paper(capsys, path, method, stated):
    num_clusters, steps, epochs, rate, momentum, *further = stated
    own = content(path)
    if method == "fedclust" and "label-skew-20" in path.stem:
        num_clusters = str(BEST[path.stem.split("-")[2]])
    config = printed(capsys, "-c", path, "-c", CONFIGS / "methods" / f"{method}.yaml")
    found = settings(config)
    expected = {"num_clusters": num_clusters, "steps": steps, "epochs": epochs, "lr": rate}
    expected |= dict(word.split("=") for word in further)
    assert {key: shown(found.get(key)) for key in expected} == expected
    assert found["momentum"] == float(momentum)
    for group in ("trainer", "data"):
        assert {key: config[group][key] for key in own[group] if key != "dataset"} == {
            key: value for key, value in own[group].items() if key != "dataset"
        }


@pytest.mark.slow
@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("of", ["lcfed", "fedac", "ascfl", "fedclust"])
def test_every_other_method_on_top_has_the_local_work_of_the_paper(capsys, of):
    path = next(path for path in PAPERS if paper(path) == of)
    unit, number = STATED[paper(path)][-1]
    for method in {method.stem for method in METHODS} - {row[1] for row in ROWS if row[0] == paper(path)}:
        found = settings(printed(capsys, "-c", path, "-c", CONFIGS / "methods" / f"{method}.yaml"))
        assert {key: found[key] for key in ("steps", "epochs")} == {"steps": None, "epochs": None} | {unit: number}
        if method == "late_clusters":  # a falling rate is a part of it, and the data determine its number of clusters
            rounds = content(path)["trainer"]["rounds"]
            assert found["after"] == round(0.6 * rounds)
            assert 0.12 < found["lr_decay"] ** rounds < 0.14 or (paper(path) == "ascfl" and found["lr_decay"] == 0.99)
            continue
        if paper(path) in ("lcfed", "fedac") and "num_clusters" in found:
            assert found["num_clusters"] == 10
        assert found.get("lr_decay", 1.0) == (0.99 if paper(path) == "ascfl" else 1.0) or "outer_lr" in found


@pytest.mark.usefixtures("here")
def test_an_option_after_the_method_wins_over_the_paper(capsys):
    path, fesem = PAPERS[[path.stem for path in PAPERS].index("lcfed-table1-mnist-pathological-3")], "fesem"
    words = ("-c", path, "-c", CONFIGS / "methods" / f"{fesem}.yaml", "--method.clustering.num_clusters=7")
    assert settings(printed(capsys, *words))["num_clusters"] == 7


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
