"""Training of a personal model that is pulled to the model of the federation (Ditto)."""

from dataclasses import dataclass, replace
from typing import ClassVar

from lcfl.core.clients import ClientState
from lcfl.core.messages import Downlink
from lcfl.methods.local.engine import Engine
from lcfl.methods.local.training import LocalData, LocalOutput, LocalTraining

__all__ = ["DittoTraining"]


@dataclass(frozen=True)
class DittoTraining(LocalTraining):
    """Trains the model that was sent, and with the same batches a personal model that is pulled to it (Ditto, Alg. 1).

        w_i <- LocalTraining from w_t
        v_i <- v_i - eta (g(v_i) + lambda (v_i - w_t)), for each batch

    w_t is the ``model`` in the downlink, and lambda is ``model.cluster_weight``, whose default of 0 pulls nothing. The
    client keeps v_i and sends w_i.
    The arguments are those of `LocalTraining`; with ``start: own`` v_i goes on from where it was.

    Raises:
        ValueError: as `LocalTraining`.
    """

    reads: ClassVar[tuple[str, ...]] = ("model",)
    provides: ClassVar[tuple[str, ...]] = ("model",)
    adds: ClassVar[tuple[str, ...]] = ("centre",)
    uses_own_model: ClassVar[bool] = True

    def __call__(self, state: ClientState, downlink: Downlink, data: LocalData, engine: Engine) -> LocalOutput:
        """Returns v_i as the client's model, and w_i in ``extras["model"]``. The loss is that of v_i."""
        shared = super().__call__(state, downlink, data, engine)
        personal = super().__call__(state, Downlink({"centre": downlink.payload["model"]}), data, engine)
        return replace(personal, extras={"model": shared.model})

    def cost(self, num_samples: int, batch_size: int) -> int:
        """Returns the number of samples in both runs."""
        return 2 * super().cost(num_samples, batch_size)
