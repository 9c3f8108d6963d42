"""Training of a personal model near the model of the cluster, by Moreau envelopes (pFedMe, CGPFL).

Legend: P parameters and Q buffer entries in a model's flat vector.
"""

import warnings
from dataclasses import dataclass
from typing import ClassVar

import torch

from lcfl.core.clients import ClientState
from lcfl.core.messages import Downlink
from lcfl.methods.local.engine import Engine
from lcfl.methods.local.training import (
    MOST_STEPS,
    LocalData,
    LocalOutput,
    LocalUpdate,
    check_amount,
    draw_batches,
    mean_logged,
    mean_loss,
    starting_model,
)

__all__ = ["EnvelopeTraining"]


@dataclass(frozen=True)
class EnvelopeTraining(LocalUpdate):
    """Minimises ``F_i(w) = min_theta f_i(theta) + lambda/2 |theta - w|^2``, whose gradient is lambda (w - theta).

        w <- Omega; theta <- w; for each batch b of the run:
            S times: theta <- theta - a (g(theta; b) + lambda (theta - w))
            w <- w - eta lambda (w - theta)

    theta is the client's personal model, and w is what the client sends. theta starts at w in every participation and
    continues from one batch to the next. ``model.optimizer`` is not used. The buffers of both models are those that the
    forward passes of theta left.

    Args:
        steps: R, the number of batches per participation; give either this or `epochs`.
        epochs: the number of full passes per participation.
        inner_steps: S, the number of steps of theta per batch.
        inner_lr: a, the learning rate of theta.
        outer_lr: eta, the learning rate of w.
        penalty: lambda, the weight of the pull of theta to w.

    Raises:
        ValueError: unless exactly one of `steps` and `epochs` is a number >= 1, `inner_steps` is at least 1, the rates
            and the penalty are positive, and a lambda and eta lambda are below 2. From 2 on, the pull alone diverges.
    """

    start: ClassVar[str] = "own"
    provides: ClassVar[tuple[str, ...]] = ("model",)
    has_pulls: ClassVar[bool] = False

    steps: int | None = None
    epochs: int | None = None
    inner_steps: int = 5
    inner_lr: float = 0.05
    outer_lr: float = 0.005
    penalty: float = 15.0

    def __post_init__(self) -> None:
        check_amount(self.steps, self.epochs)
        if not 1 <= self.inner_steps <= MOST_STEPS or not min(self.inner_lr, self.outer_lr, self.penalty) > 0:
            raise ValueError(
                f"method.local_update: got inner_steps={self.inner_steps}, inner_lr={self.inner_lr}, outer_lr="
                f"{self.outer_lr}, penalty={self.penalty}; allowed are inner_steps from 1 to {MOST_STEPS} and "
                "positive numbers."
            )
        if max(self.inner_lr, self.outer_lr) * self.penalty >= 2:
            raise ValueError(
                f"method.local_update: got penalty={self.penalty} with inner_lr={self.inner_lr} and outer_lr="
                f"{self.outer_lr}; a rate times the penalty must be below 2, or the pull alone diverges."
            )
        if self.inner_lr * self.penalty > 1:
            warnings.warn(
                f"method.local_update: inner_lr times penalty is {self.inner_lr * self.penalty}; above 1, a personal "
                "model jumps beyond the model that it is pulled to. Lower inner_lr or penalty.",
                stacklevel=3,
            )

    def __call__(self, state: ClientState, downlink: Downlink, data: LocalData, engine: Engine) -> LocalOutput:
        """Returns theta as the client's model and w in ``extras["model"]``. The loss is f_i(theta)."""
        end, a, pull = engine.layout.num_parameters, self.inner_lr, self.penalty
        w = theta = starting_model(self.start, state, downlink, engine.layout).to(engine.device)
        consumed, batches = draw_batches(state.consumed, data, self.steps, self.epochs)
        losses, logged = [], []
        for number, batch in enumerate(batches[: engine.max_steps]):
            for _ in range(self.inner_steps):
                slope = engine.gradient(theta, batch, number)
                vector = slope.vector + pull * (theta[:end] - w[:end])
                theta = slope._replace(vector=vector).step_from(theta, a)
                losses.append(slope.loss)
                logged.append(slope.logged)
            w = torch.cat([w[:end] - self.outer_lr * pull * (w[:end] - theta[:end]), theta[end:]])
        means = mean_logged(logged)
        return LocalOutput(theta.cpu(), consumed, mean_loss(losses), means, len(losses), {"model": w.cpu()})

    def cost(self, num_samples: int, batch_size: int) -> int:
        """Returns the number of samples in all gradients."""
        if self.epochs is not None:
            return self.inner_steps * self.epochs * num_samples
        assert self.steps is not None
        return self.inner_steps * self.steps * min(batch_size, num_samples)
