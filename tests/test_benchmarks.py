"""Tests that the benchmarks run, at tiny scale, on random images and without other packages."""

import csv
import importlib
import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import lcfl
from lcfl import FederatedModule
from lcfl.cli.trials import given_to, parse_grid, points_of
from lcfl.models import CNN, LeNet5
from tests.helpers.commandline import METHODS, printed
from tests.helpers.hosts import TUN

BENCHMARKS = Path(lcfl.__file__).parent.parent / "benchmarks"
TINY = ["--root", "random", "--num_clients", "4", "--clients_per_round", "2", "--num_samples", "40"]
SHORT = [*TINY, "--turns", "1", "--rounds", "1", "--devices", "1"]


@pytest.fixture
def module(monkeypatch):
    """Imports a script as if it was started, with its folder first on the path."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module


@pytest.mark.slow
def test_round_writes_an_entry_per_engine_and_number_of_devices(module, tmp_path, capsys):
    path = tmp_path / "round.json"
    rows = module("round").main([*SHORT, "--only", "sequential", "reference-loop, 1 thread", "--json", str(path)])
    assert json.loads(path.read_text()) == rows
    assert [(row["engine"], row["devices"]) for row in rows] == [("sequential", 1), ("reference-loop, 1 thread", 1)]
    ours, loop = rows
    assert ours["accuracy"] == loop["accuracy"] and ours["loss"] == pytest.approx(loop["loss"], abs=1e-5)
    assert ours["over_ours"] == 1 and loop["over_ours"] == loop["seconds_per_round"] / ours["seconds_per_round"]
    assert all(0 < row["fastest_round"] <= row["seconds_per_round"] < row["start_up_s"] for row in rows)
    assert all(0 < row["beyond_imports_mb"] < row["memory_mb"] for row in rows)
    assert ours["versions"]["lcfl"] == lcfl.__version__
    printed = capsys.readouterr().out
    assert "| sequential | 1 |" in printed and "| reference-loop, 1 thread | 1 |" in printed


def test_the_plain_loop_is_among_the_entries(module):
    entries = module("round").entries_of(module("round").parse(["--devices", "1"]))
    assert ("reference-loop", 1) in {(entry.engine, entry.devices) for entry in entries}
    assert ("sequential", 1) in {(entry.engine, entry.devices) for entry in entries if entry.is_ours}


def test_an_entry_that_cannot_run_is_reported_with_the_reason(module, tmp_path):
    contest = module("contest")
    task = contest.Task(contest.Plan(root=None, num_rounds=1, num_clients=2, clients_per_round=1), tmp_path)
    runner = contest.Runner(contest.Entry("none", 1, ["peers.none"]), task)
    with pytest.raises(contest.Unable, match=r"none x 1: it did not answer\n.*No module named peers.none"), runner:
        pass


def test_folders_and_torchvision_read_the_same_images(module, tmp_path, capsys):
    path = tmp_path / "folders.json"
    words = ["--num_clients", "3", "--per_client", "4", "--size", "8", "--turns", "1", "--json", str(path)]
    result = module("folders").main(words)
    assert json.loads(path.read_text()) == result and result["ratio"] > 0
    assert "3 clients with 4 images of 8 x 8 each" in capsys.readouterr().out


def test_a_peer_that_is_not_installed_is_left_out(module, monkeypatch, capsys):
    monkeypatch.setattr(module("contest").importlib.util, "find_spec", lambda name: None)
    entries = module("round").entries_of(module("round").parse(["--peers-python", "pfl=/env/bin/python"]))
    assert [entry.python for entry in entries if entry.engine == "pfl"] == ["/env/bin/python"]
    assert not {"fedlab", "blazefl", "fluke", "flower"} & {entry.engine for entry in entries}
    assert "fedlab is left out: fedlab is not installed here" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        module("round").parse(["--peers-python", "tff=/env/bin/python"])


@pytest.mark.parametrize("name", ["lenet", "cnn"])
def test_the_networks_of_the_peers_equal_those_of_lcfl(module, name):
    plain = module("peers.common").networks[name]()
    ours = FederatedModule(module("peers.ours").NETWORKS[name]).make_network()
    for own, value in zip(ours.parameters(), plain.parameters(), strict=True):
        own.data.copy_(value)
    inputs = torch.randn(2, 1, 28, 28) if name == "lenet" else torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(ours(inputs), plain(inputs))


def test_the_networks_of_the_plain_flower_app_equal_those_of_lcfl(module):
    pytest.importorskip("flwr")
    plain = module("peers.flower_nodes.plain").networks
    for name, network in {"lenet": LeNet5, "cnn": CNN}.items():
        other, ours = plain[name](), FederatedModule(network).make_network()
        for own, value in zip(ours.parameters(), other.parameters(), strict=True):
            own.data.copy_(value)
        inputs = torch.randn(2, 3, 32, 32)
        torch.testing.assert_close(ours(inputs), other(inputs))


@pytest.mark.slow
def test_fleet_measures_three_ways_and_leaves_no_process_behind(module, tmp_path, capsys, monkeypatch):
    pytest.importorskip("flwr")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    path = tmp_path / "fleet.csv"
    rows = module("fleet").main(["--networks=lenet", "--num_nodes=2", "--rounds=2", "--csv", str(path)])
    assert [row["way"] for row in rows] == ["simulation", "fleet", "plain Flower app"]
    simulation, fleet, plain = (row["array_bytes"] for row in rows)
    assert simulation == fleet == 2 * 2 * 4 * 62_006 < plain < 1.01 * fleet  # 2 directions and clients; .npy headers
    assert all(row["array_bytes"] < row["sent_bytes"] < 2 * row["array_bytes"] for row in rows[1:])
    assert all(0 < row["fastest"] <= row["seconds"] <= row["slowest"] for row in rows)
    assert path.read_text().count("lenet") == 3 and "| lenet | fleet |" in capsys.readouterr().out
    ours = f"FLWR_HOME={tmp_path}/".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            assert ours not in (process / "environ").read_bytes()


def test_memory_of_a_process_tree_counts_every_page_once(module):
    processes = module("processes")
    code = (
        "import os, sys\n"
        "held = bytearray(os.urandom(1) * (200 << 20))\n"
        "if not os.fork():\n"
        "    own = bytearray(b'1' * (50 << 20))\n"
        "    print(flush=True)\n"
        "    sys.stdin.read()\n"
        "    os._exit(0)\n"
        "sys.stdin.read()\n"
        "os.wait()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        assert len(processes.tree(process.pid)) == 2
        assert 250 < processes.memory_mb(process.pid) < 300
        process.stdin.close()


@pytest.mark.slow
def test_busy_measures_in_pairs(module, tmp_path):
    (row,) = module("busy").main([*SHORT, "--only", "sequential"])
    assert row["busy_over_quiet"] == row["seconds_per_round_busy"] / row["seconds_per_round"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--cold"]])
def test_start_measures_the_first_round(module, tmp_path, options):
    rows = module("start").main(["--turns", "1", "--json", str(tmp_path / "s.json"), *options])
    assert json.loads((tmp_path / "s.json").read_text()).keys() == rows.keys()
    assert rows["lcfl --help"]["seconds"] < rows["import torch"]["seconds"] < rows["first round"]["seconds"]
    assert rows["first round"]["beyond_import_mb"] > 0


@pytest.mark.slow
def test_kernels_measures_every_width_of_vectors(module, tmp_path):
    words = ["--networks", "mlp 784", "--turns", "1", "--seconds", "0", "--json", str(tmp_path / "k.json")]
    rows = module("kernels").main(words)
    assert json.loads((tmp_path / "k.json").read_text()) == rows
    assert list(rows["mlp 784"])[:2] == ["sequential", "native"] and all(ms > 0 for ms in rows["mlp 784"].values())


@pytest.mark.slow
def test_gpu_runs_every_task_on_a_cpu(module, tmp_path, capsys):
    path = tmp_path / "gpu.json"
    words = ["--root", "random", "--accelerator", "cpu", "--tasks", "lenet", "crowd", "lcfed", "--rounds", "1"]
    words += ["--turns", "1", "--lcfed_rounds", "1", "--crowd", "3", "--num_clients", "4", "--clients_per_round", "2"]
    rows = module("gpu").main([*words, "--num_samples", "30", "--json", str(path)])
    assert json.loads(path.read_text()) == rows
    assert [(row["task"], row["engine"]) for row in rows] == [
        *[("lenet", engine) for engine in ("reference-loop", "sequential", "stacked") for _ in range(2)],
        ("crowd", "stacked"), ("lcfed", "stacked"),
    ]  # fmt: skip
    assert [row["accuracy"] for row in rows[2:6:2]] == pytest.approx([rows[0]["accuracy"]] * 2, abs=0.01)
    assert all(0 < row["local_seconds_per_round"] < row["seconds_per_round"] for row in rows[2:])
    assert "lenet  stacked        bf16-mixed" in capsys.readouterr().out


def test_the_figure_of_cifar10_shows_every_number_of_the_methods_in_both_tables(module):
    page = module("cifar10_page")
    tables = {name: page.table_of(page.read(page.RESULTS / f"cifar10-{name}.csv")) for name in page.TITLES}
    first, second = page.draw(tables).axes
    assert [label.get_text() for label in first.get_yticklabels()][-1] == "fl_hc"  # 80.92
    common = set.intersection(*map(set, tables.values())) - {page.BASELINE}
    for axes, table in zip((first, second), tables.values(), strict=True):
        drawn = {float(place) for container in axes.containers for place in container.lines[0].get_xdata()}
        assert drawn == {accuracy for method in common for accuracy, _ in table[method].values()}


def test_the_page_has_the_tables_of_cifar10(module):
    page = module("cifar10_page")
    rows_of = {name: page.read(page.RESULTS / f"cifar10-{name}.csv") for name in page.TITLES}
    text = page.PAGE.read_text()
    assert page.with_tables(text, rows_of) == text
    assert "| fl_hc |  | 80.92 ± 0.57 | 20.57 ± 1.80 | 80.44 ± 0.55 | lr=0.02 num_clusters=4 |" in text


def test_a_newer_comparison_replaces_the_rows_of_its_methods(module):
    page = module("cifar10_page")
    rows = page.read(page.RESULTS / "cifar10-pathological.csv")
    new = [row | {"acc": "0.5"} for row in rows if row["label"] in ("local", page.BASELINE)]
    found = page.added(sorted(rows, key=lambda row: row["label"]), new)
    assert [(row["protocol"], row["label"]) for row in found] == [(row["protocol"], row["label"]) for row in rows]
    changed = {row["label"] for row, old in zip(found, rows, strict=True) if row != old}
    assert changed == {"local"}


ABLATIONS = {"ascfl_no_adjustment", "ascfl_no_incentive", "ascfl_no_lowrank", "cgpfl_prox"}


@pytest.mark.parametrize(
    ("partition", "option"),
    [("pathological", "--data.partition.classes_per_client=3"), ("dirichlet", "--data.partition.alpha=0.1")],
)
def test_cifar10_gives_every_method_the_same_number_of_trials(module, partition, option):
    cifar10 = module("cifar10")
    methods = list(cifar10.grids_of(partition))
    assert set(methods) == {path.stem for path in METHODS} - ABLATIONS
    words = cifar10.words_of(partition, methods, "data", 1000)
    grids = [parse_grid(word.removeprefix("--grid=")) for word in words if word.startswith("--grid=")]
    assert {len(points_of(method, grids)) for method in methods} == {4}
    assert option in words and "--trainer.rounds=1000" in words


NAMES = ("ascfl", "cfl", "cgpfl", "fedbabu", "fedbn", "fedclust", "fedrep", "lcfed", "pacfl", "per_fedavg")
BLOCKS = [("pathological", name) for name in NAMES]


@pytest.mark.parametrize(
    ("partition", "method"), [*BLOCKS, *(("dirichlet", name) for name in ("cgpfl", "fedclust", "ifca", "pacfl"))]
)
def test_every_point_of_cifar10_is_a_valid_configuration(module, capsys, partition, method):
    """Parses the last point of one method per kind of grid as `lcfl fit` would. Nothing is run."""
    words = module("cifar10").words_of(partition, [method], "data", 1000)
    grids = [parse_grid(word.removeprefix("--grid=")) for word in words if word.startswith("--grid=")]
    kept = [word for word in words if not word.startswith(("--grid", "--methods"))]
    point = points_of(method, grids)[-1]
    chosen = [*given_to(method, grids), *(f"--{option}={value}" for option, value in point)]
    config = printed(capsys, *kept[:2], "-c", f"configs/methods/{method}.yaml", *kept[2:], *chosen)
    rate = config["model"]["optimizer"]["init_args"]["lr"]
    assert rate == (0.01 if method == "cgpfl" else 0.05)  # cgpfl has other rates
    local = config["method"]["local_update"]["init_args"]
    assert local["steps"] == 5 and local["epochs"] is None
    if method == "lcfed":
        assert (config["model"]["cluster_weight"], config["model"]["global_weight"]) == (1, 0.5)


@pytest.mark.slow
def test_frozen_measures_fewer_bytes_for_a_smaller_part(module, tmp_path, capsys):
    tiny = ["--num_clients=2", "--batch_size=2", "--steps=1", "--rounds=2", "--image_size=32", "--turns=1"]
    rows = module("frozen").main([*tiny, "--json", str(tmp_path / "frozen.json")])
    assert json.loads((tmp_path / "frozen.json").read_text())["rows"] == rows
    assert [row["parameters"] for row in rows] == [11_181_642, 8_398_858, 5_130]
    assert [row["parameters"] + row["frozen"] for row in rows] == [11_181_642] * 3
    assert [row["bytes_per_round"] > 2 * 2 * 4 * row["parameters"] - 1 for row in rows] == [True] * 3
    assert rows[-1]["checkpoint_bytes"] < 46e6 < rows[1]["checkpoint_bytes"]
    assert "| head alone | 5,130 |" in capsys.readouterr().out


def test_checkpoints_measures_what_is_written(module, tmp_path, capsys, monkeypatch):
    words = ["--parameters", "4000", "--clients", "20", "--clusters", "2", "--number", "2", "--folder", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["checkpoints.py", *words])
    module("checkpoints").main()
    megabytes = float(capsys.readouterr().out.splitlines()[-1].split("|")[3])
    assert 4000 * 4 * 20 < megabytes * 1e6 < 4000 * 4 * 50  # the projection alone is 50 models
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_hosts_measures_what_crosses_the_network(module, tmp_path, capsys):
    hosts = module("hosts")
    if reason := hosts.why_not():
        pytest.skip(reason)
    path, words = tmp_path / "hosts.csv", ["--networks", "lenet", "--rounds", "3", "--clients", "4"]
    if not os.access(TUN, os.R_OK | os.W_OK):
        pytest.skip(f"a slow cable needs {TUN}")
    one, two, slow = hosts.main([*words, "--csv", str(path)])
    model = 4 * 61_706 / 1e6
    assert max(one["sent_mb"], one["received_mb"]) < 0.001  # the system may send a packet of its own
    assert all(model < row["sent_mb"] < 2 * model < row["received_mb"] < 3 * model for row in (two, slow))
    assert path.read_text().startswith("network,hosts,round_s,") and "2 hosts, 10 ms, 100 Mbit/s" in path.read_text()
    assert "| lenet | 1 host |" in capsys.readouterr().out


def test_the_runs_under_attack_are_distinct_and_their_words_are_understood(module, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(BENCHMARKS.parent)
    attacks = module("attacks")
    keys = list(attacks.keys_of(list(attacks.METHODS), list(attacks.RULES), list(attacks.FAULTS), [0], 3))
    assert len(set(keys)) == len(keys) == 4 * 5 * (1 + 4 * 3)
    for key in (("lcfed", "median", "backdoor", "0.2", "1", "3"), ("ifca", "mean", "sign flip", "0.4", "0", "3")):
        config = printed(capsys, *attacks.words_of(key, "data", str(tmp_path))[1:])
        shares = [each["init_args"]["clients"] for each in config["data"]["faults"]]
        assert shares == [float(key[3])] * (2 if key[2] == "backdoor" else 1)
        rule = config["method"]["aggregation"]["init_args"]["rule"]
        assert (rule is None) == (key[1] == "mean")


def test_the_table_of_attacks_is_continued_and_drawn(module, tmp_path):
    attacks, path = module("attacks"), tmp_path / "attacks.csv"
    for number, share in enumerate(attacks.SHARES):
        row = dict(zip(attacks.KEYS, ("fedavg", "median", "backdoor", str(share), "0", "3"), strict=True))
        attacks.append(path, row | dict.fromkeys(attacks.VALUES, str(0.1 * number)))
    rows = attacks.read(path)
    assert [key[3] for key in rows] == ["0.0", "0.1", "0.2", "0.3", "0.4"]
    figure = attacks.draw(rows)
    lines = {axes.get_title(): [line.get_ydata() for line in axes.lines] for axes in figure.axes}
    assert lines["fedavg, backdoor"][0].tolist() == pytest.approx([0, 10, 20, 30, 40])
    assert lines["ifca, label flip"] == []


def test_the_code_of_authors_that_is_not_there_is_skipped(module, tmp_path, capsys):
    official, path = module("official"), tmp_path / "official.csv"
    assert official.main([str(tmp_path), "--csv", str(path)]) == []
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": skipped, there is no clone of ")[0] for line in lines] == list(official.COMPARISONS)
    assert path.read_text() == ",".join(official.FIELDS) + "\n"


def test_methods_that_are_not_compared_keep_their_rows(module, tmp_path):
    official, path = module("official"), tmp_path / "official.csv"
    path.write_bytes(official.TABLE.read_bytes())
    official.main([str(tmp_path), "--csv", str(path)])  # there are no clones
    assert path.read_bytes() == official.TABLE.read_bytes()
    new = dict.fromkeys(official.FIELDS, "new") | {"method": "IFCA"}
    official.write(path, [new])
    with path.open(newline="") as file:
        found = list(csv.DictReader(file))
    assert [row for row in found if row["method"] == "IFCA"] == [new]
    assert list(dict.fromkeys(row["method"] for row in found)) == list(official.COMPARISONS)


def test_the_table_against_the_code_of_authors_holds_every_comparison(module):
    official = module("official")
    with official.TABLE.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["method"] for row in rows} == set(official.COMPARISONS)
    assert all(float(row["relative"] or row["difference"]) < 1e-5 or row["reason"] for row in rows)
