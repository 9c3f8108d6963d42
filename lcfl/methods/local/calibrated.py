"""Local training with calibrated scores, for clients that have few samples of some classes (FedLC).

Legend: P parameters and Q buffer entries in a model's flat vector, C classes.
"""

from dataclasses import dataclass, replace

from lcfl.core.clients import ClientState
from lcfl.core.messages import Downlink
from lcfl.methods.local.engine import Engine
from lcfl.methods.local.training import LocalData, LocalOutput, LocalTraining, starting_model
from lcfl.models.metrics import CLASS_LOSSES, ignore_index
from lcfl.models.module import FederatedModule

__all__ = ["CalibratedTraining"]

FEWEST = 1e-8  # the count of a class that the client lacks


@dataclass(frozen=True)
class CalibratedTraining(LocalTraining):
    """Trains with lower scores for classes of which the client has few samples (FedLC, Zhang et al. 2022).

        s_c <- s_c - tau n_c^(-1/4), for each class c and each batch

    n_c is the number of the client's training targets of class c. The client counts its samples once and remembers the
    counts. Lowering a score has the same effect as lowering its bias in the output layer. So every run begins with
    lowered biases, whatever the engine, and the change that it makes is added to the biases that were sent.

    Args:
        tau: tau; 0 is `LocalTraining`. The other arguments are those of `LocalTraining`.

    Raises:
        ValueError: as `LocalTraining`, and for a negative tau.
    """

    tau: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.tau < float("inf"):
            raise ValueError(f"method.local_update: got tau={self.tau}; it must be a finite number >= 0.")

    def check(self, module: FederatedModule) -> None:
        """Checks that targets are classes, and that the output layer is linear with a trained bias.

        Weight decay of this bias is refused, too. It would act on the lowered bias, and so raise the biases of classes
        that clients lack.

        Raises:
            ValueError: for any other module.
        """
        name = "method.local_update: CalibratedTraining"
        if not isinstance(module.loss, CLASS_LOSSES):
            raise ValueError(
                f"{name} counts the samples of each class: got model.loss {type(module.loss).__name__}; it must be "
                f"{' or '.join(each.__name__ for each in CLASS_LOSSES)}."
            )
        if _output_bias(module) is None:
            raise ValueError(
                f"{name} lowers the bias of the output layer, but the layer that the network registers last, "
                f"{_output_layer(module)}, is not a linear layer with a trained bias. Use a network that ends with "
                "torch.nn.Linear."
            )
        bias = dict(module.network.named_parameters())[f"{_output_layer(module)}.bias"]
        for group in module.configure_optimizers().param_groups:
            if group.get("weight_decay") and any(each is bias for each in group["params"]):
                raise ValueError(
                    f"{name} got weight_decay={group['weight_decay']} for the bias of the output layer, which it "
                    "lowers in training. Set it to 0, or give this bias a group of its own in configure_optimizers."
                )

    def __call__(self, state: ClientState, downlink: Downlink, data: LocalData, engine: Engine) -> LocalOutput:
        """Returns the trained model, and the counts ``[C]`` as memory."""
        bias = _output_bias(engine.module)
        assert bias is not None, "a module without one was refused"
        count_C = state.memory
        if count_C is None:
            labels = engine.pixels(data.indices)[1]
            labels = labels[labels != ignore_index(engine.module.loss)]  # 1-d, whether a sample has one target or many
            count_C = labels.bincount(minlength=bias.stop - bias.start).float()
        margin_C = self.tau * count_C.clamp(min=FEWEST).pow(-0.25)
        start = starting_model(self.start, state, downlink, engine.layout)
        payload = {**downlink.payload, "model": start}
        for name in payload.keys() & {"model", "centre", "embedding"}:
            if len(payload[name]) >= bias.stop:  # an embedding may end before the output layer
                payload[name] = payload[name].clone()
                payload[name][bias] -= margin_C
        output = super().__call__(state, Downlink(payload), data, engine)
        model = output.model.clone()
        model[bias] = start[bias] + (model[bias] - payload["model"][bias])  # the same bits where nothing has changed
        return replace(output, model=model, memory=count_C)


def _output_layer(module: FederatedModule) -> str:
    """Returns the name of the layer that the network registers last, trained or not, within the decision head."""
    has_head = module.layout.num_embedding < module.layout.num_parameters
    embedding = module.layout.names_of("embedding") if has_head else set()
    *_, last = (name for name, _ in module.network.named_parameters() if name not in embedding)
    return last.rpartition(".")[0]


def _output_bias(module: FederatedModule) -> slice | None:
    """Returns the place of the output layer's bias ``[C]``; None if that layer is not linear with a trained bias."""
    layer, shapes = _output_layer(module), dict(module.layout.parameters)
    is_linear = len(shapes.get(f"{layer}.weight", ())) == 2
    return module.layout.places.get(f"{layer}.bias") if is_linear else None
