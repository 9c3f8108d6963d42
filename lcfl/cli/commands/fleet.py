"""``lcfl fleet app DIR``: writes the Flower app of a run. ``check``, ``export`` and ``predict`` are for its nodes."""

import argparse
import json
import logging
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

from torch import nn

import lcfl
from lcfl.cli import model_file, prediction_file
from lcfl.cli.federated_cli import FederatedCLI, class_paths, instantiate, instantiate_trainer
from lcfl.cli.fleet_config import data_of, node_of, options_of
from lcfl.core.files import check_new, read_regular
from lcfl.core.validation import abbreviated
from lcfl.data.datasets import FederatedDataset
from lcfl.fleet.data import described_spec
from lcfl.fleet.node import identity_of
from lcfl.fleet.states import Owner, newest_model, spec_of
from lcfl.methods.exchange import ModelKind
from lcfl.runs.serialization import deserialized

__all__ = ["main", "parser"]

KEPT = (*get_args(ModelKind), "newcomer")
CODE = '''"""The Flower app of a federation: `server` runs beside the SuperLink, `client` on every SuperNode."""

from pathlib import Path

from lcfl.cli.flower_app import client_app, server_app

CONFIG = Path(__file__).with_name("config.yaml")

server = server_app(CONFIG)
client = client_app(CONFIG)
'''
PROJECT = """[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = {name}
version = "1.0.0"
description = "A federation of lcfl"
license = "Apache-2.0"
dependencies = ["lcfl[flower]=={version}"]

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "lcfl"

[tool.flwr.app.components]
serverapp = "fleet_app:server"
clientapp = "fleet_app:client"

# Each can be changed for one run: flwr run DIR --run-config "deadline=60.0 ckpt-path='auto'"
[tool.flwr.app.config]
deadline = 600.0        # seconds after which a round goes on without those who have not answered
min-answers = 0.5       # but it waits for this share (0.5) or number (5) of the clients that it asked
max-message-mib = 1024  # the largest answer that the server accepts
newcomer-epochs = 5     # epochs for which a node that registers during the run trains the model that it gets
ckpt-path = ""          # last, best, auto or a path; auto starts a run or resumes it
root = ""               # the folder of the runs, instead of trainer.default_root_dir
"""


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command's options."""
    options = argparse.ArgumentParser(
        prog="lcfl fleet", allow_abbrev=False, description="Federations whose clients are machines of their own."
    )
    commands = options.add_subparsers(dest="command", required=True)
    app = commands.add_parser(
        "app",
        allow_abbrev=False,
        help="write the Flower app of a run",
        description="Writes the Flower app of a run into a new folder. The operator starts it with: flwr run DIR",
        epilog="All further options are those of lcfl fit, such as -c FILE and --trainer.rounds=50.",
    )
    app.add_argument("folder", type=Path, metavar="DIR", help="a new folder")
    check = commands.add_parser(
        "check",
        allow_abbrev=False,
        help="try on a node whether its data and the network of a run fit together",
        description="Reads the data of a node and tries the network of a run on them. Nothing is sent.",
    )
    export = commands.add_parser(
        "export",
        allow_abbrev=False,
        help="write a model that a node keeps to a file",
        description="Writes a model of the node's client, as it was when the node last tested it, to a file.",
    )
    predict = commands.add_parser(
        "predict",
        allow_abbrev=False,
        help="predict new samples with a model that a node keeps",
        description="Predicts new samples with a model of the node's client, as it was when the node last tested it.",
    )
    for each in (check, export, predict):
        each.add_argument("data", type=Path, help="the YAML file with the node's data section")
        each.add_argument("--app", type=Path, required=True, metavar="DIR", help="the folder of the run's app")
        each.add_argument("--client", type=int, help="the client that the node plays, if its data section has several")
    for each in (export, predict):
        each.add_argument("--state", type=Path, required=True, metavar="DIR", help="the folder with the node's states")
        each.add_argument("--model", required=True, choices=KEPT, help="kind of model")
    model_file.add_options(export)
    prediction_file.add_options(predict, needs_data=True)
    return options


def main(args: Sequence[str]) -> None:
    """Writes an app, checks a node, writes a model of a node, or predicts with it.

    Raises:
        FileExistsError: if the folder of the app, the file of the model or that of the predictions exists already.
        FileNotFoundError: if the node keeps no such model.
        ValueError: if the configuration cannot be run on a fleet, if network and data do not fit together, if a kept
            model is damaged, if torch cannot export the network, or if new samples do not fit the node's data.
    """
    options, more = parser().parse_known_args(args)
    if options.command == "app":
        write_app(options.folder, more)
        print(f"written to {options.folder}; start it with: flwr run {options.folder} --stream")
        return
    if more:
        parser().error(f"unrecognized arguments: {' '.join(more)}")
    if options.command == "check":
        for line in checked(options.data, options.app, options.client):
            print(line)
        return
    prediction_file.check_out(options.out, getattr(options, "new", None))
    config = _config_of(options.app)
    network, file = kept_network(config, options.state, options.model, options.client)

    def dataset() -> FederatedDataset:
        return data_of(config, options.data, options.client).dataset

    if options.command == "predict":
        then = spec_of(file)
        rows = prediction_file.rows_of_new_samples(network, dataset(), options.new, options.scores, then)
        prediction_file.write_rows(rows, options.out)
    else:
        model_file.write_model(network, options.out, options.format, lambda: dataset().spec)
        print(f"written to {options.out}, from {file}")


def write_app(folder: Path, words: Sequence[str]) -> None:
    """Writes ``pyproject.toml``, ``fleet_app.py``, ``config.yaml`` and the user's own modules that it needs.

    Args:
        folder: a new folder.
        words: the options of ``lcfl fit``.
    """
    check_new(folder)
    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)  # it tells the seed
    sys.argv[1:] = ["fit", *words]  # LightningCLI warns about arguments that the process does not have
    cli = _ConfigOnly()
    config = cli.config["fit"]
    with tempfile.TemporaryDirectory() as place:
        app = Path(place)
        (app / "config.yaml").write_text(cli.dumped(), "utf-8")
        options_of(app / "config.yaml", {})
        (app / "fleet_app.py").write_text(CODE, "utf-8")
        name = json.dumps(_app_name(config["trainer"]["name"]))
        (app / "pyproject.toml").write_text(PROJECT.format(name=name, version=lcfl.__version__), "utf-8")
        for file in _own_modules(config):
            (app / file.parent).mkdir(parents=True, exist_ok=True)
            shutil.copy(file, app / file)
        shutil.copytree(app, folder)


def _app_name(name: str) -> str:
    """Returns a name that Flower accepts: at most 32 letters, digits and hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", f"lcfl-{name}".lower())[:32].strip("-")


def checked(data: Path, app: Path, client: int | None = None) -> Iterator[str]:
    """Yields what a node would tell the server, after a trial of network, loss and metrics.

    Args:
        data: the file with the node's data section.
        app: the folder of the run's app.
        client: which client of the data section the node is; None if all samples are its own.
    """
    with tempfile.TemporaryDirectory() as state:
        own: dict[str, Any] = {"data": str(data), "state": state} | ({} if client is None else {"client": client})
        node = node_of(_config_of(app), own)
        place = node.place[0]
        sets = {"train": node.data.population.train} | node.data.population.sets(node.data.protocols)
        yield f"name: {node.name}"
        spec = described_spec(node.data.dataset, node.data.samples)
        yield f"input: {spec['shape']}, {spec['num_classes'] or 'no'} classes"
        if spec["classes"]:
            yield f"classes, in the order that all nodes must have: {', '.join(spec['classes'])}"
        if spec["columns"]:
            yield f"columns, in the order that all nodes must have: {abbreviated(spec['columns'])}"
        if how := spec["normalisation"]:
            yield f"normalisation, which all nodes must have: mean {how['mean']}, std {how['std']}"
        yield from (f"{name}: {len(indices[place])} samples" for name, indices in sets.items())
        yield f"engine: {node.engine.name}"
        yield "network, loss, metrics and data fit together"


def _config_of(app: Path) -> Path:
    """Returns the configuration of an app, whose own modules can then be imported."""
    if not (app / "config.yaml").is_file():
        raise ValueError(f"--app: {app} has no config.yaml; give the folder that lcfl fleet app wrote.")
    sys.path.append(str(app))
    return app / "config.yaml"


def kept_network(config: Path, state: Path, kind: str, client: int | None) -> tuple[nn.Module, Path]:
    """Returns the newest network of a kind that a client keeps on its node, in evaluation mode, and its file.

    Args:
        config: the configuration of the run.
        state: the folder with the node's states.
        kind: the kind of model.
        client: which client of the node's data section it is; None if all samples are its own.
    """
    (module, method), seed = instantiate(config, with_weights=True), instantiate_trainer(config).seed
    file = newest_model(state, kind, Owner(identity_of(module, method, seed), client or 0))
    network = module.network_of(module.initial_model(seed)).eval()
    try:
        missing = network.load_state_dict(deserialized(read_regular(file)), strict=False).missing_keys
        if lost := [name for name in missing if not name.endswith("_extra_state")]:  # which may be no tensor
            raise ValueError(f"it has no {abbreviated(lost)}")
    except Exception as error:  # of any kind, from a damaged file
        why = str(error).partition("\n")[0] or type(error).__name__
        raise ValueError(f"{file} is damaged ({why}); give another folder as --state.") from None
    return network, file


class _ConfigOnly(FederatedCLI):
    """Parses and checks a configuration, and builds nothing."""

    def instantiate_classes(self) -> None:
        """Does nothing: the data are on the nodes."""

    def _run_subcommand(self, subcommand: str) -> None:
        """Does nothing."""

    def dumped(self) -> str:
        """Returns the whole configuration as YAML."""
        text: str = self._parser("fit").dump(self.config["fit"], skip_none=False)
        return text


def _own_modules(config: Any) -> list[Path]:
    """Returns the Python files of the current folder that a configuration needs, relative to it.

    These are the modules that it names, in packages or not, and what they import from the current folder.
    """
    for path in class_paths(config):
        import_module(path.rpartition(".")[0].partition(".")[0])
    files = []
    for name, module in list(sys.modules.items()):
        place = Path(*name.split("."))
        file = place / "__init__.py" if hasattr(module, "__path__") else place.with_suffix(".py")
        is_here = file.is_file() and Path(getattr(module, "__file__", None) or "").resolve() == file.resolve()
        if is_here and place.parts[0] != "lcfl":  # which nodes have installed, also if this is its checkout
            files.append(file)
    return files
