"""Sums of models in float64, and sums of the server's stored models that are updated when models change.

Legend: N clients, G groups of clients, P + Q length of a model's flat vector.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lcfl.core.cores import in_threads

__all__ = ["ModelSums", "Move", "Mover", "add_models", "squared_distance"]

BLOCK = 2**16  # entries of a model that are added together: half a megabyte in float64 stays in a core's cache
WORTH_THREADS = 100  # additions of a block, which take a few milliseconds
AT_ONCE = 32  # models that are held at the same time while sums are updated

HALF_ULP = 2.0**-53  # the relative rounding error of one float64 addition
TOLERANCE = 2.0**-30  # relative to a group's largest entry; sums with a larger error bound are not used any further

Move = tuple[int, int, int]  # a client, the sum that its model leaves and the one that it joins; -1 for none


def add_models(total: Tensor, models: Sequence[Tensor], factors: Sequence[float]) -> None:
    """Computes ``total += factor_i model_i`` in place, one model ``[P + Q]`` after the other in the given order.

    Works through the entries part by part and adds all models to a part before it continues with the next part. The
    result has the same bits as without parts, but `total` is read and written only once. Parts of large models are
    computed by several threads.

    Raises:
        ValueError: for a model of another shape, which would be added up as something else.
    """
    if wrong := [list(model.shape) for model in models if model.shape != total.shape]:
        raise ValueError(f"got a model of shape {wrong[0]} in a mean of models of shape {list(total.shape)}.")

    def add_block(begin: int) -> None:
        part = total[begin : begin + BLOCK]
        for model, factor in zip(models, factors, strict=True):
            part.add_(model[begin : begin + BLOCK], alpha=factor)

    begins = range(0, len(total), BLOCK)
    if len(begins) * len(models) >= WORTH_THREADS:
        in_threads(add_block, begins)
    else:
        for begin in begins:
            add_block(begin)


def squared_distance(one: Tensor, other: Tensor) -> float:
    """Returns the squared L2 distance of two models ``[P]``, computed in float64 part by part."""
    parts = zip(one.split(BLOCK), other.split(BLOCK), strict=True)
    return sum(float((own.double() - its).square_().sum()) for own, its in parts)


@dataclass
class ModelSums:
    """The sum of the stored models of each group, in float64.

    When a model is replaced, it is subtracted and its successor is added. The cost of a round therefore depends on how
    many models change, not on how many are stored. Every addition may round. `error` bounds the rounding errors that
    the entries of each group have gathered since the sums were last recomputed from scratch. All additions are in the
    order of the clients' numbers.

    Attributes:
        total: the sums ``[G, P + Q]``, float64.
        group: the sum that each client's model is in ``[N]``, int64; -1 for none.
        error: an upper bound of the difference between a group's entries and the exact sums ``[G]``, float64.
        largest: an upper bound of the absolute values of a group's entries ``[G]``, float64.
    """

    total: Tensor
    group: Tensor
    error: Tensor = field(default_factory=lambda: torch.zeros(()))
    largest: Tensor = field(default_factory=lambda: torch.zeros(()))

    def __post_init__(self) -> None:
        self.error, self.largest = (  # checkpoints of earlier versions have one number for all groups
            torch.as_tensor(each, dtype=torch.float64).expand(len(self.total)).clone()
            for each in (self.error, self.largest)
        )

    @classmethod
    def from_models(cls, group_N: Tensor, num_groups: int, size: int, move: "Mover") -> "ModelSums":
        """Computes the sums from scratch.

        Args:
            group_N: the group of each client ``[N]``, int64; -1 for clients that do not count.
            num_groups: G.
            size: P + Q.
            move: carries out moves, see `lcfl.core.clients.ClientStore.move_models`.
        """
        sums = cls(torch.zeros(num_groups, size, dtype=torch.float64), torch.full_like(group_N, -1))
        sums.regroup(group_N, move)
        return sums

    @property
    def is_exact_enough(self) -> bool:
        """Whether each `error` is at most 2**-30 of its group's largest entry, 64 times less than float32 rounds it."""
        return bool((self.error <= TOLERANCE * self.largest)[self.counts() > 0].all())

    def take_out(self, clients: Iterable[int], move: "Mover") -> None:
        """Subtracts the models of clients from the sums that they are in."""
        moves = [(client, group, -1) for client in sorted(clients) if (group := int(self.group[client])) >= 0]
        if moves:
            move(self, moves)
            self.group[[client for client, *_ in moves]] = -1

    def regroup(self, group_N: Tensor, move: "Mover") -> None:
        """Moves the models of clients whose group has changed, and adds models that are not in a sum yet."""
        changed = torch.nonzero(self.group != group_N).flatten().tolist()
        move(self, [(client, int(self.group[client]), int(group_N[client])) for client in changed])
        self.group = group_N.clone()
        self.largest = torch.tensor([_largest(total) for total in self.total], dtype=torch.float64)

    def move(self, moves: Sequence[Move], model_of: Callable[[int], Tensor]) -> None:
        """Carries out moves one after the other, given the stored model ``[P + Q]`` of each client."""
        for begin in range(0, len(moves), AT_ONCE):
            changes: dict[int, tuple[list[Tensor], list[int]]] = {}
            for client, before, after in moves[begin : begin + AT_ONCE]:
                model = model_of(client)
                for group, sign in ((before, -1), (after, 1)):
                    if group >= 0:
                        self._note(group, model)
                        terms, signs = changes.setdefault(group, ([], []))
                        terms.append(model)
                        signs.append(sign)
            for group, (terms, signs) in changes.items():
                add_models(self.total[group], terms, signs)

    def counts(self) -> Tensor:
        """Returns the number of models in each sum ``[G]``, int64."""
        return torch.bincount(self.group[self.group >= 0], minlength=len(self.total))

    def _note(self, group: int, model: Tensor) -> None:
        """Updates the bounds of a group for the addition or subtraction of a model."""
        self.largest[group] += _largest(model)
        self.error[group] += HALF_ULP * self.largest[group]


Mover = Callable[[ModelSums, Sequence[Move]], None]  # carries out moves in sums, where the models are


def _largest(values: Tensor) -> float:
    """Returns the largest absolute value. This is ten times as fast as torch's maximum norm."""
    lowest, highest = torch.aminmax(values)
    return max(-float(lowest), float(highest))
