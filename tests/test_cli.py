"""The command line: commands, layers of configuration, resume, parts by name, and what it says."""

import os
import subprocess
import sys

import pytest
import torch
import yaml

import lcfl as package
from lcfl import __main__, checkpoint
from lcfl.cli import FederatedCLI
from tests.commandline import FEDAVG, LCFED, QUICKSTART, SMALL, SYNTHETIC, failure, files, here, lcfl, printed  # noqa: F401

pytestmark = pytest.mark.usefixtures("here")

CLUSTERS = ("--method.clustering.init_args.num_clusters=4", "--method.clustering.init_args.dimension=10")
FIT = ("fit", *SYNTHETIC, *LCFED, *SMALL, *CLUSTERS)

PARTS = """
import os, signal
import torch
from torch import nn
from lcfl import Callback
from lcfl.clustering import Clustering

class Parity(Clustering):
    def on_round_end(self, state):
        state.assignment = torch.arange(state.num_clients) % 2
        state.centres = state.initial.repeat(2, 1) if len(state.centres) != 2 else state.centres

class Net(nn.Module):
    def __init__(self, width: int = 5):
        super().__init__()
        self.body, self.head = nn.Linear(16, width), nn.Linear(width, 8)
    def forward(self, inputs):
        return self.head(self.body(inputs).relu())

class Stop(Callback):
    def on_round_start(self, state):
        if state.round == 1:
            os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.fixture
def parts(tmp_path):
    """A module of one's own in the working directory."""
    (tmp_path / "own_parts.py").write_text(PARTS)


@pytest.fixture
def built(monkeypatch):
    """``built(*args)``: what ``lcfl fit`` would train, by name: trainer, model, datamodule, method, ckpt_path."""
    found = {}

    def fit(self, **arguments):
        found.update(arguments, trainer=self.trainer)
        self.result = {}

    monkeypatch.setattr(FederatedCLI, "fit", fit)

    def build(*args):
        lcfl("fit", *SYNTHETIC, *LCFED, *args)
        return dict(found)

    return build


def equal(run, other):
    """Whether two runs end in the same bits."""
    ours, theirs = run.state, other.state
    if ours.round != theirs.round or list(ours.clients) != list(theirs.clients):
        return False
    same = [torch.equal(ours.clients[i].model, theirs.clients[i].model) for i in ours.clients]
    return (
        all(same) and torch.equal(ours.centres, theirs.centres) and torch.equal(ours.global_model, theirs.global_model)
    )


# The command without torch


@pytest.mark.parametrize(
    ("words", "answer"),
    [(["--help"], "usage: lcfl"), (["-h"], "usage: lcfl"), ([], "usage: lcfl"), (["--version"], package.__version__)],
)
def test_help_and_version_answer_without_importing_torch(words, answer):
    script = "import sys; from lcfl.__main__ import main; main(sys.argv[1:]); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert answer in done.stdout


def test_each_command_has_help_that_names_the_groups(capsys):
    with pytest.raises(SystemExit) as ended:
        lcfl("validate", "--help")
    shown = capsys.readouterr().out
    assert ended.value.code == 0
    assert all(
        f"--{group}" in shown for group in ("trainer.rounds", "method.exchange", "model.network", "data.dataset")
    )
    assert "--seed_everything" in shown and "--ckpt_path" in shown and "--trainer.seed" not in shown


def test_the_real_command_trains_quietly(tmp_path, parts):
    words = ["-m", "lcfl", *FIT, "--model.network=own_parts.Net", "--model.cut=head", "--trainer.devices=2"]
    words += ["--trainer.enable_progress_bar=true"]
    done = subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "majority" in done.stdout and "logs/lcfl/version_0" in done.stdout
    assert "Seed set" not in done.stdout and "distributed" not in done.stdout


# fit, validate, test


def test_fit_returns_the_run_and_leaves_its_files():
    run = lcfl(*FIT)
    assert str(run.path) == "logs/lcfl/version_0" and run.state.round == 2
    assert {"config.yaml", "metrics.csv", "summary.json", "partition.json", "checkpoints"} <= set(os.listdir(run.path))
    assert run.metrics["test/own_split/majority/acc"] == 0.5


def test_validate_without_validation_data():
    small = (*SYNTHETIC, *FEDAVG, *SMALL, "--data.val_fraction=0")
    lcfl("fit", *small)
    with pytest.raises(ValueError, match=r"validate: no client has validation data; set data\.val_fraction"):
        lcfl("validate", *small)


def test_validate_and_test_measure_the_last_checkpoint_and_write_nothing(tmp_path, capsys):
    run = lcfl(*FIT)
    before = files(tmp_path)
    capsys.readouterr()
    for command, stage in (("test", "test"), ("validate", "val")):
        metrics = lcfl(command, *FIT[1:])
        wanted = {name: value for name, value in run.metrics.items() if name.startswith(f"{stage}/")}
        assert metrics == wanted and len(wanted) > 10
        shown = capsys.readouterr().out
        assert f"{100 * metrics[f'{stage}/own_split/personal/acc']:.2f}" in shown and "cluster" in shown
    assert files(tmp_path) == before


# Configuration


def test_a_printed_configuration_gives_itself_again(tmp_path, capsys):
    args = (*SYNTHETIC, *LCFED, *SMALL, "--seed_everything=3", "--trainer.callbacks+=EarlyStopping")
    first = printed(capsys, *args, "--trainer.callbacks.monitor=val/own_split/personal/acc")
    assert first["seed_everything"] == 3 and first["trainer"]["rounds"] == 2 and "seed" not in first["trainer"]
    assert first["data"]["batch_size"] == 10 and first["data"]["drop_last"] is False
    (tmp_path / "printed.yaml").write_text(yaml.safe_dump(first))
    assert printed(capsys, "-c", "printed.yaml") == first


def test_the_configuration_in_a_run_directory_runs_the_same(capsys):
    run = lcfl(*FIT, "--seed_everything=5")
    saved = yaml.safe_load((run.path / "config.yaml").read_text())
    assert saved["seed_everything"] == 5 and "seed" not in saved["trainer"]
    again = lcfl("fit", "-c", run.path / "config.yaml")
    assert again.path.name == "version_1" and equal(run, again)
    assert yaml.safe_load((again.path / "config.yaml").read_text()) == saved
    assert not equal(run, lcfl(*FIT, "--seed_everything=6"))


def test_later_layers_and_options_win(capsys):
    layers = ("-c", "trainer: {rounds: 5, name: one}", "-c", "trainer: {rounds: 6}", "--trainer.evaluate_every=3")
    trainer = printed(capsys, *SYNTHETIC, *FEDAVG, *layers)["trainer"]
    assert (trainer["rounds"], trainer["name"], trainer["evaluate_every"]) == (6, "one", 3)


def test_the_seed_is_the_federations(built):
    assert built("--seed_everything=7")["trainer"].seed == 7
    assert built()["trainer"].seed == 0


@pytest.mark.parametrize("seed", ["-1", "4294967296", "true", "1.5"])
def test_a_seed_that_is_none_is_refused(capsys, seed):
    assert "seed_everything" in failure(capsys, *FIT, f"--seed_everything={seed}")


def test_the_trainers_seed_is_no_option(capsys):
    assert "seed_everything" in failure(capsys, *FIT, "--trainer.seed=3")
    said = failure(capsys, *FIT, "-c", "trainer: {seed: 3}")
    assert "trainer.seed" in said and "Did you mean seed_everything?" in said


# Checkpoints


def test_a_run_goes_on_in_its_own_directory_and_ends_in_the_same_bits():
    whole = lcfl(*FIT, "--trainer.rounds=4", "--trainer.name=whole")
    first = lcfl(*FIT)
    resumed = lcfl(*FIT, "--trainer.rounds=4", "--ckpt_path=last")
    assert resumed.path.samefile(first.path) and not (first.path.parent / "version_1").exists()
    assert yaml.safe_load((first.path / "config.yaml").read_text())["trainer"]["rounds"] == 4
    assert equal(whole, resumed)


def test_a_checkpoint_is_given_by_its_directory_or_as_last_or_best():
    best = ("--trainer.callbacks+=Checkpoint", "--trainer.callbacks.monitor=val/own_split/personal/acc")
    every = "--trainer.callbacks.every_n_rounds=1"
    run = lcfl(*FIT, *best, every)
    saved = {path.name: path for path in (run.path / "checkpoints").glob("*.ckpt")}
    tested = {name: lcfl("test", *FIT[1:], f"--ckpt_path={path}") for name, path in saved.items()}
    assert tested["round-000001.ckpt"] != tested["round-000002.ckpt"]
    assert lcfl("test", *FIT[1:], "--ckpt_path=last") == tested["round-000002.ckpt"]
    chosen = yaml.safe_load((run.path / "checkpoints" / "best.json").read_text())["checkpoint"]
    assert lcfl("test", *FIT[1:], "--ckpt_path=best") == tested[chosen]


@pytest.mark.parametrize("path", ["last", "best", "nowhere/round-000003.ckpt"])
def test_a_missing_checkpoint_says_where_it_was_looked_for(tmp_path, path):
    with pytest.raises(checkpoint.CheckpointError) as error:
        lcfl(*FIT, f"--ckpt_path={path}")
    if path == "nowhere/round-000003.ckpt":
        assert path in str(error.value) and "last or best" in str(error.value)
    else:
        assert "no run of that name" in str(error.value)
    assert not files(tmp_path)


def test_a_file_that_is_called_last_is_not_opened(tmp_path):
    run = lcfl(*FIT)
    (tmp_path / "last").write_text("no checkpoint")
    assert lcfl("test", *FIT[1:], "--ckpt_path=last") == {k: v for k, v in run.metrics.items() if k.startswith("test/")}


# Parts by name


def test_callbacks_are_added_by_short_name_with_their_arguments(built):
    arguments = ("--trainer.callbacks.monitor=val/own_split/personal/acc", "--trainer.callbacks.patience=9")
    for path in ("EarlyStopping", "lcfl.callbacks.EarlyStopping"):
        callbacks = built(f"--trainer.callbacks+={path}", *arguments, "--trainer.callbacks+=Monitor")[
            "trainer"
        ].callbacks
        early = [callback for callback in callbacks if type(callback).__name__ == "EarlyStopping"]
        assert [callback.patience for callback in early] == [9]
        names = [type(callback).__name__ for callback in callbacks]
        assert names.count("Monitor") == names.count("Checkpoint") == names.count("Progress") == 1


def test_parts_are_named_without_their_modules(built):
    layer = """
    method: {local_update: {class_path: LocalTraining, init_args: {epochs: 2}}, clustering: [LowRankCosine]}
    data: {dataset: CIFAR10, partition: {class_path: ClientDirichlet, init_args: {alpha: 0.5}}}
    model: {network: LeNet5, optimizer: {class_path: Adam, init_args: {lr: 0.25}}}
    """
    found = built("-c", layer)
    assert found["method"].local_update.epochs == 2 and found["method"].clustering[0].num_clusters == 10
    data = found["datamodule"]
    assert type(data.dataset).__name__ == "CIFAR10" and data.partition.alpha == 0.5 and data.num_clients == 20
    optimizer = found["model"].configure_optimizers()
    assert isinstance(optimizer, torch.optim.Adam) and optimizer.param_groups[0]["lr"] == 0.25
    assert found["model"].configure_optimizers() is not optimizer


def test_the_learning_rate_of_a_run_is_that_of_its_yaml():
    run = lcfl(*FIT, "-c", "model: {optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.3}}}")
    assert run.summary()["identity"]["model"]["optimizer"]["lr"] == 0.3


def test_one_line_swaps_the_clustering(parts):
    run = lcfl("fit", *SYNTHETIC, *LCFED, *SMALL, "-c", "method: {clustering: [own_parts.Parity]}")
    assert run.state.assignment.tolist() == [0, 1] * 10 and run.state.num_clusters == 2


NETWORKS = {
    "class": (
        "{class_path: lcfl.networks.MLP, init_args: {in_features: 16, hidden: [32], num_classes: 8}}",
        "decision",
    ),
    "own class": ("{class_path: own_parts.Net, init_args: {width: 7}}", "head"),
    "own class by name": ("own_parts.Net", "head"),
    "function": ("{class_path: torchvision.models.resnet18, init_args: {num_classes: 8}}", "fc"),
    "function by name": ("torchvision.models.squeezenet1_1", "classifier"),
    "split": (
        "{class_path: lcfl.networks.split, init_args: {"
        "embedding: {class_path: torch.nn.Linear, init_args: {in_features: 16, out_features: 4}}, "
        "decision: {class_path: torch.nn.Linear, init_args: {in_features: 4, out_features: 8}}}}",
        "decision",
    ),
}


@pytest.mark.parametrize("kind", NETWORKS)
def test_every_initial_model_is_a_new_network(built, parts, kind):
    network, cut = NETWORKS[kind]
    model = built("-c", f"model: {{network: {network}, cut: {cut}}}")["model"]
    one, two = model.make_network(), model.make_network()
    assert not {id(parameter) for parameter in one.parameters()} & {id(parameter) for parameter in two.parameters()}
    zero = model.initial_model(0, number=0)
    assert torch.equal(zero, model.initial_model(0, number=0)) and not torch.equal(
        zero, model.initial_model(0, number=1)
    )
    assert 0 < model.layout.num_embedding < model.layout.num_parameters


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("CNN", "{channels: [2], hidden: []}"),
        ("LeNet5", "{}"),
        ("ResNet9", "{}"),
        ("VGG16", "{}"),
    ],
)
def test_networks_of_lcfl_go_by_their_short_names(built, name, arguments):
    model = built("-c", f"model: {{network: {{class_path: {name}, init_args: {arguments}}}}}")["model"]
    assert type(model.network).__module__.startswith("lcfl.networks.") and type(model.network).__name__ == name


@pytest.mark.parametrize("kind", ["own class", "split"])
def test_networks_of_ones_own_train(parts, kind):
    network, cut = NETWORKS[kind]
    run = lcfl(*FIT, "-c", f"model: {{network: {network}, cut: {cut}}}")
    assert run.metrics["test/own_split/personal/acc"] > 0
    saved = yaml.safe_load((run.path / "config.yaml").read_text())["model"]
    assert saved["cut"] == cut and saved["network"]["class_path"] in network


def test_a_run_starts_from_weights_in_a_file_and_goes_on_without_it():
    torch.save(lcfl(*FIT).model("global").state_dict(), "start.pt")
    more = ("--model.init_from=start.pt", "--trainer.name=tuned")
    run = lcfl(*FIT, *more)
    start = run._module.layout.pack(run.model("global"))
    begun = lcfl(*FIT, *more, "--trainer.rounds=0").state.initial
    os.rename("start.pt", "moved.pt")
    assert torch.equal(begun, torch.cat([each.flatten() for each in torch.load("moved.pt").values()]))
    assert torch.equal(run._module.layout.pack(package.load(run.path).model("global")), start)
    resume = ("--trainer.name=tuned", f"--ckpt_path={run.path}", "--trainer.rounds=3")
    assert lcfl(*FIT, *resume, "--model.init_from=moved.pt").state.round == 3
    with pytest.raises(ValueError, match=r"model.init_from: there is no file 'start.pt'"):
        lcfl(*FIT, *resume, "--model.init_from=start.pt")
    with pytest.raises(checkpoint.CheckpointError, match=r"init_from: the checkpoint has '\w{64}', this run None"):
        lcfl(*FIT, *resume)
    assert lcfl("test", *FIT[1:], f"--ckpt_path={run.path}")


def test_torchvisions_resnet_cut_at_its_last_layer_runs():
    network = "{class_path: torchvision.models.resnet18, init_args: {num_classes: 10}}"
    layer = f"""
    data: {{dataset: CIFAR10, partition: IID, num_clients: 2, batch_size: 5}}
    model: {{network: {network}, cut: fc}}
    method: {{clustering: [{{class_path: LowRankCosine, init_args: {{num_clusters: 2}}}}]}}
    """
    run = lcfl("fit", *SYNTHETIC, *LCFED, "-c", layer, "--trainer.fast_dev_run=true", "--trainer.devices=1")
    fc = 512 * 10 + 10
    assert run.state.round == 1 and run.model("global").fc.out_features == 10
    assert run._module.layout.num_parameters - run._module.layout.num_embedding == fc


# What it says


@pytest.mark.parametrize("words", [["--trainer.roundz=2"], ["-c", "trainer: {roundz: 2}"]])
def test_an_unknown_key_is_named_with_the_closest_one(capsys, words):
    said = failure(capsys, *FIT, *words)
    assert "trainer.roundz" in said and "Did you mean trainer.rounds?" in said
    assert len(said.splitlines()) == 2 and "lcfl fit --help" in said


@pytest.mark.parametrize(
    ("layer", "key"),
    [
        ("nonsense: 3", "nonsense"),
        ("data: {alpha: 3}", "data.alpha"),
        ("data: {partition: {class_path: IID, init_args: {alpha: 3}}}", "alpha"),
        ("method: {clusterings: []}", "method.clusterings"),
        ("model: {network: {init_args: {widht: 3}}}", "widht"),
    ],
)
def test_an_unknown_key_in_a_file_is_named(capsys, layer, key):
    assert f"'{key}'" in failure(capsys, *FIT, "-c", layer)


@pytest.mark.parametrize(
    ("words", "wrong", "meant"),
    [
        (["--data.dataset=CIFAR11"], "CIFAR11", "CIFAR10"),
        (["--trainer.callbacks+=EarlyStoping"], "EarlyStoping", "EarlyStopping"),
        (["-c", "method: {clustering: [LowRankCosin]}"], "LowRankCosin", "LowRankCosine"),
        (["-c", "method: {exchange: lcfl.exchange.FulModel}"], "FulModel", "FullModel"),
        (["-c", "model: {optimizer: torch.optim.SDG}"], "SDG", "SGD"),
        (["--model.network=LeNet"], "LeNet", "LeNet5"),
    ],
)
def test_a_misspelt_class_is_answered_with_the_closest_ones(capsys, words, wrong, meant):
    said = failure(capsys, *FIT, *words)
    assert f"'{wrong}'" in said and f"Did you mean {meant}" in said
    assert len(said.splitlines()) == 2


def test_a_class_that_is_like_none_is_answered_with_all_of_that_kind(capsys):
    said = failure(capsys, *FIT, "--data.partition=Xyz")
    assert "data.partition" in said and "Pathological" in said and "IID" in said and "Did you mean" not in said
    assert "CIFAR10" not in said and "Partition," not in said


def test_a_callback_of_lightnings_trainer_is_refused(capsys):
    words = ("--trainer.callbacks+=lightning.pytorch.callbacks.Timer",)
    assert "lcfl.Callback" in failure(capsys, *FIT, *words)


def test_a_users_error_is_one_line_and_status_1(monkeypatch, capsys):
    monkeypatch.delenv("LCFL_DEBUG", raising=False)
    words = [str(word) for word in (*FIT, "--trainer.clients_per_round=50")]
    with pytest.raises(SystemExit) as ended:
        __main__.main(words)
    assert str(ended.value.code).startswith("lcfl: error: trainer.clients_per_round: got 50")
    monkeypatch.setenv("LCFL_DEBUG", "1")
    with pytest.raises(ValueError, match="got 50"):
        __main__.main(words)


def test_a_signal_stops_after_the_round_with_its_own_status(parts):
    with pytest.raises(SystemExit) as ended:
        lcfl(*FIT, "--trainer.rounds=4", "--trainer.callbacks+=own_parts.Stop")
    assert ended.value.code == 128 + 15
    assert lcfl(*FIT, "--trainer.rounds=3", "--ckpt_path=last").state.round == 3
    assert package.load("logs/lcfl/version_0").summary()["rounds"] == 3


def test_an_interrupt_outside_of_a_round_is_status_130(monkeypatch):
    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setattr("lcfl.cli.main", interrupted)
    with pytest.raises(SystemExit) as ended:
        __main__.main(["fit"])
    assert ended.value.code == 130


def test_a_try_run_of_the_quickstart_leaves_nothing(tmp_path):
    run = lcfl("fit", "-c", QUICKSTART, "--trainer.fast_dev_run=true", "--trainer.devices=1")
    assert run.state.round == 1 and not files(tmp_path)
