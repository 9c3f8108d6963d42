"""The settings of torch's optimizers, for engines that take their steps themselves and for methods that count them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from lcfl.models.hooks import has_parameter_hooks, has_step_hooks
from lcfl.models.module import FederatedModule

__all__ = ["SgdSettings", "plain_settings", "sgd_settings"]


@dataclass(frozen=True)
class SgdSettings:
    """One setting of SGD for all parameters.

    Attributes:
        rate: eta.
        momentum: rho.
        dampening: the dampening of the momentum, from the second step on.
        weight_decay: the factor with which the parameter is added to the gradient.
        nesterov: whether the momentum is Nesterov's.
    """

    rate: float
    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool

    @torch.no_grad()
    def step(
        self,
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        velocities: list[Tensor | None],
        rate_scale: float = 1.0,
    ) -> None:
        """Takes one step in place, with the same bits as torch. A parameter without a gradient stays as it is.

        Args:
            parameters: the parameters that are trained.
            gradients: the gradient of each parameter, or None.
            velocities: the velocity of each parameter, None before its first step. The caller keeps them for one run.
            rate_scale: the factor by which the learning rate is multiplied.
        """
        for number, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
            if gradient is None:
                continue
            if self.weight_decay:
                gradient = gradient.add(parameter, alpha=self.weight_decay)
            if self.momentum:
                velocity = velocities[number]
                if velocity is None:
                    velocity = velocities[number] = gradient.clone()
                else:
                    velocity.mul_(self.momentum).add_(gradient, alpha=1 - self.dampening)
                gradient = gradient.add(velocity, alpha=self.momentum) if self.nesterov else velocity
            parameter.add_(gradient, alpha=-self.rate * rate_scale)


def sgd_settings(module: FederatedModule) -> SgdSettings | None:
    """Returns the settings of the module's optimizer; None unless it is plain SGD without hooks."""
    group = plain_settings(module, SGD)
    if group is None:
        return None
    return SgdSettings(group["lr"], group["momentum"], group["dampening"], group["weight_decay"], group["nesterov"])


def plain_settings(module: FederatedModule, *kinds: type[Optimizer]) -> Mapping[str, Any] | None:
    """Returns the settings of the module's optimizer by name, if a step does just what torch's class says.

    None unless its class is one of `kinds`, it minimizes, has no hooks, and has one setting for all trained parameters.
    """
    optimizer = module.configure_optimizers()
    if type(optimizer) not in kinds or has_step_hooks(optimizer) or any(map(has_parameter_hooks, module.parameters())):
        return None
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    group = groups[0]
    if any(other != group for other in groups) or group["maximize"] or group["differentiable"]:
        return None
    trained = {id(parameter) for each in optimizer.param_groups for parameter in each["params"]}
    return group if trained == set(map(id, module.trained_parameters())) else None
