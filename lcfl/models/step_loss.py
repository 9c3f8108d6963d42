"""The loss of one training step, which a subclass of `FederatedModule` may define as it likes."""

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lcfl.models.module import Batch, FederatedModule

__all__ = ["check_gradient", "loss_of_step"]


def loss_of_step(module: FederatedModule, batch: Batch, number: int = 0) -> Tensor:
    """Returns the loss that `training_step` gives for a batch, either alone or as the entry ``loss`` of a dict.

    Warns if the step leaves out the pulls of the method.

    Raises:
        ValueError: if the loss is anything other than one number.
    """
    module.has_regularized = False
    output: Any = module.training_step(batch, *((number,) if _takes_number(type(module).training_step) else ()))
    if not module.has_regularized and (left_out := _pulls_in(module)):
        kind = type(module).__name__
        warnings.warn(
            f"model: {kind}.training_step does not call self.regularizer(), so this has no effect: {left_out}. Return "
            "loss + self.regularizer().",
            stacklevel=2,
        )
    loss = output.get("loss") if isinstance(output, dict) else output
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(output).__name__
        raise ValueError(
            f"{type(module).__name__}.training_step: got {got}; it must return the loss, a tensor of one number, or "
            'a dict that has it as "loss".'
        )
    return loss


@functools.cache
def _takes_number(step: Callable[..., Any]) -> bool:
    """Returns whether a training step takes the number of its batch, which Lightning lets it leave out."""
    try:
        inspect.signature(step).bind(None, None, 0)
    except TypeError:
        return False
    return True


def _pulls_in(module: FederatedModule) -> str:
    """Returns the names of what `FederatedModule.regularizer` would add now, for a warning; empty for nothing."""
    if type(module).regularizer is not FederatedModule.regularizer:
        return ""
    centre, embedding, correction = module.pulls
    given = {
        "model.cluster_weight": centre is not None and module.cluster_weight > 0,
        "model.global_weight": embedding is not None and module.global_weight > 0,
        "the method's correction of gradients": correction is not None,
    }
    return " and ".join(name for name, is_given in given.items() if is_given)


def check_gradient(module: FederatedModule, loss: Tensor) -> None:
    """Refuses the loss of a training step that does not depend on a trained parameter.

    Within torch.vmap, a loss does not say whether it does.
    """
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise ValueError(
            f"{type(module).__name__}.training_step: the loss has no gradient, because it does not depend on a trained "
            "parameter. Compute it from self(inputs), without detach, item, argmax or torch.no_grad."
        )
