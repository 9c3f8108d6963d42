"""Opens the run in a run directory."""

import warnings
from pathlib import Path

from lcfl.methods.method import Method
from lcfl.models.module import FederatedModule
from lcfl.runs.result import Run

__all__ = ["load"]


def load(
    run: str | Path,
    model: FederatedModule | None = None,
    method: Method | None = None,
    ckpt_path: str | Path = "last",
) -> Run:
    """Opens the run in a run directory, whose models can then be used. Warns if the run is not finished.

    For example, ``lcfl.load("logs/quickstart/version_0").model("personal", client=3)`` is a plain ``nn.Module``.

    Args:
        run: the run directory.
        model: the module that the run was started with; needed only for a run that was started from Python.
        method: the method that the run was started with; needed only for a run that was started from Python.
        ckpt_path: the checkpoint that holds the models: ``last``, the newest; ``best``, the one that the run's monitor
            chose; or the name or the path of a checkpoint.

    Returns:
        The run.

    Raises:
        FileNotFoundError: if there is no run.
        ValueError: if the run was started from Python, and `model` or `method` is not given.
    """
    path = Path(run)
    config = path / "config.yaml"
    if not config.is_file():
        reason = "it has no config.yaml" if path.is_dir() else "there is no such folder"
        raise FileNotFoundError(f"{path} is not a run directory: {reason}.")
    if model is None or method is None:
        from lcfl.cli.federated_cli import instantiate

        model, method = instantiate(config)
    if not (path / "summary.json").is_file():
        warnings.warn(f"{path} is not finished: its models are those of an intermediate round.", stacklevel=2)
    return Run(path, model, method, ckpt_path=ckpt_path)
