"""Tests of the script that runs the papers' tables: its cells, and a small table from its first run to its picture."""

import csv
import importlib
from collections import Counter
from itertools import product
from math import isnan
from pathlib import Path

import pytest
import yaml

import lcfl
from tests.helpers.commandline import CONFIGS, METHODS, PAPERS, printed

HOME = Path(lcfl.__file__).parent.parent
TOY = """
trainer: {rounds: 3, clients_per_round: 4, evaluate_every: 1, final_models: []}
data:
  dataset: {class_path: Digits}
  partition: {class_path: ClientDirichlet, init_args: {alpha: 0.5}}
  num_clients: 8
  newcomers: 2
model:
  network: {class_path: MLP, init_args: {in_features: 64, hidden: [8], num_classes: 10}}
"""


@pytest.fixture
def module(monkeypatch):
    """Imports a script as if it was started, with its folder first on the path."""
    monkeypatch.syspath_prepend(HOME / "benchmarks")
    return importlib.import_module


@pytest.mark.parametrize("path", sorted((HOME / "docs/results/papers").glob("*.csv")), ids=lambda path: path.stem)
def test_the_commands_of_measured_cells_name_no_folder_of_a_machine(path):
    _header, *rows = path.read_text().splitlines()
    assert rows and not [row for row in rows if "=/" in row]


@pytest.fixture
def toy(module, monkeypatch, tmp_path):
    """Returns a function that runs a toy table of two methods, as the script would."""
    papers, items = module("papers"), module("paper_items")
    folder = tmp_path / "configs" / "papers"
    folder.mkdir(parents=True)
    (folder / "toy-table1-digits-dirichlet.yaml").write_text(TOY)
    cells = [
        items.Cell("toy-table1-digits-dirichlet", method, target=0.01, printed={"test_accuracy": (50.0, 1.0)})
        for method in ("fedavg", "ifca")
    ]
    metrics = ("test_accuracy", "rounds_to_target", "communication_mb", "newcomer_test_accuracy", "clusters")
    monkeypatch.setitem(papers.ITEMS, "toy", items.Item("Toy", tuple(cells), metrics))
    for each in (papers, module("paper_tasks")):
        monkeypatch.setattr(each, "HOME", tmp_path)

    def run(*words):
        folders = [f"--out={tmp_path / 'logs'}", f"--results={tmp_path / 'results'}", f"--root={tmp_path}"]
        papers.main(["toy", *folders, *words])
        with (tmp_path / "results" / "toy.csv").open(newline="") as file:
            return list(csv.DictReader(file))

    return run


def test_every_printed_cell_of_the_tables_has_a_configuration_and_a_method(module):
    items = module("paper_items").ITEMS
    configs, methods = {path.stem for path in PAPERS}, {path.stem for path in METHODS}
    for name, item in items.items():
        keys = [(cell.config, cell.method, cell.point) for cell in item.cells]
        assert len(set(keys)) == len(keys), name
        assert {cell.config for cell in item.cells} <= configs and {cell.method for cell in item.cells} <= methods
    counts = {name: Counter(metric for cell in item.cells for metric in cell.printed) for name, item in items.items()}
    assert counts["lcfed-table1"]["test_accuracy"] == 63 and counts["fedac-table1"]["test_accuracy"] == 32
    assert [counts[f"fedclust-table{n}"].total() for n in range(1, 7)] == [40, 40, 40, 36, 36, 33]  # three misprints
    assert [counts[f"ascfl-{name}"].total() for name in ("table3", "table4", "fig4", "fig5")] == [6, 7, 7, 2]
    assert len(items["ascfl-table3"].cells) == 24


def test_printed_numbers_by_hand(module):
    items = module("paper_items").ITEMS
    printed_in = {name: {(cell.column, cell.row): cell.printed for cell in item.cells} for name, item in items.items()}
    assert printed_in["lcfed-table1"]["cifar10-pathological-3", "lcfed"]["test_accuracy"] == (81.29, 0.61)
    assert printed_in["ascfl-table3"]["mnist-dirichlet-0.4", "fedavg"]["test_accuracy"][0] == pytest.approx(80.5)
    without = printed_in["ascfl-table4"]["mnist-dirichlet-0.6", "ascfl_no_incentive"]["test_accuracy"]
    assert without[0] == pytest.approx(91.5 - 3.4) and isnan(without[1])
    rounds = printed_in["ascfl-table4"]["mnist-dirichlet-0.6", "ascfl_no_incentive"]["rounds_to_90pct_peak"]
    assert rounds[0] == pytest.approx(40 * 1.375)
    (fifty,) = [
        each.target for each in items["fedclust-table4"].cells if each.row == "lg_fedavg" and "100" in each.column
    ]
    assert fifty == 0.5 and isnan(
        printed_in["fedclust-table4"]["cifar100-label-skew-20", "lg_fedavg"]["rounds_to_target"][0]
    )
    low = printed_in["ascfl-fig4"]["mnist-dirichlet-0.4", "cfl_fixed alpha=0.1"]["test_accuracy"]
    assert low[0] == pytest.approx(88.0)


@pytest.mark.slow
def test_the_words_of_readings_and_points_are_understood(module, monkeypatch, tmp_path, capsys):
    """One cell of each paper under each reading that applies to it, and the last point of each figure."""
    monkeypatch.chdir(HOME)
    papers, items, readings = module("papers"), module("paper_items").ITEMS, module("paper_readings")
    found = {
        (cell.paper, reading): (item, cell)
        for item in items.values()
        for reading in readings.READINGS
        for cell in item.cells
        if readings.words_of(cell, reading)
    }
    assert {reading for _, reading in found} == {*readings.READINGS}
    chosen = [(*pair, reading) for (_, reading), pair in found.items()]
    chosen += [(item, item.cells[-1], readings.AS_CONFIGURED) for item in items.values() if item.cells[-1].point]
    for item, cell, reading in chosen:
        task = papers.Task(item, cell, reading, ("0",), "data", tmp_path)
        kept = [word for word in task.words[1:] if not word.startswith(("--methods", "--seeds", "--out", "--grid"))]
        method = str(CONFIGS / "methods" / f"{cell.method}.yaml")
        assert printed(capsys, *kept[:2], "-c", method, *kept[2:])["trainer"]["rounds"] in (50, 100, 200, 1000)


def test_readings_leave_alone_what_a_paper_states_or_a_figure_varies(module):
    items, words_of = module("paper_items").ITEMS, module("paper_readings").words_of
    fedclust, lcfed, point = (items[name].cells[0] for name in ("fedclust-table1", "lcfed-table1", "lcfed-fig2"))
    for reading in ("epochs", "momentum", "faster", "everyone", "lenet", "tuned", "strict", "letters"):
        assert words_of(fedclust, reading) is None
    assert words_of(lcfed, "tuned_rate") is None and words_of(lcfed, "lenet+strict") is None
    assert words_of(point, "tuned") is None and words_of(point, "lenet") is not None
    assert words_of(lcfed, "as_configured") == []


def test_points_without_options_have_the_value_of_the_configuration(module):
    """They share the runs of a table, so a wrong value would be another point's."""
    values = {
        "mu=0.5 lambda=0.5": lambda config: (config["model"]["cluster_weight"], config["model"]["global_weight"]),
        "low_rank_cosine": lambda config: config["method"]["clustering"][0]["init_args"]["similarity"],
        "K=10": lambda config: config["method"]["clustering"][0]["init_args"]["num_clusters"],
        "alpha=0.4": lambda config: config["data"]["partition"]["init_args"]["base"]["init_args"]["alpha"],
        "theta=0.85": lambda config: config["method"]["clustering"][0]["init_args"]["theta"],
        "dropout=0": lambda config: config["trainer"].get("client_dropout", 0),
    }
    expected = dict(zip(values, [(0.5, 0.5), "low_rank_cosine", 10, 0.4, 0.85, 0], strict=True))
    cells = [cell for item in module("paper_items").ITEMS.values() for cell in item.cells if cell.point]
    plain = {(cell.config, cell.point) for cell in cells if not cell.words}
    assert {point for _, point in plain} == set(values)
    for config, point in plain:
        content = yaml.safe_load((CONFIGS / "papers" / f"{config}.yaml").read_text())
        assert values[point](content) == expected[point]


def test_methods_that_are_tuned_have_the_same_number_of_trials(module, tmp_path):
    papers, items = module("papers"), module("paper_items").ITEMS
    for item in (items["lcfed-table1"], items["fedac-table1"]):
        tasks = [papers.Task(item, cell, "tuned", ("0", "1"), "data", tmp_path) for cell in item.cells]
        assert {(len(task.points), task.num_runs) for task in tasks} == {(4, 5)}


@pytest.mark.slow
def test_a_table_is_run_continued_and_drawn(toy, tmp_path, capsys):
    rows = toy("--methods=fedavg")
    assert {row["method"] for row in rows} == {"fedavg"} and {row["seeds"] for row in rows} == {"0"}
    rows = toy("--seeds=0,1", "--jobs=2")
    said = capsys.readouterr().out
    assert "0 cells are done, 0 have no data, 2 are run" in said and "fedavg, as_configured: done" in said
    by_metric = {(row["method"], row["metric"], row["model"]): row for row in rows}
    fedavg = by_metric["fedavg", "test_accuracy", "global"]
    assert float(fedavg["difference"]) == pytest.approx(float(fedavg["mean"]) - 50)
    assert float(fedavg["best"]) >= float(fedavg["mean"]) and fedavg["seeds"] == "0 1" and fedavg["rounds"] == "3"
    megabits = {method: float(by_metric[method, "communication_mb", model]["mean"]) for method, model in KINDS}
    rounds = {method: float(by_metric[method, "rounds_to_target", model]["mean"]) for method, model in KINDS}
    assert megabits["fedavg"] == pytest.approx(rounds["fedavg"] * 4 * 2 * PARAMETERS * 32 / 1e6 / 100)
    assert 0 < float(by_metric["ifca", "newcomer_test_accuracy", "after"]["mean"]) <= 100
    assert (tmp_path / "results" / "toy.png").read_bytes().startswith(b"\x89PNG")
    toy("--seeds=0,1", "--list")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines[:2]] == ["done", "done"] and "0.0 h with --jobs 1" in lines[2]
    for other, cost in (("--seeds=0,1,2", "0 min"), ("--seeds=2", "0 min"), ("--rounds=2", "unknown time")):
        toy("--seeds=0,1", other, "--list")
        assert f" runs, {cost}" in capsys.readouterr().out  # other seeds or rounds are not done
    assert not list(tmp_path.glob("logs/**/checkpoints"))


KINDS = (("fedavg", "global"), ("ifca", "cluster"))
PARAMETERS = 64 * 8 + 8 + 8 * 10 + 10


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--columns=svhn"], "--columns: got svhn; allowed are digits-dirichlet."),
        (["--methods=lcfed"], "--methods: got lcfed; allowed are fedavg, ifca."),
        (["--readings=lenet+blue"], "--readings: got blue; allowed are adapted, all_images, as_configured"),
    ],
)
def test_unknown_names_are_refused(toy, words, said):
    with pytest.raises(SystemExit, match=said.replace("+", r"\+")):
        toy(*words)


def test_cells_without_data_are_listed_and_left_out(module, tmp_path, capsys):
    papers = module("papers")
    words = ["fedclust-table1", "--columns=svhn-label-skew-20", f"--root={tmp_path}", f"--results={tmp_path}"]
    papers.main([*words, "--list"])
    assert f"there is no {tmp_path}/train_32x32.mat" in capsys.readouterr().out
    papers.main(words)
    assert "10 have no data, 0 are run" in capsys.readouterr().out


@pytest.mark.slow
def test_distances_of_layers_are_measured_and_drawn(module, tmp_path, capsys):
    """The paper's Fig. 1: ten clients in two groups, four layers."""
    module("fedclust_layers").main(["--root=random", "--epochs=1", "--samples=20", f"--out={tmp_path}"])
    with (tmp_path / "fedclust-fig1.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert Counter(row["layer"] for row in rows) == dict.fromkeys(("1", "7", "14", "16"), 45)
    assert Counter(row["same_group"] for row in rows) == {"True": 4 * 20, "False": 4 * 25}
    assert all(float(row["distance"]) > 0 for row in rows)
    last = capsys.readouterr().out.splitlines()[-1]
    within, between, ratio = (float(cell) for cell in last.split("|")[2:5])
    assert last.startswith("| 16 |") and ratio == pytest.approx(between / within, abs=2e-3) and ratio > 1.1
    assert (tmp_path / "fedclust-fig1.png").read_bytes().startswith(b"\x89PNG")


def test_cells_within_two_deviations_are_counted_by_hand(module, monkeypatch, tmp_path):
    page, items, rows = module("paper_page"), module("paper_items"), module("paper_rows")

    def row(method, model, mean, std=0.4, printed=80.0):
        cell = {"column": "mnist-iid", "method": method, "point": "", "metric": "test_accuracy", "reading": "ring"}
        numbers = {"mean": mean, "std": std, "best": mean, "best_std": std, "printed": printed, "printed_std": 0.3}
        more = {"seeds": "0 1", "options": "", "rounds": 9, "seconds": 1.0, "command": "", "protocol": "own_split"}
        return rows.Row(**cell, model=model, difference=mean - printed, **numbers, **more)

    made = [
        row("fedavg", "global", 80.9),  # 0.9 is within 2 sqrt(0.3^2 + 0.4^2) = 1.0
        row("lcfed", "personal", 78.0),
        row("lcfed", "cluster", 80.0),  # its paper reports the personal model
        row("lcfed", "after_local", 79.5, std=float("nan")),  # one seed: 0.5 is within 2 x 0.3
        row("lcfed", "global", 10.0, printed=float("nan")),
    ]
    rows.write(tmp_path / "toy.csv", made, rows.Row)
    assert rows.read(tmp_path / "toy.csv", rows.Row)[:3] == made[:3]
    monkeypatch.setattr(page, "RESULTS", tmp_path)
    monkeypatch.setattr(page, "ITEMS", {"toy": items.Item("Toy", ())})
    text = page.with_counts("before\n<!-- cells: toy -->\n| old |\n\nafter\n")
    lines = text.splitlines()
    assert lines[:2] == ["before", "<!-- cells: toy -->"] and lines[-2:] == ["", "after"] and "old" not in text
    assert lines[4] == "| ring | reported | own_split | 2 | 1 | 2 | -0.55 | 1.45 |"
    assert lines[5] == "| ring | after_local | own_split | 1 | 1 | 1 | -0.50 | 0.50 |"
    assert page.with_counts(text) == text
    mark = "<!-- values: toy, ring, reported, own_split -->\n"
    text = page.with_values(f"{mark}| old |\n\nafter\n")
    assert text.splitlines()[3:] == [
        "| fedavg | **80.90 ± 0.40** (**80.00 ± 0.30**) |",
        "| lcfed | 78.00 ± 0.40 (**80.00 ± 0.30**) |",
        "",
        "after",
    ]
    assert text.startswith(mark) and "| mnist-iid |" in text and page.with_values(text) == text


def test_the_models_that_pacfl_tests_are_a_group(module):
    page, rows = module("paper_page"), module("paper_rows")
    cell = {"column": "cifar10-label-skew-20", "point": "", "metric": "test_accuracy", "reading": "as_configured"}
    numbers = {"mean": 80.0, "std": 0.4, "best": 80.0, "best_std": 0.4, "printed": 80.0, "printed_std": 0.3}
    more = {"seeds": "0", "options": "", "rounds": 9, "seconds": 1.0, "command": "", "protocol": "label_view"}
    made = [
        rows.Row(**cell, method=method, model=model, difference=0.0, **numbers, **more)
        for method, model in product(("fedavg", "cfl", "fedclust"), ("global", "cluster", "after_local"))
        if (method, model) != ("fedavg", "cluster")
    ]
    groups = {
        kind: [(row.method, row.model) for row in members]
        for (_, kind, _), members in page.groups_of("fedclust-table1", made).items()
    }
    assert groups["as in PACFL"] == [("fedavg", "global"), ("cfl", "cluster"), ("fedclust", "after_local")]
    assert groups["reported"] == [("fedavg", "global"), ("cfl", "cluster"), ("fedclust", "cluster")]
    assert "as in PACFL" not in {kind for _, kind, _ in page.groups_of("fedac-table1", made)}
