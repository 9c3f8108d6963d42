"""The engine that each of several tasks running side by side gets, and the requests that it submits.

Legend: P parameters and Q buffer entries in a model's flat vector, B batch size.
"""

from collections.abc import Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice

from torch import Tensor

from lcfl.core import rng
from lcfl.data.samples import Samples
from lcfl.engines.lockstep import Submit
from lcfl.engines.sequential import SequentialEngine, check_steps
from lcfl.methods.local.engine import Gradient, Indices, OptimizerResult
from lcfl.models.layout import Part
from lcfl.models.pulls import NO_PULLS, Pulls

__all__ = [
    "OptimizerRequest",
    "GradientRequest",
    "ScoresRequest",
    "StepSamples",
    "Request",
    "ClientEngine",
    "length_of",
]

StepSamples = Indices | tuple[Tensor, Tensor]  # inputs and targets if they depend on the client's random stream


def length_of(batch: StepSamples) -> int:
    """Returns the batch size B."""
    return len(batch[1]) if isinstance(batch, tuple) else len(batch)


class ClientEngine(SequentialEngine):
    """Submits what is computed for several tasks at once, and does the rest as the sequential engine does.

    Args:
        engine: provides device, module and precision; `samples` and `buffers` belong to this client engine.
        submit: submits one of the requests below and waits for its answer.
    """

    def __init__(self, engine: SequentialEngine, submit: Submit) -> None:
        vars(self).update(vars(engine))  # saves finding out again what the engine knows about its module
        self._submit = submit

    def seeded(self, seed: int, purpose: str, *address: int) -> AbstractContextManager[None]:
        """See `lcfl.core.rng.seeded`. The states of the generators are restored once, after all tasks."""
        rng.seed_all(seed, purpose, *address)
        return nullcontext()

    def run_optimizer(
        self,
        start: Tensor,
        batches: Iterable[Indices],
        pulls: Pulls = NO_PULLS,
        rate_scale: float = 1.0,
        part: Part = "all",
    ) -> OptimizerResult:
        """See `lcfl.methods.local.engine.Engine.run_optimizer`."""
        drawn = [self._drawn(batch) for batch in islice(batches, self.max_steps)]
        check_steps(drawn)
        answer: OptimizerResult = self._submit(OptimizerRequest(self, start, drawn, pulls, rate_scale, part))
        return answer

    def gradient(self, model: Tensor, batch: Indices, number: int = 0, pulls: Pulls = NO_PULLS) -> Gradient:
        """See `lcfl.methods.local.engine.Engine.gradient`."""
        answer: Gradient = self._submit(GradientRequest(self, model, self._drawn(batch), number, pulls))
        return answer

    def hessian_vector_product(self, model: Tensor, batch: Indices, direction: Tensor, number: int = 0) -> Gradient:
        """See `lcfl.methods.local.engine.Engine.hessian_vector_product`."""
        answer: Gradient = self._submit(GradientRequest(self, model, self._drawn(batch), number, direction=direction))
        return answer

    def scores(self, model: Tensor, samples: Samples, indices: Indices) -> tuple[Tensor, Tensor]:
        """See `SequentialEngine.scores`."""
        if samples.is_random(training=False):
            return super().scores(model, samples, indices)
        answer: tuple[Tensor, Tensor] = self._submit(ScoresRequest(self, model, samples, indices))
        return answer

    def keep(self, buffers: Tensor) -> None:
        """Remembers buffers ``[Q]`` if the client keeps its own (``model.buffer_policy: local``)."""
        if self.module.keeps_buffers:
            self.buffers = buffers.cpu().clone()

    def _drawn(self, batch: Indices) -> StepSamples:
        """Returns the batch's tensors if they depend on the client's random stream, else the indices.

        They must be drawn now: while this client waits, other clients use the global random generators.
        """
        is_random = self.samples.is_random(training=True)
        return self.samples.training_batch(batch, self.device) if is_random else batch


@dataclass(frozen=True, eq=False)
class OptimizerRequest:
    """A request for `lcfl.methods.local.engine.Engine.run_optimizer`."""

    client: ClientEngine
    start: Tensor
    batches: Sequence[StepSamples]
    pulls: Pulls
    rate_scale: float
    part: Part

    def kind(self, by_size: bool) -> Hashable:
        """Returns what requests that are answered at once must have in common. Batches are grouped step by step."""
        drawn = isinstance(self.batches[0], tuple)
        return type(self), self.rate_scale, self.part, *(each is None for each in self.pulls), drawn


@dataclass(frozen=True, eq=False)
class GradientRequest:
    """A request for `lcfl.methods.local.engine.Engine.gradient`, or with a direction for `hessian_vector_product`."""

    client: ClientEngine
    model: Tensor
    batch: StepSamples
    number: int
    pulls: Pulls = NO_PULLS
    direction: Tensor | None = None

    def kind(self, by_size: bool) -> Hashable:
        """Returns what requests that are answered at once must have in common; with `by_size` also their batch size."""
        drawn, size = isinstance(self.batch, tuple), length_of(self.batch) if by_size else 0
        absent = [tensor is None for tensor in (*self.pulls, self.direction)]
        return type(self), self.number, *absent, drawn, size


@dataclass(frozen=True, eq=False)
class ScoresRequest:
    """A request for `SequentialEngine.scores`."""

    client: ClientEngine
    model: Tensor
    samples: Samples
    indices: Indices

    def kind(self, by_size: bool) -> Hashable:
        """Returns the same for all: all scores are computed at once."""
        return (type(self),)


Request = OptimizerRequest | GradientRequest | ScoresRequest
