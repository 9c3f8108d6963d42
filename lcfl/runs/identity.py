"""Describes configuration and data as plain values, which must be equal when a run is resumed."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence, Set
from enum import Enum
from functools import partial
from pathlib import PurePath
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric

from lcfl.core import rng
from lcfl.core.earlier_versions import is_implied, public_name
from lcfl.core.metric_names import Reported
from lcfl.core.part_words import is_setting, kept_arguments, settings_beyond_fields
from lcfl.models.module import FederatedModule

__all__ = ["added_attributes", "describe", "describe_metrics", "describe_module", "differences", "needed_for"]

EVALUATED = ("seed", "data", "augmentation", "partition", "batch_size", "drop_last", "model", "method")

OF_EVERY_LAYER = vars(nn.Module()).keys()


class _Nothing(Metric):
    """Has only the attributes of every metric."""

    def update(self) -> None: ...

    def compute(self) -> None: ...


OF_EVERY_METRIC = vars(_Nothing()).keys()
DESCRIBED_BY_VALUE = (bool, int, float, str, Enum, Tensor, np.ndarray, np.generic, nn.Module, partial)


def describe(value: Any) -> Any:
    """Returns plain JSON values that distinguish two configurations.

    Numbers, text, lists and mappings describe themselves. Other objects are described by their class and their fields.
    """
    if isinstance(value, Enum):  # before the plain types, because an Enum may also be a number or text
        return value.name
    if isinstance(value, Tensor | np.ndarray | np.generic):
        return describe(value.tolist())
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): describe(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [describe(item) for item in value]
    if isinstance(value, nn.Module):
        return repr(value)
    if isinstance(value, Set):
        return sorted((describe(item) for item in value), key=repr)
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, partial):
        return {"function": describe(value.func), "args": describe(value.args), "keywords": describe(value.keywords)}
    if _is_function(value):
        return _path_of(value)
    name = _path_of(type(value))
    if dataclasses.is_dataclass(value):
        names = [*(item.name for item in dataclasses.fields(value)), *settings_beyond_fields(value)]
    else:
        names = sorted(key for key in getattr(value, "__dict__", {}) if not key.startswith("_"))
        names += _kept_privately(value)
    return {"class": name} | {key: describe(getattr(value, key)) for key in names}


def _kept_privately(value: Any) -> list[str]:
    """Returns the private attributes of a user's object that keep plain arguments: ``_at`` for ``at``."""
    if type(value).__module__.startswith("lcfl."):
        return []
    return [name for name in kept_arguments(value) if name.startswith("_")]


def _path_of(value: Any) -> str:
    """Returns the import path of a class or function. For those of lcfl, it is the name alone."""
    return public_name(f"{value.__module__}.{value.__qualname__}")


def describe_module(module: FederatedModule) -> dict[str, Any]:
    """Describes the network, cut, loss, regulariser weights and optimizer settings of a module.

    A network is described by the text of its layers and by the constructor arguments, plain values and functions, that
    the layers keep as attributes. It does not matter how the network was built.

    The description also has the class of the module and the public attributes that a subclass of `FederatedModule`
    adds, including buffers, layers and hyper-parameters saved by Lightning. An attribute is described by its value if
    that is plain data, and otherwise by its class.
    """
    optimizer = module.configure_optimizers()
    groups = optimizer.param_groups if isinstance(optimizer, Optimizer) else [{}]
    first, *others = [{key: describe(value) for key, value in group.items() if key != "params"} for group in groups]
    settings, functions = (_settings(module.network, kind) for kind in (is_setting, _is_function))
    numbers = {key: value for key, value in _numbers_kept(module).items() if key not in settings}
    names = [name for name, _ in module.layout.parameters]
    is_plain = names == [name for name, _ in module.network.named_parameters()]
    has_buffers = bool(module.layout.buffers or module.buffer_layout)
    return {key: _describe_plain(value) for key, value in _added(module).items()} | {
        "class": _path_of(type(module)),
        "network": repr(module.network),
        **({"network_settings": settings} if settings else {}),
        **({"network_functions": functions} if functions else {}),
        **({"numbers_kept": numbers} if numbers else {}),
        "num_embedding": module.layout.num_embedding,
        **({} if is_plain else {"trained": names}),
        "loss": _describe_loss(module.loss),
        **({} if module.reported == Reported() else {"report": vars(module.reported)}),
        "cluster_weight": module.cluster_weight,
        "global_weight": module.global_weight,
        "optimizer": {"class": type(optimizer).__qualname__}
        | (_own_settings(optimizer) if isinstance(optimizer, Optimizer) else {})
        | first
        | ({"other_groups": others} if others else {}),
        **({"buffer_policy": module.buffer_policy} if has_buffers else {}),
    }


def describe_metrics(module: FederatedModule) -> dict[str, Any]:
    """Describes the metrics of a module by name: their classes, and the plain values that they keep publicly.

    Empty if accuracy is the only one. What a metric sums up does not count.
    """
    if module.has_accuracy_alone:
        return {}
    return {str(name): _describe_metric(metric) for name, metric in module.metrics.items()}


def _describe_metric(metric: Metric) -> dict[str, Any]:
    """Describes a metric, and those in it, by numbers, texts, functions, and tensors that it does not sum up."""

    def is_own(key: str, value: Any, part: nn.Module) -> bool:
        if key in OF_EVERY_METRIC or key in getattr(part, "_defaults", {}):
            return False
        return value is None or is_setting(value) or _is_function(value) or isinstance(value, Tensor)

    return {"class": _path_of(type(metric))} | {
        f"{place}.{key}" if place else key: describe(value)
        for place, part in metric.named_modules()
        for key, value in (vars(part) | part._buffers).items()
        if key[0] != "_" and is_own(key, value, part)
    }


def _settings(network: nn.Module, is_wanted: Callable[[Any], bool]) -> dict[str, Any]:
    """Returns the constructor arguments of a kind that layers keep as attributes of the same name.

    The keys are dotted paths of layer and argument. Layers of torch are left out, because their text shows these
    arguments.
    """
    settings = {}
    for place, layer in network.named_modules():
        if type(layer).__module__.startswith("torch.nn.") and not any(layer.children()):
            continue
        for key in inspect.signature(type(layer).__init__).parameters:
            if is_wanted(vars(layer).get(key)):
                settings[f"{place}.{key}" if place else key] = describe(vars(layer)[key])
    return settings


def _numbers_kept(module: FederatedModule) -> dict[str, Any]:
    """Returns the numbers that the layers of a user's network keep under any name, as a new network has them.

    Texts are often paths and devices, which may change.
    """

    def is_own(layer: nn.Module) -> bool:
        return not type(layer).__module__.startswith(("torch.", "torchvision.", "lcfl."))

    if not any(map(is_own, module.network.modules())):
        return {}
    with rng.seeded(0, "description"):
        network = module.make_network()
    return {
        f"{place}.{key}" if place else key: describe(value)
        for place, layer in network.named_modules()
        if is_own(layer)
        for key, value in vars(layer).items()
        if key not in OF_EVERY_LAYER and isinstance(value, bool | int | float)
    }


def _own_settings(optimizer: Optimizer) -> dict[str, Any]:
    """Returns the plain values that a user's optimizer keeps as attributes."""
    if type(optimizer).__module__.startswith("torch."):
        return {}
    known = vars(torch.optim.SGD([nn.Parameter(torch.zeros(1))]))
    return {key: describe(value) for key, value in vars(optimizer).items() if key not in known and is_setting(value)}


def _is_function(value: Any) -> bool:
    """Returns whether the value is a function or a class, which its path describes."""
    return isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__"))


def _added(module: FederatedModule) -> dict[str, Any]:
    """Returns the public attributes of a subclass of `FederatedModule`."""
    added = {key: value for key, value in added_attributes(module).items() if not key.startswith("_")}
    return added | ({"hparams": dict(module.hparams)} if module.hparams else {})


def added_attributes(module: FederatedModule) -> dict[str, Any]:
    """Returns the attributes, buffers and layers of a module that a plain `FederatedModule` does not have."""
    plain = _attributes(FederatedModule(nn.Identity, cut=None))  # a network that draws no random numbers
    return {key: value for key, value in _attributes(module).items() if key not in plain}


def _attributes(module: nn.Module) -> dict[str, Any]:
    return vars(module) | module._parameters | module._buffers | module._modules


def _describe_plain(value: Any) -> Any:
    """Describes plain values as `describe` does, and other objects by their class alone.

    Other objects may hold paths, caches and counters.
    """
    if isinstance(value, Mapping):
        return {str(key): _describe_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_describe_plain(item) for item in value]
    if isinstance(value, Set):
        return sorted((_describe_plain(item) for item in value), key=repr)
    if value is None or isinstance(value, DESCRIBED_BY_VALUE) or hasattr(value, "__qualname__"):
        return describe(value)
    return {"class": _path_of(type(value))}


def _describe_loss(loss: nn.Module) -> dict[str, Any]:
    """Describes a loss by its text, settings and tensors.

    The text alone is not enough: torch leaves out, for example, the label smoothing.
    """
    settings = {key: value for key, value in vars(loss).items() if not key.startswith("_") and key != "training"}
    private = {key: value for key, value in vars(loss).items() if key[0] == "_" and isinstance(value, float)}
    settings |= private | {key: getattr(loss, key) for key in _kept_privately(loss)}
    return {"text": repr(loss)} | {key: describe(value) for key, value in (settings | loss.state_dict()).items()}


def needed_for(use: Literal["evaluation", "prediction"], identity: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the part of a run's identity on which a use of its models depends.

    For an evaluation, clients train the models ``after_local`` and those that a method fine-tunes. So it depends on
    everything that training a client depends on, except for the arithmetic (engine and precision), which may be that of
    another machine. A prediction depends only on the network, its cut and the method.
    """
    if use == "evaluation":
        return {name: identity.get(name) for name in EVALUATED}
    network = {key: value for key, value in identity["model"].items() if key.startswith(("network", "num_"))}
    return {"model": network, "method": identity["method"]}


def differences(saved: Any, now: Any, path: str = "") -> list[str]:
    """Returns one line for each place where two descriptions differ, with its path and both values."""
    if isinstance(saved, dict) and isinstance(now, dict):
        keys = [*saved, *(key for key in now if key not in saved and not is_implied(key, now[key]))]
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
    is_nan = saved != saved and now != now
    return [] if saved == now or is_nan else [f"{path}: the checkpoint has {saved!r}, this run {now!r}"]
