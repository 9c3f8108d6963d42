"""The server of a fleet as Flower's ServerApp."""

import logging
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flwr.serverapp import Grid
from lightning.pytorch.cli import SaveConfigCallback

from lcfl.cli.federated_cli import instantiate, instantiate_trainer
from lcfl.cli.fleet_config import options_of, proxy_of
from lcfl.core.files import replacing
from lcfl.fleet import server
from lcfl.fleet.flower import FlowerLink
from lcfl.runs.result import Run

__all__ = ["lead"]


def lead(config: Path, grid: Grid, run_config: Mapping[str, Any]) -> Run:
    """Trains with the nodes of a Flower federation.

    Args:
        config: the configuration of the run.
        grid: reaches the nodes.
        run_config: what ``flwr run`` was given.
    """
    warnings.formatwarning = lambda message, *_: f"warning: {message}\n"  # without the line of lcfl's code
    ours = logging.getLogger("lcfl")
    if not ours.hasHandlers():
        ours.addHandler(logging.StreamHandler())
    ours.setLevel(logging.INFO)
    federation, options = instantiate_trainer(config), options_of(config, run_config)
    federation.save_config = [_Kept(config)]
    federation.default_root_dir = str(run_config.get("root") or federation.default_root_dir)
    module, method = instantiate(config, with_weights=True)
    link = FlowerLink(grid, ttl=2 * options.patience.deadline + 60)
    ckpt_path = str(run_config.get("ckpt-path") or "") or None
    return server.fit(federation, module, method, link, options, ckpt_path, proxy_of(config))


class _Kept(SaveConfigCallback):
    """Writes ``config.yaml`` into the run directory."""

    def __init__(self, config: Path) -> None:
        self.path = config

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        with replacing(Path(trainer.log_dir) / "config.yaml") as temporary:
            shutil.copyfile(self.path, temporary)
