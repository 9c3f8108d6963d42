"""Optimizers of the server, which make a step where an aggregation would replace a model (FedOpt, FedAvgM).

Legend: G models of the server, which are those of the clusters or a single global one; P parameters of each.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lcfl.core.schema import Array, Forms
from lcfl.core.validation import CheckedFields

__all__ = [
    "MEMORIES",
    "ServerAdagrad",
    "ServerAdam",
    "ServerDynamics",
    "ServerMomentum",
    "ServerOptimizer",
    "ServerYogi",
]

MOST = torch.finfo(torch.float32).max  # the largest v; an infinite v would make later models NaN or never change again
Memory = dict[str, Tensor]  # what an optimizer remembers of one model, ``[P]`` each

# All that the optimizers remember, by name.
MEMORIES: Forms = dict.fromkeys(("velocity", "first_moment", "second_moment"), Array(("G", "P")))


@dataclass(frozen=True)
class ServerOptimizer(CheckedFields, ABC):
    """Performs an update step from the change that an aggregation would make: Delta = merged model - model.

    What it remembers is in ``state.aggregation``, a row for each model of the server. Clusters that are split, merged
    or renumbered take their rows along (`FederationState.take_clusters`). If the number of models changes for any
    other reason, it is forgotten.

    Args:
        lr: eta, the learning rate of the server.

    Raises:
        ValueError: for a learning rate that is not positive.
    """

    remembers: ClassVar[tuple[str, ...]]  # the names of what it remembers, among those in `MEMORIES`

    lr: float = 1.0

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise ValueError(f"method.aggregation: {type(self).__name__} got lr={self.lr}; it must be above 0.")

    def __call__(
        self, memory: dict[str, Any], before_GP: Tensor, merged_GP: Tensor, shares: Mapping[int, float]
    ) -> Tensor:
        """Returns the models after the step, ``[G, P]``.

        Args:
            memory: ``state.aggregation``, which is updated.
            before_GP: the models before the round.
            merged_GP: what the aggregation has made of them.
            shares: which share of its clients has sent something, by the row of each model for which somebody has. The
                other models stay as they are.
        """
        own = {name: memory[name].clone() for name in self.remembers if name in memory}
        if any(each.shape != before_GP.shape for each in own.values()) or not own:
            own = {name: torch.full_like(before_GP, self.initial(name)) for name in self.remembers}
        after_GP = before_GP.clone()
        for row, share in shares.items():
            of_row = {name: each[row] for name, each in own.items()}
            after_GP[row] += self.lr * self.step(merged_GP[row] - before_GP[row], of_row, share)
        memory.update(own)
        return after_GP

    def initial(self, name: str) -> float:
        """Returns the value with which a memory begins."""
        return 0.0

    @abstractmethod
    def step(self, change_P: Tensor, memory: Memory, share: float) -> Tensor:
        """Returns the step of one model, without eta, and updates the memory in place.

        Args:
            change_P: Delta.
            memory: what is remembered of this model.
            share: the share of its clients that has sent something.
        """


@dataclass(frozen=True)
class ServerMomentum(ServerOptimizer):
    """v <- beta v + Delta; w <- w + eta v (FedAvgM, Hsu et al. 2019).

    Args:
        lr: eta.
        momentum: beta.

    Raises:
        ValueError: for a momentum outside [0, 1).
    """

    remembers: ClassVar[tuple[str, ...]] = ("velocity",)

    momentum: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_momenta(self, momentum=self.momentum)

    def step(self, change_P: Tensor, memory: Memory, share: float) -> Tensor:
        """Returns v."""
        return memory["velocity"].mul_(self.momentum).add_(change_P)


@dataclass(frozen=True)
class ServerDynamics(ServerOptimizer):
    """u <- u + s Delta; w <- w + eta (Delta + u) (FedDyn, Algorithm 1).

    s is the share of all clients that has sent something. u is -h / alpha of the paper. Its h <- h - alpha s Delta and
    w <- mean - h / alpha give the same.

    Args:
        lr: eta, 1 in the paper.
    """

    remembers: ClassVar[tuple[str, ...]] = ("velocity",)

    def step(self, change_P: Tensor, memory: Memory, share: float) -> Tensor:
        """Returns Delta + u."""
        return change_P + memory["velocity"].add_(change_P, alpha=share)


@dataclass(frozen=True)
class ServerAdagrad(ServerOptimizer):
    """m <- beta1 m + (1 - beta1) Delta; v <- v + Delta^2; w <- w + eta m / (sqrt(v) + tau) (FedAdagrad).

    See Reddi et al. 2021, Algorithm 2, with v = tau^2 at first. There is no correction of the bias.

    Args:
        lr: eta.
        beta1: the weight of the old m; 0 for FedAdagrad as in the paper's experiments.
        tau: the degree of adaptivity; a smaller one adapts more.

    Raises:
        ValueError: for a beta1 outside [0, 1), or a tau that is not positive.
    """

    remembers: ClassVar[tuple[str, ...]] = ("first_moment", "second_moment")

    lr: float = 0.1
    beta1: float = 0.0
    tau: float = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_momenta(self, beta1=self.beta1)
        if not self.tau > 0:
            raise ValueError(f"method.aggregation: {type(self).__name__} got tau={self.tau}; it must be above 0.")

    def initial(self, name: str) -> float:
        """Returns tau^2 for v, and 0 for m."""
        return min(self.tau * self.tau, MOST) if name == "second_moment" else 0.0

    def step(self, change_P: Tensor, memory: Memory, share: float) -> Tensor:
        """Returns m / (sqrt(v) + tau)."""
        first = memory["first_moment"].lerp_(change_P, 1 - self.beta1)
        second = memory["second_moment"]
        self.accumulate(second, change_P.square().clamp(max=MOST))
        second.clamp_(max=MOST)
        return first / (second.sqrt() + self.tau)

    def accumulate(self, second_P: Tensor, square_P: Tensor) -> None:
        """Updates v in place, given Delta^2."""
        second_P += square_P


@dataclass(frozen=True)
class ServerAdam(ServerAdagrad):
    """`ServerAdagrad` with v <- beta2 v + (1 - beta2) Delta^2 (FedAdam).

    Args:
        lr: eta.
        beta1: the weight of the old m.
        tau: see `ServerAdagrad`.
        beta2: the weight of the old v.

    Raises:
        ValueError: for a beta outside [0, 1), or a tau that is not positive.
    """

    beta1: float = 0.9
    beta2: float = 0.99

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_momenta(self, beta2=self.beta2)

    def accumulate(self, second_P: Tensor, square_P: Tensor) -> None:
        """Updates v in place, given Delta^2."""
        second_P.lerp_(square_P, 1 - self.beta2)


@dataclass(frozen=True)
class ServerYogi(ServerAdam):
    """`ServerAdagrad` with v <- v - (1 - beta2) Delta^2 sign(v - Delta^2) (FedYogi).

    Args:
        lr: eta.
        beta1: the weight of the old m.
        tau: see `ServerAdagrad`.
        beta2: 1 - beta2 is the weight of Delta^2.

    Raises:
        ValueError: for a beta outside [0, 1), or a tau that is not positive.
    """

    def accumulate(self, second_P: Tensor, square_P: Tensor) -> None:
        """Updates v in place, given Delta^2."""
        second_P -= (1 - self.beta2) * square_P * (second_P - square_P).sign()


def _check_momenta(optimizer: ServerOptimizer, **momenta: float) -> None:
    for name, value in momenta.items():
        if not 0 <= value < 1:
            raise ValueError(
                f"method.aggregation: {type(optimizer).__name__} got {name}={value}; allowed are numbers from 0 to "
                "below 1."
            )
