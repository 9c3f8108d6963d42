"""The options that take a class, and the classes of lcfl for each of them."""

import inspect
import re
from difflib import get_close_matches
from types import ModuleType
from typing import Any

from torch import nn

import lcfl.callbacks
import lcfl.data.augmentation
import lcfl.data.datasets
import lcfl.data.faults
import lcfl.data.partition
import lcfl.data.transforms
import lcfl.methods.aggregation
import lcfl.methods.clustering
import lcfl.methods.exchange
import lcfl.methods.exchange.transforms
import lcfl.methods.local
import lcfl.models
from lcfl.core.callback import Callback
from lcfl.methods.exchange.transforms import UploadTransform

__all__ = ["CLASSES", "OTHERS", "PARTS", "classes", "closest", "with_modules"]

# The modules whose classes can be given by name alone, and the base of these classes. A misspelt name is compared with
# their names.
PARTS: dict[str, tuple[ModuleType, type]] = {
    "trainer.callbacks": (lcfl.callbacks, Callback),
    "method.local_update": (lcfl.methods.local, lcfl.methods.local.LocalUpdate),
    "method.exchange": (lcfl.methods.exchange, lcfl.methods.exchange.Exchange),
    "method.exchange.init_args.transforms": (lcfl.methods.exchange.transforms, UploadTransform),
    "method.aggregation": (lcfl.methods.aggregation, lcfl.methods.aggregation.Aggregation),
    "method.aggregation.init_args.rule": (lcfl.methods.aggregation, lcfl.methods.aggregation.AggregationRule),
    "method.aggregation.init_args.optimizer": (lcfl.methods.aggregation, lcfl.methods.aggregation.ServerOptimizer),
    "method.clustering": (lcfl.methods.clustering, lcfl.methods.clustering.Clustering),
    "model.network": (lcfl.models, nn.Module),
    "data.dataset": (lcfl.data.datasets, lcfl.data.datasets.FederatedDataset),
    "data.dataset.init_args.reader": (lcfl.data.datasets, lcfl.data.datasets.Reader),
    "data.dataset.init_args.augmentation": (lcfl.data.augmentation, lcfl.data.augmentation.Augmentation),
    "data.partition": (lcfl.data.partition, lcfl.data.partition.Partition),
    "data.client_transforms": (lcfl.data.transforms, lcfl.data.transforms.ClientTransform),
    "data.faults": (lcfl.data.faults, lcfl.data.faults.ClientFault),
}
# The other options that take a class, each with an example.
OTHERS = {
    "trainer.logger": "lightning.pytorch.loggers.CSVLogger",
    "model.optimizer": "torch.optim.Adam",
    "model.loss": "torch.nn.CrossEntropyLoss",
    "model.metrics": "torchmetrics.F1Score",
}
CLASSES = (*PARTS, *OTHERS)


def classes(option: str) -> dict[str, type]:
    """Returns lcfl's classes for an option or one below it, by their names."""
    if (part := _part(option)) is None:
        return {}
    module, base = part
    kinds = {name: getattr(module, name) for name in module.__all__}
    return {
        name: kind
        for name, kind in kinds.items()
        if isinstance(kind, type) and issubclass(kind, base) and kind is not base and not inspect.isabstract(kind)
    }


def with_modules(value: Any, option: str = "") -> Any:
    """Returns the value of an option in which each of lcfl's networks that is given by its name alone has its module.

    Such a name would be ambiguous if another library has a network of the same name, as torchvision has an MLP. Other
    classes of lcfl have bases of lcfl, so their names are not.
    """
    if isinstance(value, dict):
        return {key: with_modules(item, f"{option}.{key}".lstrip(".")) for key, item in value.items()}
    if isinstance(value, list):
        return [with_modules(item, option) for item in value]
    of = option.removesuffix(".class_path")
    part = _part(of) if of != option or of in PARTS else None
    if part is None or part[1] is not nn.Module or value not in classes(of):
        return value
    return f"{part[0].__name__}.{value}"


def _part(option: str) -> tuple[ModuleType, type] | None:
    """Returns the module and the base of the classes for an option or one below it."""
    option = re.sub(r"^(model|data)\.init_args\.", r"\1.", option)  # the path of a group whose class is named
    groups = sorted((name for name in PARTS if f"{option}.".startswith(f"{name}.")), key=len)
    return PARTS[groups[-1]] if groups else None


def closest(name: str, known: list[str], cutoff: float = 0.6) -> str:
    """Returns a question that suggests the names closest to a misspelt one, or an empty text."""
    close = get_close_matches(name, list(dict.fromkeys(known)), n=2, cutoff=cutoff)
    return f" Did you mean {' or '.join(close)}?" if close else ""
