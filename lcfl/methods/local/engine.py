"""The interface of engines, which compute whole runs of an optimizer and gradients for a client.

Legend: P parameters and Q buffer entries in a model's flat vector.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lcfl.data.partition.pool import Indices
from lcfl.models.layout import Layout, Part
from lcfl.models.module import FederatedModule
from lcfl.models.pulls import NO_PULLS, Pulls

__all__ = ["OptimizerResult", "Engine", "Gradient", "Indices"]


class OptimizerResult(NamedTuple):
    """The outcome of a run of the optimizer.

    Attributes:
        model: the trained model, ``[P + Q]``.
        loss: the mean loss over the steps.
        logged: the means of the logged values over the steps, by name.
    """

    model: Tensor
    loss: float
    logged: Mapping[str, float]


class Gradient(NamedTuple):
    """The gradient of the module's loss on one batch. Its vectors lie on the device of the model.

    Attributes:
        vector: the gradient, ``[P]``.
        buffers: the buffers of the network after the forward pass, ``[Q]``.
        loss: the loss as a tensor with one number, so that nobody has to wait for it.
        logged: the means of what the step logged, by name.
    """

    vector: Tensor
    buffers: Tensor
    loss: Tensor
    logged: Mapping[str, Tensor]

    def step_from(self, model: Tensor, rate: float) -> Tensor:
        """Returns ``w - rate g`` for a model w ``[P + Q]``, with the buffers as the forward pass left them."""
        return torch.cat([model[: len(self.vector)] - rate * self.vector, self.buffers])


class Engine(Protocol):
    """Computes local updates on this rank. A method does not know which engine it uses.

    There are two ways to compute. `run_optimizer` performs a whole run of the module's optimizer. `gradient` and
    `hessian_vector_product` return the numbers themselves, for methods that take a different step.

    Attributes:
        module: defines the loss, the optimizer and the weights of the pulls; a method reads its settings.
        layout: how models lie in flat vectors.
        device: where a method that computes with vectors should put the vectors.
        max_steps: the number of steps after which every local run is cut; None for no cut. `run_optimizer` applies it
            itself.
        buffers: those of the network ``[Q]`` that the client keeps, updated by each forward pass in training; None if
            clients keep none, or for the first ones.
    """

    module: FederatedModule
    layout: Layout
    device: torch.device
    max_steps: int | None
    buffers: Tensor | None

    def run_optimizer(
        self,
        start: Tensor,
        batches: Iterable[Indices],
        pulls: Pulls = NO_PULLS,
        rate_scale: float = 1.0,
        part: Part = "all",
    ) -> OptimizerResult:
        """Takes one optimizer step per batch, starting from the model `start`.

        Args:
            start: the model to start from, ``[P + Q]``.
            batches: indices into the pool of samples, one array per step.
            pulls: Omega ``[P + Q]``, Phi ``[P_phi]`` and a correction ``[P]``.
            rate_scale: the factor by which the learning rates of the optimizer are multiplied.
            part: the part of the parameters that is trained. The others keep their bits, whatever weight decay and
                momentum are. Loss and pulls are those of the whole model, and the buffers of all layers are updated.
        """
        ...

    def gradient(self, model: Tensor, batch: Indices, number: int = 0, pulls: Pulls = NO_PULLS) -> Gradient:
        """Returns the gradient of the module's training step at `model`, in training mode and without the optimizer.

        Args:
            model: the model, ``[P + Q]``.
            batch: indices into the pool of samples.
            number: the number of the step within the local run.
            pulls: Omega ``[P + Q]``, Phi ``[P_phi]`` and a correction ``[P]``.
        """
        ...

    def hessian_vector_product(self, model: Tensor, batch: Indices, direction: Tensor, number: int = 0) -> Gradient:
        """Returns the exact product ``H(w; batch) v``, without pulls.

        It is computed by differentiating the gradient along v = `direction` ``[P]``. The `vector` of the result is
        the product. The other fields are as `gradient` returns them. Buffers that clients keep stay as they are.
        """
        ...

    def loss(self, model: Tensor, indices: Indices) -> float:
        """Returns L_sup of a model as in an evaluation: no dropout, stored batch statistics, no augmentation.

        Args:
            model: the model, ``[P + Q]``.
            indices: indices into the pool of samples. The loss is the mean over all these samples.
        """
        ...

    def pixels(self, indices: Indices) -> tuple[Tensor, Tensor]:
        """Returns the raw values ``[n, D]`` of samples and their labels ``[n]`` (or targets ``[n, ...]``).

        The values are those that the client sees, before normalisation and augmentation.
        """
        ...
