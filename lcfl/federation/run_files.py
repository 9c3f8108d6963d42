"""What a run directory has besides the rows of the rounds and the checkpoints: what the run is, and its result."""

import platform
import shlex
import sys
from collections.abc import Sequence
from importlib.metadata import version
from math import isfinite
from pathlib import Path
from typing import Any

import lightning
import torch
import yaml
from lightning.pytorch.cli import SaveConfigCallback

import lcfl
from lcfl.core.files import write_json, write_whole
from lcfl.runs.identity import describe
from lcfl.server.server import Server

__all__ = ["write_description", "write_summary"]


def write_description(server: Server, save_config: Sequence[SaveConfigCallback]) -> None:
    """Writes ``partition.json`` and ``config.yaml``.

    Args:
        server: the server at the start of the run.
        save_config: LightningCLI's callbacks, which write ``config.yaml`` on the command line. If there are none, it
            holds a description.
    """
    server.data.write(server.run_dir / "partition.json")
    for callback in save_config:
        callback.setup(trainer=_RunView(server.run_dir), pl_module=server.module, stage="fit")  # type: ignore[arg-type]
    if not save_config:
        text = "# Describes Python objects; lcfl.load(run, model, method) needs these objects again.\n"
        text += yaml.safe_dump({"described": server.identity})
        write_whole(server.run_dir / "config.yaml", text.encode())


def write_summary(server: Server, metrics: dict[str, float]) -> None:
    """Writes ``summary.json``: the final metrics, and what the run was."""
    measured = server.schedule.num_evaluated
    summary = {
        "metrics": {name: value if isfinite(value) else None for name, value in metrics.items()},
        "reported": vars(server.module.reported),
        "rounds": server.state.round,
        "planned_rounds": int(server.schedule.rounds),
        "evaluate_clients": None if measured == server.data.num_initial_clients else measured,  # None means all
        "total_bytes": server.state.total_bytes,
        "privacy": describe(server.privacy_guarantee()),
        "identity": server.identity,
        "ranks": server.fabric.world_size,
        "versions": {
            "lcfl": lcfl.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "lightning": lightning.__version__,
            "scikit-learn": version("scikit-learn"),
        },
        "command": shlex.join(sys.argv),
    }
    write_json(server.run_dir / "summary.json", summary, indent=2)


class _RunView:
    """The part of a Trainer that LightningCLI's SaveConfigCallback uses."""

    is_global_zero = True

    def __init__(self, path: Path) -> None:
        self.log_dir = str(path)
        self.strategy = self

    def broadcast(self, value: Any, src: int = 0) -> Any:
        """Returns `value`, because only the server writes and no other rank needs it."""
        return value
