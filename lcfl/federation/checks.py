"""Checks that the parts of a run fit together, before data are loaded."""

import pickle
from collections.abc import Sequence
from numbers import Integral

import torch
from lightning.pytorch import Callback as TrainerCallback

from lcfl.callbacks.checkpoint import Checkpoint
from lcfl.core.callback import Callback, check_hooks
from lcfl.core.validation import check_instance
from lcfl.data.datamodule import FederatedDataModule
from lcfl.federation.effects import warn_of_idle_pulls, warn_of_method, warn_of_missing_weights
from lcfl.federation.module_checks import check_module, check_rate, warn_of_large_steps
from lcfl.methods.clustering import Clustering
from lcfl.methods.compatibility import check_rounds, check_start
from lcfl.methods.exchange import ModelKind
from lcfl.methods.method import Method
from lcfl.models.module import FederatedModule

__all__ = ["check_callbacks", "check_method", "check_parts", "check_sendable", "number_of_clients"]


def number_of_clients(option: str, wanted: int | float, num_clients: int, num_newcomers: int = 0) -> int:
    """Returns max(1, floor(fraction * n)) for a fraction of the n clients that are not newcomers, or the count itself.

    Args:
        option: option of the trainer, for errors: ``clients_per_round`` (|S_t|) or ``evaluate_clients``.
        wanted: a fraction (a float) or a count.
        num_clients: N.
        num_newcomers: N - n.

    Raises:
        ValueError: for a fraction outside (0, 1] or a count outside 1..n.
    """
    kept_out = f" without {num_newcomers} newcomers" if num_newcomers else ""
    most = num_clients - num_newcomers
    if not isinstance(wanted, Integral):
        if not 0 < wanted <= 1:
            raise ValueError(
                f"trainer.{option}: got the fraction {wanted}; allowed are fractions in (0, 1] and counts "
                f"from 1 to data.num_clients={num_clients}{kept_out}."
            )
        return max(1, int(wanted * most + 1e-9))
    if not 1 <= wanted <= most:
        raise ValueError(
            f"trainer.{option}: got {wanted} for data.num_clients={num_clients}{kept_out}; allowed are counts "
            f"from 1 to {most} and fractions in (0, 1]."
        )
    return int(wanted)


def check_callbacks(callbacks: Sequence[object]) -> None:
    """Refuses callbacks of ``lightning.Trainer``, clusterings, misspelt hooks, a second `Checkpoint`, other objects.

    Nothing would call a callback of ``lightning.Trainer``, and two `Checkpoint` would remove each other's files.
    """
    for callback in callbacks:
        if isinstance(callback, TrainerCallback):
            raise ValueError(
                f"trainer.callbacks: {type(callback).__name__} is a callback of lightning.Trainer and would never be "
                "called; use those of lcfl.callbacks (Checkpoint, EarlyStopping, Monitor, Progress) or derive from "
                "lcfl.Callback."
            )
        check_instance("trainer.callbacks", callback, Callback)
        if isinstance(callback, Clustering):
            raise ValueError(
                f"trainer.callbacks: {type(callback).__name__} is a clustering, which is a part of the method. List it "
                "in method.clustering."
            )
    if (number := sum(isinstance(callback, Checkpoint) for callback in callbacks)) > 1:
        raise ValueError(
            f"trainer.callbacks: got {number} Checkpoint; allowed is one, because each would remove the files of the "
            "others. One saves at regular intervals and after the best round, too: set its every_n_rounds and monitor."
        )
    check_hooks(callbacks)


def check_parts(model: object, datamodule: object, method: object) -> None:
    """Refuses objects of the wrong class as model, data module or method, which Python accepts, and another dtype.

    Raises:
        TypeError: for the first object of another class.
        ValueError: if tensors are not float32 by default.
    """
    if torch.get_default_dtype() != torch.float32:
        raise ValueError(
            f"torch.set_default_dtype: got {torch.get_default_dtype()}; a federation computes in torch.float32. Set it "
            "back, and choose the arithmetic of a training step with trainer.precision."
        )
    check_instance("model", model, FederatedModule)
    check_instance("datamodule", datamodule, FederatedDataModule)
    check_instance("method", method, Method)


def check_method(method: Method, module: FederatedModule, num_clients: int) -> None:
    """Refuses parts that cannot work together and warns about settings without an effect.

    Raises:
        ValueError: if a part cannot work with this number of clients or with the exchange, or if the module makes
            something other than one optimizer with finite settings.
    """
    optimizer = check_module(module)
    check_hooks(method.clustering, "method.clustering")
    check_rounds(method.exchange, method.clustering, num_clients)
    for clustering in method.clustering:
        clustering.check(num_clients)
        clustering.check_layout(module.layout)
    method.exchange.check(module.layout)
    method.local_update.check(module)
    check_rate(method.local_update, optimizer)
    check_start(method.local_update, method.exchange)
    warn_of_method(method)
    warn_of_idle_pulls(method, module)
    warn_of_missing_weights(method, module)
    warn_of_large_steps(module, optimizer, (*method.exchange.sends, *method.local_update.adds))


def check_sendable(method: Method, kinds: Sequence[ModelKind]) -> None:
    """Refuses a local update that cannot go from process to process, as it does for models that an evaluation trains.

    Args:
        method: the method.
        kinds: the kinds of model that are evaluated.

    Raises:
        ValueError: if its class, or what it holds, is not found by its name, like what is defined in a function.
    """
    for local_update in filter(None, (method.exchange.evaluation_update(kind, method.local_update) for kind in kinds)):
        try:
            pickle.dumps(local_update)
        except Exception as error:  # of any kind, because the user's class may say how it is pickled
            raise ValueError(
                f"method.local_update: {type(local_update).__name__} cannot be sent to another process ({error}). "
                "Define its class and the functions that it holds by name in a module or script, or set "
                "trainer.devices to 1."
            ) from error
