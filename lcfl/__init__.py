"""Clustered and personalised federated learning on PyTorch Lightning and Fabric."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lcfl.cli.loading import load
    from lcfl.core.callback import Callback
    from lcfl.data.datamodule import FederatedDataModule
    from lcfl.federation.federation import Federation
    from lcfl.methods import *  # noqa: F403
    from lcfl.models.module import FederatedModule

__version__ = "0.2.0.dev0"
# The parts of a method, all that `lcfl.methods` names, can be had from here, too.
__all__ = ["Callback", "FederatedDataModule", "FederatedModule", "Federation", "__version__", "load"]

_HOMES = {
    "Callback": "lcfl.core.callback",
    "FederatedDataModule": "lcfl.data.datamodule",
    "FederatedModule": "lcfl.models.module",
    "Federation": "lcfl.federation.federation",
    "load": "lcfl.cli.loading",
}


def __getattr__(name: str) -> Any:
    """Imports a name of the package when it is first used: ``lcfl --help`` must not wait for torch."""
    from importlib import import_module

    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    methods = import_module("lcfl.methods")
    if name in methods.__all__:
        return getattr(methods, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """What a notebook completes: also names that are not imported yet, and not what this file needs itself."""
    from lcfl import methods

    return sorted({*globals(), *_HOMES, *methods.__all__} - {"Any", "TYPE_CHECKING", "_HOMES"})
