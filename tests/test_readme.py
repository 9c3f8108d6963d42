"""Tests that the files, commands, tables and links in README.md, CONTRIBUTING.md and docs/ are correct."""

import csv
import functools
import inspect
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

import lcfl
import lcfl.data.partition
from lcfl.data.transforms import LabelPermutation
from lcfl.models import MLP

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "configs/README.md", "logs/README.md"]
BUILT = ("docs/_build/", "docs/api/", "docs/project/")  # built by `make docs`
PAGES += [str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [page for page in PAGES if not page.startswith(BUILT)]
EXAMPLES = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "examples").glob("*.py"))]
README = (ROOT / "README.md").read_text()
STARTED = (ROOT / "docs/getting_started.md").read_text()


def marked(text, mark):
    """Returns the code block below ``<!-- mark -->``."""
    return re.search(rf"<!-- {re.escape(mark)} -->\n```\w+\n(.*?)```", text, re.DOTALL)[1]


def one_command(block):
    """Returns the only line of a block of README.md."""
    (line,) = marked(README, f"block: {block}").splitlines()
    return line


def commands(text):
    """Returns every command in the bash blocks of a page, with its continuation lines joined."""
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [part.strip() for line in lines for part in line.split("&&")]


def lcfl_commands(text):
    """Returns the arguments of every command ``lcfl ...`` in the bash blocks of a page."""
    words = [shlex.split(command) for command in commands(text)]
    return [each[1:] for each in words if each and each[0].rpartition("/")[2] == "lcfl"]


@pytest.mark.parametrize("name", ["examples/own.py", "examples/own.yaml"])
def test_shown_files_equal_the_files(name):
    assert marked(STARTED, f"file: {name}") == (ROOT / name).read_text()


@pytest.mark.slow
def test_user_defined_data_and_network_as_written_in_a_shell_train_quietly(tmp_path):
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    for name in ("own.py", "own.yaml"):
        path = tmp_path / "examples" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(marked(STARTED, f"file: examples/{name}"))
    command = marked(STARTED, "block: own").strip() + " --trainer.rounds 2 --trainer.devices 2"
    command += " --trainer.logger false --method.clustering.dimension 5"  # of more dimensions than clients, it warns
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environ = os.environ | {"PYTHONPATH": str(ROOT), "PATH": path}
    done = subprocess.run(
        command, shell=True, cwd=tmp_path, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stderr == "", done.stdout + done.stderr
    assert "2 rounds" in done.stdout and "majority class" in done.stdout
    assert "Seed set" not in done.stdout and "distributed" not in done.stdout
    assert (tmp_path / "examples/logs/own/version_0/summary.json").is_file()


def test_the_readme_has_commands():
    assert len(lcfl_commands(README)) >= 2


def test_the_quickstart_has_as_many_rounds_as_the_readme_says():
    rounds = yaml.safe_load((ROOT / "configs/quickstart.yaml").read_text())["trainer"]["rounds"]
    assert f"for {rounds} rounds" in README


@pytest.mark.filterwarnings("error:model.cluster_weight")  # the pulls of the method need weights
@pytest.mark.parametrize(("page", "rounds"), [(README, "rounds=100"), (STARTED, "rounds=30")])
def test_python_block_as_written(tmp_path, monkeypatch, page, rounds):
    from tests.test_examples import parts

    block = next(block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "lcfl.Federation" in block)
    monkeypatch.chdir(tmp_path)
    names = parts() | {"lcfl": lcfl, "network": functools.partial(MLP, in_features=16, num_classes=8)}
    exec(block.replace(rounds, "rounds=2, devices=1"), names)
    assert names["run"].path == (names["again"].path if "lcfl.load" in block else names["run"].path)
    assert names["run"].metrics


def test_a_method_read_from_its_file_as_written():
    names = {"lcfl": lcfl, "functools": functools, "torch": torch, "MLP": MLP}
    exec(marked(STARTED, "python: method"), names)
    assert (names["method"].clustering[0].dimension, names["model"].cluster_weight) == (15, 0.5)


def test_newcomers_from_python_as_written(tmp_path, monkeypatch):
    from tests.test_examples import parts

    monkeypatch.chdir(tmp_path)
    names = parts()
    names["data"] = lcfl.FederatedDataModule(names["data"].dataset, names["data"].partition, 20, newcomers=2)
    names["run"] = lcfl.Federation(rounds=2, devices=1, logger=False).fit(*names.values())
    names["lcfl"] = lcfl
    exec(marked(STARTED, "python: onboard"), names)
    assert [row["client"] for row in names["found"].rows()] == list(names["data"].newcomer_clients)


def test_predictions_from_python_as_written_are_those_of_the_evaluation(tmp_path, monkeypatch):
    from tests.test_examples import parts

    monkeypatch.chdir(tmp_path)
    names, transforms = parts(), [LabelPermutation(num_groups=2, by="client")]
    plain = names["data"]
    names["data"] = lcfl.FederatedDataModule(plain.dataset, plain.partition, 20, client_transforms=transforms)
    names["run"] = run = lcfl.Federation(rounds=2, devices=1, logger=False).fit(*names.values())
    exec(marked(STARTED, "python: predict"), names)
    with (run.path / "clients.csv").open(newline="") as file:
        expected = [row["test/own_split/personal/acc"] for row in csv.DictReader(file)][3]
    assert float((names["predictions"] == names["labels"]).float().mean()) == pytest.approx(float(expected))
    assert torch.load("personal.pt").keys() == names["network"].state_dict().keys()


@pytest.mark.parametrize("path", [*PAGES, *EXAMPLES])
def test_samples_are_shown_as_clients_see_them(path):
    """Reading `data.samples` leaves out the transforms of a client."""
    assert "data.samples.batch" not in (ROOT / path).read_text()


def test_a_confusion_matrix_from_python_as_written(tmp_path, monkeypatch, capsys):
    from tests.test_examples import parts

    monkeypatch.chdir(tmp_path)
    names = parts()
    names["run"] = lcfl.Federation(rounds=2, devices=1, logger=False).fit(*names.values())
    exec(marked(STARTED, "python: confusion").replace("num_classes=10", "num_classes=8"), names)
    assert names["matrix"].compute().sum() == sum(map(len, names["data"].population.test["own_split"]))


def test_a_report_of_predictions_as_written(tmp_path, monkeypatch, capsys):
    from lcfl.cli import federated_cli
    from lcfl.cli.commands import predict

    monkeypatch.chdir(tmp_path)
    words = ["--trainer.rounds=1", "--trainer.devices=1", "--trainer.logger=false"]
    run = federated_cli.main(["fit", "-c", str(ROOT / "configs/quickstart.yaml"), *words])
    predict.main([str(run.path), "--model=personal", "--out=predictions.csv"])
    exec(marked(STARTED, "python: report"), {})
    assert "macro avg" in capsys.readouterr().out


def test_table_of_the_trainer_is_complete_and_correct():
    page = (ROOT / "docs/configuration.md").read_text()
    rows = page.partition("## Options of the trainer\n")[2]
    shown = {}
    for line in rows.splitlines():
        if line.startswith("| `") and not line.startswith("| `trainer."):
            names, defaults = (cell.strip().split(", ") for cell in line.split("|")[1:3])
            defaults = defaults * len(names) if len(defaults) == 1 else defaults
            shown |= dict(zip((name.strip("`") for name in names), defaults, strict=True))
    parameters = inspect.signature(lcfl.Federation).parameters
    as_text = {True: "true", False: "false", None: ""}
    real = {
        name: as_text[parameter.default]
        if parameter.default is None or isinstance(parameter.default, bool)
        else str(parameter.default).replace("<factory>", "[]")
        for name, parameter in parameters.items()
        if name != "seed"
    }
    assert shown == real


def test_tables_of_methods_and_partitions_are_complete():
    table = (ROOT / "docs/methods.md").read_text()
    named = re.sub(r"\W", "", README.lower())
    for path in (ROOT / "configs/methods").glob("*.yaml"):
        assert f"`methods/{path.name}`" in table
        name = re.sub(r"_(plus|prox|silhouette|fixed|no_\w+)$", "", path.stem)  # a variant has the name of its method
        assert name.replace("_", "") in named, "README names every method"
    partitions = set(lcfl.data.partition.__all__) - {"Partition", "ClientShares", "Pool", "write_partition"}
    page = (ROOT / "docs/partitions.md").read_text()
    assert not [name for name in partitions if f"`{name}" not in page]


def test_make_and_readme_run_the_same_tests():
    makefile = (ROOT / "Makefile").read_text()
    assert one_command("tests").rpartition(" && ")[2].replace(".venv/bin/", "$(BIN)") in makefile
    assert one_command("quickstart").rpartition(" && ")[2].replace(".venv/bin/", "$(BIN)") in makefile
    script = (ROOT / ".ci/run").read_text()
    assert "readme quickstart" in script and "readme tests" in script
    assert os.access(ROOT / ".ci/run", os.X_OK)


@pytest.mark.parametrize("page", PAGES)
def test_every_link_has_a_target(page):
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        path = (ROOT / page).parent / name if name else ROOT / page
        assert path.exists(), f"{page}: {target}"
        if anchor:
            assert anchor in anchors(path.read_text()), f"{page}: {target}"


def anchors(text):
    """Returns the anchors of the headings."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
