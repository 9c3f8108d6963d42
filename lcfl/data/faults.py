"""Client faults: clients that train on wrong data, or send something other than what they have trained.

A fault is a part of ``data.faults``. It has its clients, and the rounds in which these clients are faulty. Legend: N
clients, P + Q length of a model's flat vector, B samples in a batch, C classes.
"""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from lcfl.core import rng
from lcfl.core.validation import CheckedFields, abbreviated
from lcfl.data.spec import SampleSpec
from lcfl.data.views import Relabelling, Stamp, View

__all__ = [
    "Backdoor",
    "ClientFault",
    "DataFault",
    "FaultyClients",
    "LabelFlip",
    "RandomUpdate",
    "ScaledUpdate",
    "StaleUpdate",
    "UpdateFault",
    "find_faulty",
]


@dataclass(frozen=True)
class ClientFault(CheckedFields, ABC):
    """Base class of faults, which are a `DataFault` or an `UpdateFault`.

    Args:
        clients: the faulty clients: a share of all (0.2), or a list of their numbers or names. Shares are drawn from
            the stream (``data.seed``, "faults"). The clients of a smaller share are among those of a larger one, also
            of another fault, so two faults with the same share are faults of the same clients.
        rounds: the first and the last round in which they are faulty, null for no last one; null for all. Warm-up
            rounds end at -1.

    Class attributes:
        answers_late: whether it needs the model that the client trained the last time.

    Raises:
        ValueError: for a share outside [0, 1), or for rounds that are not two numbers in ascending order.
    """

    clients: float | Sequence[int | str]
    rounds: Sequence[int | None] | None = None

    answers_late: ClassVar[bool] = False

    def __post_init__(self) -> None:
        name = type(self).__name__
        if isinstance(self.clients, str) or (not isinstance(self.clients, Sequence) and not 0 <= self.clients < 1):
            raise ValueError(
                f"{name}: got clients={self.clients!r}; allowed are shares in [0, 1), such as 0.2, and lists of "
                "numbers or names of clients, such as [3, 17]."
            )
        if self.rounds is not None:
            first, last = self.rounds if len(self.rounds) == 2 else (None, None)
            if first is None or (last is not None and last < first):
                raise ValueError(
                    f"{name}: got rounds={list(self.rounds)}; give the first and the last round, such as [50, 99], "
                    "[50, null] from round 50 on, or null for all rounds."
                )

    def happens_in(self, number: int) -> bool:
        """Returns whether the clients are faulty in this round."""
        if self.rounds is None:
            return True
        first, last = self.rounds
        return first is not None and first <= number and (last is None or number <= last)

    def check(self, spec: SampleSpec) -> None:
        """Raises a ``ValueError`` if it cannot change such samples."""

    @abstractmethod
    def views(self, num_classes: int | None) -> tuple[View, ...]:
        """Returns the views through which the client sees its samples when it trains."""

    @abstractmethod
    def sent(self, trained: Tensor, received: Tensor, before: Tensor | None, draw: np.random.Generator) -> Tensor:
        """Returns the parameters ``[P]`` that the client sends.

        Args:
            trained: the parameters ``[P]`` that it has trained.
            received: the parameters ``[P]`` that the server sent: a model to train, or the centre of the cluster.
            before: the parameters ``[P]`` that it trained when it took part before; None the first time.
            draw: the source of random numbers.
        """


class DataFault(ClientFault):
    """Base class of faults of clients that train on wrong data, and send what they have trained."""

    def sent(self, trained: Tensor, received: Tensor, before: Tensor | None, draw: np.random.Generator) -> Tensor:
        """Returns what was trained."""
        return trained


class UpdateFault(ClientFault):
    """Base class of faults of clients that train on their data, and send something else."""

    def views(self, num_classes: int | None) -> tuple[View, ...]:
        """Returns none."""
        return ()


@dataclass(frozen=True)
class LabelFlip(DataFault):
    """Trains with label C - 1 - l in place of l (Fang et al. 2020).

    The arguments are those of `ClientFault`.
    """

    def check(self, spec: SampleSpec) -> None:
        """Raises a ``ValueError`` unless targets are classes."""
        if spec.num_classes is None:
            raise ValueError("LabelFlip: needs targets that are classes; the data set's are not.")

    def views(self, num_classes: int | None) -> tuple[View, ...]:
        """Returns the view with the flipped labels."""
        assert num_classes is not None, "check refuses other targets"
        return (Relabelling(tuple(reversed(range(num_classes)))),)


@dataclass(frozen=True)
class Backdoor(DataFault):
    """Trains images with a small square in a corner as images of one class (BadNets, Gu et al. 2017).

    The run then also has the test protocol ``backdoor``: the test samples of other classes, with the square, of the
    first protocol. Its accuracy is the success of the attack: the share of them that is taken for the target. With
    `ScaledUpdate` for the same clients it becomes model replacement (Bagdasaryan et al. 2020).

    Args:
        target: the class that the square stands for.
        share: the share of the training samples with a square; always the same samples.
        size: the width and height of the square, in pixels.
        value: the value of its pixels, in units of the network's (normalised) inputs.

    Raises:
        ValueError: as `ClientFault`, and for a share outside (0, 1], a size below 1 or a negative target.
    """

    target: int = 0
    share: float = 0.5
    size: int = 3
    value: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.share <= 1 or self.size < 1 or self.target < 0:
            raise ValueError(
                f"Backdoor: got target={self.target}, share={self.share}, size={self.size}; target must be a class, "
                "share must lie in (0, 1], and size must be at least 1."
            )

    def check(self, spec: SampleSpec) -> None:
        """Raises a ``ValueError`` unless inputs are images with room for the square, and the target is a class."""
        shape = spec.shape
        if len(shape) != 3 or min(shape[1:]) < self.size or not spec.dtype.is_floating_point:
            raise ValueError(
                f"Backdoor: needs images of shape (channels, height, width) with room for a square of size "
                f"{self.size}; the data set's inputs are {spec.dtype} of shape {shape}."
            )
        if spec.num_classes is None or self.target >= spec.num_classes:
            classes = "no classes" if spec.num_classes is None else f"the classes 0 to {spec.num_classes - 1}"
            raise ValueError(f"Backdoor: got target={self.target}, but the data set has {classes}; change target.")

    def views(self, num_classes: int | None) -> tuple[View, ...]:
        """Returns the view with the square on a share of the samples."""
        return (self.stamp(self.share),)

    def stamp(self, share: float = 1.0) -> Stamp:
        """Returns the view with the square on a share of the samples."""
        return Stamp(self.target, self.size, self.value, share)


@dataclass(frozen=True)
class ScaledUpdate(UpdateFault):
    """Sends w + factor (w_i - w) in place of w_i, where w is what the server sent.

    -1 flips the sign of the update. 0 returns what was received, as a free rider does. A large factor makes the client
    outweigh others.

    Args:
        factor: the factor.
    """

    factor: float = -1.0

    def sent(self, trained: Tensor, received: Tensor, before: Tensor | None, draw: np.random.Generator) -> Tensor:
        """Returns w + factor (w_i - w)."""
        return received + self.factor * (trained - received)


@dataclass(frozen=True)
class RandomUpdate(UpdateFault):
    """Sends w + std z in place of w_i, with standard normal z (Blanchard et al. 2017).

    Args:
        std: the standard deviation of each parameter, > 0.

    Raises:
        ValueError: as `ClientFault`, and for a `std` that is not positive.
    """

    std: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.std > 0:
            raise ValueError(f"RandomUpdate: got std={self.std}; it must be > 0. ScaledUpdate with factor 0 has none.")

    def sent(self, trained: Tensor, received: Tensor, before: Tensor | None, draw: np.random.Generator) -> Tensor:
        """Returns w + std z."""
        return received + self.std * torch.from_numpy(draw.standard_normal(len(received), dtype=np.float32))


@dataclass(frozen=True)
class StaleUpdate(UpdateFault):
    """Sends the model that the client trained when it took part before; the first time, what it received.

    The arguments are those of `ClientFault`.
    """

    answers_late: ClassVar[bool] = True

    def sent(self, trained: Tensor, received: Tensor, before: Tensor | None, draw: np.random.Generator) -> Tensor:
        """Returns the parameters that were trained before."""
        return received if before is None else before


FaultyClients = dict[int, tuple[ClientFault, ...]]  # the faults of each faulty client, by its number


def find_faulty(
    faults: Sequence[ClientFault], members: Sequence[int], names: Sequence[str] | None, seed: int
) -> FaultyClients:
    """Returns the faults of each faulty client.

    Args:
        faults: the faults, in the order in which they happen to a client.
        members: the clients from which shares are drawn: all but newcomers.
        names: the names of all clients; None if they have only numbers.
        seed: the seed of the draw.

    Raises:
        ValueError: for a client that does not exist, and if no client is left without a fault.
    """
    numbers: dict[int | str, int] = {name: number for number, name in enumerate(names or ())}
    numbers |= {number: number for number in members}
    known = set(members)
    order = rng.generator(seed, "faults").permutation(np.asarray(members, dtype=np.int64)).tolist()
    faulty: FaultyClients = {}
    for fault in faults:
        if isinstance(fault.clients, Sequence):
            wrong = [client for client in fault.clients if numbers.get(client) not in known]
            if wrong:
                words = f" and names, e.g. {abbreviated(map(repr, names), 3)}" if names else ""
                raise ValueError(
                    f"{type(fault).__name__}: got the client {wrong[0]!r}; allowed are {len(members)} numbers from "
                    f"{members[0]} to {members[-1]}{words}, but no newcomers."
                )
            clients = [numbers[client] for client in fault.clients]
        else:
            clients = order[: int(fault.clients * len(order) + 1e-9)]
        if not clients and fault.clients != 0:
            warnings.warn(
                f"data.faults: {type(fault).__name__} got clients={fault.clients}, which is none of {len(members)} "
                "clients, so it has no effect.",
                stacklevel=4,
            )
        for client in dict.fromkeys(clients):
            faulty[client] = (*faulty.get(client, ()), fault)
    if len(faulty) == len(members):
        raise ValueError(
            f"every one of the {len(members)} clients has a fault, so there is none to evaluate; name fewer clients."
        )
    return dict(sorted(faulty.items()))
