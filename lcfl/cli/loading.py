"""Opening a run that another process has left behind."""

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
    """The run in a run directory, ready to give models that predict; warns of one that has not come to its end.

    ``lcfl.load("logs/quickstart/version_0").model("personal", client=3)`` is a plain ``nn.Module``.

    Args:
        run: the run directory.
        model: for a run that was started from Python: the module it was started with.
        method: likewise, its method.
        ckpt_path: the checkpoint whose models are given: ``last``, the newest; ``best``, the one that the run's monitor
            chose; or its name or path.

    Raises:
        FileNotFoundError: if there is no run.
        ValueError: for a run that was started from Python, if `model` and `method` are not given.
    """
    path = Path(run)
    config = path / "config.yaml"
    if not config.is_file():
        raise FileNotFoundError(f"{path} is no run directory: it has no config.yaml.")
    if model is None or method is None:
        from lcfl.cli.federated_cli import instantiate

        model, method = instantiate(config)
    if not (path / "summary.json").is_file():
        warnings.warn(f"{path} has not come to its end: its models are of a round on the way.", stacklevel=2)
    return Run(path, model, method, ckpt_path=ckpt_path)
