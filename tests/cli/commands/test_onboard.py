"""Tests the table and the files of ``lcfl onboard`` for the newcomers of a finished run."""

import csv
import json
from pathlib import Path

import pytest
import torch
import yaml

import lcfl
from lcfl.cli.commands import onboard, predict
from lcfl.cli.federated_cli import instantiate_data
from tests.helpers.builders import blobs
from tests.helpers.commandline import CONFIGS, FEDAVG, KIND_OF_METHOD, NEEDS, SMALL, SYNTHETIC, files
from tests.helpers.commandline import lcfl as command

pytestmark = pytest.mark.usefixtures("here")

FEDCLUST = ("-c", CONFIGS / "methods" / "fedclust.yaml", "--method.local_update.init_args.epochs=2")


def trained(*words):
    return command("fit", *SYNTHETIC, *FEDCLUST, *SMALL, "--data.newcomers=0.25", *words)


def test_newcomers_join_and_the_run_does_not_change(capsys):
    run = trained()
    before = files(run.path)
    capsys.readouterr()
    onboard.main(["--ckpt_path", str(run.path), "--epochs", "3"])
    out = capsys.readouterr().out
    assert (
        "5 newcomers join" in out and "round-000002.ckpt" in out and "rule: the cluster whose layers are nearest" in out
    )
    assert "test/own_split" in out and "as given" in out and "after 3 epochs" in out
    after = files(run.path)
    new = {path.name for path in after.keys() - before.keys()}
    assert new == {"newcomers.json", "newcomers.csv"} and all(after[path] == before[path] for path in before)

    content = json.loads((run.path / "newcomers.json").read_text())
    assert content["epochs"] == 3 and content["checkpoint"] == "round-000002.ckpt"
    assert content["metrics"]["test/own_split/before/acc"] > 0.9
    with open(run.path / "newcomers.csv") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["client"]) for row in rows] == [each["client"] for each in content["newcomers"]]
    newcomers = json.loads((run.path / "partition.json").read_text())["newcomers"]
    assert [int(row["client"]) for row in rows] == newcomers
    mean = sum(float(row["test/own_split/after/acc"]) for row in rows) / len(rows)
    assert mean == pytest.approx(content["metrics"]["test/own_split/after/acc"])
    assert {row["group"] for row in rows} <= {"0", "1", "2", "3"}


NORMED = "{class_path: lcfl.models.CNN, init_args: {in_channels: 1, image_size: 8, channels: [4], batch_norm: true}}"


@pytest.mark.parametrize("policy", ["average", "local"])
def test_personalised_models_are_kept_in_a_folder_of_their_own(policy, capsys):
    """Each has the accuracy that the table says, which is that of a newcomer who keeps its model."""
    words = ("-c", CONFIGS / "data" / "digits.yaml", *FEDCLUST, *SMALL, "--data.num_clients=8", "--data.newcomers=2")
    words += ("--method.local_update.init_args.epochs=1",)
    run = command("fit", *words, f"--model.network={NORMED}", f"--model.buffer_policy={policy}")
    onboard.main([f"--ckpt_path={run.path}", "--epochs=1"])
    before = files(run.path)
    onboard.main([f"--ckpt_path={run.path}", "--epochs=1", "--out=joined"])
    assert files(run.path) == before and "written to joined/newcomers.json" in capsys.readouterr().out
    told = json.loads(Path("joined/newcomers.json").read_text())
    assert told == json.loads((run.path / "newcomers.json").read_text())

    data = instantiate_data(run.path / "config.yaml")
    data.setup()
    for each in told["newcomers"]:
        indices = data.population.test["own_split"][each["client"]]
        inputs, targets = data.samples.batch(indices, torch.device("cpu"))
        network = run.model("global")
        network.load_state_dict(torch.load(f"joined/client-{each['client']}.pt"))
        with torch.no_grad():
            accuracy = (network(inputs).argmax(dim=1) == targets).float().mean()
        assert float(accuracy) == pytest.approx(each["test/own_split/after/acc"])
    with pytest.raises(FileExistsError, match="joined exists already"):
        onboard.main([f"--ckpt_path={run.path}", "--out=joined"])


def test_clients_of_another_file_join(capsys):
    """They have their own test protocol; batches are those of the run."""
    run = command("fit", *SYNTHETIC, *FEDCLUST, *SMALL)
    section = yaml.safe_load((run.path / "config.yaml").read_text())["data"]
    section |= {"num_clients": 4, "newcomers": 2, "batch_size": 1, "protocols": ["global"]}
    Path("new.yaml").write_text(yaml.safe_dump({"data": section}))
    onboard.main([f"--ckpt_path={run.path}", "--data=new.yaml", "--epochs=1"])
    out = capsys.readouterr().out
    assert "4 newcomers join" in out and "test/global" in out
    assert [each["client"] for each in json.loads((run.path / "newcomers.json").read_text())["newcomers"]] == [
        20, 21, 22, 23
    ]  # fmt: skip
    first = (run.path / "newcomers.json").read_text()
    for epochs, kept in ((1, False), (2, True)):  # the same once more, and then other numbers
        onboard.main([f"--ckpt_path={run.path}", "--data=new.yaml", f"--epochs={epochs}"])
        assert ("the earlier tables are now newcomers-1.json" in capsys.readouterr().out) == kept
    assert (run.path / "newcomers-1.json").read_text() == first != (run.path / "newcomers.json").read_text()
    assert (run.path / "newcomers-1.csv").is_file()
    with pytest.raises(ValueError, match=r"nowhere\.yaml is not a file; give a YAML file with a data section"):
        onboard.main([f"--ckpt_path={run.path}", "--data=nowhere.yaml"])


def test_a_method_without_clusters_has_no_cluster_rule(capsys):
    run = command("fit", *SYNTHETIC, *FEDAVG, *SMALL, "--data.newcomers=2")
    onboard.main([f"--ckpt_path={run.path}"])
    out = capsys.readouterr().out
    assert "rule: none: the method has no clusters" in out and "cluster 0" not in out


def test_models_of_clients_outside_the_federation_are_refused():
    run = lcfl.load(trained("--data.leavers={1: 1}").path)
    (newcomer, *_) = json.loads((run.path / "partition.json").read_text())["newcomers"]
    leaver = 1 if newcomer != 1 else None
    for client in {newcomer, leaver} - {None}:
        with pytest.raises(ValueError, match=f"client {client} is not in the federation"):
            run.model("cluster", client=client)
    predict.main([str(run.path), "--model=cluster", "--out=p.csv"])
    with open("p.csv") as file:
        predicted = {int(row["client"]) for row in csv.DictReader(file)}
    assert predicted == {i for i in range(20) if run.state.active[i]} and len(predicted) == 14


def test_a_missing_checkpoint_is_refused(tmp_path):
    with pytest.raises(ValueError, match="there is no"):
        onboard.main([f"--ckpt_path={tmp_path}"])


@pytest.mark.parametrize("method", KIND_OF_METHOD)
def test_every_method_with_newcomers_and_leavers(method):
    """The second client would leave after the last round."""
    newcomers = blobs(20, newcomers=0.1).newcomer_clients
    leaver, later = sorted(set(range(20)) - set(newcomers))[:2]
    words = ("fit", *SYNTHETIC, "-c", method, *SMALL, *NEEDS.get(method.stem, ()), "--data.newcomers=0.1")
    words += ("--trainer.evaluate_every=0",)
    state = command(*words, "-c", f"data: {{leavers: {{{leaver}: 1, {later}: 2}}}}", "--trainer.name=here").state
    outside = torch.tensor([*newcomers, leaver])
    assert not state.participated[outside].any() and int(state.active.sum()) == 20 - len(outside)
    assert (state.assignment[outside] == -1).all()
    onboard.main(["--ckpt_path=last", "--trainer.name=here", "--epochs=1"])
    content = json.loads(Path("logs/here/version_0/newcomers.json").read_text())
    assert [each["client"] for each in content["newcomers"]] == list(newcomers)
    for each in content["newcomers"]:
        assert (each["cluster"] is None) == content["rule"].startswith("none")
        assert each["cluster"] is None or 0 <= each["cluster"] < state.num_clusters
        assert 0 <= each["test/own_split/after/acc"] <= 1
