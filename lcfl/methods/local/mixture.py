"""Training of a shared model and of a personal mixture of it with a model of the client's own (APFL).

Legend: P parameters and Q buffer entries in a model's flat vector.
"""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from lcfl.core.clients import ClientState
from lcfl.core.messages import Downlink
from lcfl.methods.local.engine import Engine
from lcfl.methods.local.normalised import known_sgd
from lcfl.methods.local.training import LocalData, LocalOutput, LocalTraining, draw_batches, mean_logged, mean_loss
from lcfl.models.module import FederatedModule

__all__ = ["MixtureTraining"]


@dataclass(frozen=True)
class MixtureTraining(LocalTraining):
    """Trains the model that was sent, and with the same batches its mixture with the client's own v_i (APFL, Alg. 1).

        w_i <- w_i - eta g(w_i), for each batch, from w_i = w
        v_i <- v_i - eta alpha g(m_i), for each batch, where m_i = alpha v_i + (1 - alpha) w_i
        alpha <- clip(alpha - eta <v_i - w_i, g(m_i)>, 0, 1), in the first step (section 4.2)

    All right sides are from before the step. w is the ``model`` in the downlink. Both models take the steps of the
    module's SGD. The client keeps m_i and remembers v_i, which is the initial model at first, and alpha. It sends w_i.
    The buffers of m_i are those that its forward passes left.

    Args:
        steps: see `LocalTraining`.
        epochs: see `LocalTraining`.
        stragglers: see `LocalTraining`.
        lr_decay: see `LocalTraining`.
        fill_batch: see `LocalTraining`.
        alpha: the share of v_i in the mixture at first.
        adapt: when alpha changes: in the first step of each ``round``, in each ``step``, or ``never``.

    Raises:
        ValueError: as `LocalTraining`, for an alpha outside [0, 1], or for an unknown word.
    """

    reads: ClassVar[tuple[str, ...]] = ("model",)
    provides: ClassVar[tuple[str, ...]] = ("model",)
    uses_own_model: ClassVar[bool] = True

    start: Literal["own", "centre", "embedding"] = field(init=False, default="own")  # w_i starts from what was sent
    alpha: float = 0.5
    adapt: Literal["round", "step", "never"] = "round"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"method.local_update: got alpha={self.alpha}; allowed are shares from 0 to 1.")

    def check(self, module: FederatedModule) -> None:
        """Checks that the optimizer is SGD with one setting for all parameters, whose steps it takes itself.

        Raises:
            ValueError: for any other optimizer.
        """
        known_sgd(module, self)

    def __call__(self, state: ClientState, downlink: Downlink, data: LocalData, engine: Engine) -> LocalOutput:
        """Returns m_i as the client's model, w_i in ``extras["model"]`` and (v_i, alpha) as memory ``[P + 1]``.

        The loss is that of m_i.
        """
        assert state.model is not None, "the exchange keeps models at the clients"
        end, sgd, factor = engine.layout.num_parameters, known_sgd(engine.module, self), self.rate_scale(data)
        w = downlink.payload["model"].to(engine.device, copy=True)
        memory = torch.cat([state.model[:end], torch.tensor([self.alpha])]) if state.memory is None else state.memory
        v, alpha = memory.to(engine.device, copy=True).split([end, 1])
        buffers = state.model[end:].to(engine.device)
        consumed, batches = draw_batches(state.consumed, data, *self._steps_and_epochs(data))
        batches = batches[: engine.max_steps]
        velocities: list[Tensor | None] = [None, None]
        losses, logged = [], []
        for number, batch in enumerate(batches):
            shared = engine.gradient(w, batch, number)
            mixed = engine.gradient(_mixture(v, w, alpha, buffers), batch, number)
            change = sgd.rate * factor * ((v - w[:end]) * mixed.vector).sum()
            sgd.step([w[:end], v], [shared.vector, alpha * mixed.vector], velocities, factor)
            if self.adapt == "step" or (self.adapt == "round" and number == 0):
                alpha = (alpha - change).clamp(0, 1)
            w[end:], buffers = shared.buffers, mixed.buffers
            losses.append(mixed.loss)
            logged.append(mixed.logged)
        return LocalOutput(
            _mixture(v, w, alpha, buffers).cpu(),
            consumed,
            mean_loss(losses),
            {**mean_logged(logged), "train/alpha": float(alpha)},
            len(batches),
            {"model": w.cpu()},
            torch.cat([v, alpha]).cpu(),
        )

    def cost(self, num_samples: int, batch_size: int) -> int:
        """Returns the number of samples in both gradients."""
        return 2 * super().cost(num_samples, batch_size)


def _mixture(v: Tensor, w: Tensor, alpha: Tensor, buffers: Tensor) -> Tensor:
    """Returns alpha v + (1 - alpha) w with these buffers ``[P + Q]``."""
    return torch.cat([alpha * v + (1 - alpha) * w[: len(v)], buffers])
