"""``lcfl fleet check`` on a node whose data fit, or do not fit, the network of a run."""

import csv
import importlib
import logging
import os
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import lcfl
from lcfl.cli import fleet_config, flower_node
from lcfl.cli.commands import fleet
from lcfl.cli.federated_cli import instantiate
from lcfl.cli.fleet_config import node_of, options_of
from lcfl.fleet.data import described_spec
from lcfl.fleet.messages import Message, decode, encode
from lcfl.fleet.node import identity_of
from lcfl.fleet.states import NodeStates, Owner
from lcfl.models import MLP
from tests.helpers.commandline import CONFIGS

SECTION = """
data:
  dataset:
    class_path: Folders
    init_args:
      root: patients
      reader: {{class_path: Table, init_args: {{target: diagnosis}}}}
      classes: [benign, malignant]
  {partition}
"""


@pytest.fixture
def check(here, capsys):
    """Returns ``check(owners, partition, columns)``, the lines that the command prints for such a folder."""
    words = ["-c", f"{CONFIGS}/data/synthetic.yaml", "-c", f"{CONFIGS}/methods/fedavg.yaml", "--data.num_clients=2"]
    words += ["--model.network={class_path: lcfl.models.MLP, init_args: {in_features: 3, hidden: [4], num_classes: 2}}"]
    fleet.write_app(here / "app", words)

    def checked(owners, partition, columns=3):
        for owner in owners:
            (here / "patients" / owner).mkdir(parents=True)
            with (here / "patients" / owner / "train.csv").open("w") as file:
                rows = csv.writer(file)
                rows.writerow([*(f"x{i}" for i in range(columns)), "diagnosis"])
                rows.writerows([*[i] * columns, ("benign", "malignant")[i % 2]] for i in range(20))
        (here / "hospital.yaml").write_text(SECTION.format(partition=partition))
        fleet.main(["check", "hospital.yaml", "--app", "app"])
        return capsys.readouterr().out.splitlines()

    return checked


def test_the_only_owner_is_the_client(check):
    lines = check(["alder"], "partition: ByOwner")
    assert lines[0] == "name: alder" and "input: [3], 2 classes" in lines
    assert lines[-1] == "network, loss, metrics and data fit together"


def test_without_a_partition_the_samples_of_all_owners_are_one_clients(check):
    lines = check(["alder", "birch"], "")
    number = sum(int(line.split(": ")[1].split()[0]) for line in lines if line.endswith(" samples"))
    assert number == 40


def test_without_a_partition_own_test_samples_keep_their_part(check, here, capsys):
    assert "train: 20 samples" not in check(["alder"], "")  # some are held out
    for part, size in {"val": 2, "test": 4}.items():
        rows = "1,2,3,benign\n" * size
        (here / f"patients/alder/{part}.csv").write_text(f"x0,x1,x2,diagnosis\n{rows}")
    fleet.main(["check", "hospital.yaml", "--app", "app"])
    lines = capsys.readouterr().out.splitlines()
    assert {"name: alder", "train: 20 samples", "val/own_split: 2 samples", "test/own_split: 4 samples"} <= {*lines}


def test_several_owners_are_refused_and_none_is_left_out(check):
    with pytest.raises(ValueError, match=r"the data section has 2 clients \(alder, birch\), but a node is one client"):
        check(["alder", "birch"], "partition: ByOwner")


def test_a_node_is_told_to_change_its_data_and_not_the_network(check):
    with pytest.raises(ValueError, match=r"The network is that of the run, so a node changes its data instead\.$"):
        check(["alder"], "partition: ByOwner", columns=2)


def test_an_app_has_own_modules_and_what_they_import(here, capsys, monkeypatch):
    """A network in a package uses a file beside it and one of the current folder; what nothing imports stays."""
    monkeypatch.syspath_prepend(here)
    (here / "fleet_nets/deep").mkdir(parents=True)
    (here / "fleet_nets/__init__.py").write_text("")
    (here / "fleet_nets/deep/__init__.py").write_text("from .parts_of import Net\n")
    (here / "fleet_nets/deep/parts_of.py").write_text(
        "from torch import nn\nfrom fleet_helper import width\n\nclass Net(nn.Sequential):\n"
        "    def __init__(self):\n        super().__init__(nn.Linear(16, width), nn.Linear(width, 8))\n"
    )
    (here / "fleet_helper.py").write_text("width = 5\n")
    (here / "unused.py").write_text("")
    words = ["-c", f"{CONFIGS}/data/synthetic.yaml", "-c", f"{CONFIGS}/methods/fedavg.yaml", "--data.num_clients=2"]
    fleet.write_app(here / "app", [*words, "--model.network=fleet_nets.deep.Net", "--model.cut=1"])
    files = {str(path.relative_to(here / "app")) for path in (here / "app").rglob("*.py")}
    own = {"fleet_nets/__init__.py", "fleet_nets/deep/__init__.py", "fleet_nets/deep/parts_of.py", "fleet_helper.py"}
    assert files == own | {"fleet_app.py"}
    shutil.rmtree(here / "fleet_nets")
    (here / "fleet_helper.py").unlink()
    for name in ("fleet_helper", *(name for name in sys.modules if name.partition(".")[0] == "fleet_nets")):
        sys.modules.pop(name, None)
    importlib.invalidate_caches()
    fleet.main(["check", str(CONFIGS / "data/synthetic.yaml"), "--app", "app", "--client", "0"])
    assert capsys.readouterr().out.endswith("network, loss, metrics and data fit together\n")
    assert Path(sys.modules["fleet_helper"].__file__) == here / "app/fleet_helper.py"


def test_an_app_has_a_name_that_flower_accepts(here):
    words = ["-c", f"{CONFIGS}/data/synthetic.yaml", "-c", f"{CONFIGS}/methods/fedavg.yaml", "--data.num_clients=2"]
    fleet.write_app(here / "app", [*words, "--trainer.name=my Zürich run_lr0.1 with a long name"])
    assert 'name = "lcfl-my-z-rich-run-lr0-1-with-a"' in (here / "app" / "pyproject.toml").read_text()


def test_a_folder_that_is_no_app_is_named(check, here):
    shutil.rmtree(here / "app")
    with pytest.raises(ValueError, match=r"--app: app has no config\.yaml; give the folder that lcfl fleet app wrote"):
        check(["alder"], "")


@pytest.mark.parametrize(("seconds", "corrected"), [(-1, True), (1e9, False)])
def test_a_node_that_is_asked_to_join_again_reads_its_data_anew(check, here, monkeypatch, seconds, corrected):
    check(["alder"], "partition: ByOwner")
    monkeypatch.setattr(flower_node, "FRESH", seconds)
    monkeypatch.setattr(sys, "path", sys.path[:])
    told = []

    def join(answer):
        fields = {"nonce": "n", "lcfl": lcfl.__version__, "sets": ["test/own_split"], "refused": "too few"}
        told.append(decode(answer(encode(Message("join", fields))), 2**20).fields)

    def keep(place, needed_by, answer):
        join(answer)
        table = here / "patients/alder/train.csv"
        text = table.read_text()
        table.write_text(text + "1,1,1,benign\n" * 20)
        join(answer)
        table.write_text(text.replace("benign", "unknown"))
        join(answer)

    monkeypatch.setattr(flower_node, "keep", keep)
    own = f'{{"data": "{here}/hospital.yaml", "state": "{here}/state"}}'
    flower_node.main(str(here / "app/config.yaml"), own, "unused", "1")
    first, second, third = told
    assert (second["sizes"]["train"] > first["sizes"]["train"]) is corrected
    assert ("unknown" in third.get("reason", "")) is corrected


@pytest.fixture
def kept(check, here):
    """Two runs of an app whose models a node keeps: yields its networks, the newer one last, and the newer file."""
    check(["alder"], "partition: ByOwner")
    module, method = instantiate(here / "app/config.yaml")
    data = fleet_config.data_of(here / "app/config.yaml", here / "hospital.yaml")
    data.prepare_data()
    data.setup()
    spec, owner = described_spec(data.dataset, data.samples), Owner(identity_of(module, method, 0), 0)
    networks = [MLP(3, [4], 2) for _ in range(2)]
    for number, network in enumerate(networks):
        states = NodeStates(here / f"state/run{number}/client-1", None)
        states.keep_model("personal", network.state_dict() | {"_extra_state": {1}}, owner, spec)
        os.utime(states.folder / "personal.pt", (number, number))
    return networks, states.folder / "personal.pt"


EXPORT = ["export", "hospital.yaml", "--app=app", "--model=personal", "--out"]


def test_a_node_writes_the_newest_of_its_models(kept, here, capsys):
    networks, inputs = kept[0], torch.randn(5, 3)
    fleet.main([*EXPORT, "alder.pt2", "--state=state/run0", "--format=torch_export"])
    torch.testing.assert_close(torch.export.load("alder.pt2").module()(inputs), networks[0](inputs))
    shutil.rmtree("patients")  # the weights need no samples
    fleet.main([*EXPORT, "alder.pt", "--state=state"])
    assert "written to alder.pt, from state/run1/client-1/personal.pt\n" in capsys.readouterr().out
    network = MLP(3, [4], 2)
    network.load_state_dict(torch.load("alder.pt"))
    assert torch.equal(network(inputs), networks[1](inputs))


def test_a_node_predicts_new_samples(kept, here):
    networks, _ = kept
    (here / "new.csv").write_text("x2,x0,x1\n3,1,2\n-6,-4,-5\n")
    words = ["predict", "hospital.yaml", "--app=app", "--state=state", "--model=personal", "--data=new.csv", "--scores"]
    fleet.main([*words, "--out=predictions.csv"])
    with open("predictions.csv") as file:
        rows = list(csv.DictReader(file))
    with torch.no_grad():
        scores = networks[1](torch.tensor([[1.0, 2.0, 3.0], [-4.0, -5.0, -6.0]])).softmax(dim=1)
    for number, row in enumerate(rows):
        assert (row["file"], row["row"]) == ("new.csv", str(number + 1))
        assert row["prediction"] == ("benign", "malignant")[scores[number].argmax()]
        assert float(row["score_malignant"]) == pytest.approx(float(scores[number, 1]), abs=1e-5)
    assert len(rows) == 2
    with pytest.raises(FileExistsError, match=r"predictions\.csv"):
        fleet.main([*words, "--out=predictions.csv"])


@pytest.mark.parametrize(
    ("before", "now", "changed"),
    [
        ("classes: [benign, malignant]", "classes: [malignant, benign]", "classes: [malignant, benign], and [benign, "),
        (
            "{target: diagnosis}",
            "{target: diagnosis, features: [x2, x1, x0]}",
            "columns: [x2, x1, x0], and [x0, x1, x2]",
        ),
        ("{target: diagnosis}", "{target: diagnosis, features: [x2, x1]}", "shape: [2], and [3] in the run; columns: "),
    ],
)
def test_a_node_whose_data_section_has_changed_predicts_nothing(kept, here, before, now, changed):
    """The scores would be those of other classes, or the features in another order."""
    section = here / "hospital.yaml"
    section.write_text(section.read_text().replace(before, now))
    (here / "new.csv").write_text("x2,x0,x1\n3,1,2\n")
    words = ["predict", "hospital.yaml", "--app=app", "--state=state", "--model=personal", "--data=new.csv"]
    with pytest.raises(ValueError, match=re.escape(f"trained with other data than now ({changed}")):
        fleet.main(words)


@pytest.mark.parametrize("content", ["", "hello", "half", "other", Path("a"), [1], {"layers.0.bias": torch.zeros(4)}])
def test_a_damaged_model_is_named(kept, content):
    _, file = kept
    whole = file.read_bytes()
    if isinstance(content, str):
        texts = {"half": whole[: len(whole) // 2], "other": whole.replace(b"weight", b"w\xffight")}
        file.write_bytes(texts.get(content, content.encode()))
    else:
        torch.save(content, file)
    with pytest.raises(
        ValueError, match=rf"^{file.relative_to(Path.cwd())} is damaged \(.*\); give another folder as --state"
    ):
        fleet.main([*EXPORT, "alder.pt", "--state=state"])
    assert not Path("alder.pt").exists()


@pytest.mark.parametrize(
    ("setting", "value", "words"),
    [
        ("deadline", "abc", "it must be a number"),
        ("min-answers", True, "it must be a number"),
        ("newcomer-epochs", -1, "it must be a whole number from 1"),
        ("max-message-mib", -5, "it must be a whole number from 1"),
        ("ckpt-path", 3, "it must be a text in quotes"),
    ],
)
def test_a_setting_of_the_server_with_another_value_is_refused(here, setting, value, words):
    (here / "config.yaml").write_text("data: {num_clients: 2}")
    with pytest.raises(ValueError, match=rf"^--run-config: got {setting}={value!r}; {words}\.$"):
        options_of(here / "config.yaml", {setting: value})


@pytest.mark.parametrize(
    ("setting", "value", "words"),
    [("max-message-mib", 0, "it must be a whole number from 1"), ("clinet", 0, "allowed are data, state, name")],
)
def test_a_setting_of_a_node_with_another_value_is_refused(here, setting, value, words):
    with pytest.raises(ValueError, match=rf"^--node-config: got {setting}={value!r}; {words}"):
        node_of(here / "config.yaml", {setting: value})


@pytest.mark.parametrize(("debug", "has_traceback"), [("", False), ("1", True)])
def test_flower_logs_a_mistake_of_the_operator_in_one_line(here, monkeypatch, caplog, debug, has_traceback):
    pytest.importorskip("flwr")
    from lcfl.cli.flower_app import server_app

    (here / "config.yaml").write_text("data: {num_clients: 2}")
    monkeypatch.setattr("lcfl.cli.flower_server.lead", lambda config, grid, settings: options_of(config, settings))
    monkeypatch.setenv("LCFL_DEBUG", debug)
    flower = logging.getLogger("flwr")
    monkeypatch.setattr(flower, "filters", [])
    monkeypatch.setattr(flower, "propagate", True)
    with pytest.raises(ValueError, match="deadline: got 0") as caught:
        server_app(here / "config.yaml")(None, SimpleNamespace(run_config={"deadline": 0}))
    flower.error("%s raised an exception", "ServerApp", exc_info=caught.value)  # as Flower does
    assert caplog.messages[0].startswith("lcfl: error: deadline: got 0") is not has_traceback
    assert ("Traceback" in caplog.text) is has_traceback
