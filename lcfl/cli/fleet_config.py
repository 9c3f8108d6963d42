"""Builds the parts of a fleet: from the configuration of a run, and from the data section of a node."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from lightning.fabric import Fabric

from lcfl.cli.federated_cli import instantiate, instantiate_data, instantiate_trainer
from lcfl.cli.yaml_files import LOADER, yaml_error
from lcfl.data.datamodule import FederatedDataModule
from lcfl.distributed.worker import Worker
from lcfl.fleet.node import Node, NodeSettings
from lcfl.fleet.post import Patience
from lcfl.fleet.server import FleetOptions

__all__ = ["data_of", "newcomers_of", "node_of", "options_of", "proxy_of", "shared_of"]

MIB = 2**20
SHARED = ("batch_size", "drop_last", "protocols")  # what the run, and not the node, decides of a data section
OF_THE_RUN = (*SHARED, "newcomers", "leavers", "seed")
WHOLE = {"num_clients": 1, "partition": {"class_path": "lcfl.data.partition.by_owner.OneClient"}}
# What a setting may be: its types, its least value, and both in words.
TEXT, SWITCH = ((str,), None, "a text in quotes"), ((bool,), None, "true or false")
NUMBER, COUNT = ((int, float), None, "a number"), ((int,), 1, "a whole number from 1")
PLACE = ((int,), 0, "a whole number from 0")
Kinds = Mapping[str, tuple[tuple[type, ...], int | None, str]]
OF_A_NODE: Kinds = {
    "data": TEXT,
    "state": TEXT,
    "name": TEXT,
    "client": PLACE,
    "begin-anew": SWITCH,
    "max-message-mib": COUNT,
}
OF_A_SERVER: Kinds = {
    "deadline": NUMBER,
    "min-answers": NUMBER,
    "max-message-mib": COUNT,
    "newcomer-epochs": COUNT,
    "ckpt-path": TEXT,
    "root": TEXT,
}


def options_of(config: Path, run_config: Mapping[str, Any]) -> FleetOptions:
    """Returns what the server decides of data and messages.

    Args:
        config: the configuration of the run.
        run_config: what ``flwr run`` was given.

    Raises:
        ValueError: if the configuration does not say how many clients there are, or for a setting with another value.
    """
    _check("--run-config", {name: run_config[name] for name in OF_A_SERVER if name in run_config}, OF_A_SERVER)
    section = _data_section(config)
    if section.get("num_clients") is None:
        raise ValueError("data.num_clients: got null; a fleet must know how many clients it waits for.")
    of_the_run = {name: section[name] for name in OF_THE_RUN if name in section}
    patience = Patience(float(run_config.get("deadline", 600.0)), run_config.get("min-answers", 0.5))
    most_bytes = run_config.get("max-message-mib", 1024) * MIB
    newcomer_epochs = run_config.get("newcomer-epochs", 5)
    return FleetOptions(section["num_clients"], of_the_run, patience, most_bytes, newcomer_epochs)


def _check(option: str, given: Mapping[str, Any], allowed: Kinds) -> None:
    """Refuses settings that are unknown or have another value than is allowed."""
    for name, value in given.items():
        if name not in allowed:
            raise ValueError(f"{option}: got {name}={value!r}; allowed are {', '.join(allowed)}.")
        types, least, words = allowed[name]
        if type(value) not in types or (least is not None and value < least):
            raise ValueError(f"{option}: got {name}={value!r}; it must be {words}.")


def proxy_of(config: Path) -> Worker | None:
    """Returns a worker with the server's proxy set, whose data set the server must have; None without one."""
    if not _data_section(config).get("proxy"):
        return None
    module, method = instantiate(config)
    trainer, data = instantiate_trainer(config), instantiate_data(config)
    data.prepare_data()
    data.setup()
    fabric = Fabric(accelerator=trainer.device_type, devices=1)
    return Worker(fabric, module, data, method, trainer.seed)


def shared_of(config: Path) -> dict[str, Any]:
    """Returns what the run decides of a node's data section."""
    section = _data_section(config)
    return {name: section[name] for name in SHARED if name in section}


def newcomers_of(config: Path, file: Path) -> FederatedDataModule:
    """Returns the data of clients that are new to a run, from a file with a data section as that of a node.

    Args:
        config: the configuration of the run.
        file: the file. Without a partition, all samples are one client's. It may have ``protocols`` of its own.
    """
    given = _data_section(file) if file.is_file() else {}
    shared = {name: value for name, value in shared_of(config).items() if name != "protocols" or name not in given}
    alone: dict[str, Any] = {"newcomers": 0, "leavers": None, "proxy": 0, "faults": []}
    return _own_data(file, {**shared, **_whole(file), **alone})


def node_of(config: Path, settings: Mapping[str, Any]) -> Node:
    """Returns a node.

    Args:
        config: the configuration of the run.
        settings: the node's own: ``data``, a YAML file with its data section; ``state``, a folder for what is private;
            ``name``, what the server calls it; ``client``, which one of the clients of a data section that deals
            samples out it is; and ``begin-anew``, see `NodeSettings`. Without ``client``, all samples are its own.

    Raises:
        ValueError: for unknown or missing settings, and if network and data do not fit together.
    """
    _check("--node-config", settings, OF_A_NODE)
    if missing := [name for name in ("data", "state") if name not in settings]:
        raise ValueError(
            f"--node-config: {' and '.join(missing)} must be given, as in "
            '--node-config \'data="/etc/lcfl/hospital.yaml" state="/var/lib/lcfl"\'.'
        )
    client = settings.get("client")
    data = data_of(config, Path(settings["data"]), client)
    module, method = instantiate(config, with_weights=True)
    own = NodeSettings(Path(settings["state"]), settings.get("name"), client, client, settings.get("begin-anew", False))
    return Node(module, method, data, instantiate_trainer(config), own)


def data_of(config: Path, file: Path, client: int | None = None) -> FederatedDataModule:
    """Returns the data of a node.

    Args:
        config: the configuration of the run.
        file: the file with the node's data section.
        client: which of the clients of a data section that deals samples out the node is; None if all are its own.
    """
    return _own_data(file, {**shared_of(config), **({} if client is not None else _whole(file))})


def _own_data(file: Path, changes: Mapping[str, Any]) -> FederatedDataModule:
    if not file.is_file():
        raise ValueError(f"data: {file} is not a file; give a YAML file with a data section.")
    return instantiate_data(file, changes)


def _whole(file: Path) -> dict[str, Any]:
    """Returns the arguments that make all samples one client's, unless the file has a partition or a number."""
    given = _data_section(file) if file.is_file() else {}
    return {} if any(given.get(name) is not None for name in WHOLE) else WHOLE


def _data_section(config: Path) -> dict[str, Any]:
    if problem := yaml_error(config):
        raise ValueError(f"{config} is not valid YAML: {problem}.")
    content = yaml.load(config.read_bytes(), LOADER)
    section = content.get("data") if isinstance(content, dict) else None
    if not isinstance(section, dict):
        raise ValueError(f"{config}: it has no section data, with a dataset.")
    return dict(section.get("init_args") or {}) if "class_path" in section else section
