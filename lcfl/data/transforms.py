"""Client transforms, which define how each client sees its samples: rotated, noisy or with permuted labels.

A client sees its training, validation and test samples in the same way. A `ClientTransform` gives every client a
`View`. A view is a pure function of a batch, so it does not matter when, where or together with which other samples a
sample is read. Shapes: N clients, C classes.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from lcfl.core import rng
from lcfl.core.validation import CheckedFields
from lcfl.data.partition.base import Indices
from lcfl.data.spec import SampleSpec
from lcfl.data.views import Noise, QuarterTurns, Relabelling, View

__all__ = ["ClientTransform", "GaussianNoise", "LabelPermutation", "Rotation", "groups_and_views", "true_groups"]

By = Literal["client", "random", "group"]


class ClientTransform(CheckedFields, ABC):
    """Decides which view each client gets.

    Attributes:
        makes_groups: whether clients with equal views form a true group, which ``cluster/ari`` compares clusters with.
    """

    makes_groups: ClassVar[bool] = False

    def __call__(
        self, num_clients: int, num_classes: int | None, groups: Indices | None, generator: np.random.Generator
    ) -> list[View]:
        """Returns the view of each client and checks it.

        Args:
            num_clients: N.
            num_classes: C; None if targets are not classes.
            groups: [N] group of each client if the partition knows the groups, else None.
            generator: source of all draws.

        Raises:
            ValueError: if the rule cannot give these clients views, or if a view is not a dataclass.
        """
        views = list(self.views(num_clients, num_classes, groups, generator))
        if len(views) != num_clients:
            raise ValueError(
                f"{type(self).__name__}: gives {len(views)} views for {num_clients} clients; give one per client"
            )
        for view in views:
            if "__dataclass_fields__" not in vars(type(view)):
                raise ValueError(
                    f"{type(self).__name__}: the view {type(view).__name__} is not a dataclass, so lcfl cannot tell "
                    "whether two clients see their samples alike; decorate it with @dataclass(frozen=True)"
                )
        return views

    @abstractmethod
    def views(
        self, num_clients: int, num_classes: int | None, groups: Indices | None, generator: np.random.Generator
    ) -> Sequence[View]:
        """Applies the rule itself. The caller checks the result."""

    def check(self, spec: SampleSpec) -> None:
        """Raises a ``ValueError`` if it cannot transform such samples."""


@dataclass(frozen=True)
class Rotation(ClientTransform):
    """Rotates all images of a client by one angle. Pixels are moved and not interpolated, so the rotation is exact.

    IFCA's rotated MNIST and CIFAR use ``angles=(0, 90, 180, 270)`` and ``(0, 180)`` with ``by="group"`` and the
    partition ``CopyPerGroup``. AS-CFL (section 4.1) applies "random image rotations to each client's data". One angle
    per image would leave no clusters to find, so this is read as one angle per client.

    Args:
        angles: K angles in degrees, counter-clockwise, multiples of 90.
        by: which client gets which angle. ``client`` gives client i angle number i mod K, which balances the angles.
            ``random`` draws an angle for each client. ``group`` gives a client in group g of the partition angle number
            g mod K.
    """

    makes_groups: ClassVar[bool] = True

    angles: tuple[int, ...] = (0, 90, 180, 270)
    by: By = "client"

    def __post_init__(self) -> None:
        if not self.angles or any(angle % 90 for angle in self.angles):
            raise ValueError(f"Rotation: angles must be multiples of 90, at least one; got {list(self.angles)}")

    def views(
        self, num_clients: int, num_classes: int | None, groups: Indices | None, generator: np.random.Generator
    ) -> Sequence[View]:
        """Returns the quarter turns of each client."""
        numbers = _numbers("Rotation", self.by, len(self.angles), num_clients, groups, generator)
        return [QuarterTurns(self.angles[number] // 90 % 4) for number in numbers]

    def check(self, spec: SampleSpec) -> None:
        """Raises a ``ValueError`` unless inputs are images (channels, height, width).

        The images must be square unless all angles are multiples of 180. Targets of two or more dimensions must be
        masks of the images, which are turned, too.
        """
        shape = spec.shape
        square = len(shape) == 3 and shape[1] == shape[2]
        if len(shape) != 3 or (not square and any(angle % 180 for angle in self.angles)):
            raise ValueError(
                f"Rotation: angles {list(self.angles)} need images of shape (channels, height, width)"
                f"{' with height equal to width' if len(shape) == 3 else ''}; the data set's inputs are {shape}"
            )
        if len(spec.target_shape) > 1 and spec.target_shape[-2:] != shape[-2:]:
            raise ValueError(
                f"Rotation: targets of shape {spec.target_shape} are no masks of images of shape {shape}, so they "
                "would no longer fit"
            )


@dataclass(frozen=True)
class GaussianNoise(ClientTransform):
    """Adds Gaussian noise of standard deviation i / N sigma to the inputs of client i = 1, ..., N (NIID-Bench).

    Noise differs between samples, but a sample always gets the same noise: it depends on client, sample and pixel.

    Args:
        sigma: standard deviation for the last client, in units of the network's (normalised) inputs, >= 0.
    """

    sigma: float

    def __post_init__(self) -> None:
        if not 0 <= self.sigma < math.inf:
            raise ValueError(f"GaussianNoise: sigma must be a finite number >= 0, got {self.sigma}")

    def views(
        self, num_clients: int, num_classes: int | None, groups: Indices | None, generator: np.random.Generator
    ) -> Sequence[View]:
        """Returns a noise level and a separate key for each client."""
        seed = int(generator.integers(2**63))
        keys = [rng.stream_seed(seed, "noise", client) % 2**63 for client in range(num_clients)]
        return [Noise(self.sigma * (client + 1) / num_clients, key) for client, key in enumerate(keys)]

    def check(self, spec: SampleSpec) -> None:
        """Raises a ``ValueError`` unless inputs are floating-point numbers."""
        if not spec.dtype.is_floating_point:
            raise ValueError(f"GaussianNoise: needs floating-point inputs; the data set's are {spec.dtype}")


@dataclass(frozen=True)
class LabelPermutation(ClientTransform):
    """Permutes the labels differently for each group of clients. The first group keeps the true labels.

    Args:
        num_groups: K, the number of different permutations. With ``by="group"``, None means one for each group.
        by: which client gets which permutation, as in `Rotation`.
    """

    makes_groups: ClassVar[bool] = True

    num_groups: int | None = None
    by: By = "group"

    def __post_init__(self) -> None:
        if self.num_groups is None and self.by != "group":
            raise ValueError(f"LabelPermutation: by {self.by!r} needs num_groups, the number of permutations")
        if self.num_groups is not None and self.num_groups < 1:
            raise ValueError(f"LabelPermutation: num_groups must be at least 1, got {self.num_groups}")

    def views(
        self, num_clients: int, num_classes: int | None, groups: Indices | None, generator: np.random.Generator
    ) -> Sequence[View]:
        """Draws K different permutations, the identity first."""
        if num_classes is None:
            raise ValueError("LabelPermutation: needs targets that are classes; the data set's are not")
        num_permutations = self.num_groups
        if num_permutations is None:
            num_permutations = 1 if groups is None else int(groups.max()) + 1
        if num_permutations > math.factorial(min(num_classes, 20)):
            raise ValueError(
                f"LabelPermutation: {num_classes} classes do not have {num_permutations} different permutations; lower "
                "num_groups"
            )
        numbers = _numbers("LabelPermutation", self.by, num_permutations, num_clients, groups, generator)
        permutations = {tuple(range(num_classes)): None}
        while len(permutations) < num_permutations:
            permutations[tuple(generator.permutation(num_classes).tolist())] = None
        views = [Relabelling(permutation) for permutation in permutations]
        return [views[number] for number in numbers]


def groups_and_views(
    transforms: Sequence[ClientTransform], groups: Indices | None, num_clients: int, num_classes: int | None, seed: int
) -> tuple[Indices | None, list[tuple[View, ...]] | None]:
    """Returns the true groups [N] and, for each client, its views; without transforms, the given groups and None.

    The transform with number k draws from the stream (seed, "client transform", k).

    Args:
        transforms: the client transforms, in the order in which they are applied.
        groups: [N] groups of the partition, or None if it knows none.
        num_clients: N.
        num_classes: C; None if targets are not classes.
        seed: seed of the draws.
    """
    if not transforms:
        return groups, None
    views = [
        transform(num_clients, num_classes, groups, rng.generator(seed, "client transform", number))
        for number, transform in enumerate(transforms)
    ]
    return true_groups(groups, transforms, views), list(zip(*views, strict=True))


def true_groups(
    groups: Indices | None, transforms: Sequence[ClientTransform], views: Sequence[Sequence[View]]
) -> Indices | None:
    """Returns the true groups that follow from partition and views.

    Two clients are in the same true group if they are in the same group of the partition and see samples alike. Groups
    are numbered in the order of their first client.

    Args:
        groups: [N] groups of the partition, or None if it knows none.
        transforms: the client transforms.
        views: for each transform, the view of each client.

    Returns:
        [N] true group of each client; None if neither the partition nor a transform makes groups.
    """
    criteria = [] if groups is None else [groups.tolist()]
    for transform, seen in zip(transforms, views, strict=True):
        if transform.makes_groups and any(view != seen[0] for view in seen):
            criteria.append(list(seen))
    if not criteria:
        return groups
    numbers: dict[tuple[object, ...], int] = {}
    return np.array([numbers.setdefault(key, len(numbers)) for key in zip(*criteria, strict=True)], dtype=np.int64)


def _numbers(
    name: str, by: By, number: int, num_clients: int, groups: Indices | None, generator: np.random.Generator
) -> list[int]:
    """Returns a number from 0 to ``number`` - 1 for each client."""
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
