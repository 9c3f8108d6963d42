"""The engine as one of several works sees it that run side by side, and what it asks for.

Legend: P parameters and Q buffer entries in a model's flat vector, B batch size.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from torch import Tensor

from lcfl.data.samples import Samples
from lcfl.engines.lockstep import Ask
from lcfl.engines.sequential import SequentialEngine
from lcfl.methods.local.engine import Gradient, Indices, OptimizerRun

__all__ = ["OptimizerRequest", "GradientRequest", "ScoresRequest", "Batch", "Request", "ClientEngine", "length_of"]

Batch = Indices | tuple[Tensor, Tensor]  # inputs and labels where they depend on the client's random stream


def length_of(batch: Batch) -> int:
    """B."""
    return len(batch[1]) if isinstance(batch, tuple) else len(batch)


class ClientEngine(SequentialEngine):
    """Hands on what is computed for several works at once, and does the rest by itself as the sequential engine does.

    Args:
        engine: whose device, module and precision it has; `examples` and `buffers` are its own.
        ask: asks one of the questions below, and waits.
    """

    def __init__(self, engine: SequentialEngine, ask: Ask) -> None:
        vars(self).update(vars(engine))  # what the engine found out about its module is not found out again
        self._ask = ask

    def run_optimizer(
        self,
        start: Tensor,
        batches: Iterable[Indices],
        centre: Tensor | None = None,
        embedding: Tensor | None = None,
        rate_scale: float = 1.0,
    ) -> OptimizerRun:
        """See `lcfl.methods.local.engine.Engine.run_optimizer`."""
        drawn = [self._drawn(batch) for batch in islice(batches, self.max_steps)]
        found: OptimizerRun = self._ask(OptimizerRequest(self, start, drawn, centre, embedding, rate_scale))
        return found

    def gradient(
        self,
        model: Tensor,
        batch: Indices,
        number: int = 0,
        centre: Tensor | None = None,
        embedding: Tensor | None = None,
    ) -> Gradient:
        """See `lcfl.methods.local.engine.Engine.gradient`."""
        found: Gradient = self._ask(GradientRequest(self, model, self._drawn(batch), number, centre, embedding))
        return found

    def hessian_product(self, model: Tensor, batch: Indices, direction: Tensor, number: int = 0) -> Gradient:
        """See `lcfl.methods.local.engine.Engine.hessian_product`."""
        found: Gradient = self._ask(GradientRequest(self, model, self._drawn(batch), number, direction=direction))
        return found

    def scores(self, model: Tensor, samples: Samples, indices: Indices) -> tuple[Tensor, Tensor]:
        """See `SequentialEngine.scores`."""
        if samples.is_random(training=False):
            return super().scores(model, samples, indices)
        found: tuple[Tensor, Tensor] = self._ask(ScoresRequest(self, model, samples, indices))
        return found

    def keep(self, buffers: Tensor) -> None:
        """Remembers buffers ``[Q]`` where the client keeps its own."""
        if self.module.buffer_layout is not None and self.module.buffer_policy == "local":
            self.buffers = buffers.cpu().clone()

    def _drawn(self, batch: Indices) -> Batch:
        """The batch itself if it depends on the client's random stream, which is another's while this one waits."""
        is_random = self.samples.is_random(training=True)
        return self.samples.training_batch(batch, self.device) if is_random else batch


@dataclass(frozen=True, eq=False)
class OptimizerRequest:
    """See `lcfl.methods.local.engine.Engine.run_optimizer`."""

    client: ClientEngine
    start: Tensor
    batches: Sequence[Batch]
    centre: Tensor | None
    embedding: Tensor | None
    rate_scale: float

    def kind(self, by_size: bool) -> Hashable:
        """What must be equal of those that are answered at once; batches are grouped step by step."""
        drawn = isinstance(self.batches[0], tuple)
        return type(self), self.rate_scale, self.centre is None, self.embedding is None, drawn


@dataclass(frozen=True, eq=False)
class GradientRequest:
    """See `lcfl.methods.local.engine.Engine.gradient`, and with a direction `hessian_product`."""

    client: ClientEngine
    model: Tensor
    batch: Batch
    number: int
    centre: Tensor | None = None
    embedding: Tensor | None = None
    direction: Tensor | None = None

    def kind(self, by_size: bool) -> Hashable:
        """What must be equal of those that are answered at once; with `by_size` also the size of their batches."""
        drawn, size = isinstance(self.batch, tuple), length_of(self.batch) if by_size else 0
        absent = [each is None for each in (self.centre, self.embedding, self.direction)]
        return type(self), self.number, *absent, drawn, size


@dataclass(frozen=True, eq=False)
class ScoresRequest:
    """See `SequentialEngine.scores`."""

    client: ClientEngine
    model: Tensor
    samples: Samples
    indices: Indices

    def kind(self, by_size: bool) -> Hashable:
        """All scores are computed at once."""
        return (type(self),)


Request = OptimizerRequest | GradientRequest | ScoresRequest
