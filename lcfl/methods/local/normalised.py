"""Local training that reports how far it went (FedNova)."""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch

from lcfl.core.clients import ClientState
from lcfl.core.messages import Downlink
from lcfl.methods.local.engine import Engine
from lcfl.methods.local.sgd import SgdSettings, sgd_settings
from lcfl.methods.local.training import LocalData, LocalOutput, LocalTraining
from lcfl.models.module import FederatedModule

__all__ = ["NormalisedTraining", "known_sgd", "normaliser"]


def normaliser(
    num_steps: int, momentum: float = 0.0, dampening: float = 0.0, nesterov: bool = False, pull: float = 0.0
) -> float:
    """Returns a_i, the distance that tau steps of SGD cover if every gradient is 1, divided by the learning rate.

    It is the sum of the weights with which the gradients of a run enter w - w_i (FedNova section 4). It is tau for
    plain SGD, and [tau - rho (1 - rho^tau) / (1 - rho)] / (1 - rho) with momentum rho. With a proximal term it follows
    from a <- (1 - eta mu) a + 1 at every step. The recursion below covers all cases, as torch's SGD takes the steps.

    Args:
        num_steps: tau.
        momentum: rho.
        dampening: the dampening of the momentum, from the second step on.
        nesterov: whether the momentum is Nesterov's.
        pull: eta mu, the learning rate times the weight of the pull to the start of the run.
    """
    length, velocity = 0.0, 0.0
    for number in range(num_steps):
        slope = 1 - pull * length
        velocity = momentum * velocity + (1 - dampening if number > 0 else 1) * slope
        length += slope + momentum * velocity if nesterov else velocity
    return length


@dataclass(frozen=True)
class NormalisedTraining(LocalTraining):
    """`LocalTraining` that also returns a_i, the normaliser of its steps, in ``extras["normaliser"]``.

    rho and eta are those of the module's SGD. mu is ``model.cluster_weight`` if the downlink holds a centre.

    Args:
        steps: see `LocalTraining`.
        epochs: see `LocalTraining`.
        start: see `LocalTraining`.
        stragglers: see `LocalTraining`.
        lr_decay: see `LocalTraining`.
        fill_batch: see `LocalTraining`.
        effective_steps: what the server sums up to tau_eff. With ``normaliser`` it sums a_i, so that FedNova with equal
            steps is FedAvg. With ``steps`` it sums tau_i, as the authors' code does if there is a proximal term; tau_i
            is one more float in the upload.

    Raises:
        ValueError: as `LocalTraining`, and for an unknown word.
    """

    provides: ClassVar[tuple[str, ...]] = ("normaliser",)
    effective_steps: Literal["normaliser", "steps"] = "normaliser"

    def check(self, module: FederatedModule) -> None:
        """Checks that the optimizer is SGD with one setting for all parameters, for which the normaliser is known.

        Raises:
            ValueError: for any other optimizer.
        """
        known_sgd(module, self)

    def __call__(self, state: ClientState, downlink: Downlink, data: LocalData, engine: Engine) -> LocalOutput:
        """Returns w_i as `LocalTraining` does, and a_i or (a_i, tau_i)."""
        trained = super().__call__(state, downlink, data, engine)
        sgd = known_sgd(engine.module, self)
        rate = sgd.rate * self.rate_scale(data)
        pull = rate * engine.module.cluster_weight if "centre" in downlink.payload else 0.0
        numbers = [normaliser(trained.num_steps, sgd.momentum, sgd.dampening, sgd.nesterov, pull)]
        if self.effective_steps == "steps":
            numbers.append(float(trained.num_steps))
        return replace(trained, extras={"normaliser": torch.tensor(numbers)})


def known_sgd(module: FederatedModule, local_update: LocalTraining) -> SgdSettings:
    """Returns the settings of the module's optimizer, for which the normaliser is known.

    Raises:
        ValueError: unless it is SGD with one setting for all parameters.
    """
    settings = sgd_settings(module)
    if settings is None:
        name = type(module.configure_optimizers()).__name__
        raise ValueError(
            f"method.local_update: {type(local_update).__name__} got the optimizer {name}; how far its steps go is "
            "known only for torch.optim.SGD with the same settings for all parameters. Set model.optimizer accordingly."
        )
    return settings
