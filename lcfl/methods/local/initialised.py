"""Local training from a blend of the client's own model and the model that was sent (FedALA).

Legend: P parameters and Q buffer entries in a model's flat vector, S parameters of the last layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from lcfl.core import rng
from lcfl.core.clients import ClientState
from lcfl.core.messages import Downlink
from lcfl.methods.local.batch_order import samples_per_epoch
from lcfl.methods.local.engine import Engine, Indices
from lcfl.methods.local.training import MOST_STEPS, LocalData, LocalOutput, LocalTraining, LocalUpdate
from lcfl.models.layout import Layout
from lcfl.models.module import FederatedModule
from lcfl.models.subset import ParameterSubset, layer_subset

__all__ = ["AdaptiveInitialisation", "InitialisedTraining"]

STEADY_PASSES = 10  # whose losses must be close to one another at the end of the first learning


@dataclass(frozen=True)
class AdaptiveInitialisation(LocalUpdate):
    """Blends the client's model with the one that was sent, entry by entry, and trains nothing else (FedALA, ALA).

        W <- clip(W - eta g(b_i; batch) * (w - w_i), 0, 1), for each batch of a sample of the client's data (Eq. 5)
        b_i = w_i + (w - w_i) * W in the last layers, and w below (Eq. 4)

    w is the ``centre`` in the downlink, and w_i the client's model. W is 1 at first and stays with the client. The
    first time, passes over the sample are repeated until the losses of ten of them hardly differ; later there is one
    pass. As long as w_i equals w, there is nothing to learn. The buffers of b_i are those of w.

    Args:
        layers: p, the number of last layers with trained parameters that are blended, or patterns of what is blended.
        share: s, the share of the client's samples that W is learned on, at least one sample. They are drawn anew every
            time.
        weight_lr: eta.
        threshold: the first learning ends when the standard deviation of the mean losses of ten passes is below this.
        most_passes: the largest number of passes of the first learning.

    Raises:
        ValueError: for no layer, a share outside (0, 1], a rate or threshold that is not positive, or fewer than one
            pass.
    """

    reads: ClassVar[tuple[str, ...]] = ("centre",)
    uses_own_model: ClassVar[bool] = True

    layers: int | list[str] = 1
    share: float = 0.8
    weight_lr: float = 1.0
    threshold: float = 0.1
    most_passes: int = 50

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layers in (0, []) or (isinstance(self.layers, int) and self.layers < 0):
            raise ValueError(
                f"method.local_update: got layers={self.layers}; allowed are a number >= 1 of last layers, or a list "
                "of layer names or patterns."
            )
        if not (0 < self.share <= 1 and min(self.weight_lr, self.threshold) > 0):
            raise ValueError(
                f"method.local_update: got share={self.share}, weight_lr={self.weight_lr}, threshold={self.threshold}; "
                "allowed are a share above 0 and up to 1, and positive numbers."
            )
        if not 1 <= self.most_passes <= MOST_STEPS:
            raise ValueError(
                f"method.local_update: got most_passes={self.most_passes}; allowed are numbers from 1 to {MOST_STEPS}."
            )

    def check(self, module: FederatedModule) -> None:
        """Checks that the network has the layers.

        Raises:
            ValueError: if it has not.
        """
        try:
            self._blended(module.layout)
        except ValueError as error:
            raise ValueError(f"method.local_update: {type(self).__name__}: {error}") from None

    def __call__(self, state: ClientState, downlink: Downlink, data: LocalData, engine: Engine) -> LocalOutput:
        """Returns b_i as the model, and W of the last layers as memory ``[S]``."""
        assert state.model is not None, "the exchange keeps models at the clients"
        sent, own = downlink.payload["centre"].to(engine.device), state.model.to(engine.device)
        end, part = engine.layout.num_parameters, self._blended(engine.layout)
        if torch.equal(own[:end], sent[:end]):
            return LocalOutput(downlink.payload["centre"], state.consumed, None)
        own_S, update_S = part.take(own), part.take(sent - own)

        def blend(weight_S: Tensor) -> Tensor:
            return part.put(own_S + update_S * weight_S, sent)

        is_first, kept = state.memory is None, engine.buffers
        weight_S = torch.ones_like(own_S) if state.memory is None else state.memory.to(engine.device)
        batches = self._batches(data)[: engine.max_steps]
        losses: list[float] = []
        while not losses or (is_first and engine.max_steps is None and not self._has_converged(losses)):
            losses_of_pass: list[Tensor] = []
            for batch in batches:
                number = len(losses) * len(batches) + len(losses_of_pass)
                slope = engine.gradient(blend(weight_S), batch, number)
                weight_S = (weight_S - self.weight_lr * part.take(slope.vector) * update_S).clamp(0, 1)
                losses_of_pass.append(slope.loss)
            losses.append(float(torch.stack(losses_of_pass).float().mean()))
        engine.buffers = kept  # the forward passes have updated those that the client keeps
        return LocalOutput(blend(weight_S).cpu(), state.consumed, losses[-1], memory=weight_S.cpu())

    def _blended(self, layout: Layout) -> ParameterSubset:
        """Returns the part that is blended."""
        return layer_subset(layout, self.layers, with_buffers=False)

    def _batches(self, data: LocalData) -> list[Indices]:
        """Returns the batches of a new sample of the client's data."""
        draw = rng.generator(data.seed, "initialisation", data.round, data.client)
        sample = data.indices[draw.permutation(len(data.indices))[: self._sample_size(len(data.indices))]]
        length = samples_per_epoch(len(sample), data.batch_size, data.drop_last)
        return [sample[begin : begin + data.batch_size] for begin in range(0, length, data.batch_size)]

    def _sample_size(self, num_samples: int) -> int:
        return max(1, int(self.share * num_samples))

    def _has_converged(self, losses: Sequence[float]) -> bool:
        """Returns whether the first learning ends, given the mean loss of each pass so far."""
        deviation = torch.tensor(losses[-STEADY_PASSES:]).std(correction=0)
        is_steady = len(losses) >= STEADY_PASSES and bool(deviation < self.threshold)
        return is_steady or len(losses) >= self.most_passes

    def sizes_drawn(self, num_samples: int) -> tuple[int, ...]:
        """Returns the number of samples that the weights are learnt on, and that of all."""
        return self._sample_size(num_samples), num_samples

    def cost(self, num_samples: int, batch_size: int) -> int:
        """Returns the number of samples in one pass."""
        return self._sample_size(num_samples)


@dataclass(frozen=True)
class InitialisedTraining(AdaptiveInitialisation, LocalTraining):
    """Trains from the model that `AdaptiveInitialisation` makes (FedALA, Algorithm 1).

        w_i <- LocalTraining from b_i

    In a warm-up round, which sends no centre, it is plain training.

    Args:
        steps: see `LocalTraining`.
        epochs: see `LocalTraining`.
        stragglers: see `LocalTraining`.
        lr_decay: see `LocalTraining`.
        fill_batch: see `LocalTraining`.
        layers: see `AdaptiveInitialisation`.
        share: see `AdaptiveInitialisation`.
        weight_lr: see `AdaptiveInitialisation`.
        threshold: see `AdaptiveInitialisation`.
        most_passes: see `AdaptiveInitialisation`.

    Raises:
        ValueError: as `LocalTraining` and `AdaptiveInitialisation`.
    """

    start: Literal["own", "centre", "embedding"] = field(init=False, default="own")  # a run starts from b_i

    @property
    def adaptation(self) -> LocalUpdate:
        """The initialisation alone, which gives the model that the paper evaluates."""
        options = {option.name: getattr(self, option.name) for option in fields(AdaptiveInitialisation)}
        return AdaptiveInitialisation(**options)

    def __call__(self, state: ClientState, downlink: Downlink, data: LocalData, engine: Engine) -> LocalOutput:
        """Returns w_i, and W of the last layers as memory ``[S]``."""
        if "centre" not in downlink.payload:
            return LocalTraining.__call__(self, state, downlink, data, engine)
        begun = AdaptiveInitialisation.__call__(self, state, downlink, data, engine)
        downlink = Downlink({**downlink.payload, "model": begun.model})
        return replace(LocalTraining.__call__(self, state, downlink, data, engine), memory=begun.memory)

    def cost(self, num_samples: int, batch_size: int) -> int:
        """Returns the number of samples in one pass of the initialisation and in the training."""
        return self._sample_size(num_samples) + LocalTraining.cost(self, num_samples, batch_size)
