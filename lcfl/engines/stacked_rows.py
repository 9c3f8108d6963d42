"""Stacks of the clients that are trained at once: selected rows, their optimizer and means per client.

Legend: C clients at once.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lcfl.engines.vmapped import Named
from lcfl.models.module import FederatedModule

__all__ = ["RowMeans", "Rows", "at", "pad_rows", "give_gradient", "joined", "optimizer_of"]

Rows = slice | Tensor  # of a stack: all rows, or their numbers


def at(stacked: Named, rows: Rows) -> Named:
    """Returns rows of a stack: the stack itself for all rows, else copies."""
    if isinstance(rows, slice):
        return stacked
    return {name: each.detach()[rows].requires_grad_(each.requires_grad) for name, each in stacked.items()}


def give_gradient(parameter: Tensor, rows: Rows, slope: Tensor) -> None:
    """Stores the gradient of some rows where an optimizer finds it."""
    if isinstance(rows, slice):
        parameter.grad = slope
        return
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    parameter.grad[rows] = slope


def joined(stacked: Named) -> Tensor:
    """Joins the tensors of a stack side by side into one matrix ``[C, ...]``."""
    return torch.cat([each.detach()[:, None].flatten(1).float() for each in stacked.values()], dim=1)


def pad_rows(values: Tensor, length: int) -> Tensor:
    """Pads a tensor to a length by repeating its first row."""
    return torch.cat([values, values[:1].expand(length - len(values), *values.shape[1:])])


def optimizer_of(module: FederatedModule, stacks: Named) -> Optimizer:
    """Returns the module's optimizer with stacks in place of the parameters in its groups.

    The module makes it with its own parameters first, because stacks have one dimension more.

    Args:
        module: provides the optimizer.
        stacks: stacks of its parameters ``[C, ...]``, by name.
    """
    own = module.configure_optimizers()
    names = [name for name, _ in module.layout.parameters]
    stack_of = {id(each): stacks[name] for name, each in zip(names, module.trained_parameters(), strict=True)}
    groups = [{**group, "params": [stack_of[id(each)] for each in group["params"]]} for group in own.param_groups]
    make: Callable[[Any], Optimizer] = type(own)
    optimizer = make(groups)
    for each, state in own.state.items():  # Adagrad's sums do not begin at zero
        stack = stack_of[id(each)]
        optimizer.state[stack] = {
            name: value.expand_as(stack).clone() if value.shape == each.shape else value.clone()
            for name, value in state.items()
        }
    return optimizer


class RowMeans:
    """Means of values per client. Some values are logged in some steps only."""

    def __init__(self, num_clients: int, device: torch.device) -> None:
        self._zeros = torch.zeros(2, num_clients, device=device)
        self._sums: dict[str, Tensor] = {}

    def add(self, rows: Rows, values: Named) -> None:
        """Adds values ``[C, times]`` by name for the clients in these rows."""
        for name, each in values.items():
            sums = self._sums.setdefault(name, self._zeros.clone())
            sums[0, rows] += each.sum(1)
            sums[1, rows] += each.shape[1]

    def by_row(self) -> list[dict[str, float]]:
        """Returns the means of every client, by name."""
        numbers = {name: sums.tolist() for name, sums in self._sums.items()}
        return [
            {name: sums[row] / times[row] for name, (sums, times) in numbers.items() if times[row]}
            for row in range(self._zeros.shape[1])
        ]
