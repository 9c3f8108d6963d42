"""Training of a model that is good after one step on a client's own data (Per-FedAvg).

Legend: P parameters and Q buffer entries in a model's flat vector, B batch size.
"""

from dataclasses import dataclass
from itertools import islice
from typing import ClassVar

import torch

from lcfl.core.clients import ClientState
from lcfl.core.messages import Downlink
from lcfl.methods.local.engine import Engine, Indices
from lcfl.methods.local.training import (
    LocalData,
    LocalOutput,
    LocalUpdate,
    check_amount,
    draw_batches,
    mean_logged,
    mean_loss,
    starting_model,
)
from lcfl.models.module import FederatedModule

__all__ = ["GradientStep", "MetaTraining"]


@dataclass(frozen=True)
class GradientStep(LocalUpdate):
    """Takes the step ``w' = w - alpha g(w; b)`` on the next batch of a client's training samples.

    Args:
        rate: alpha.

    Raises:
        ValueError: for a negative rate.
    """

    start: ClassVar[str] = "own"

    rate: float

    def __post_init__(self) -> None:
        if self.rate < 0:
            raise ValueError(f"GradientStep: got rate={self.rate}; it must be at least 0.")

    def __call__(self, state: ClientState, downlink: Downlink, data: LocalData, engine: Engine) -> LocalOutput:
        """Takes one step from what the server sends."""
        model = starting_model(self.start, state, downlink, engine.layout).to(engine.device)
        consumed, (batch,) = draw_batches(state.consumed, data, steps=1)
        slope = engine.gradient(model, batch)
        return LocalOutput(slope.step_from(model, self.rate).cpu(), consumed, float(slope.loss), num_steps=1)

    def cost(self, num_samples: int, batch_size: int) -> int:
        """Returns the number of samples in one batch."""
        return min(batch_size, num_samples)


@dataclass(frozen=True)
class MetaTraining(LocalUpdate):
    """Minimises the loss *after* one step of rate alpha, by steps of rate beta (Per-FedAvg).

        w' = w - alpha g(w; b1);  w <- w - beta g(w'; b2)                                       first order
        w' = w - alpha g(w; b1);  w <- w - beta [g(w'; b2) - alpha H(w; b3) g(w'; b2)]          with `hessian`

    b1, b2, b3 are consecutive batches of the client's order. ``model.optimizer`` takes no steps, because inner
    gradients must not enter the momentum of outer steps.

    Args:
        steps: the number of steps w <- ... per participation, each on 2 batches (3 with `hessian`). Give either this or
            `epochs`.
        epochs: the number of full passes per participation. Each pass is cut into floor(#batches / 2) steps (reading
            A22; 3 instead of 2 with `hessian`). A pass with fewer batches than a step needs is one step, which repeats
            the batches from the first.
        inner_lr: alpha, which is also the rate of the step with which a client makes its personal model.
        outer_lr: beta; None for the learning rate of ``model.optimizer``.
        outer_momentum: the momentum of the steps w <- ...; the velocity starts at zero in every participation.
        hessian: whether to use the exact meta-gradient with its Hessian-vector product instead of the first-order one.

    Raises:
        ValueError: unless exactly one of `steps` and `epochs` is a number >= 1, for negative rates, or for a momentum
            outside [0, 1).
    """

    start: ClassVar[str] = "own"
    has_pulls: ClassVar[bool] = False

    steps: int | None = None
    epochs: int | None = None
    inner_lr: float = 0.01
    outer_lr: float | None = None
    outer_momentum: float = 0.0
    hessian: bool = False

    def __post_init__(self) -> None:
        check_amount(self.steps, self.epochs)
        rates = [self.inner_lr] if self.outer_lr is None else [self.inner_lr, self.outer_lr]
        if min(rates) < 0 or not 0 <= self.outer_momentum < 1:
            raise ValueError(
                f"method.local_update: got inner_lr={self.inner_lr}, outer_lr={self.outer_lr}, outer_momentum="
                f"{self.outer_momentum}; allowed are rates >= 0 and a momentum from 0 to below 1."
            )

    @property
    def adaptation(self) -> LocalUpdate:
        """One step of rate alpha on a training batch, which gives the model that Per-FedAvg aims at."""
        return GradientStep(self.inner_lr)

    def check(self, module: FederatedModule) -> None:
        """Checks that there is an `outer_lr` or that the optimizer has a learning rate.

        Raises:
            ValueError: if there is neither.
        """
        self._beta(module)

    def __call__(self, state: ClientState, downlink: Downlink, data: LocalData, engine: Engine) -> LocalOutput:
        """Takes the steps from what the server sends. The loss is that of w', which the steps lower."""
        w = starting_model(self.start, state, downlink, engine.layout).to(engine.device)
        consumed, groups = self._groups(state.consumed, data)
        alpha, beta = self.inner_lr, self._beta(engine.module)
        velocity = torch.zeros(engine.layout.num_parameters, device=engine.device)
        losses, logged = [], []
        for number, batches in enumerate(islice(groups, engine.max_steps)):
            adapted = engine.gradient(w, batches[0], number).step_from(w, alpha)
            outer = engine.gradient(adapted, batches[1], number)
            direction = outer.vector
            if self.hessian:
                curved = engine.hessian_vector_product(w, batches[2], direction, number)
                direction = direction - alpha * curved.vector
            velocity = self.outer_momentum * velocity + direction
            w = outer._replace(vector=velocity).step_from(w, beta)
            losses.append(outer.loss)
            logged.append(outer.logged)
        return LocalOutput(w.cpu(), consumed, mean_loss(losses), mean_logged(logged), len(losses))

    def _groups(self, consumed: int, data: LocalData) -> tuple[int, list[list[Indices]]]:
        """Returns the number of samples consumed after the run, and the batches of each step."""
        size = 3 if self.hessian else 2
        per_pass = -(-data.samples_per_epoch // data.batch_size)
        if self.epochs is not None:
            consumed, batches = draw_batches(consumed, data, epochs=self.epochs)
            passes = [batches[start : start + per_pass] for start in range(0, len(batches), per_pass)]
            return consumed, [group for one_pass in passes for group in _grouped(one_pass, size)]
        assert self.steps is not None
        if per_pass == 1:  # consecutive batches hold the same samples, so one is enough
            consumed, batches = draw_batches(consumed, data, steps=self.steps)
            return consumed, [[batch] * size for batch in batches]
        consumed, batches = draw_batches(consumed, data, steps=self.steps * size)
        return consumed, _grouped(batches, size)

    def _beta(self, module: FederatedModule) -> float:
        if self.outer_lr is not None:
            return self.outer_lr
        optimizer = module.configure_optimizers()
        rate = optimizer.param_groups[0].get("lr")
        if rate is None:
            raise ValueError(
                f"method.local_update: got outer_lr=None, but {type(optimizer).__name__} has no learning rate to use "
                "instead. Set outer_lr."
            )
        return float(rate)

    def cost(self, num_samples: int, batch_size: int) -> int:
        """Returns the number of samples in all gradients, which is about the number that is drawn."""
        if self.epochs is not None:
            return self.epochs * num_samples
        assert self.steps is not None
        return self.steps * (3 if self.hessian else 2) * min(batch_size, num_samples)


def _grouped(batches: list[Indices], size: int) -> list[list[Indices]]:
    """Returns groups of `size` consecutive batches.

    Batches that are left over at the end are dropped. If there are fewer than `size` batches, they form one group and
    are repeated from the first.
    """
    if len(batches) < size:
        return [[batches[number % len(batches)] for number in range(size)]]
    return [batches[start : start + size] for start in range(0, len(batches) - size + 1, size)]
