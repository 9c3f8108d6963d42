"""Training of the embedding and of the decision head apart (FedRep, FedBABU)."""

from dataclasses import dataclass, field, replace

from lcfl.core.clients import ClientState
from lcfl.core.messages import Downlink
from lcfl.methods.local.engine import Engine
from lcfl.methods.local.training import LocalData, LocalOutput, LocalTraining, LocalUpdate, check_amount
from lcfl.models.layout import Part
from lcfl.models.module import FederatedModule

__all__ = ["AlternatingTraining", "FineTunedTraining", "PartTraining"]


@dataclass(frozen=True)
class PartTraining(LocalTraining):
    """`LocalTraining` of a part of the model.

    Parameters outside of the part keep their bits. The buffers of all layers are updated, because every step is a
    forward pass through the whole network in training mode.

    Args:
        part: what is trained: the embedding phi, the decision head h, or all of the model. The other arguments are
            those of `LocalTraining`.

    Raises:
        ValueError: as `LocalTraining`, and for an unknown part.
    """

    part: Part = "all"

    @property
    def trained(self) -> Part:
        """The `part`."""
        return self.part

    def check(self, module: FederatedModule) -> None:
        """Checks that the network has the part.

        Raises:
            ValueError: if the part has no parameters.
        """
        _check_parts(module, self, self.part)


@dataclass(frozen=True)
class _FirstRun(PartTraining):
    """The first run of a local update, with the learning rate of that.

    Args:
        of: the local update. The other arguments are those of `PartTraining`.
    """

    of: LocalTraining = field(kw_only=True)

    def rate_scale(self, data: LocalData) -> float:
        """Returns that of the local update, whose `lr_factor` may be the user's own."""
        return self.of.rate_scale(data)


@dataclass(frozen=True)
class AlternatingTraining(LocalTraining):
    """Trains the decision head h, then the embedding phi (FedRep, Algorithm 1).

        h_i <- GRD(f_i(phi, h_i), h_i), for each batch of a first run
        phi_i <- GRD(f_i(phi_i, h_i), phi_i), for each batch of a second run

    Each is a run of the module's optimizer with a new state. The second run goes on in the order of batches
    where the first one has ended.

    Args:
        head_steps: the number of mini-batches of the first run; give either this or `head_epochs`.
        head_epochs: the number of passes of the first run. The other arguments are those of `LocalTraining`. `steps`,
            `epochs` and `stragglers` are for the second run.

    Raises:
        ValueError: as `LocalTraining`, and unless exactly one of `head_steps` and `head_epochs` is a number >= 1.
    """

    head_steps: int | None = None
    head_epochs: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_amount(self.head_steps, self.head_epochs, "head_")

    @property
    def trained(self) -> Part:
        """The embedding, in the second run."""
        return "embedding"

    @property
    def head_training(self) -> PartTraining:
        """The first run."""
        return _FirstRun(
            steps=self.head_steps,
            epochs=self.head_epochs,
            start=self.start,
            fill_batch=self.fill_batch and self.head_epochs is not None,
            part="head",
            of=self,
        )

    def check(self, module: FederatedModule) -> None:
        """Checks that the network has an embedding and a decision head.

        Raises:
            ValueError: if one of the two has no parameters.
        """
        _check_parts(module, self, "embedding", "head")

    def __call__(self, state: ClientState, downlink: Downlink, data: LocalData, engine: Engine) -> LocalOutput:
        """Returns (phi_i, h_i). The loss is that of the second run."""
        head = self.head_training(state, downlink, data, engine)
        after = Downlink({**downlink.payload, "model": head.model})
        both = super().__call__(replace(state, consumed=head.consumed), after, data, engine)
        return replace(both, num_steps=head.num_steps + both.num_steps)

    def cost(self, num_samples: int, batch_size: int) -> int:
        """Returns the number of samples in both runs."""
        return self.head_training.cost(num_samples, batch_size) + super().cost(num_samples, batch_size)


@dataclass(frozen=True)
class FineTunedTraining(PartTraining):
    """Trains a part of a model that clients fine-tune before they use it (FedBABU).

    With ``part: embedding``, the decision head keeps its initial value for the whole federation (FedBABU, Algorithm 1).
    A client's personal model is made by further steps of the module's optimizer, from the model that training would
    start from.

    Args:
        part: what is trained in the federation.
        fine_tuned: what a client trains to make its personal model.
        fine_tuning_steps: the number of mini-batches of that; give either this or `fine_tuning_epochs`.
        fine_tuning_epochs: the number of passes of that. The other arguments are those of `LocalTraining`; of these,
            the fine-tuning has `start` and `lr_decay`.

    Raises:
        ValueError: as `PartTraining`, and unless exactly one of `fine_tuning_steps` and `fine_tuning_epochs` is a
            number >= 1.
    """

    fine_tuned: Part = "all"
    fine_tuning_steps: int | None = None
    fine_tuning_epochs: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_amount(self.fine_tuning_steps, self.fine_tuning_epochs, "fine_tuning_")

    @property
    def adaptation(self) -> LocalUpdate:
        """The fine-tuning, which has the start and the learning rate of the round."""
        steps, epochs = self.fine_tuning_steps, self.fine_tuning_epochs
        return replace(self, steps=steps, epochs=epochs, part=self.fine_tuned, stragglers=0.0, fill_batch=False)

    def check(self, module: FederatedModule) -> None:
        """Checks that the network has what is trained and what is fine-tuned.

        Raises:
            ValueError: if one of the two has no parameters.
        """
        _check_parts(module, self, self.part, self.fine_tuned)


def _check_parts(module: FederatedModule, local_update: LocalTraining, *parts: Part) -> None:
    for part in parts:
        place = module.layout.range_of(part)
        if place.start == place.stop:
            words = {"embedding": "embedding", "head": "decision head", "all": "model"}
            raise ValueError(
                f"method.local_update: {type(local_update).__name__} trains the {words[part]}, which has none of the "
                f"{module.layout.num_parameters} trained parameters. Set model.cut to the layer at which the decision "
                "head begins, so that there are parameters before it and in it."
            )
