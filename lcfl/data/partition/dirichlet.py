"""Label skew by Dirichlet draws, over clients for each class or over classes for each client.

Shapes: S samples in the pool, N clients, C classes that occur in the pool.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lcfl.data.partition.base import (
    ClientShares,
    Indices,
    Partition,
    Pool,
    check_fractions,
    check_sizes,
    draw_fractions,
    draw_sizes,
    shuffled_classes,
)

__all__ = ["ClassDirichlet", "ClientDirichlet", "check_alpha", "fill"]


@dataclass(frozen=True)
class ClassDirichlet(Partition):
    """Deals each class out to clients by a Dirichlet draw (NIID-Bench, "noniid-labeldir"; FedClust's Dir(0.1)).

    For each class k, p ~ Dirichlet(alpha 1_N) is drawn over clients. p_j is set to 0 for clients that already hold S /
    N samples or more, and p is renormalised. The shuffled class is then cut at floor(cumsum(p) n_k), and the rest goes
    to the last client. The whole draw is repeated until the smallest client has ``min_samples``. Every sample is used.
    The documentation has a table of the options that reproduce the variants of other sources.

    Args:
        alpha: concentration (beta in NIID-Bench), > 0; small values give few labels per client.
        min_samples: smallest number of samples of a client, at least 1.
        max_tries: largest number of tries of the whole draw, and of draws of one class whose proportions all became 0.
        balance: whether clients that already hold a fair share get no more samples.
        fractions: (low, high); without balance, the expected parts of the pool are proportional to
            r_i ~ Uniform(low, high), as p ~ Dirichlet(alpha N r / sum r). This is one reading of AS-CFL's client sizes
            of 10 % to 60 % (section 4.1), normalised to sum 1. None means that equal parts are expected.
    """

    alpha: float
    min_samples: int = 10
    max_tries: int = 100
    balance: bool = True
    fractions: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        check_alpha("ClassDirichlet", self.alpha)
        if self.min_samples < 1 or self.max_tries < 1:
            raise ValueError(
                "ClassDirichlet: min_samples and max_tries must be at least 1, "
                f"got min_samples {self.min_samples} and max_tries {self.max_tries}"
            )
        check_fractions("ClassDirichlet", self.fractions)
        if self.fractions is not None and self.balance:
            raise ValueError("ClassDirichlet: fractions need balance: false, which allows clients of different sizes")

    def split(self, pool: Pool, num_clients: int, generator: np.random.Generator) -> ClientShares:
        """Draws until every client has ``min_samples``, at most ``max_tries`` times."""
        if num_clients * self.min_samples > len(pool):
            raise ValueError(
                f"ClassDirichlet: {num_clients} clients with min_samples {self.min_samples} need more than the "
                f"{len(pool)} samples of the pool; lower num_clients or min_samples"
            )
        concentration = np.full(num_clients, self.alpha)
        if self.fractions is not None:
            weights = draw_fractions(self.fractions, num_clients, generator)
            concentration *= weights / weights.mean()
        for _ in range(self.max_tries):
            indices = self._draw(pool, concentration, generator)
            if min(map(len, indices)) >= self.min_samples:
                return ClientShares(indices)
        raise self._no_success(num_clients)

    def _draw(self, pool: Pool, concentration: NDArray[np.float64], generator: np.random.Generator) -> list[Indices]:
        num_clients = len(concentration)
        held = np.zeros(num_clients, dtype=np.int64)
        parts: list[list[Indices]] = [[] for _ in range(num_clients)]
        for members in shuffled_classes(pool.labels, generator):
            has_room = held < (len(pool) / num_clients if self.balance else np.inf)
            proportions = self._proportions(concentration, has_room, generator)
            cuts = np.floor(np.cumsum(proportions)[:-1] * len(members)).astype(np.int64)
            for part, piece in zip(parts, np.split(members, cuts), strict=True):
                part.append(piece)
            held += np.diff(cuts, prepend=0, append=len(members))
        return [np.concatenate(part) for part in parts]

    def _proportions(
        self, concentration: NDArray[np.float64], has_room: NDArray[np.bool_], generator: np.random.Generator
    ) -> NDArray[np.float64]:
        """Draws the proportions [N] of one class.

        It draws again if a small alpha puts all mass on clients that are full.
        """
        for _ in range(self.max_tries):
            proportions = generator.dirichlet(concentration) * has_room
            total = proportions.sum()
            if total > 0:
                return np.asarray(proportions / total, dtype=np.float64)
        raise self._no_success(len(has_room))

    def _no_success(self, num_clients: int) -> ValueError:
        return ValueError(
            f"ClassDirichlet: none of {self.max_tries} draws with alpha {self.alpha} gave each of num_clients "
            f"{num_clients} at least min_samples {self.min_samples}; lower min_samples or num_clients, or raise alpha "
            "or max_tries"
        )


@dataclass(frozen=True)
class ClientDirichlet(Partition):
    """Draws a label distribution for each client, which allows fixed client sizes (FedAC, section 5.1).

    p_i ~ Dirichlet(alpha 1_C) and counts ~ Multinomial(n_i, p_i). Samples are drawn without replacement. If a class is
    exhausted, the missing samples come from the client's next most probable class. Sizes therefore hold exactly.

    Args:
        alpha: concentration over classes, > 0; small values give few labels per client.
        sizes: (low, high); n_i ~ Uniform{low, ..., high}, (50, 350) in FedAC. None means n_i = S // N.
    """

    alpha: float
    sizes: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        check_alpha("ClientDirichlet", self.alpha)
        check_sizes("ClientDirichlet", self.sizes)

    def split(self, pool: Pool, num_clients: int, generator: np.random.Generator) -> ClientShares:
        """Lets one client after another take samples that the previous clients left."""
        if self.sizes is None:
            sizes = np.full(num_clients, len(pool) // num_clients, dtype=np.int64)
        else:
            sizes = draw_sizes(self.sizes, num_clients, generator)
        if sizes.sum() > len(pool):
            raise ValueError(
                f"ClientDirichlet: {num_clients} clients of sizes {self.sizes} drew {sizes.sum()} samples in all, but "
                f"the pool has {len(pool)}; lower sizes or num_clients"
            )
        members = shuffled_classes(pool.labels, generator)
        available = np.array([len(samples) for samples in members], dtype=np.int64)
        taken = np.zeros_like(available)
        indices = []
        for size in sizes:
            proportions = generator.dirichlet(np.full(len(members), self.alpha))
            drawn = generator.multinomial(size, proportions)
            counts = fill(drawn, available - taken, proportions)
            pieces = zip(members, taken, taken + counts, strict=True)
            indices.append(np.concatenate([samples[start:stop] for samples, start, stop in pieces]))
            taken = taken + counts
        return ClientShares(indices)


def fill(wanted: Indices, available: Indices, proportions: NDArray[np.float64]) -> Indices:
    """Returns counts [C] that the available samples can satisfy.

    Samples that a class lacks are taken from the next most probable class.

    Args:
        wanted: [C] counts that were drawn.
        available: [C] number of samples left in each class; the sum is at least that of ``wanted``.
        proportions: [C] label distribution of the client, which orders the classes.
    """
    counts = np.zeros_like(wanted)
    order = np.argsort(-proportions, kind="stable")
    owed = 0
    # The second pass takes what the least probable classes lack from more probable classes with samples left.
    for demand in (wanted, np.zeros_like(wanted)):
        for label in order:
            owed += int(demand[label])
            added = min(owed, int(available[label] - counts[label]))
            counts[label] += added
            owed -= added
    assert owed == 0, "fill needs at least as many samples available as wanted"
    return counts


def check_alpha(name: str, alpha: float) -> None:
    """Raises a ``ValueError`` unless ``alpha`` is a finite number > 0."""
    if not (alpha > 0 and math.isfinite(alpha)):
        raise ValueError(f"{name}: alpha must be a finite number > 0, got {alpha}")
