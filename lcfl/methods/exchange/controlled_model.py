"""Exchanges that also send control variates (SCAFFOLD).

Legend: P parameters of a model, K clusters.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lcfl.core.messages import Downlink
from lcfl.core.schema import Array
from lcfl.core.state import FederationState
from lcfl.methods.exchange.base import Exchange
from lcfl.methods.exchange.cluster_models import ClusterModel
from lcfl.methods.exchange.global_model import FullModel
from lcfl.methods.local.training import LocalOutput
from lcfl.models.layout import Layout

__all__ = ["ControlledClusterModel", "ControlledModel"]


@dataclass(frozen=True)
class _Controlled(Exchange):
    """Adds the control variate c to a downlink with a model, and the change of c_i to the uplink."""

    sends: ClassVar[tuple[str, ...]] = ("model", "control")
    returns: ClassVar[tuple[str, ...]] = ("model", "control_change")
    extras: ClassVar[tuple[str, ...]] = ("control_change",)

    def down(self, state: FederationState, client: int, layout: Layout) -> Downlink:
        """Returns the model, and c of the client's cluster ``[P]``, which is 0 before the first round."""
        control_KP, cluster = state.aggregation.get("control", ()), int(state.assignment[client])
        is_known = len(control_KP) == state.num_clusters and cluster >= 0
        control_P = control_KP[cluster] if is_known else torch.zeros(layout.num_parameters)
        downlink = super().down(state, client, layout)  # type: ignore[safe-super] # that of the other base class
        return Downlink({**downlink.payload, "control": control_P})

    def up(self, output: LocalOutput, downlink: Downlink, layout: Layout) -> Mapping[str, Tensor]:
        """Returns the trained model, and the change of c_i, which is 0 in a warm-up round."""
        change = output.extras.get("control_change", torch.zeros(layout.num_parameters))
        return {"model": output.model, "control_change": change}

    def upload_forms(self, layout: Layout) -> dict[str, Array]:
        """Returns the forms of both."""
        return {"model": Array((layout.size,)), "control_change": Array((layout.num_parameters,))}


@dataclass(frozen=True)
class ControlledModel(_Controlled, FullModel):
    """Sends the global model and c down, and the client's model and the change of c_i up: 4P floats (SCAFFOLD)."""


@dataclass(frozen=True)
class ControlledClusterModel(_Controlled, ClusterModel):
    """Sends the client's cluster model and c of its cluster down, its model and the change of c_i up: 4P floats.

    It is SCAFFOLD inside every cluster. c is the mean of the members' c_i if clusters are formed before the first round
    and stay as they are.

    Args:
        keeps_model: see `ClusterModel`.
    """

    keeps_model: bool = False  # again, because the other base class has no such argument
