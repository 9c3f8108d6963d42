"""Checks of a module and its optimizer, before training starts."""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from math import isfinite
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torchmetrics import Metric

from lcfl.core import rng
from lcfl.core.validation import abbreviated, errors_of
from lcfl.methods.local.training import LocalTraining, LocalUpdate
from lcfl.models.hooks import has_parameter_hooks
from lcfl.models.module import FederatedModule

__all__ = ["check_module", "check_optimizer", "check_rate", "warn_of_large_steps"]

# Lightning's Trainer calls these methods of a module; a federation does not call them.
TRAINER_HOOKS = ["validation_step", "test_step", "configure_gradient_clipping", "backward", "lr_scheduler_step"]
TRAINER_HOOKS += ["optimizer_step", "optimizer_zero_grad", "transfer_batch_to_device", "setup", "teardown"]
TRAINER_HOOKS += ["prepare_data", "configure_model", "configure_callbacks"]
TRAINER_HOOKS += [name for name in dir(FederatedModule) if name.startswith("on_")]
HOOKS_OF_A_LAYER = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
FACTORIES = ("make_network", "optimizer")  # of a module; they make new objects, from settings that no copy changes


def check_module(module: FederatedModule) -> Optimizer:
    """Checks what a subclass may define for itself, and returns an optimizer that the module has made.

    Raises:
        ValueError: if it makes something other than one optimizer of the network with finite settings, or takes the
            steps itself.
    """
    _check_automatic(module)
    _check_copies(module)
    optimizer = _checked_optimizer(module)
    _check_parameters(module, optimizer)
    _warn_of_hooks(module)
    return optimizer


def _check_automatic(module: FederatedModule) -> None:
    """Refuses manual optimization: the engines, and many methods, take the steps from the loss that a step returns."""
    if not module.automatic_optimization:
        raise ValueError(
            f"model: {type(module).__name__} sets automatic_optimization=False, but in a federation lcfl takes the "
            "steps. Remove it, return the loss from training_step, and the optimizer from configure_optimizers."
        )


def _check_copies(module: FederatedModule) -> None:
    """Refuses what a copy of the module would lose or share with it: each process trains a copy.

    A copy has no hooks of parameters, and a function that holds the module or a part of it still holds the original.
    """
    for name, parameter in module.named_parameters():
        if has_parameter_hooks(parameter):
            raise ValueError(
                f"model: the parameter {name} has a hook, which a copy of the module loses, and each process trains a "
                "copy. Use a hook of its layer (register_full_backward_hook), change gradients in an optimizer of your "
                "own, or change the loss in training_step."
            )
    parts = {id(each) for each in (*module.modules(), *module.parameters(), *module.buffers())}
    for place, layer in module.named_modules():
        if isinstance(layer, Metric):  # which binds its wrapped functions anew in a copy
            continue
        own = {name: value for name, value in vars(layer).items() if place or name not in FACTORIES}
        values = [(f"{place}.{name}" if place else name, value) for name, value in own.items()]
        values += [(f"a hook of {place or 'it'}", hook) for name in HOOKS_OF_A_LAYER for hook in own[name].values()]
        for what, value in values:
            if any(id(held) in parts for held in _held_by(value)):
                raise ValueError(
                    f"model: {what} is a function that holds the module or a part of it, such as self. Each process "
                    "trains a copy of the module, in which the function would still read the original. Use a method."
                )


def _held_by(value: object) -> list[object]:
    """Returns what a function holds besides its code: variables around it, and values of its arguments."""
    if not isinstance(value, FunctionType):
        return []
    cells = [cell for cell in value.__closure__ or () if cell != CellType()]
    defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    return [*(cell.cell_contents for cell in cells), *defaults]


def _checked_optimizer(module: FederatedModule) -> Optimizer:
    """Returns the module's optimizer, after it has checked that it is one and that its settings are finite."""
    factory = module.optimizer
    module.optimizer = watched = _Watched(factory)
    try:
        with errors_of("model.optimizer"):
            optimizer = module.configure_optimizers()
    except RuntimeError as error:  # of torch, for a list in place of a number
        raise ValueError(f"model.optimizer: {error}.") from error
    finally:
        module.optimizer = factory
    is_default = isinstance(factory, partial) and (factory.func, factory.keywords) == (torch.optim.SGD, {"lr": 0.01})
    if not watched.is_used and not is_default:
        warnings.warn(
            f"model.optimizer has no effect: {type(module).__name__}.configure_optimizers does not use self.optimizer. "
            "Return self.optimizer(parameters), or leave model.optimizer out.",
            stacklevel=3,
        )
    if not isinstance(optimizer, Optimizer):
        raise ValueError(
            f"{type(module).__name__}.configure_optimizers: got {type(optimizer).__name__}; a local run needs one "
            "torch.optim.Optimizer. A learning rate that changes from round to round is lr_decay of "
            "LocalTraining, or its lr_factor."
        )
    for name, value in ((name, value) for group in optimizer.param_groups for name, value in group.items()):
        if name == "lr" and isinstance(value, Tensor):
            raise ValueError(
                f"model.optimizer: {type(optimizer).__name__} got a tensor as lr, {value.tolist()}; give one number."
            )
        numbers = value if isinstance(value, tuple | list) else [value]
        if name != "params" and not all(isfinite(each) for each in numbers if isinstance(each, int | float | Tensor)):
            raise ValueError(
                f"model.optimizer: {type(optimizer).__name__} got {name}={value}; it must be a finite number."
            )
    return optimizer


class _Watched:
    """A factory of optimizers that notices whether it is used, by a call or through an attribute."""

    def __init__(self, factory: Callable[..., Optimizer]) -> None:
        self.factory, self.is_used = factory, False

    def __call__(self, *args: Any, **options: Any) -> Optimizer:
        self.is_used = True
        return self.factory(*args, **options)

    def __getattr__(self, name: str) -> Any:
        self.is_used = True
        return getattr(self.factory, name)


def _check_parameters(module: FederatedModule, optimizer: Optimizer) -> None:
    """Refuses an optimizer of parameters that are no part of a model: one client would go on with those of another.

    Warns about parameters that are in neither, such as those of a loss.
    """
    trained = {id(each) for group in optimizer.param_groups for each in group["params"]}
    names = [name for name, each in module.named_parameters() if id(each) in trained]
    if outside := [name for name in names if not name.startswith("network.")]:
        raise ValueError(
            f"{type(module).__name__}.configure_optimizers: got parameters outside of the network: "
            f"{abbreviated(outside)}. They would be neither sent nor saved, and each client would go on with those of "
            "another one. Make them a part of model.network, or leave them out."
        )
    free = [name for name, each in module.named_parameters() if each.requires_grad]
    if left := [name for name in free if not name.startswith("network.")]:
        warnings.warn(
            f"model: {abbreviated(left)} of {type(module).__name__} are parameters outside of the network, which no "
            "client trains. Make them a part of model.network, or set their requires_grad to False.",
            stacklevel=3,
        )


def _warn_of_hooks(module: FederatedModule) -> None:
    """Warns about hooks that a subclass defines for Lightning's Trainer.

    They are not an error, because the module may also train under that Trainer.
    """
    kind = type(module)
    unused = [name for name in TRAINER_HOOKS if getattr(kind, name) is not getattr(FederatedModule, name)]
    if unused:
        warnings.warn(
            f"model: {kind.__name__} defines {', '.join(unused)}, which lightning.Trainer calls and a federation does "
            "not. Put changes to a step into training_step or into the optimizer that configure_optimizers returns, "
            "measurements into model.metrics, and data into the data module.",
            stacklevel=3,
        )


def check_rate(update: LocalUpdate, optimizer: Optimizer) -> None:
    """Refuses a learning rate that changes from round to round if the optimizer has none by the usual name."""
    changes = isinstance(update, LocalTraining) and (
        update.lr_decay != 1 or type(update).lr_factor is not LocalTraining.lr_factor
    )
    if changes and not all("lr" in group for group in optimizer.param_groups):
        raise ValueError(
            f"method.local_update: lr_decay and lr_factor multiply lr, which {type(optimizer).__name__} has not. Call "
            "its learning rate lr in the optimizer's groups of parameters, or set lr_decay to 1."
        )


def warn_of_large_steps(module: FederatedModule, optimizer: Optimizer, pulls: Sequence[str]) -> None:
    """Warns if the pulls alone would make local runs diverge.

    Args:
        module: the module, with the weights of its pulls.
        optimizer: the module's optimizer.
        pulls: what clients receive or find: ``centre`` and ``embedding`` pull.
    """
    pull = module.cluster_weight * ("centre" in pulls) + module.global_weight * ("embedding" in pulls)
    rates = [group["lr"] for group in optimizer.param_groups if "lr" in group]
    if rates and max(rates) * pull >= 2:
        warnings.warn(
            f"the learning rate {max(rates)} times model.cluster_weight + model.global_weight = {pull} is >= 2: the "
            "pull alone makes local runs diverge. Keep the product at 1 or below.",
            stacklevel=3,
        )


def check_optimizer(module: FederatedModule) -> None:
    """Tries one step of the optimizer on the CPU, with gradients of zero; the network does not change.

    Raises:
        ValueError: if the optimizer cannot take a step.
    """
    parameters = module.trained_parameters()
    values = [parameter.detach().clone() for parameter in parameters]
    optimizer = module.configure_optimizers()
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    try:
        with rng.seeded(0, "check optimizer"):
            optimizer.step()
    except Exception as error:
        raise ValueError(
            f"model.optimizer: {type(optimizer).__name__} cannot take a step on a CPU "
            f"({type(error).__name__}: {error}). Change its arguments, or use another one."
        ) from error
    finally:
        for parameter, value in zip(parameters, values, strict=True):
            parameter.detach().copy_(value)
            parameter.grad = None
