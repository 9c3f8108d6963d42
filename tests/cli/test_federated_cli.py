"""Tests the command line: commands, layers of configuration, resuming, and how a run ends."""

import os
import re
import signal
import subprocess
import sys
import threading
import warnings
from signal import SIGINT, SIGTERM
from types import SimpleNamespace

import pytest
import torch
import yaml
from lightning.fabric.utilities import warnings as lightning_warnings
from lightning.pytorch.cli import LightningArgumentParser

import lcfl as package
from lcfl import __main__
from lcfl.runs import checkpoint
from tests.helpers.commandline import FEDAVG, FIT, LCFED, QUICKSTART, SMALL, SYNTHETIC, failure, files, lcfl, printed
from tests.helpers.pipes import closed_pipe

pytestmark = pytest.mark.usefixtures("here")


def equal(run, other):
    """Returns whether two runs end with the same bits."""
    first, second = run.state, other.state
    if first.round != second.round or list(first.clients) != list(second.clients):
        return False
    same = [torch.equal(first.clients[i].model, second.clients[i].model) for i in first.clients]
    return (
        all(same)
        and torch.equal(first.centres, second.centres)
        and torch.equal(first.global_model, second.global_model)
    )


def test_the_help_of_a_command_lists_all_groups(capsys):
    with pytest.raises(SystemExit) as ended:
        lcfl("validate", "--help")
    shown = capsys.readouterr().out
    assert ended.value.code == 0
    assert all(
        f"--{group}" in shown for group in ("trainer.rounds", "method.exchange", "model.network", "data.dataset")
    )
    assert "--seed_everything" in shown and "--ckpt_path" in shown and "--trainer.seed" not in shown


# fit, validate, test


def test_fit_returns_the_run_and_writes_its_files():
    run = lcfl(*FIT)
    assert str(run.path) == "logs/lcfl/version_0" and run.state.round == 2
    assert {"config.yaml", "metrics.csv", "summary.json", "partition.json", "checkpoints"} <= set(os.listdir(run.path))
    assert run.metrics["test/own_split/trivial/acc"] == 0.5


def test_validate_without_validation_data_is_refused():
    small = (*SYNTHETIC, *FEDAVG, *SMALL, "--data.val_fraction=0")
    lcfl("fit", *small)
    with pytest.raises(ValueError, match=r"validate: no client has validation data; set data\.val_fraction"):
        lcfl("validate", *small)


def test_validate_and_test_evaluate_the_last_checkpoint_and_write_nothing(tmp_path, capsys):
    run = lcfl(*FIT)
    before = files(tmp_path)
    capsys.readouterr()
    for command, stage in (("test", "test"), ("validate", "val")):
        metrics = lcfl(command, *FIT[1:])
        expected = {name: value for name, value in run.metrics.items() if name.startswith(f"{stage}/")}
        assert metrics == expected and len(expected) > 10
        shown = capsys.readouterr().out
        assert f"{100 * metrics[f'{stage}/own_split/personal/acc']:.2f}" in shown and "cluster" in shown
    assert files(tmp_path) == before


# configuration


def test_a_printed_configuration_can_be_read_and_printed_again(tmp_path, capsys):
    args = (*SYNTHETIC, *LCFED, *SMALL, "--seed_everything=3", "--trainer.callbacks+=EarlyStopping")
    first = printed(capsys, *args, "--trainer.callbacks.monitor=val/own_split/personal/acc")
    assert first["seed_everything"] == 3 and first["trainer"]["rounds"] == 2 and "seed" not in first["trainer"]
    assert first["data"]["batch_size"] == 10 and first["data"]["drop_last"] is False
    (tmp_path / "printed.yaml").write_text(yaml.safe_dump(first))
    assert printed(capsys, "-c", "printed.yaml") == first


def test_the_configuration_in_a_run_directory_reproduces_the_run(capsys):
    run = lcfl(*FIT, "--seed_everything=5")
    saved = yaml.safe_load((run.path / "config.yaml").read_text())
    assert saved["seed_everything"] == 5 and "seed" not in saved["trainer"]
    again = lcfl("fit", "-c", run.path / "config.yaml")
    assert again.path.name == "version_1" and equal(run, again)
    assert yaml.safe_load((again.path / "config.yaml").read_text()) == saved
    assert not equal(run, lcfl(*FIT, "--seed_everything=6"))


def test_later_layers_and_options_override_earlier_ones(capsys):
    layers = ("-c", "trainer: {rounds: 5, name: one}", "-c", "trainer: {rounds: 6}", "--trainer.evaluate_every=3")
    trainer = printed(capsys, *SYNTHETIC, *FEDAVG, *layers)["trainer"]
    assert (trainer["rounds"], trainer["name"], trainer["evaluate_every"]) == (6, "one", 3)


def test_seed_everything_is_the_seed_of_the_federation(built):
    assert built("--seed_everything=7")["trainer"].seed == 7
    assert built()["trainer"].seed == 0


@pytest.mark.parametrize("seed", ["-1", "4294967296", "true", "1.5"])
def test_an_invalid_seed_is_refused(capsys, seed):
    assert "seed_everything" in failure(capsys, *FIT, f"--seed_everything={seed}")


def test_trainer_seed_is_not_an_option(capsys):
    assert "seed_everything" in failure(capsys, *FIT, "--trainer.seed=3")
    said = failure(capsys, *FIT, "-c", "trainer: {seed: 3}")
    assert "trainer.seed" in said and "Did you mean seed_everything?" in said


# checkpoints


def test_a_resumed_run_continues_in_its_directory_and_ends_with_the_same_bits():
    whole = lcfl(*FIT, "--trainer.rounds=4", "--trainer.name=whole")
    first = lcfl(*FIT)
    resumed = lcfl(*FIT, "--trainer.rounds=4", "--ckpt_path=last")
    assert resumed.path.samefile(first.path) and not (first.path.parent / "version_1").exists()
    saved = yaml.safe_load((first.path / "config.yaml").read_text())
    assert saved["trainer"]["rounds"] == 4 and saved["ckpt_path"] is None
    assert equal(whole, resumed)
    assert lcfl("fit", "-c", first.path / "config.yaml").path.name == "version_1"
    with pytest.raises(
        checkpoint.CheckpointError, match=r"has 4 rounds, but trainer\.rounds, .* is 3\. Set it to 4 or mo"
    ):
        lcfl(*FIT, "--trainer.rounds=3", f"--ckpt_path={first.path}")


def test_a_checkpoint_is_given_by_its_path_or_as_last_or_best(tmp_path):
    """A file named ``last`` is not opened."""
    (tmp_path / "last").write_text("no checkpoint")
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
def test_a_missing_checkpoint_is_reported_with_its_path_or_name(tmp_path, path):
    with pytest.raises(checkpoint.CheckpointError) as error:
        lcfl(*FIT, f"--ckpt_path={path}")
    if path == "nowhere/round-000003.ckpt":
        assert path in str(error.value) and "last or best" in str(error.value)
    else:
        assert "no run of that name" in str(error.value)
    assert not files(tmp_path)


# how a run ends


def test_a_user_error_is_one_line_and_status_1(monkeypatch, capsys):
    monkeypatch.delenv("LCFL_DEBUG", raising=False)
    words = [str(word) for word in (*FIT, "--trainer.clients_per_round=50")]
    with pytest.raises(SystemExit) as ended:
        __main__.main(words)
    assert str(ended.value.code).startswith("lcfl: error: trainer.clients_per_round: got 50")
    assert "\n" not in str(ended.value.code)
    monkeypatch.setenv("LCFL_DEBUG", "1")
    with pytest.raises(ValueError, match="got 50"):
        __main__.main(words)


@pytest.mark.parametrize("devices", [1, 2])
def test_an_error_in_user_code_is_reported_with_its_place(monkeypatch, tmp_path, parts, devices):
    monkeypatch.delenv("LCFL_DEBUG", raising=False)
    line = (tmp_path / "own_parts.py").read_text().splitlines().index("        first, second = uploads") + 1
    with pytest.raises(SystemExit) as ended:
        __main__.main([*map(str, FIT), "--trainer.callbacks+=own_parts.Unpacks", f"--trainer.devices={devices}"])
    assert ended.value.code == (
        "lcfl: error: too many values to unpack (expected 2)\n"
        f"(ValueError at {tmp_path}/own_parts.py, line {line}; "
        "set LCFL_DEBUG=1 in the environment to see the traceback)"
    )


def test_a_warning_has_no_path_wherever_it_comes_from(capsys, here, monkeypatch):
    """Lightning replaces the format of warnings that come from its own files."""
    monkeypatch.delenv("LCFL_DEBUG", raising=False)
    code = compile("import warnings\nwarnings.warn('a warning of a callback')", here / "lightning" / "x.py", "exec")

    def command(words):
        monkeypatch.setattr(warnings, "formatwarning", lightning_warnings._custom_format_warning)  # as its import does
        exec(code)

    monkeypatch.setattr(__main__, "import_module", lambda name: SimpleNamespace(main=command))
    monkeypatch.setattr(warnings, "showwarning", __main__.SHOW_WARNING)  # instead of that of the tests
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        __main__.main(["compare"])
    assert capsys.readouterr().err == "lcfl: warning: a warning of a callback\n"


FAULTY = """
from lcfl.models import MLP

class Faulty(MLP):
    calls = 0
    def forward(self, inputs):
        self.calls += self.training
        if self.calls > 20:
            raise RuntimeError("the network is faulty")
        return super().forward(inputs)
"""


@pytest.mark.parametrize("devices", [1, 2])
def test_an_error_in_a_client_s_work_is_reported_with_its_place(monkeypatch, here, devices):
    """Frames of the rank that raises it come before those of the client's work."""
    monkeypatch.delenv("LCFL_DEBUG", raising=False)
    (here / "faulty.py").write_text(FAULTY)
    options = [
        "--model.network=faulty.Faulty",
        "--model.network.in_features=16",
        "--model.network.num_classes=8",
        f"--trainer.devices={devices}",
    ]
    with pytest.raises(SystemExit) as ended:
        __main__.main([*map(str, FIT), "--trainer.engine=sequential", *options])
    first, second = str(ended.value.code).splitlines()
    assert re.fullmatch(r"lcfl: error: client \d+, round -1, rank \d: RuntimeError: the network is faulty", first)
    line = FAULTY.splitlines().index('            raise RuntimeError("the network is faulty")') + 1
    assert second.startswith(f"(ClientError at {here}/faulty.py, line {line}; set LCFL_DEBUG=1")


BROKEN = """
import torch
from torch.utils.data import Dataset

class Broken(Dataset):
    def __len__(self):
        return 200
    def __getitem__(self, index):
        if index == 101:
            raise OSError("the disk is gone")
        return torch.zeros(4), index % 2

class Talkative(Broken):
    targets = [index % 2 for index in range(200)]  # so that only training reads every item
    def __getitem__(self, index):
        if index == 101:
            raise OSError("these are gone:" + 9_000 * "\\nfile" + 90_000 * "x" + " and the last")
        return torch.zeros(4), index % 2
"""


def broken_items(folder, kind, devices):
    """Returns what the command says about a broken item, as its lines."""
    (folder / "broken_items.py").write_text(BROKEN)
    data = f"{{class_path: Datasets, init_args: {{train: {{class_path: broken_items.{kind}}}, num_classes: 2}}}}"
    layer = f"{{data: {{dataset: {data}, partition: IID, num_clients: 4, client_transforms: []}}, model: {{network: "
    layer += "{class_path: lcfl.models.MLP, init_args: {in_features: 4, num_classes: 2}}}}"
    words = ["fit", *SYNTHETIC, *FEDAVG, *SMALL, "-c", layer, f"--trainer.devices={devices}"]
    with pytest.raises(SystemExit) as ended:
        __main__.main([*map(str, words), "--trainer.clients_per_round=4"])
    return str(ended.value.code).splitlines()


@pytest.mark.parametrize("devices", [1, 2])
def test_a_broken_item_is_two_lines_with_item_and_cause(monkeypatch, tmp_path, devices):
    monkeypatch.delenv("LCFL_DEBUG", raising=False)
    said, place = broken_items(tmp_path, "Broken", devices)
    assert re.search(r"item 101 of train cannot be read: OSError: the disk is gone$", said), said
    assert f"(OSError at {tmp_path}/broken_items.py, line 10" in place


@pytest.mark.parametrize("devices", [1, 2])
def test_an_error_with_a_long_message_is_one_screen_whatever_the_rank(monkeypatch, tmp_path, devices):
    monkeypatch.delenv("LCFL_DEBUG", raising=False)
    said, *rest, last, place = broken_items(tmp_path, "Talkative", devices)
    expected = r"client \d, round 0, rank \d: .*item 101 of train cannot be read: OSError: these are gone:$"
    assert re.search(expected, said), said
    assert len(rest) < 15 and sum(map(len, rest)) < 1000 and last.endswith("x and the last")
    assert f"ClientError at {tmp_path}/broken_items.py, line 17" in place


@pytest.mark.parametrize("words", ["configs", "--help", "compare --help"])
def test_a_closed_pipe_ends_a_command_quietly(words):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        f"{sys.executable} -m lcfl {words} | head -c 0",  # which ends before Python has started
        shell=True,
        capture_output=True,
        text=True,
        env=environment | {"PYTHONPATH": os.path.dirname(os.path.dirname(package.__file__))},
    )
    assert done.returncode == 0 and done.stdout == done.stderr == ""


@pytest.mark.parametrize("command", ["fit", "test"])
def test_a_closed_pipe_ends_neither_a_run_nor_its_evaluation(monkeypatch, command):
    if command == "test":
        lcfl(*FIT)
    with closed_pipe() as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        __main__.main([command, *map(str, FIT[1:]), "--trainer.enable_progress_bar=true"])
    assert (package.load("logs/lcfl/version_0").path / "summary.json").is_file()


@pytest.mark.parametrize("in_process", [True, False])
def test_help_before_a_command_is_the_help_of_the_command(capsys, monkeypatch, in_process):
    words = ["--help", "fit", "trainer.rounds"]
    monkeypatch.setattr(sys, "argv", ["lcfl", *words])
    with pytest.raises(SystemExit) as ended:
        __main__.main(words if in_process else None)
    assert ended.value.code == 0 and capsys.readouterr().out.startswith("  --trainer.rounds 100\n")
    __main__.main(["--help", "trainer.rounds"])  # of no command
    assert capsys.readouterr().out == f"{__main__.HELP}\n"


def test_a_signal_stops_a_run_after_its_round_with_the_status_of_the_signal(parts):
    with pytest.raises(SystemExit) as ended:
        lcfl(*FIT, "--trainer.rounds=4", "--trainer.callbacks+=own_parts.Stop")
    assert ended.value.code == 128 + 15
    assert lcfl(*FIT, "--trainer.rounds=3", "--ckpt_path=last").state.round == 3
    assert package.load("logs/lcfl/version_0").summary()["rounds"] == 3


@pytest.mark.parametrize(("command", "number"), [("fit", SIGINT), ("sweep", SIGINT), ("sweep", SIGTERM)])
def test_a_signal_outside_of_a_round_gives_its_status(monkeypatch, command, number):
    module = "federated_cli" if command == "fit" else f"commands.{command}"
    monkeypatch.setattr(f"lcfl.cli.{module}.main", lambda args: signal.raise_signal(number))
    before = signal.getsignal(SIGTERM)
    with pytest.raises(SystemExit) as ended:
        __main__.main([command])
    assert ended.value.code == 128 + number and signal.getsignal(SIGTERM) is before


def test_a_command_runs_outside_of_the_main_thread_which_alone_may_handle_signals(monkeypatch):
    done = []
    monkeypatch.setattr("lcfl.cli.commands.compare.main", done.append)
    thread = threading.Thread(target=__main__.main, args=(["compare", "logs"],))
    thread.start()
    thread.join()
    assert done == [["logs"]]


def test_an_interrupt_of_the_users_own_may_have_a_text(monkeypatch):
    def interrupted(args):
        raise KeyboardInterrupt("enough")

    monkeypatch.setattr("lcfl.cli.federated_cli.main", interrupted)
    with pytest.raises(SystemExit) as ended:
        __main__.main(["fit"])
    assert ended.value.code == 128 + SIGINT


def test_a_resume_that_cannot_write_its_configuration_leaves_the_old_one(monkeypatch):
    """As on a full disk."""
    path = lcfl(*FIT, "--trainer.rounds=1").path / "config.yaml"
    before = path.read_text()

    def half(self, config, path, **options):
        path.write_text("# half of it")
        raise OSError("no space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="no space left"):
        patch.setattr(LightningArgumentParser, "save", half)
        lcfl(*FIT, "--ckpt_path=last")
    assert path.read_text() == before
    assert lcfl(*FIT, "--ckpt_path=last").state.round == 2


def test_fast_dev_run_of_the_quickstart_writes_no_files_and_prints_one_line(tmp_path, capsys):
    run = lcfl("fit", "-c", QUICKSTART, "--trainer.fast_dev_run=true", "--trainer.devices=1")
    assert run.state.round == 1 and not files(tmp_path)
    said = "fast_dev_run: one round on random data succeeded; nothing was saved\n"
    assert capsys.readouterr().out == said


def test_an_unknown_command_is_refused_with_all_that_there_are():
    with pytest.raises(SystemExit, match=r"got the command 'fti'; allowed are fit, .*, sweep\. Did you mean fit\?$"):
        __main__.main(["fti"])
