"""Clustered and personalised federated learning on PyTorch Lightning and Fabric."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lcfl.federation import Federation
    from lcfl.hooks import Callback
    from lcfl.loading import load
    from lcfl.method import Method
    from lcfl.module import FederatedModule

__version__ = "0.1.0"
__all__ = ["Callback", "FederatedModule", "Federation", "Method", "__version__", "load"]

_HOMES = {
    "Callback": "lcfl.hooks",
    "FederatedModule": "lcfl.module",
    "Federation": "lcfl.federation",
    "Method": "lcfl.method",
    "load": "lcfl.loading",
}


def __getattr__(name: str) -> Any:
    """Imports a name of the package when it is first used: ``lcfl --help`` must not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """What a notebook completes: also the names that are not imported yet, and not what this file needs itself."""
    return sorted({*globals(), *__all__} - {"Any", "TYPE_CHECKING", "_HOMES"})
