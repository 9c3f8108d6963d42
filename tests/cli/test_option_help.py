"""Tests `--help`: its length, and what it says about every option, group and class."""

import pytest
from jsonargparse import capture_parser

from lcfl.cli.class_options import CLASSES, OTHERS, classes
from lcfl.cli.commands import partition
from lcfl.cli.federated_cli import FederatedCLI
from lcfl.cli.option_help import described, options, overview
from tests.helpers.commandline import failure, lcfl

OPTIONS = [path.replace(".init_args", "") for path in CLASSES]


@pytest.fixture(scope="module")
def parsers():
    """Provides the parsers of the commands that have many options."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["lcfl"])
        commands = capture_parser(FederatedCLI)._subcommands_action.choices
    return {**commands, "partition": partition.parser()}


@pytest.fixture
def fit(parsers):
    return parsers["fit"]


@pytest.mark.parametrize("columns", [80, 100, 200])
def test_the_help_of_every_command_is_short(parsers, columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    for name, parser in parsers.items():
        lines = parser.format_help().splitlines()
        assert len(lines) <= (160 if columns == 80 else 130), name
        assert max(map(len, lines)) <= min(columns, 100), name
        assert not any(word in "\n".join(lines) for word in ("torch.nn", "subclasses", "Union", "typing", "`"))


def test_the_help_has_every_option_with_its_default(fit):
    text = overview(fit)
    for name in options(fit):
        assert f"--{name} " in text or f"--{name}\n" in text
    assert "--trainer.rounds 100 " in text and "--model.loss null" in text and "--trainer.logger true" in text
    assert "--data.partition CLASS" in text and "(required)" in text and "lcfl fit --help model.network=CNN" in text


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_that_takes_a_class_lists_the_classes_of_lcfl(fit, option):
    text = described(fit, option)
    (path,) = (path for path in CLASSES if path.replace(".init_args", "") == option)
    known = classes(path) if path not in OTHERS else {}
    assert f"--{option}" in text and all(f"\n  {name} " in text for name in known)
    assert f"lcfl fit --help {option}={OTHERS.get(path) or next(iter(known))}" in text
    assert len(text.splitlines()) < 60


@pytest.mark.parametrize("option", OPTIONS)
def test_a_class_is_shown_with_its_arguments(fit, option):
    (path,) = (path for path in CLASSES if path.replace(".init_args", "") == option)
    for name in [OTHERS[path]] if path in OTHERS else classes(path):
        text = described(fit, f"{option}={name}")
        assert "Args:" not in text and (f"  --{option}." in text or "It has no arguments." in text), name


def test_a_class_or_a_function_of_another_package_is_shown(fit):
    assert "--model.network.num_classes 1000" in described(fit, "model.network=torchvision.models.resnet18")
    text = described(fit, "model.optimizer=torch.optim.Adam")
    assert "--model.optimizer.lr 0.001" in text and "params " not in text.partition("arguments,")[2][:80]


def test_a_group_and_an_option_are_shown_in_full(fit):
    text = " ".join(described(fit, "trainer").split())
    assert "--trainer.rounds 100" in text and "continues up to this number." in text and "--model" not in text
    assert "Type: a whole number from 0 to 2**32 - 1." in described(fit, "--seed_everything")
    assert "Type: one of memory, mapped." in described(fit, "trainer.client_store")
    assert "Type: a number or null." in described(fit, "trainer.client_timeout")
    assert "Type: null or a list; each item is one of personal," in described(fit, "trainer.final_models")
    assert "--method.clustering.theta" not in described(fit, "method.clustering")


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("trainer.round", "there is no such option. Did you mean trainer.rounds?"),
        ("metod", "Did you mean method"),
        ("trainer.rounds=IID", "trainer.rounds is not an option that takes a class."),
        ("data.partition=Shard", "there is no class 'Shard'. Did you mean Shards? Classes of lcfl: IID,"),
        ("model.loss=torch.nn.Crossentropy", "there is no class 'torch.nn.Crossentropy'."),
    ],
)
def test_an_unknown_path_is_reported(fit, path, said):
    with pytest.raises(ValueError, match=r"There are|takes a class|import path") as error:
        described(fit, path)
    assert said in str(error.value)


def test_the_command_prints_what_was_asked_for(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["x"])
    for words, said in {
        ("--help",): "--model.network CLASS ",
        ("--help", "model.network"): "Required. Type: a class or a function.\n",
        ("--help=data",): "--data.num_clients null",
        ("-h", "data.partition=Shards"): "--data.partition.shards_per_client",
        ("--model.network.help", "LeNet5"): "--model.network.padding 0\n",
    }.items():
        with pytest.raises(SystemExit) as ended:
            lcfl("fit", *words)
        assert ended.value.code == 0 and said in capsys.readouterr().out
    said = failure(capsys, "fit", "--help", "trainer", "model")
    assert said.startswith("lcfl: error: --help trainer model: got 2 names;")
    said = failure(capsys, "fit", "--help", "trainer.round")
    assert said.startswith("lcfl: error: --help trainer.round: there is no such option. Did you mean trainer.rounds?")
    assert len(said.splitlines()) == 2
