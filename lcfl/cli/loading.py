"""Opens the run in a run directory."""

import warnings
from pathlib import Path
from typing import Any

import yaml

from lcfl.cli.yaml_files import LOADER
from lcfl.core.earlier_versions import with_current_names
from lcfl.methods.method import Method
from lcfl.models.module import FederatedModule
from lcfl.runs.identity import describe, describe_module, differences, needed_for
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
        ValueError: if the run was started from Python, and `model` or `method` is not given or has another network, cut
            or part of the method.
    """
    path = Path(run)
    config = path / "config.yaml"
    if not config.is_file():
        reason = "it has no config.yaml" if path.is_dir() else "there is no such folder"
        raise FileNotFoundError(f"{path} is not a run directory: {reason}.")
    if model is None or method is None:
        from lcfl.cli.federated_cli import instantiate

        model, method = instantiate(config)
    else:
        _check_same(config, model, method)
    if not (path / "summary.json").is_file():
        warnings.warn(f"{path} is not finished: its models are those of an intermediate round.", stacklevel=2)
    return Run(path, model, method, ckpt_path=ckpt_path)


def _check_same(config: Path, model: FederatedModule, method: Method) -> None:
    """Compares network and method with the description of a run that was started from Python.

    Raises:
        ValueError: if one differs, with both values.
    """
    saved = with_current_names(yaml.load(config.read_text("utf-8"), LOADER).get("described"))
    if not saved:
        return
    now = needed_for("prediction", {"model": describe_module(model), "method": describe(method)})
    if lines := differences(_named_as(now, needed_for("prediction", saved)), now):
        raise ValueError(f"{config.parent} was started with another model or method: {'; '.join(lines)}.")


def _named_as(now: Any, saved: Any) -> Any:
    """Returns what was saved, with the current paths of what was defined in the script that started the run."""
    if isinstance(saved, dict) and isinstance(now, dict):
        return {key: _named_as(now.get(key), value) for key, value in saved.items()}
    if isinstance(saved, list) and isinstance(now, list) and len(saved) == len(now):
        return [_named_as(*pair) for pair in zip(now, saved, strict=True)]
    of_script = isinstance(saved, str) and isinstance(now, str) and saved.startswith("__main__.")
    return now if of_script and now.endswith(saved.removeprefix("__main__")) else saved
