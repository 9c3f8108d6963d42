"""Local training with corrected gradients, so that clients with different data do not drift apart (SCAFFOLD, FedDyn).

Legend: P parameters of a model.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from lcfl.core.clients import ClientState
from lcfl.core.messages import Downlink
from lcfl.methods.local.engine import Engine
from lcfl.methods.local.normalised import known_sgd, normaliser
from lcfl.methods.local.training import LocalData, LocalOutput, LocalTraining, starting_model
from lcfl.models.layout import Layout
from lcfl.models.module import FederatedModule

__all__ = ["ControlledTraining", "DynamicTraining"]


@dataclass(frozen=True)
class ControlledTraining(LocalTraining):
    """Corrects gradients by control variates (SCAFFOLD, Algorithm 1, option II).

        y <- y - eta (g(y) - c_i + c), for each batch
        c_i <- c_i - c + (x - y) / (eta a)

    x is the model that the run starts from. a is the sum of the weights with which the gradients of the run enter
    x - y (`lcfl.methods.local.normalised.normaliser`), which is the number of steps for plain SGD. The client remembers
    c_i, which is 0 at first, and sends its change. Buffers are not corrected. In a warm-up round, which sends no c, it
    is plain training.

    The arguments are those of `LocalTraining`.

    Raises:
        ValueError: as `LocalTraining`.
    """

    reads: ClassVar[tuple[str, ...]] = ("control",)
    provides: ClassVar[tuple[str, ...]] = ("control_change",)

    def check(self, module: FederatedModule) -> None:
        """Checks that the optimizer is SGD with one setting for all parameters, so that a is known.

        Raises:
            ValueError: for any other optimizer.
        """
        known_sgd(module, self)

    def correction(self, state: ClientState, downlink: Downlink, layout: Layout) -> Tensor | None:
        """Returns c - c_i."""
        control = downlink.payload.get("control")
        return None if control is None else control - _memory(state, layout)

    def __call__(self, state: ClientState, downlink: Downlink, data: LocalData, engine: Engine) -> LocalOutput:
        """Returns y, and the change of c_i ``[P]`` in ``extras["control_change"]``."""
        output, end = super().__call__(state, downlink, data, engine), engine.layout.num_parameters
        if "control" not in downlink.payload:
            return output
        start, sgd = starting_model(self.start, state, downlink, engine.layout), known_sgd(engine.module, self)
        rate = sgd.rate * self.rate_scale(data)
        length = rate * normaliser(output.num_steps, sgd.momentum, sgd.dampening, sgd.nesterov)
        change = (start[:end] - output.model[:end]) / length - downlink.payload["control"]
        return replace(output, memory=_memory(state, engine.layout) + change, extras={"control_change": change})


@dataclass(frozen=True)
class DynamicTraining(LocalTraining):
    """Adds a linear term to the loss that brings the clients' optima together (FedDyn, Algorithm 1).

        w_i <- arg min L_i(w) - <g_i, w> + alpha/2 |w - w_t|^2, by `LocalTraining`
        g_i <- g_i - alpha (w_i - w_t)

    w_t is the ``centre`` in the downlink, and alpha is ``model.cluster_weight``. The client remembers g_i, which is 0
    at first. In a warm-up round, which sends no centre, it is plain training.

    The arguments are those of `LocalTraining`, but a run starts from w_t unless `start` says otherwise.

    Raises:
        ValueError: as `LocalTraining`.
    """

    reads: ClassVar[tuple[str, ...]] = ("centre",)

    start: Literal["own", "centre", "embedding"] = "centre"

    def check(self, module: FederatedModule) -> None:
        """Checks that alpha is positive.

        Raises:
            ValueError: if it is 0.
        """
        if module.cluster_weight == 0:
            raise ValueError(
                "method.local_update: DynamicTraining got model.cluster_weight=0, which is alpha of FedDyn; set it to "
                "a positive number, e.g. 0.01."
            )

    def correction(self, state: ClientState, downlink: Downlink, layout: Layout) -> Tensor | None:
        """Returns -g_i."""
        return -_memory(state, layout) if "centre" in downlink.payload else None

    def __call__(self, state: ClientState, downlink: Downlink, data: LocalData, engine: Engine) -> LocalOutput:
        """Returns w_i."""
        output, end = super().__call__(state, downlink, data, engine), engine.layout.num_parameters
        if "centre" not in downlink.payload:
            return output
        apart = output.model[:end] - downlink.payload["centre"][:end]
        return replace(output, memory=_memory(state, engine.layout) - engine.module.cluster_weight * apart)


def _memory(state: ClientState, layout: Layout) -> Tensor:
    return torch.zeros(layout.num_parameters) if state.memory is None else state.memory
