"""Opening a run that another process has left behind."""

from pathlib import Path

from lcfl.method import Method
from lcfl.module import FederatedModule
from lcfl.result import Run

__all__ = ["load"]


def load(run: str | Path, model: FederatedModule | None = None, method: Method | None = None) -> Run:
    """The run in a run directory, ready to give models that predict.

    ``lcfl.load("logs/quickstart/version_0").model("personal", client=3)`` is a plain ``nn.Module``.

    Args:
        run: the run directory.
        model: for a run that was started from Python: the module it was started with.
        method: likewise, its method.

    Raises:
        FileNotFoundError: if there is no run.
        ValueError: for a run that was started from Python, if `model` and `method` are not given.
    """
    path = Path(run)
    config = path / "config.yaml"
    if not config.is_file():
        raise FileNotFoundError(f"{path} is no run directory: it has no config.yaml.")
    if model is None or method is None:
        from lcfl.cli import instantiate

        model, method = instantiate(config)
    return Run(path, model, method)
