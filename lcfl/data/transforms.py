"""What a client sees of its images: rotations, noise, permuted labels - the same for training, validation and test.

A `ClientTransform` gives every client a `View`. A view is a pure function of a batch, so that it does not matter when,
where or beside which other images an image is read. Shapes: N clients, C classes.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch

from lcfl.core import rng
from lcfl.core.validation import check_choices
from lcfl.data.partition.base import Indices
from lcfl.data.views import Noise, QuarterTurns, Relabelling, View

__all__ = ["ClientTransform", "GaussianNoise", "LabelPermutation", "Rotation", "true_groups"]

By = Literal["client", "random", "group"]


class ClientTransform(ABC):
    """Decides which view each client has.

    Attributes:
        makes_groups: whether clients of equal views are a true group, which ``cluster/ari`` compares with.
    """

    makes_groups: ClassVar[bool] = False

    def __call__(
        self, num_clients: int, num_classes: int, groups: Indices | None, generator: np.random.Generator
    ) -> list[View]:
        """The view of each client, checked.

        Args:
            num_clients: N.
            num_classes: C.
            groups: [N] the group of each client if the partition knows it, else None.
            generator: source of every draw.

        Raises:
            ValueError: these clients cannot be given views, or a view is no dataclass.
        """
        views = list(self.views(num_clients, num_classes, groups, generator))
        if len(views) != num_clients:
            raise ValueError(f"{type(self).__name__}: gives {len(views)} views for {num_clients} clients")
        for view in views:
            if "__dataclass_fields__" not in vars(type(view)):
                raise ValueError(
                    f"{type(self).__name__}: the view {type(view).__name__} is no dataclass, so nobody can tell "
                    "whether two clients see alike; decorate it with @dataclass(frozen=True)"
                )
        return views

    @abstractmethod
    def views(
        self, num_clients: int, num_classes: int, groups: Indices | None, generator: np.random.Generator
    ) -> Sequence[View]:
        """The rule itself; its result is checked by the caller."""

    def check(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:  # noqa: B027 - some take any inputs
        """Raises a ValueError for inputs of a shape or type that it cannot take."""


@dataclass(frozen=True)
class Rotation(ClientTransform):
    """Every client sees its images rotated by an angle of its own, exactly: pixels are moved, not interpolated.

    IFCA's rotated MNIST and CIFAR are ``angles=(0, 90, 180, 270)`` and ``(0, 180)`` with ``by="group"`` over the
    partition ``CopyPerGroup``. AS-CFL (section 4.1) applies "random image rotations to each client's data"; an angle
    for each image would leave no clusters to find, so the reading chosen is one angle for each client.

    Args:
        angles: in degrees, counter-clockwise, multiples of 90.
        by: who gets which: ``client``: client i the angle number i mod K, so that they are balanced; ``random``:
            drawn; ``group``: a client of the partition's group g the angle number g mod K.
    """

    makes_groups: ClassVar[bool] = True

    angles: tuple[int, ...] = (0, 90, 180, 270)
    by: By = "client"

    def __post_init__(self) -> None:
        if not self.angles or any(angle % 90 for angle in self.angles):
            raise ValueError(f"Rotation: angles must be multiples of 90, at least one; got {list(self.angles)}")
        check_choices("Rotation", self)

    def views(
        self, num_clients: int, num_classes: int, groups: Indices | None, generator: np.random.Generator
    ) -> Sequence[View]:
        """A number of quarter turns for each client."""
        numbers = _numbers("Rotation", self.by, len(self.angles), num_clients, groups, generator)
        return [QuarterTurns(self.angles[number] // 90 % 4) for number in numbers]

    def check(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Images (channels, height, width) only, and square ones unless all angles are multiples of 180."""
        square = len(shape) == 3 and shape[1] == shape[2]
        if len(shape) != 3 or (not square and any(angle % 180 for angle in self.angles)):
            raise ValueError(
                f"Rotation: angles {list(self.angles)} need images of shape (channels, height, width)"
                f"{', height equal to width' if len(shape) == 3 else ''}; the data set's inputs are {shape}"
            )


@dataclass(frozen=True)
class GaussianNoise(ClientTransform):
    """Client i = 1, ..., N sees its images with Gaussian noise of standard deviation i / N sigma (NIID-Bench).

    Every image has noise of its own, always the same one: it is addressed by client, image and pixel.

    Args:
        sigma: standard deviation at the last client, in units of the network's (normalised) inputs, >= 0.
    """

    sigma: float

    def __post_init__(self) -> None:
        if not 0 <= self.sigma < math.inf:
            raise ValueError(f"GaussianNoise: sigma must be a finite number >= 0, got {self.sigma}")

    def views(
        self, num_clients: int, num_classes: int, groups: Indices | None, generator: np.random.Generator
    ) -> Sequence[View]:
        """A level and a key of its own for each client."""
        seed = int(generator.integers(2**63))
        keys = [rng.stream_seed(seed, "noise", client) % 2**63 for client in range(num_clients)]
        return [Noise(self.sigma * (client + 1) / num_clients, key) for client, key in enumerate(keys)]

    def check(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Floating-point inputs only."""
        if not dtype.is_floating_point:
            raise ValueError(f"GaussianNoise: needs floating-point inputs; the data set's are {dtype}")


@dataclass(frozen=True)
class LabelPermutation(ClientTransform):
    """Every group of clients calls the same images by other labels; the first group keeps the true ones.

    Args:
        num_groups: K, how many different permutations there are; None with ``by="group"``: one for each group.
        by: who gets which, as in `Rotation`.
    """

    makes_groups: ClassVar[bool] = True

    num_groups: int | None = None
    by: By = "group"

    def __post_init__(self) -> None:
        check_choices("LabelPermutation", self)
        if self.num_groups is None and self.by != "group":
            raise ValueError(f"LabelPermutation: by {self.by!r} needs num_groups, how many permutations there are")
        if self.num_groups is not None and self.num_groups < 1:
            raise ValueError(f"LabelPermutation: num_groups must be at least 1, got {self.num_groups}")

    def views(
        self, num_clients: int, num_classes: int, groups: Indices | None, generator: np.random.Generator
    ) -> Sequence[View]:
        """Draws K different permutations, the identity first."""
        wanted = self.num_groups
        if wanted is None:
            wanted = 1 if groups is None else int(groups.max()) + 1
        if wanted > 2 and wanted > math.factorial(min(num_classes, 20)):
            raise ValueError(
                f"LabelPermutation: {num_classes} classes have no {wanted} different permutations; lower num_groups"
            )
        numbers = _numbers("LabelPermutation", self.by, wanted, num_clients, groups, generator)
        permutations = {tuple(range(num_classes)): None}
        while len(permutations) < wanted:
            permutations[tuple(generator.permutation(num_classes).tolist())] = None
        views = [Relabelling(permutation) for permutation in permutations]
        return [views[number] for number in numbers]


def true_groups(
    groups: Indices | None, transforms: Sequence[ClientTransform], views: Sequence[Sequence[View]]
) -> Indices | None:
    """[N] groups of clients that are in one group of the partition and see images alike; None where nothing is known.

    Numbers are in order of their first client.

    Args:
        groups: [N] of the partition, or None.
        transforms: of the clients.
        views: per transform the view of each client.
    """
    known = [] if groups is None else [groups.tolist()]
    for transform, seen in zip(transforms, views, strict=True):
        if transform.makes_groups and any(view != seen[0] for view in seen):
            known.append(list(seen))
    if not known:
        return groups
    numbers: dict[tuple[object, ...], int] = {}
    return np.array([numbers.setdefault(key, len(numbers)) for key in zip(*known, strict=True)], dtype=np.int64)


def _numbers(
    name: str, by: By, number: int, num_clients: int, groups: Indices | None, generator: np.random.Generator
) -> list[int]:
    """For each client a number from 0 to ``number`` - 1."""
    if by == "client":
        numbers = np.arange(num_clients) % number
    elif by == "random":
        numbers = generator.integers(number, size=num_clients)
    elif groups is None:
        raise ValueError(
            f"{name}: by 'group' needs a partition that knows its groups (CopyPerGroup, Pathological); use by "
            "'client' or 'random', or another data.partition"
        )
    else:
        numbers = groups % number
    return [int(each) for each in numbers]
