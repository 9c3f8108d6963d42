"""``lcfl export`` and ``lcfl predict``: files that give what the run's models give."""

import csv

import pytest
import torch

import lcfl
from lcfl.commands import export, predict
from lcfl.networks import MLP
from tests.commandline import LCFED, SMALL, SYNTHETIC
from tests.commandline import lcfl as command

pytestmark = pytest.mark.usefixtures("here")

INPUTS = torch.linspace(-1, 1, 5 * 16).reshape(5, 16)


@pytest.fixture
def run():
    return command("fit", *SYNTHETIC, *LCFED, *SMALL)


def exported(run, *words):
    export.main([str(run.path), *words])


def test_a_state_dict_is_the_networks(run, capsys):
    exported(run, "--model=personal", "--client=3", "--out=models/client3.pt")
    assert "written to models/client3.pt" in capsys.readouterr().out
    network = MLP(16, [32], 8)
    network.load_state_dict(torch.load("models/client3.pt", weights_only=True))
    assert torch.equal(network(INPUTS), run.model("personal", client=3)(INPUTS))


def test_a_program_takes_any_batch(run):
    exported(run, "--model=cluster", "--cluster=1", "--out=cluster.pt2", "--format=torch_export")
    module = torch.export.load("cluster.pt2").module()
    for number in (1, 5):
        expected = run.model("cluster", cluster=1)(INPUTS[:number])
        torch.testing.assert_close(module(INPUTS[:number]), expected)


def test_nothing_is_overwritten_and_nothing_half_is_left(run, tmp_path):
    exported(run, "--model=global", "--out=one.pt")
    with pytest.raises(FileExistsError, match=r"one\.pt exists already; name a new file"):
        exported(run, "--model=global", "--out=one.pt")
    with pytest.raises(ValueError, match="got client=99"):
        exported(run, "--model=personal", "--client=99", "--out=two.pt")
    assert sorted(path.name for path in tmp_path.glob("*.pt*")) == ["one.pt"]


def test_no_run(tmp_path):
    for main in (export.main, predict.main):
        with pytest.raises(FileNotFoundError, match="is no run directory"):
            main([str(tmp_path), "--model=global", "--out=x"])


@pytest.mark.parametrize("kind", ["personal", "cluster", "global"])
def test_predictions_have_the_accuracy_of_the_run(run, kind):
    predict.main([str(run.path), f"--model={kind}", "--out=predictions.csv"])
    with open("predictions.csv") as file:
        rows = list(csv.DictReader(file))
    by_client = {}
    for row in rows:
        by_client.setdefault(int(row["client"]), []).append(row["label"] == row["prediction"])
        assert 0 < float(row["score"]) <= 1
    accuracies = [sum(hits) / len(hits) for hits in by_client.values()]
    assert sum(accuracies) / len(accuracies) == pytest.approx(run.metrics[f"test/own_split/{kind}/acc"])
    state = lcfl.load(run.path).state
    assert list(by_client) == list(range(state.num_clients))


def test_one_client_on_the_terminal(run, capsys):
    capsys.readouterr()
    predict.main([str(run.path), "--model=personal", "--client=2"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "client,index,label,prediction,score" and len(lines) > 1
    assert {line.split(",")[0] for line in lines[1:]} == {"2"}


def test_a_protocol_that_the_run_has_not(run):
    with pytest.raises(ValueError, match="got --protocol global; this run has own_split"):
        predict.main([str(run.path), "--model=global", "--protocol=global", "--out=x.csv"])
