"""What must be equal for a run to be continued: a plain description of configuration and data."""

import dataclasses
from collections.abc import Mapping, Sequence, Set
from enum import Enum
from functools import partial
from pathlib import PurePath
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer

from lcfl.module import FederatedModule

__all__ = ["describe", "describe_module", "differences"]


def describe(value: Any) -> Any:
    """Plain JSON values that tell two configurations apart: numbers, text, lists, and objects by class and fields."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): describe(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [describe(item) for item in value]
    if isinstance(value, nn.Module):
        return repr(value)
    if isinstance(value, Tensor | np.ndarray | np.generic):
        return describe(value.tolist())
    if isinstance(value, Set):
        return sorted((describe(item) for item in value), key=repr)
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, partial):
        return {"function": describe(value.func), "args": describe(value.args), "keywords": describe(value.keywords)}
    if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
        return f"{value.__module__}.{value.__qualname__}"
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    if dataclasses.is_dataclass(value):
        names = [item.name for item in dataclasses.fields(value)]
    else:
        names = sorted(key for key in getattr(value, "__dict__", {}) if not key.startswith("_"))
    return {"class": name} | {key: describe(getattr(value, key)) for key in names}


def describe_module(module: FederatedModule) -> dict[str, Any]:
    """Class, network, cut, loss, regulariser weights and optimizer settings of a module."""
    optimizer = module.configure_optimizers()
    settings = optimizer.param_groups[0] if isinstance(optimizer, Optimizer) else {}
    return {
        "class": f"{type(module).__module__}.{type(module).__qualname__}",
        "network": repr(module.network),
        "num_embedding": module.layout.num_embedding,
        "loss": _describe_loss(module.loss),
        "cluster_weight": module.cluster_weight,
        "global_weight": module.global_weight,
        "optimizer": {"class": type(optimizer).__qualname__}
        | {key: describe(value) for key, value in settings.items() if key != "params"},
    }


def _describe_loss(loss: nn.Module) -> dict[str, Any]:
    """A loss's text, settings and tensors: torch's text of a loss leaves out e.g. its label smoothing."""
    settings = {key: value for key, value in vars(loss).items() if not key.startswith("_") and key != "training"}
    return {"text": repr(loss)} | {key: describe(value) for key, value in (settings | loss.state_dict()).items()}


def differences(saved: Any, now: Any, path: str = "") -> list[str]:
    """The places where two descriptions differ, as ``path: was, is now``."""
    if isinstance(saved, dict) and isinstance(now, dict):
        keys = [*saved, *(key for key in now if key not in saved)]
        return [
            line
            for key in keys
            for line in differences(saved.get(key), now.get(key), f"{path}.{key}" if path else str(key))
        ]
    if isinstance(saved, list) and isinstance(now, list) and len(saved) == len(now):
        return [
            line
            for number, (was, new) in enumerate(zip(saved, now, strict=True))
            for line in differences(was, new, f"{path}.{number}")
        ]
    return [] if saved == now else [f"{path}: the checkpoint has {saved!r}, this run {now!r}"]
