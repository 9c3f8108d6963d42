"""Tests that the files of ``lcfl export`` and ``lcfl predict`` match the models of the run."""

import csv
import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

import lcfl
from lcfl.cli import model_file
from lcfl.cli.commands import export, predict
from lcfl.data.samples import TensorSamples
from lcfl.models import MLP
from lcfl.runs.checkpoint import CheckpointError
from tests.helpers.clients_on_disk import write_table, write_wards
from tests.helpers.commandline import CONFIGS, FEDAVG, LCFED, SMALL, SYNTHETIC, files, shared
from tests.helpers.commandline import lcfl as command

pytestmark = pytest.mark.usefixtures("here")

INPUTS = torch.linspace(-1, 1, 5 * 16).reshape(5, 16)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run, which no test may change."""
    return shared(tmp_path_factory.mktemp("run"), *SYNTHETIC, *LCFED, *SMALL)


def exported(run, *words):
    export.main([str(run.path), *words])


def test_a_state_dict_fits_the_network(run, capsys):
    exported(run, "--model=personal", "--client=3", "--out=models/client3.pt")
    assert "written to models/client3.pt" in capsys.readouterr().out
    network = MLP(16, [32], 8)
    network.load_state_dict(torch.load("models/client3.pt", weights_only=True))
    assert torch.equal(network(INPUTS), run.model("personal", client=3)(INPUTS))


def test_a_client_of_another_cluster_is_refused(run):
    client = 3
    other = int(run.state.assignment[client]) ^ 1
    with pytest.raises(ValueError, match=rf"got cluster={other}, but client 3 is in cluster {other ^ 1}; give one"):
        exported(run, "--model=cluster", f"--cluster={other}", "--client=3", "--out=models/cluster.pt")


@pytest.mark.parametrize("client", [1.5, True, -1])
def test_a_client_is_a_whole_number(run, client):
    with pytest.raises(ValueError, match=rf"got client={client}; this run has clients 0 to \d+\."):
        run.model("personal", client=client)


def test_a_cluster_of_another_kind_of_model_is_refused(run):
    with pytest.raises(ValueError, match="got cluster=1 for a global model; only a cluster model is that of a cluster"):
        exported(run, "--model=global", "--cluster=1", "--out=models/global.pt")


def test_a_program_accepts_any_batch_size(run):
    exported(run, "--model=cluster", "--cluster=1", "--out=cluster.pt2", "--format=torch_export")
    module = torch.export.load("cluster.pt2").module()
    for number in (1, 5):
        expected = run.model("cluster", cluster=1)(INPUTS[:number])
        torch.testing.assert_close(module(INPUTS[:number]), expected)


class LastStep(nn.Module):
    """Reads series whose last channel is 1 where they have values and 0 in the padding."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(2, 4, batch_first=True)

    def forward(self, inputs):
        lengths = inputs[..., -1].sum(dim=1).long()
        return self.lstm(inputs[..., :-1])[0][torch.arange(len(inputs)), lengths - 1]


class Branching(LastStep):
    def forward(self, inputs):
        return super().forward(inputs if inputs.sum() > 3 else 2 * inputs)


def test_a_network_that_asks_for_its_batch_size_is_exported():
    network, inputs = LastStep().eval(), torch.ones(5, 3, 3)
    module = model_file._exported(network, torch.ones(2, 3, 3)).module()
    torch.testing.assert_close(module(inputs), network(inputs))


def test_a_network_that_cannot_be_exported_is_refused_in_one_line(capfd):
    with pytest.raises(
        ValueError, match=r"^--format: torch.export cannot export Branching .*Use --format state_dict"
    ) as e:
        model_file._exported(Branching().eval(), torch.ones(2, 3, 3))
    assert len(str(e.value).splitlines()) == 1 and "def forward" not in capfd.readouterr().err


@pytest.mark.parametrize("main", [export.main, predict.main])
def test_nothing_is_overwritten_and_no_partial_file_or_folder_remains(run, tmp_path, capsys, main):
    words = [str(run.path), "--model=personal", "--client=1"]
    main([*words, "--out=folder/one"])
    assert capsys.readouterr().out == "written to folder/one\n"
    before = files(tmp_path)
    with pytest.raises(FileExistsError, match=r"folder/one exists already; name a new one"):
        main([*words, "--client=99", "--out=folder/one"])
    for out in ("folder/two", "new/folder/two"):
        with pytest.raises(ValueError, match="there is no client '99'"):
            main([*words, "--client=99", f"--out={out}"])
    assert files(tmp_path) == before and len(before) == 1 and not Path("new").exists()


def test_the_best_or_any_other_checkpoint_can_be_chosen():
    monitor = ("--trainer.callbacks=Checkpoint", "--trainer.callbacks.monitor=val/own_split/personal/acc")
    run = command("fit", *SYNTHETIC, *LCFED, *SMALL, "--trainer.rounds=3", *monitor, "--trainer.callbacks.mode=min")
    first, last = (run.path / "checkpoints" / f"round-00000{number}.ckpt" for number in (1, 3))
    (run.path / "checkpoints" / "best.json").write_text(json.dumps({"checkpoint": first.name}))
    assert first.is_dir() and last.is_dir()
    predictions = {}
    for which in ("last", "best", first.name, str(first)):
        name = which.replace("/", "_")
        exported(run, "--model=global", f"--ckpt_path={which}", f"--out={name}.pt")
        predict.main([str(run.path), "--model=global", f"--ckpt_path={which}", f"--out={name}.csv"])
        loaded = lcfl.load(run.path, ckpt_path=which)
        assert loaded.state.round == (3 if which == "last" else 1)
        weights = torch.load(f"{name}.pt", weights_only=True)
        assert all(torch.equal(weights[key], value) for key, value in loaded.model("global").state_dict().items())
        predictions[which] = Path(f"{name}.csv").read_text()
    assert predictions["best"] == predictions[first.name] == predictions[str(first)] != predictions["last"]


def test_a_checkpoint_of_another_run_is_refused(run):
    other = command("fit", *SYNTHETIC, *LCFED, *SMALL, "--seed_everything=1").path / "checkpoints" / "round-000002.ckpt"
    for path in (other, run.path):
        with pytest.raises(
            CheckpointError, match=r"is not a checkpoint of .*version_0\. Give the name of a checkpoint in"
        ):
            predict.main([str(run.path), "--model=global", f"--ckpt_path={path}"])
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        predict.main([str(run.path), "--model=global", "--ckpt_path=round-000077.ckpt"])


def test_a_client_without_test_samples_is_refused(tmp_path):
    (tmp_path / "shares.json").write_text(json.dumps({"indices": [[0], [*range(1, 200)], [*range(200, 400)]]}))
    shares = ("--data.partition=FromFile", "--data.partition.path=shares.json", "--data.num_clients=3")
    run = command("fit", *SYNTHETIC, *FEDAVG, *SMALL, *shares, "--trainer.clients_per_round=3")
    with pytest.raises(ValueError, match=r"got --client 0, which has no test samples under own_split; .*has own_split"):
        predict.main([str(run.path), "--model=global", "--client=0", "--out=none.csv"])
    assert not Path("none.csv").exists()
    predict.main([str(run.path), "--model=global", "--out=all.csv"])
    with open("all.csv") as file:
        assert {row["client"] for row in csv.DictReader(file)} == {"1", "2"}


def test_items_that_are_drawn_are_the_same_in_every_prediction(run, monkeypatch):
    batch = TensorSamples.batch

    def noisy(self, indices, device):
        inputs, targets = batch(self, indices, device)
        return inputs + torch.randn_like(inputs), targets

    monkeypatch.setattr(TensorSamples, "batch", noisy)
    for name in ("a.csv", "b.csv"):
        predict.main([str(run.path), "--model=global", f"--out={name}"])
    assert Path("a.csv").read_text() == Path("b.csv").read_text()


def test_there_is_no_best_checkpoint_without_a_monitor(run):
    with pytest.raises(CheckpointError, match=r"there is no best checkpoint, as no Checkpoint .* in .*version_0"):
        exported(run, "--model=global", "--ckpt_path=best", "--out=one.pt")
    assert not list(Path().glob("*one.pt*"))


def test_a_run_that_is_not_finished_gives_a_warning(run):
    shutil.copytree(run.path, "unfinished", ignore=shutil.ignore_patterns("summary.json"))
    with pytest.warns(UserWarning, match="is not finished: its models are those of an intermediate round"):
        export.main(["unfinished", "--model=global", "--out=one.pt"])


def test_a_folder_without_a_run_is_refused(tmp_path):
    for main in (export.main, predict.main):
        with pytest.raises(FileNotFoundError, match="is not a run directory"):
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


def test_clients_that_choose_their_cluster_choose_again_for_predictions(tmp_path):
    """With four clients a round, others have last chosen among older models."""
    made = shared(
        tmp_path, *SYNTHETIC, "-c", str(CONFIGS / "methods/ifca.yaml"), *SMALL,
        "--trainer.rounds=5", "--trainer.clients_per_round=4",
    )  # fmt: skip
    predict.main([str(made.path), "--model=cluster", "--out=predictions.csv"])
    right: dict[str, list[bool]] = {}
    with open("predictions.csv") as file:
        for row in csv.DictReader(file):
            right.setdefault(row["client"], []).append(row["label"] == row["prediction"])
    found = sum(sum(each) / len(each) for each in right.values()) / len(right)
    assert found == pytest.approx(made.metrics["test/own_split/cluster/acc"])
    with pytest.warns(UserWarning, match="client 3 is the last that the server knows"):
        old = made.model("cluster", client=3)
    own = made.model("cluster", cluster=int(made.state.assignment[3]))
    assert all(map(torch.equal, old.parameters(), own.parameters()))


def test_the_predictions_of_one_client_are_printed(run, capsys):
    capsys.readouterr()
    predict.main([str(run.path), "--model=personal", "--client=2"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "client,index,label,prediction,score" and len(lines) > 1
    assert {line.split(",")[0] for line in lines[1:]} == {"2"}


def test_the_scores_of_each_class_are_written(run):
    predict.main([str(run.path), "--model=personal", "--scores", "--out=scores.csv"])
    with open("scores.csv") as file:
        rows = list(csv.DictReader(file))
    columns = [f"score_{number}" for number in range(8)]
    assert list(rows[0])[-9:] == ["score", *columns]
    for row in rows:
        scores = [float(row[column]) for column in columns]
        assert sum(scores) == pytest.approx(1, abs=1e-5) and max(scores) == float(row["score"])
        assert scores[int(row["prediction"])] == max(scores)


def test_predictions_name_file_and_row(here, tmp_path):
    write_wards("wards", {"a": 12, "b": 16}, outcomes=("ill", "well"))
    write_table("wards/a/test.csv", ("dose", "age", "outcome"), [1, 2, "well"], [3, 4, "ill"])
    section = {"class_path": "Folders", "init_args": {"root": "wards", "reader": "Table"}}
    section["init_args"]["reader"] = {"class_path": "Table", "init_args": {"target": "outcome"}}
    Path("own.yaml").write_text(yaml.safe_dump({"data": {"dataset": section, "partition": "ByOwner"}}))
    network = "--model.network={class_path: lcfl.models.MLP, init_args: {in_features: 2, hidden: [4], num_classes: 2}}"
    run = shared(tmp_path, *FEDAVG, "-c", "own.yaml", network, *SMALL[:1], *SMALL[2:])
    predict.main([str(run.path), "--model=global", "--out=predictions.csv"])
    with open("predictions.csv") as file:
        predicted = list(csv.DictReader(file))
    assert {Path(each["file"]).name for each in predicted} == {"test.csv", "train.csv"}
    for each in predicted:
        with open(each["file"]) as file:
            assert list(csv.DictReader(file))[int(each["row"]) - 1]["outcome"] == each["label"]


OWN = """
import torch
from torch import nn

class Sums(torch.utils.data.TensorDataset):
    def __init__(self, shape: list[int]):
        inputs = torch.linspace(-1, 1, 80).view(20, 4)
        super().__init__(inputs, inputs.sum(1).view(-1, *[1] * len(shape)).expand(20, *shape))

class Network(nn.Linear):
    def __init__(self, outputs: list[int]):
        super().__init__(4, torch.Size(outputs).numel())
        self.shape = outputs
    def forward(self, inputs):
        return super().forward(inputs).view(-1, *self.shape)

class Likelihood(nn.Module):
    def forward(self, outputs, targets):
        return nn.functional.gaussian_nll_loss(outputs[:, :1], targets, outputs[:, 1:].exp())
"""


@pytest.mark.parametrize(
    ("target", "output", "loss", "columns"),
    [
        ([], [], "torch.nn.MSELoss", ["target", "output"]),
        ([2], [2], "torch.nn.MSELoss", ["target_0", "target_1", "output_0", "output_1"]),
        ([1], [2], "own_sums.Likelihood", ["target", "output_0", "output_1"]),
    ],
)
def test_numbers_have_a_column_for_each_number_of_target_and_output(here, target, output, loss, columns):
    (here / "own_sums.py").write_text(OWN)
    train = f"--data.dataset.train={{class_path: own_sums.Sums, init_args: {{shape: {target}}}}}"
    network = f"--model.network={{class_path: own_sums.Network, init_args: {{outputs: {output}}}}}"
    trained = shared(
        here, *FEDAVG, *SMALL, "--data.dataset=Datasets", train, "--data.partition=IID", "--data.num_clients=4",
        network, "--model.cut=null", f"--model.loss={loss}", "--model.report=loss",
    )  # fmt: skip
    with pytest.raises(ValueError, match="got --scores; the targets of this run are numbers"):
        predict.main([str(trained.path), "--model=global", "--scores"])
    predict.main([str(trained.path), "--model=global", "--out=numbers.csv"])
    with open("numbers.csv") as file:
        header, *rows = csv.reader(file)
    assert header == ["client", "index", *columns] and rows
    inputs = torch.linspace(-1, 1, 80).view(20, 4)[[int(row[1]) for row in rows]]
    expected = trained.model("global")(inputs).view(len(rows), -1)
    found = torch.tensor([[float(cell) for cell in row[-expected.shape[1] :]] for row in rows])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_an_unknown_protocol_is_refused(run):
    with pytest.raises(ValueError, match="got --protocol global; this run has own_split"):
        predict.main([str(run.path), "--model=global", "--protocol=global", "--out=x.csv"])


def test_the_samples_of_a_fleet_are_not_taken_from_this_machine(run, here):
    copy = shutil.copytree(run.path, here / "copy")
    (copy / "fleet.json").write_text("{}")
    with pytest.raises(ValueError, match=f"predict: {copy} is the run of a fleet, whose samples lie on its nodes"):
        predict.main([str(copy), "--model=global"])


def test_data_that_cannot_be_read_here_are_reported(run, tmp_path):
    other = shutil.copytree(run.path, tmp_path / "elsewhere")
    config = yaml.safe_load((other / "config.yaml").read_text())
    config["data"]["dataset"] = {"class_path": "lcfl.data.datasets.MNIST", "init_args": {"root": "nowhere"}}
    (other / "config.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(
        ValueError,
        match=r"the data of .* cannot be read: .*\. If its configuration has relative paths, start",
    ):
        predict.main([str(other), "--model=global", "--out=none.csv"])
    assert not Path("none.csv").exists()


@pytest.mark.parametrize(("option", "what"), [("seed", "clients' shares of them"), ("dataset", "samples")])
def test_predictions_on_changed_data_are_refused(run, tmp_path, option, what):
    """One client would get another one's rows, or rows that it was trained on."""
    other = shutil.copytree(run.path, tmp_path / "changed")
    config = yaml.safe_load((other / "config.yaml").read_text())
    if option == "seed":
        config["data"]["seed"] += 1
    else:
        config["data"]["dataset"]["init_args"]["seed"] += 1
    (other / "config.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(ValueError, match=f"predict: the .*{what}.* changed since the run in {other}"):
        predict.main([str(other), "--model=global", "--out=none.csv"])
    assert not Path("none.csv").exists()
