"""Tests the files and commands of every page in docs/howto/, as a reader would follow them."""

import csv
import json
import pickle
import re
import runpy
import shutil
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lcfl.__main__ import COMMANDS
from lcfl.cli import federated_cli
from lcfl.cli.federated_cli import instantiate, instantiate_trainer
from lcfl.cli.fleet_config import node_of
from lcfl.data.datasets import Folders
from lcfl.fleet import server as fleet
from lcfl.fleet.server import FleetOptions
from tests.helpers.commandline import printed
from tests.test_readme import lcfl_commands, marked
from tests.test_task_examples import TASKS

ROOT = Path(__file__).parent.parent
PAGES = {path.stem: path.read_text() for path in (ROOT / "docs/howto").glob("*.md")}
# The blocks of the page on fleets need the files of the page on clients; a test of their own follows them.
BLOCKS = [(page, name) for page in PAGES for name in re.findall(r"<!-- block: (\w+) -->", PAGES[page])]

SHORT = ["--trainer.rounds=2", "--trainer.evaluate_every=2", "--trainer.devices=1"]
SHORT += ["--trainer.logger=false", "--trainer.enable_progress_bar=false"]


def write_files(page, folder):
    """Writes the files that a page shows."""
    for name in re.findall(r"<!-- file: ([\w.]+) -->", PAGES[page]):
        (folder / name).write_text(marked(PAGES[page], f"file: {name}"))


@pytest.fixture
def followed(here):
    """Returns ``followed(page, block, *more)``, which writes the page's files and runs the commands of one block."""

    def follow(page, block, *more):
        write_files(page, here)
        result = None
        text = marked(PAGES[page], f"block: {block}").replace("$LCFL", str(ROOT))
        for line in text.splitlines():
            if line.startswith("python make_"):
                runpy.run_path(line.removeprefix("python "), run_name="__main__")
                continue
            if line.startswith("python -m pytest"):
                assert pytest.main([*line.split()[3:], "-p", "no:cacheprovider", "--basetemp=tmp"]) == 0
                continue
            ((command, *words),) = lcfl_commands(f"```bash\n{line}\n```")
            if command in COMMANDS:
                import_module(COMMANDS[command]).main(words)
            else:
                result = federated_cli.main([command, *words, *SHORT, *more])
        return result

    return follow


@pytest.mark.parametrize(
    ("page", "block"),
    # a sweep starts a process for each run, and the one for femnist trains a CNN
    [
        pytest.param(*each, marks=[pytest.mark.slow] if each[1] in ("hospitals", "femnist") else [])
        for each in BLOCKS
        if each[0] != "fleet"
    ],
    ids=lambda each: each,
)
def test_block_as_written(followed, here, capsys, monkeypatch, page, block):
    if page == "huggingface":
        pytest.importorskip("datasets")
    if page == "tasks":  # its blocks are run in the folder of the examples
        if find_spec(TASKS[block][0]) is None:
            pytest.skip(f"needs pip install --no-deps {TASKS[block][0]}")
        monkeypatch.chdir(ROOT / "examples")
        monkeypatch.syspath_prepend(ROOT / "examples")
    result = followed(page, block, f"--trainer.default_root_dir={here / 'logs'}")
    if result is None:
        assert block == "prove" or "clients, true groups" in capsys.readouterr().out
        return
    assert result.metrics and result.path.is_dir()
    if block == "spread":
        assert "train/spread" in (result.path / "metrics.csv").read_text().partition("\n")[0]
    if block == "weighted":
        loss = instantiate(result.path / "config.yaml")[0].loss
        assert loss.weight.tolist() == [1] * 8 + [3] * 2
    if block == "split":
        assert result.state.initial.numel() == 650


def test_the_page_of_tasks_shows_an_example_as_it_is():
    for name in re.findall(r"<!-- example: ([\w.]+) -->", PAGES["tasks"]):
        assert marked(PAGES["tasks"], f"example: {name}") == (ROOT / "examples" / name).read_text()
    assert {name for page, name in BLOCKS if page == "tasks"} == TASKS.keys()


def test_every_page_is_followed_except_the_one_for_other_machines():
    assert {page for page, _ in BLOCKS} == PAGES.keys() - {"machines"}


def test_a_hospital_that_comes_later_joins_as_its_page_says(here, capsys):
    write_files("clients", here)
    runpy.run_path("make_hospitals.py", run_name="__main__")
    folder = "--trainer.default_root_dir=logs/hospitals", "--trainer.name=ifca-seed0"
    federated_cli.main(["fit", "-c", "hospitals.yaml", "-c", str(ROOT / "configs/methods/ifca.yaml"), *SHORT, *folder])
    copy, command = marked(PAGES["clients"], "commands: later").splitlines()
    subprocess.run(copy, shell=True, check=True)
    import_module(COMMANDS["onboard"]).main(command.split()[2:])
    assert "1 newcomer joins logs/hospitals/ifca-seed0" in capsys.readouterr().out


def test_a_fleet_of_hospitals_as_its_page_says(here, capsys):
    """All nine nodes exchange messages through a folder, as the page on methods shows."""
    pytest.importorskip("flwr")
    write_files("clients", here)
    write_files("method", here)
    runpy.run_path("make_hospitals.py", run_name="__main__")
    sys.path.insert(0, str(here))
    mailbox = import_module("mailbox")
    for block in ("fleet_app", "fleet_check"):
        if block == "fleet_check":
            shown = re.search(r"```yaml\n(data:\n  dataset:.+?)```", PAGES["fleet"], re.DOTALL)[1]
            for name in sorted(path.name for path in Path("hospitals").iterdir()):
                shutil.copytree(f"hospitals/{name}", f"{name}/patients/{name}")
                (here / name / "hospital.yaml").write_text(shown.replace("/srv", str(here / name)))
            shutil.copy("alder/hospital.yaml", here)
        for line in marked(PAGES["fleet"], f"block: {block}").replace("$LCFL", str(ROOT)).splitlines():
            words = line.split()
            assert words[:2] == ["lcfl", "fleet"]
            import_module(COMMANDS["fleet"]).main(words[2:])
    printed = capsys.readouterr().out
    assert re.search(r"```text\n(name: alder.+?)```", PAGES["fleet"], re.DOTALL)[1] in printed

    config, post = here / "hospitals_app/config.yaml", here / "post"
    names = sorted(path.name for path in Path("hospitals").iterdir())
    nodes = {
        number: node_of(config, {"data": str(here / name / "hospital.yaml"), "state": str(here / name / "state")})
        for number, name in enumerate(names)
    }
    for number in nodes:
        (post / str(number)).mkdir(parents=True)

    class Both(mailbox.Mailbox):
        def receive(self, tickets):
            for number, node in nodes.items():
                mailbox.answer_all(node, self.folder / str(number))
            return super().receive(tickets)

    federation = instantiate_trainer(config)
    federation.rounds, federation.logger = 3, False
    run = fleet.fit(federation, *instantiate(config), Both(post), FleetOptions(9, {"batch_size": 10}))
    export = marked(PAGES["fleet"], "block: fleet_export").replace("/var/lib/lcfl", "alder/state").split()
    import_module(COMMANDS["fleet"]).main(export[2:])
    inputs = torch.randn(2, 30)
    expected = run.model("global")(inputs)
    torch.testing.assert_close(torch.export.load("alder.pt2").module()(inputs), expected)
    shutil.copy("hospitals/birch/train.csv", "new.csv")
    predict = marked(PAGES["fleet"], "block: fleet_predict").replace("/var/lib/lcfl", "alder/state").split()
    import_module(COMMANDS["fleet"]).main(predict[2:])
    with open("predictions.csv") as file:
        predicted = list(csv.DictReader(file))
    with open("new.csv") as file:
        right = [
            row["diagnosis"] == own["prediction"] for row, own in zip(csv.DictReader(file), predicted, strict=True)
        ]
    assert sum(right) > 0.8 * len(right) and {"score_benign", "score_malignant"} < predicted[0].keys()
    assert run.metrics["test/own_split/global/acc"] > 0.5
    with (run.path / "clients.csv").open() as file:
        assert [row["name"] for row in csv.DictReader(file)] == names


def test_hospitals_of_very_different_size_train(here):
    write_files("clients", here)
    runpy.run_path("make_hospitals.py", run_name="__main__")
    words = ["fit", "-c", str(ROOT / "configs/methods/fedavg.yaml"), "-c", "hospitals.yaml", *SHORT]
    run = federated_cli.main(words)
    with (run.path / "partition.json").open() as file:
        dealt = json.load(file)
    sizes = [[len(own) for own in lists] for lists in (dealt["train"], dealt["val"], dealt["test"]["own_split"])]
    assert dealt["names"][-1] == "yew" and [each[-1] for each in sizes] == [2, 0, 1]
    shown = re.findall(r"\| (\d+) of (\d+) \|", PAGES["clients"])
    assert shown == [("2", str(sum(sizes[0]))), ("1", str(len(sizes[2]))), ("1", str(sum(sizes[2])))]
    assert run.metrics["test/own_split/global/acc"] > 0.5


QUICKSTART, METHODS = ROOT / "configs/quickstart.yaml", ROOT / "configs/methods"
FIT = ["fit", "-c", str(QUICKSTART), "-c"]


FILES = [
    (page, name) for page in ("method", "compositions") for name in re.findall(r"<!-- file: (\w+\.yaml)", PAGES[page])
]


@pytest.mark.parametrize(("page", "name"), FILES)
def test_a_file_of_a_method_leaves_nothing_of_the_method_before_it(here, capsys, page, name):
    write_files(page, here)
    alone = printed(capsys, "-c", QUICKSTART, "-c", name)
    assert printed(capsys, "-c", QUICKSTART, "-c", METHODS / "cgpfl_prox.yaml", "-c", name) == alone


def test_a_module_of_ones_own_stays_below_another_method_until_that_of_lcfl_is_named(here, capsys):
    write_files("method", here)
    fedprox = printed(capsys, "-c", QUICKSTART, "-c", METHODS / "fedprox.yaml")["model"]
    layers = "-c", QUICKSTART, "-c", "head_prox.yaml", "-c", METHODS / "fedprox.yaml"
    own = {"class_path": "head_prox.HeadProx", "init_args": fedprox | {"head_weight": 0.1}}
    assert printed(capsys, *layers)["model"] == own
    for back in (("--model", "lcfl.FederatedModule"), ("-c", "{model: {class_path: lcfl.FederatedModule}}")):
        model = printed(capsys, *layers, *back)["model"]
        assert model == {"class_path": "lcfl.FederatedModule", "init_args": fedprox}


def test_the_server_that_remembers_resumes_to_the_same_bits(here):
    write_files("method", here)
    words = [*FIT, "fedadam.yaml", "--trainer.devices=1", "--trainer.logger=false"]
    whole = federated_cli.main([*words, "--trainer.name=whole", "--trainer.rounds=4"])
    federated_cli.main([*words, "--trainer.name=halves", "--trainer.rounds=2"])
    halves = federated_cli.main([*words, "--trainer.name=halves", "--trainer.rounds=4", "--ckpt_path=last"])
    assert torch.equal(whole.state.global_model, halves.state.global_model)
    assert set(halves.state.aggregation) == {"m", "v"}


def test_ditto_sends_one_model_and_keeps_another(here, recwarn):
    write_files("method", here)
    words = ["--trainer.rounds=3", "--trainer.devices=1", "--trainer.clients_per_round=1.0", "--trainer.logger=false"]
    state = federated_cli.main([*FIT, "ditto.yaml", *words]).state
    fedavg = federated_cli.main([*FIT, str(ROOT / "configs/methods/fedavg.yaml"), *words]).state
    assert torch.equal(state.global_model, fedavg.global_model), "the pull concerns the personal models only"
    assert not torch.equal(state.clients[3].model, state.global_model)
    assert not [warning for warning in recwarn if "has no effect" in str(warning.message)]


def test_the_exchange_of_losses_sends_one_number_more_than_a_model(here):
    write_files("method", here)
    words = ["--trainer.rounds=2", "--trainer.devices=1", "--trainer.logger=false"]
    run = federated_cli.main([*FIT, "fairer_mean.yaml", *words])
    model = run.state.global_model
    assert run.summary()["total_bytes"] == 2 * 10 * 4 * (2 * len(model) + 1)
    equal = federated_cli.main([*FIT, "fairer_mean.yaml", *words, "--method.aggregation.power=0"]).state.global_model
    fedavg = str(ROOT / "configs/methods/fedavg.yaml")
    mean = federated_cli.main([*FIT, fedavg, *words, "--method.aggregation.weights=uniform"]).state.global_model
    assert torch.equal(equal, mean) and not torch.equal(model, mean)


def test_clusters_of_heads_are_the_true_groups(here):
    write_files("method", here)
    words = ["--trainer.rounds=30", "--trainer.devices=1", "--trainer.logger=false"]
    path = federated_cli.main([*FIT, "head_kmeans.yaml", *words]).path
    with (path / "metrics.csv").open() as file:
        assert float(list(csv.DictReader(file))[-1]["cluster/ari"]) == 1


def test_the_user_defined_partition_gives_pairs(here):
    write_files("data", here)
    sys.path.insert(0, str(here))
    pairs = import_module("pairs")
    shares = pairs.Pairs(per_class=3)(np.arange(60) % 6, 6, np.random.default_rng(0))
    assert shares.groups.tolist() == [0, 1, 2, 0, 1, 2]
    assert [sorted(set((share % 6).tolist())) for share in shares.indices] == [[0, 1], [2, 3], [4, 5]] * 2


def test_the_reader_of_images_and_masks_reads_parts_in_their_order(here):
    write_files("clients", here)
    for number, place in enumerate(["a/train", "b", "a/test"]):
        for kind, value in (("images", number), ("masks", 255 * (number % 2))):
            folder = here / "sites" / place / kind
            folder.mkdir(parents=True)
            Image.fromarray(np.full((4, 6), value, dtype=np.uint8)).save(folder / "1.png")
    sys.path.insert(0, str(here))
    dataset = Folders("sites", import_module("scans").ImagesAndMasks())
    samples = pickle.loads(pickle.dumps(dataset)).load()
    assert dataset.shape == (1, 4, 6) and dataset.target_shape == (4, 6)
    inputs, targets = samples.batch(np.arange(3), torch.device("cpu"))
    assert torch.equal(inputs[:, 0, 0, 0], torch.arange(3) / 255)
    assert targets[:, 0, 0].tolist() == [0, 1, 0]


def test_the_metric_for_one_class_takes_two_scores_or_one_logit():
    (code,) = re.findall(r"```python\n(import torch\n.*?class DefinedAUROC.*?)```", PAGES["tasks"], re.DOTALL)
    exec(code, names := {})
    metric = names["DefinedAUROC"]()
    logits, targets = torch.tensor([[-3.0], [0.2], [0.7], [0.4]]), torch.tensor([0, 0, 1, 1])
    two = torch.cat([torch.zeros_like(logits), logits], dim=1)
    for outputs, wanted in ((two, targets), (logits, targets.float().unsqueeze(1))):
        metric.reset()
        for half in (slice(2), slice(2, 4)):  # only the first half shows that these are logits
            metric.update(outputs[half], wanted[half])
        assert metric.compute() == 1
        metric.reset()
        metric.update(outputs[:2], wanted[:2])
        assert metric.compute().isnan()


@pytest.mark.parametrize(("script", "shown"), [("arrays", "10 clients"), ("own_step", "train/l1")])
def test_script_as_written(here, capsys, script, shown):
    page = "data" if script == "arrays" else "network"
    write_files(page, here)
    runpy.run_path(f"{script}.py", run_name="__main__")
    assert shown in capsys.readouterr().out
    if script == "own_step":
        assert "train/l1" in (here / "logs/own_step/version_0/metrics.csv").read_text().partition("\n")[0]


FLOWER = """
import numpy as np


class DirichletPartitioner:
    def __init__(self, num_partitions, partition_by, alpha):
        self.num_partitions, self.partition_by = num_partitions, partition_by

    def load_partition(self, number):
        labels = np.array(self.dataset[self.partition_by])
        return self.dataset.select(np.flatnonzero(labels % self.num_partitions == number))
"""


def test_a_partition_of_flower_is_read_from_a_file(here, capsys):
    """A small partitioner stands in for those of the package, which other tests do not need."""
    pytest.importorskip("datasets")
    write_files("huggingface", here)
    runpy.run_path("make_digits.py", run_name="__main__")
    (here / "flwr_datasets").mkdir()
    (here / "flwr_datasets/__init__.py").touch()
    (here / "flwr_datasets/partitioner.py").write_text(FLOWER)
    sys.path.insert(0, str(here))
    blocks = re.findall(r"```python\n(.*?)```", PAGES["huggingface"], re.DOTALL)
    exec(next(block for block in blocks if "flwr" in block), {})
    partition = "{data: {partition: {class_path: FromFile, init_args: {path: partition.json}}, num_clients: null}}"
    import_module(COMMANDS["partition"]).main(["-c", "desks.yaml", "-c", partition])
    assert "10 clients" in capsys.readouterr().out
    data = import_module("datasets").load_from_disk("digits")["train"]
    shares = json.loads((here / "partition.json").read_text())["indices"]
    assert [{data["digit"][row] for row in share} for share in shares] == [{digit} for digit in range(10)]
