"""Sums of models in float64, and those of the models that the server has stored, kept up to date from what changes.

Legend: N clients, G groups of them, P + Q length of a model's flat vector.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["ModelSums", "add_models"]

BLOCK = 2**17  # entries of a model that are added up together: a megabyte in float64, which a core's cache holds
AT_ONCE = 32  # models that are held at a time while sums are brought up to date

HALF_ULP = 2.0**-53  # the relative rounding error of one float64 addition
TOLERANCE = 2.0**-30  # of the largest entry: the bound of the errors beyond which sums are not gone on with


def add_models(total: Tensor, models: Sequence[Tensor], factors: Sequence[float]) -> None:
    """``total += factor_i model_i`` in place, one after the other in the given order, for ``[P + Q]`` each.

    All of them for one part of the entries after the other: the same bits, and `total` is read and written once.
    """
    for begin in range(0, len(total), BLOCK):
        part = total[begin : begin + BLOCK]
        for model, factor in zip(models, factors, strict=True):
            part.add_(model[begin : begin + BLOCK], alpha=factor)


@dataclass
class ModelSums:
    """The sum of the stored models of every group, in float64.

    A model that is replaced is taken out and its successor added, so a round costs what it changed, however many
    models are stored. Every addition may round; `error` bounds what that can have done to any entry since the sums
    were last made from nothing. The order of all additions is that of the clients' numbers.

    Attributes:
        total: ``[G, P + Q]``, float64.
        group: which of the sums a client's model is in ``[N]``, int64; -1 for none.
        error: no entry of `total` is farther than this from the exact sum.
        largest: no entry of `total` is larger than this, whatever its sign.
    """

    total: Tensor
    group: Tensor
    error: float = 0.0
    largest: float = 0.0

    @classmethod
    def from_models(cls, group_N: Tensor, num_groups: int, size: int, model_of: Callable[[int], Tensor]) -> "ModelSums":
        """From nothing.

        Args:
            group_N: the group of every client, int64; -1 for those that do not count.
            num_groups: G.
            size: P + Q.
            model_of: the stored model of a client, by its number.
        """
        sums = cls(torch.zeros(num_groups, size, dtype=torch.float64), torch.full_like(group_N, -1))
        sums.regroup(group_N, model_of)
        return sums

    @property
    def is_exact_enough(self) -> bool:
        """Whether `error` is within the tolerance, 2**-30 of the largest entry: 64 times less than float32 rounds."""
        return self.error <= TOLERANCE * self.largest

    def take_out(self, client: int, model: Tensor) -> None:
        """Takes a client's model ``[P + Q]`` out of the sum that it is in, if it is in one."""
        group = int(self.group[client])
        if group >= 0:
            self._note(model)
            self.total[group].sub_(model)
            self.group[client] = -1

    def regroup(self, group_N: Tensor, model_of: Callable[[int], Tensor]) -> None:
        """Moves the models of clients whose group is another one now, and adds those that are in no sum yet."""
        moved = torch.nonzero(self.group != group_N).flatten().tolist()
        for begin in range(0, len(moved), AT_ONCE):
            clients = moved[begin : begin + AT_ONCE]
            models = [model_of(client) for client in clients]
            changes: dict[int, tuple[list[Tensor], list[int]]] = {}
            for client, model in zip(clients, models, strict=True):
                for group, sign in ((int(self.group[client]), -1), (int(group_N[client]), 1)):
                    if group >= 0:
                        self._note(model)
                        terms, signs = changes.setdefault(group, ([], []))
                        terms.append(model)
                        signs.append(sign)
            for group, (terms, signs) in changes.items():
                add_models(self.total[group], terms, signs)
        self.group = group_N.clone()
        self.largest = _largest(self.total)

    def counts(self) -> Tensor:
        """How many models are in each sum ``[G]``, int64."""
        return torch.bincount(self.group[self.group >= 0], minlength=len(self.total))

    def _note(self, model: Tensor) -> None:
        """What adding or subtracting a model can do to the bounds."""
        self.largest += _largest(model)
        self.error += HALF_ULP * self.largest


def _largest(values: Tensor) -> float:
    """Of their absolute values; ten times as fast as torch's norm of that kind."""
    lowest, highest = torch.aminmax(values)
    return max(-float(lowest), float(highest))
