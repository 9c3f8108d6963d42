"""Hooks of networks, parameters and optimizers, which an engine that computes a step itself would not call."""

from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["has_backward_hooks", "has_hooks", "has_parameter_hooks", "has_step_hooks"]


def has_backward_hooks(module: nn.Module) -> bool:
    """Returns whether the module itself has hooks for its backward pass."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def has_hooks(module: nn.Module) -> bool:
    """Returns whether the module itself has hooks."""
    return bool(module._forward_hooks or module._forward_pre_hooks) or has_backward_hooks(module)


def has_parameter_hooks(parameter: Tensor) -> bool:
    """Returns whether the parameter has hooks for its gradient."""
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Returns whether a step of this object does more than its class says, apart from hooks of all optimizers."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks) or "step" in vars(
        optimizer
    )
