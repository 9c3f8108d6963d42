"""Clustered and personalised federated learning on PyTorch Lightning and Fabric."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lcfl.cli.loading import load
    from lcfl.cli.method_files import read_method
    from lcfl.core.callback import Callback
    from lcfl.core.clients import ClientState
    from lcfl.core.messages import Downlink, Uplink
    from lcfl.core.schema import Array
    from lcfl.core.state import FederationState
    from lcfl.data.datamodule import FederatedDataModule
    from lcfl.federation.federation import Federation
    from lcfl.federation.onboarding import onboard
    from lcfl.methods import *  # noqa: F403
    from lcfl.methods import Method
    from lcfl.methods.clustering.base import ServerInterface
    from lcfl.methods.local.training import Engine, LocalData
    from lcfl.models.layout import Layout
    from lcfl.models.module import FederatedModule
    from lcfl.runs.result import Run

__version__ = "0.2.0.dev0"
# All names of `lcfl.methods`, the parts of a method, can be imported from here, too.
__all__ = ["Callback", "FederatedDataModule", "FederatedModule", "Federation", "Method", "__version__", "load"]
__all__ += ["ClientState", "Downlink", "Engine", "FederationState", "Layout", "LocalData", "ServerInterface"]
__all__ += ["Array", "Run", "Uplink", "onboard", "read_method"]

_HOMES = {
    "Array": "lcfl.core.schema",
    "Callback": "lcfl.core.callback",
    "ClientState": "lcfl.core.clients",
    "Downlink": "lcfl.core.messages",
    "Engine": "lcfl.methods.local.engine",
    "FederatedDataModule": "lcfl.data.datamodule",
    "FederatedModule": "lcfl.models.module",
    "Federation": "lcfl.federation.federation",
    "FederationState": "lcfl.core.state",
    "Layout": "lcfl.models.layout",
    "LocalData": "lcfl.methods.local.training",
    "Run": "lcfl.runs.result",
    "ServerInterface": "lcfl.methods.clustering.base",
    "Uplink": "lcfl.core.messages",
    "load": "lcfl.cli.loading",
    "onboard": "lcfl.federation.onboarding",
    "read_method": "lcfl.cli.method_files",
}


def __getattr__(name: str) -> Any:
    """Imports a name of the package when it is first used, so that ``lcfl --help`` does not wait for torch."""
    from importlib import import_module
    from importlib.util import find_spec

    if name.startswith("_"):  # what tools look for, such as __wrapped__
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    methods = import_module("lcfl.methods")
    if name in methods.__all__:
        return getattr(methods, name)
    if "." not in name and find_spec(f"{__name__}.{name}"):
        return import_module(f"{__name__}.{name}")  # such as lcfl.callbacks, without an import of its own
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Returns the names that a notebook completes. They include names that are not imported yet."""
    from pkgutil import iter_modules

    from lcfl import methods

    modules = {module.name for module in iter_modules(globals()["__path__"])} - {"__main__"}
    return sorted({*globals(), *_HOMES, *methods.__all__, *modules} - {"Any", "TYPE_CHECKING", "_HOMES"})
