"""Local training that says how far it went (FedNova)."""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch

from lcfl.core.clients import ClientState
from lcfl.core.messages import Downlink
from lcfl.methods.local.engine import Engine
from lcfl.methods.local.sgd import SgdSettings, sgd_settings
from lcfl.methods.local.training import LocalData, LocalOutput, LocalTraining
from lcfl.models.module import FederatedModule

__all__ = ["NormalisedTraining", "normaliser"]


def normaliser(
    num_steps: int, momentum: float = 0.0, dampening: float = 0.0, nesterov: bool = False, pull: float = 0.0
) -> float:
    """a_i: how far tau steps of SGD go, over the learning rate, where every gradient is 1.

    It is the sum of the weights with which the gradients of a run enter w - w_i (FedNova section 4): tau for plain
    SGD, [tau - rho (1 - rho^tau) / (1 - rho)] / (1 - rho) with momentum rho, and with a proximal term
    a <- (1 - eta mu) a + 1 at every step. The recursion below is all of them at once, with torch's SGD.

    Args:
        num_steps: tau.
        momentum: rho.
        dampening: of the momentum, from the second step on.
        nesterov: whether the momentum is Nesterov's.
        pull: eta mu, the learning rate times the weight of the pull to where the run started.
    """
    length, velocity = 0.0, 0.0
    for number in range(num_steps):
        slope = 1 - pull * length
        velocity = momentum * velocity + (1 - dampening if number > 0 else 1) * slope
        length += slope + momentum * velocity if nesterov else velocity
    return length


@dataclass(frozen=True)
class NormalisedTraining(LocalTraining):
    """`LocalTraining` that also gives a_i, the normaliser of its steps, in ``extras["normaliser"]``.

    rho and eta are those of the module's SGD; mu is ``model.cluster_weight`` where the downlink holds a centre.

    Args:
        steps: as `LocalTraining`.
        epochs: as `LocalTraining`.
        start: as `LocalTraining`.
        stragglers: as `LocalTraining`.
        effective_steps: what the server sums up to tau_eff. ``normaliser``: a_i, so that with equal steps FedNova is
            FedAvg; ``steps``: tau_i, what the authors' code does where there is a proximal term; it goes up as one
            more float.

    Raises:
        ValueError: as `LocalTraining`, and for another word.
    """

    provides: ClassVar[tuple[str, ...]] = ("normaliser",)
    effective_steps: Literal["normaliser", "steps"] = "normaliser"

    def check(self, module: FederatedModule) -> None:
        """The normaliser is known for SGD with one setting for all parameters.

        Raises:
            ValueError: for any other optimizer.
        """
        _settings(module)

    def __call__(self, state: ClientState, downlink: Downlink, data: LocalData, engine: Engine) -> LocalOutput:
        """w_i as `LocalTraining`, and a_i, or (a_i, tau_i)."""
        trained = super().__call__(state, downlink, data, engine)
        sgd = _settings(engine.module)
        rate = sgd.rate * self._lr_factor(data)
        pull = rate * engine.module.cluster_weight if "centre" in downlink.payload else 0.0
        numbers = [normaliser(trained.num_steps, sgd.momentum, sgd.dampening, sgd.nesterov, pull)]
        if self.effective_steps == "steps":
            numbers.append(float(trained.num_steps))
        return replace(trained, extras={"normaliser": torch.tensor(numbers)})


def _settings(module: FederatedModule) -> SgdSettings:
    """Of the module's optimizer.

    Raises:
        ValueError: unless it is SGD with one setting for all parameters.
    """
    settings = sgd_settings(module)
    if settings is None:
        name = type(module.configure_optimizers()).__name__
        raise ValueError(
            f"method.local_update: NormalisedTraining got the optimizer {name}; how far a run went is known for "
            "torch.optim.SGD with the same settings for all parameters (model.optimizer)."
        )
    return settings
