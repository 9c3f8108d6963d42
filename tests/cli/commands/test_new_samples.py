"""Tests that ``lcfl predict --data`` predicts new samples with the models of a run."""

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from lcfl.cli.commands import predict
from tests.helpers.clients_on_disk import write_arrays, write_table, write_wards
from tests.helpers.commandline import FEDAVG, LCFED, SMALL, SYNTHETIC, shared

NETWORK = "--model.network={class_path: lcfl.models.MLP, init_args: {in_features: 2, hidden: [4], num_classes: 2}}"


def configuration(root, **options):
    reader = {"class_path": "Table", "init_args": {"target": "outcome", **options}}
    dataset = {"class_path": "Folders", "init_args": {"root": str(root), "reader": reader}}
    return yaml.safe_dump({"data": {"dataset": dataset, "partition": "ByOwner"}})


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run of tables, which no test may change."""
    folder = tmp_path_factory.mktemp("run")
    write_wards(folder / "wards", {"alder": 12, "birch": 16, "cedar": 20}, outcomes=("ill", "well"))
    sizes = "--trainer.clients_per_round=3", "--method.clustering.0.num_clusters=2"
    return shared(folder, *LCFED, "-c", configuration(folder / "wards"), NETWORK, *SMALL, *sizes)


@pytest.fixture
def new(here):
    """A file of rows without targets, whose columns have another order."""
    write_table("new.csv", ("dose", "name", "age"), *[[row / 7, f"p{row}", 1 - row / 5] for row in range(600)])
    return "new.csv"


def predicted(run, *words):
    predict.main([str(run.path), "--out=predictions.csv", *words])
    with open("predictions.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    Path("predictions.csv").unlink()
    return rows


@pytest.mark.parametrize(
    ("words", "of"),
    [
        (["--model=global"], {"kind": "global"}),
        (["--model=personal", "--client=birch"], {"kind": "personal", "client": "birch"}),
        (["--model=cluster", "--client=2"], {"kind": "cluster", "client": 2}),
        (["--model=cluster", "--cluster=1"], {"kind": "cluster", "cluster": 1}),
    ],
)
def test_new_samples_are_predicted_by_the_model_that_is_asked_for(run, new, words, of):
    rows = predicted(run, *words, f"--data={new}", "--scores")
    assert list(rows[0]) == ["file", "row", "prediction", "score", "score_ill", "score_well"]
    assert [(row["file"], int(row["row"])) for row in rows] == [(new, number + 1) for number in range(600)]
    inputs = torch.tensor([[1 - row / 5, row / 7] for row in range(600)])
    with torch.no_grad():
        scores = run.model(**of)(inputs).softmax(dim=1)
    found = torch.tensor([[float(row["score_ill"]), float(row["score_well"])] for row in rows])
    torch.testing.assert_close(found, scores, rtol=0, atol=2e-6)
    assert [row["prediction"] for row in rows] == [("ill", "well")[best] for best in found.argmax(dim=1).tolist()]


def test_test_samples_are_predicted_alike_without_their_targets(run, here):
    """Their targets may be in the file; they are not read."""
    known = [row for row in predicted(run, "--model=global") if row["name"] == "birch"]
    own = predicted(run, "--model=global", f"--data={known[0]['file']}")
    for row in known:
        assert own[int(row["row"]) - 1] == {name: row[name] for name in ("file", "row", "prediction", "score")}


def test_numbers_are_written_without_a_prediction(here, new):
    write_wards("wards", {"alder": 12, "birch": 16})
    network = NETWORK.replace("num_classes: 2", "num_classes: 1")
    loss = "--model.loss=MSELoss", "--model.report=loss", "--trainer.clients_per_round=2"
    clustering = "--method.clustering.0.num_clusters=2"
    run = shared(here, *LCFED, "-c", configuration("wards", regression=True), network, *SMALL, *loss, clustering)
    rows = predicted(run, "--model=global", f"--data={new}")
    assert list(rows[0]) == ["file", "row", "output"] and len(rows) == 600
    with torch.no_grad():
        expected = run.model("global")(torch.tensor([[1.0, 0.0]])).item()
    assert float(rows[0]["output"]) == pytest.approx(expected, rel=1e-5)


IMAGES = """
data:
  dataset: {class_path: Folders, init_args: {root: arrays, reader: Arrays}}
  partition: ByOwner
trainer: {clients_per_round: 1.0}
model: {network: %s}
"""
NORMALISED = "{class_path: lcfl.models.MLP, init_args: {in_features: 4, hidden: [4], num_classes: 2, batch_norm: true}}"


def write_clients(dtype=np.uint8, most=256):
    draws = np.random.default_rng(0)
    for name in "abcd":
        values = draws.integers(0, most, (20, 1, 2, 2)).astype(dtype)
        write_arrays(f"arrays/{name}.npz", x=values, y=np.arange(20) % 2)


def test_bytes_that_were_scaled_and_no_longer_are_are_refused(here):
    write_clients()
    run = shared(here, *FEDAVG, "-c", IMAGES % NORMALISED, *SMALL)
    new = "--data=arrays/a.npz"
    assert len(predicted(run, "--model=global", new)) == 20
    write_clients(np.float32)
    with pytest.raises(ValueError, match=r"other data than now \(normalisation: None, and \{'mean': \[0\.0\], 'std'"):
        predicted(run, "--model=global", new)


def test_buffers_of_clients_need_a_client(here):
    write_clients()
    run = shared(here, *FEDAVG, "-c", IMAGES % NORMALISED, *SMALL, "--model.buffer_policy=local")
    with pytest.raises(ValueError, match=r"clients keep their own buffers .*; name the client whose buffers to use"):
        predicted(run, "--model=global", "--data=arrays/a.npz")
    rows = predicted(run, "--model=global", "--client=b", "--data=arrays/a.npz", "--scores")
    inputs = torch.from_numpy(np.load("arrays/a.npz")["x"]) / 255
    with torch.no_grad():
        scores = run.model("global", client="b")(inputs).softmax(dim=1)
    assert [float(row["score_1"]) for row in rows] == pytest.approx(scores[:, 1].tolist(), abs=1e-5)


TOKENS = "{class_path: test_new_samples_net.Tokens}"
NET = """
from torch import nn

class Tokens(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Embedding(9, 3), nn.Flatten(), nn.Linear(12, 2))
"""


def test_samples_that_the_network_refuses_are_named(here, monkeypatch):
    (here / "test_new_samples_net.py").write_text(NET)
    monkeypatch.syspath_prepend(here)
    write_clients(np.int64, 9)
    run = shared(here, *FEDAVG, "-c", IMAGES % TOKENS, *SMALL, "--model.cut=3")
    write_arrays("new.npz", x=np.full((3, 1, 2, 2), 12))
    with pytest.raises(
        ValueError, match=r"cannot compute with the samples from new\.npz row 1 to new\.npz row 3 \(Index"
    ):
        predicted(run, "--model=global", "--data=new.npz")


def test_client_transforms_do_not_change_new_samples(here):
    write_clients()
    rotated = "--data.client_transforms={class_path: Rotation}"
    run = shared(here, *FEDAVG, "-c", IMAGES % NORMALISED, *SMALL, rotated)
    with pytest.warns(UserWarning, match=r"predict: data\.client_transforms \(Rotation\) do not change new samples"):
        predicted(run, "--model=global", "--data=arrays/a.npz")


def test_predictions_do_not_become_samples(run, here, new):
    (here / "new").mkdir()
    shutil.move(new, "new")
    with pytest.raises(ValueError, match=r"--out: got new/out\.csv, in the folder of --data"):
        predict.main([str(run.path), "--model=global", "--data=new", "--out=new/out.csv"])


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--model=personal"], "a personal model needs the client whose model it is"),
        (["--model=global", "--protocol=own_split"], "got --protocol, which chooses test samples, and --data"),
        (["--model=global", "--client=oak"], "oak"),
    ],
)
def test_what_does_not_go_together_is_refused_and_no_file_remains(run, new, words, problem):
    with pytest.raises(ValueError, match=problem):
        predicted(run, *words, f"--data={new}")
    assert not Path("predictions.csv").exists()


def test_a_cluster_without_new_samples_is_refused(run, here):
    with pytest.raises(
        ValueError, match="got --cluster without --data; every test sample is predicted by its client's"
    ):
        predicted(run, "--model=cluster", "--cluster=0")


def test_a_data_set_without_files_is_refused(here, new):
    run = shared(here, *SYNTHETIC, *LCFED, *SMALL)
    with pytest.raises(ValueError, match="Synthetic has no method new_samples"):
        predicted(run, "--model=global", f"--data={new}")


@pytest.mark.parametrize(("outcome", "dose", "what"), [("dead", "dose", "classes"), ("ill", "mass", "columns")])
def test_names_that_have_changed_since_the_run_are_refused(run, here, outcome, dose, what):
    """The numbers of classes and the order of columns would be others."""
    write_table("new.csv", ("age", dose), [1, 2])
    copy = shutil.copytree(run.path, here / "copy")
    write_wards("wards", {"alder": 12}, columns=("age", dose, "outcome"), outcomes=(outcome, "well"))
    config = yaml.safe_load((copy / "config.yaml").read_text())
    config["data"]["dataset"]["init_args"]["root"] = "wards"
    (copy / "config.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(ValueError, match=rf"predict: the model was trained with other data than now \({what}: \["):
        predict.main([str(copy), "--model=global", "--data=new.csv"])
    was = json.loads((copy / "partition.json").read_text())[what]
    assert was == {"classes": ["ill", "well"], "columns": ["age", "dose"]}[what]
