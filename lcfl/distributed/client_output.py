"""Errors of a client's work, and checks of what a client's local update and exchange return.

Both may be the user's own. Legend: P + Q length of a model's flat vector.
"""

from collections.abc import Mapping
from numbers import Integral, Real

import torch
from torch import Tensor

from lcfl.core.metric_names import is_reserved
from lcfl.methods.local.training import LocalOutput

__all__ = ["ClientError", "ClientOutputError", "ClientTimeoutError", "check_output", "check_payload", "check_returned"]


class ClientError(RuntimeError):
    """Raised if a client's task raised an exception; the message names client, round and cause."""


class ClientOutputError(ClientError, ValueError):
    """Raised if a client's local update or exchange returned something that the server cannot use."""


class ClientTimeoutError(ClientError, TimeoutError):
    """Raised if a client's work was not done after ``trainer.client_timeout`` seconds."""


def check_output(name: str, output: object, size: int, may_be_empty: bool = False) -> None:
    """Checks what a local update returned.

    Args:
        name: the class of the local update.
        output: what it returned.
        size: P + Q.
        may_be_empty: whether the model may have no entry, as that of a run which only describes the client's data.

    Raises:
        ClientOutputError: if it cannot be used; names what it is and what it must be.
    """
    if not isinstance(output, LocalOutput):
        raise ClientOutputError(f"{name} returned {_described(output)}; it must return a LocalOutput.")
    model = output.model
    is_vector = isinstance(model, Tensor) and model.layout == torch.strided and model.dtype == torch.float32
    if not is_vector or (model.shape != (size,) and not (may_be_empty and model.shape == (0,))):
        raise ClientOutputError(
            f"{name} returned {_described(model)} as model; it must be a tensor of torch.float32 and shape [{size}], "
            "one entry for each parameter and exchanged buffer."
        )
    if not isinstance(output.consumed, Integral) or output.consumed < 0:
        raise ClientOutputError(
            f"{name} returned {_described(output.consumed)} as consumed; it must be a number of samples >= 0."
        )
    memory = output.memory
    is_memory = isinstance(memory, Tensor) and memory.dtype == torch.float32 and memory.dim() == 1 and len(memory) > 0
    if memory is not None and not is_memory:
        raise ClientOutputError(
            f"{name} returned {_described(memory)} as memory; it must be None or a vector of torch.float32 that is not "
            "empty."
        )
    for field in ("model", "memory", "loss"):
        if isinstance(value := getattr(output, field), Tensor) and value.requires_grad:
            raise ClientOutputError(f"{name} returned a {field} that requires a gradient; return {field}.detach().")
    if not isinstance(output.logged, Mapping):
        raise ClientOutputError(f"{name} returned {_described(output.logged)} as logged; it must be a mapping.")
    for field in output.logged:
        if not isinstance(field, str):
            raise ClientOutputError(f"{name} logs a value named {field!r}; a name must be text.")
        if is_reserved(field):
            raise ClientOutputError(f"{name} logs {field!r}, a name that lcfl logs itself. Log another name.")
    for field, value in {"loss": 0.0 if output.loss is None else output.loss, **output.logged}.items():
        if not (isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1)):
            raise ClientOutputError(f"{name} returned {_described(value)} as {field}; it must be a number.")


def check_payload(name: str, payload: object) -> None:
    """Checks what an exchange makes of a client's output for the server.

    Args:
        name: the class of the exchange.
        payload: what it returned.

    Raises:
        ClientOutputError: if it is not a mapping from names to tensors.
    """
    if not isinstance(payload, Mapping):
        raise ClientOutputError(f"{name} uploads {_described(payload)}; it must be a mapping from names to tensors.")
    for key, value in payload.items():
        if not isinstance(value, Tensor) or value.layout != torch.strided:
            raise ClientOutputError(f"{name} uploads {_described(value)} as {key!r}; it must be a dense tensor.")


def check_returned(name: str, value: object, kind: type) -> None:
    """Checks the type of what a method of an exchange returned.

    Args:
        name: the class and its method.
        value: what it returned.
        kind: the type that it must have.

    Raises:
        ClientOutputError: if it has another type.
    """
    if not isinstance(value, kind):
        raise ClientOutputError(f"{name} returned {_described(value)}; its type must be {kind.__name__}.")


def _described(value: object) -> str:
    """Returns the type of a value in words; for a tensor also its dtype and shape, for a number the number."""
    if isinstance(value, Tensor):
        kind = "tensor" if value.layout == torch.strided else "sparse tensor"
        return f"a {kind} of {value.dtype} and shape {list(value.shape)}"
    return repr(value) if value is None or isinstance(value, Real) else f"an object of type {type(value).__name__}"
