"""What carries out a client's computations: whole runs of an optimizer, and gradients.

Legend: P parameters and Q buffer entries in a model's flat vector.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lcfl.models.layout import Layout
from lcfl.models.module import FederatedModule

__all__ = ["OptimizerRun", "Engine", "Gradient", "Indices"]

Indices = NDArray[np.int64]


class OptimizerRun(NamedTuple):
    """What an engine gives back: the trained model ``[P + Q]``, and means over the steps of loss and logged values."""

    model: Tensor
    loss: float
    logged: Mapping[str, float]


class Gradient(NamedTuple):
    """The slope of the module's loss on one batch, where the model lies that it was asked for.

    Attributes:
        vector: ``[P]``.
        buffers: of the network after the forward pass, ``[Q]``.
        loss: a number, as a tensor so that nobody has to wait for it.
        logged: the means of what the step logged, by name.
    """

    vector: Tensor
    buffers: Tensor
    loss: Tensor
    logged: Mapping[str, Tensor]

    def step_from(self, model: Tensor, rate: float) -> Tensor:
        """``w - rate g`` for a model w ``[P + Q]``, with the buffers as the forward pass left them."""
        return torch.cat([model[: len(self.vector)] - rate * self.vector, self.buffers])


class Engine(Protocol):
    """What carries out a local run on this rank; a method does not know which one it is.

    Two ways to compute: `run_optimizer` is a whole run of the module's optimizer; `gradient` and `hessian_product` are
    the numbers themselves, for methods whose step is another one.

    Attributes:
        module: loss, optimizer and the weights of the pulls; a method reads its settings.
        layout: how models lie in flat vectors.
        device: where a method that computes with vectors should put them.
        max_steps: cuts every local run after so many steps; None for no cut. `run_optimizer` sees to it by itself.
    """

    module: FederatedModule
    layout: Layout
    device: torch.device
    max_steps: int | None

    def run_optimizer(
        self,
        start: Tensor,
        batches: Iterable[Indices],
        centre: Tensor | None = None,
        embedding: Tensor | None = None,
        rate_scale: float = 1.0,
    ) -> OptimizerRun:
        """One optimizer step per batch from the model `start`.

        Args:
            start: ``[P + Q]``.
            batches: indices into the pool of samples, one array per step.
            centre: Omega ``[P + Q]`` of the cluster pull, or None.
            embedding: Phi ``[P_phi]`` of the global pull, or None.
            rate_scale: what the learning rates of the optimizer are multiplied by.
        """
        ...

    def gradient(
        self,
        model: Tensor,
        batch: Indices,
        number: int = 0,
        centre: Tensor | None = None,
        embedding: Tensor | None = None,
    ) -> Gradient:
        """The gradient of the module's training step at `model`, in training mode; no optimizer takes part.

        Args:
            model: ``[P + Q]``.
            batch: indices into the pool of samples.
            number: of the step within the local run.
            centre: Omega ``[P + Q]`` of the cluster pull, or None.
            embedding: Phi ``[P_phi]`` of the global pull, or None.
        """
        ...

    def hessian_product(self, model: Tensor, batch: Indices, direction: Tensor, number: int = 0) -> Gradient:
        """``H(w; batch) v``, exactly, by differentiating the gradient along v = `direction` ``[P]``; without pulls.

        Its `vector` is the product; the rest is as `gradient` gives it. Buffers that clients keep stay as they are.
        """
        ...

    def loss(self, model: Tensor, indices: Indices) -> float:
        """L_sup of a model as it is evaluated: no dropout, stored batch statistics, no augmentation.

        Args:
            model: ``[P + Q]``.
            indices: into the pool of samples; the mean is over all of them.
        """
        ...

    def pixels(self, indices: Indices) -> tuple[Tensor, Tensor]:
        """Raw values ``[n, D]`` as the client sees them, before normalisation and augmentation, and labels ``[n]``."""
        ...
