"""Local training with calibrated scores, for clients that have few samples of some classes (FedLC).

Legend: P parameters and Q buffer entries in a model's flat vector, C classes.
"""

from dataclasses import dataclass, replace

from torch import Tensor

from lcfl.core.clients import ClientState
from lcfl.core.messages import Downlink
from lcfl.methods.local.engine import Engine
from lcfl.methods.local.training import LocalData, LocalOutput, LocalTraining, starting_model
from lcfl.models.layout import Layout
from lcfl.models.module import FederatedModule

__all__ = ["CalibratedTraining"]

FEWEST = 1e-8  # samples that a class without samples counts as


@dataclass(frozen=True)
class CalibratedTraining(LocalTraining):
    """Trains with lower scores for classes of which the client has few samples (FedLC, Zhang et al. 2022).

        s_c <- s_c - tau n_c^(-1/4), for each class c and each batch

    n_c is the number of the client's training samples of class c. The client counts once and remembers the numbers.
    To lower a score of the last layer is to lower its bias, and the gradients are the same. So the run begins with the
    lowered bias, whatever the engine, and what it has changed is added to the bias that was sent. Weight decay acts on
    the lowered bias.

    Args:
        tau: tau; 0 is `LocalTraining`. The other arguments are those of `LocalTraining`.

    Raises:
        ValueError: as `LocalTraining`, and for a negative tau.
    """

    tau: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.tau < float("inf"):
            raise ValueError(f"method.local_update: got tau={self.tau}; it must be a number from 0.")

    def check(self, module: FederatedModule) -> None:
        """Checks that the last layer is linear with a bias.

        Raises:
            ValueError: for any other last layer.
        """
        _last_bias(module.layout)

    def __call__(self, state: ClientState, downlink: Downlink, data: LocalData, engine: Engine) -> LocalOutput:
        """Returns the trained model, and the numbers of samples ``[C]`` as memory."""
        bias = _last_bias(engine.layout)
        count_C = state.memory
        if count_C is None:
            count_C = _counts(engine.pixels(data.indices)[1], bias.stop - bias.start)
        margin_C = self.tau * count_C.clamp(min=FEWEST).pow(-0.25)
        start = starting_model(self.start, state, downlink, engine.layout)
        payload = {**downlink.payload, "model": start}
        for name in payload.keys() & {"model", "centre"}:
            payload[name] = payload[name].clone()
            payload[name][bias] -= margin_C
        output = super().__call__(state, Downlink(payload), data, engine)
        model = output.model.clone()
        model[bias] = start[bias] + (model[bias] - payload["model"][bias])  # the same bits where nothing has changed
        return replace(output, model=model, memory=count_C)


def _last_bias(layout: Layout) -> slice:
    """Returns the place of the last layer's bias ``[C]``.

    Raises:
        ValueError: if the last layer is not linear or has no bias that is trained.
    """
    layer, shapes, offset = layout.layers[-1], dict(layout.parameters), 0
    for name, shape in layout.parameters:
        if name == f"{layer}.bias" and len(shapes.get(f"{layer}.weight", ())) == 2:
            return slice(offset, offset + shape.numel())
        offset += shape.numel()
    raise ValueError(
        f"method.local_update: CalibratedTraining lowers the bias of the last layer, and {layer} is not a linear layer "
        "with a trained bias. Use a network that ends with torch.nn.Linear."
    )


def _counts(label_n: Tensor, num_classes: int) -> Tensor:
    """Returns the number of samples of each class ``[C]`` in float32."""
    if label_n.dim() != 1 or label_n.is_floating_point():
        raise ValueError(
            "method.local_update: CalibratedTraining counts the samples of each class, but the targets are not classes."
        )
    return label_n.bincount(minlength=num_classes).float().cpu()
