"""CUDA graphs of the training steps of a stack: a GPU starts all kernels of a step at once.

Legend: C clients at once, B batch size.
"""

import logging
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from lcfl.engines.vmapped import Named, StepOutput
from lcfl.models.module import FederatedModule
from lcfl.models.pulls import Pulls

__all__ = ["StepGraphs", "StepResult", "is_recordable", "record", "stack_size"]

LOGGER = logging.getLogger(__name__)
STEP = ("training_step", "forward", "regularizer")

Result = TypeVar("Result")
StepResult = tuple[Named, StepOutput]  # gradients by name, and the step's other outputs
Step = Callable[[Named, Named, Tensor, Tensor, Pulls], StepResult]


class Recording(NamedTuple):
    """A step for arguments of fixed shapes: the memory that it reads and writes, and the function that repeats it."""

    arguments: list[Tensor]
    result: StepResult
    replay: Callable[[], None]


class StepGraphs:
    """Records a step once for every shape of its arguments. Later steps of that shape are replayed.

    The number of clients is rounded up (`stack_size`), so that few recordings serve all stacks. The rows beyond the
    clients hold what an earlier step left there, and their results are dropped. All recordings share their memory:
    those for fewer clients read the first rows of the largest one's arguments, and each overwrites what another wrote.
    """

    def __init__(self) -> None:
        self._recordings: dict[Hashable, Recording] = {}
        self._held: dict[Hashable, Tensor] = {}
        self._pool = torch.cuda.graph_pool_handle() if torch.cuda.is_available() else None
        self._fails = False

    def __call__(
        self, step: Step, parameters: Named, buffers: Named, inputs: Tensor, targets: Tensor, pulls: Pulls
    ) -> StepResult:
        """Returns the results of a step. The next call overwrites the gradients and the buffers.

        Args:
            step: computes gradients and other outputs from all other arguments, whose first dimension is C. It must
                start the same kernels in every call.
            parameters: ``[C, ...]`` each.
            buffers: ``[C, ...]`` each.
            inputs: ``[C, B, ...]``.
            targets: ``[C, B, ...]``.
            pulls: Omega ``[C, P]``, Phi ``[C, P_phi]`` and a correction ``[C, P]``.
        """
        if self._fails:
            return step(parameters, buffers, inputs, targets, pulls)
        count = len(targets)
        present = [each for each in pulls if each is not None]
        given = [*parameters.values(), *buffers.values(), inputs, targets, *present]
        untrained = tuple(name for name, each in parameters.items() if not each.requires_grad)
        absent = tuple(each is None for each in pulls)
        key = stack_size(count), targets.shape[1:], absent, untrained
        if key not in self._recordings:
            try:
                self._recordings[key] = self._record(step, parameters, buffers, inputs, targets, pulls)
            except RuntimeError as error:
                reason = str(error).partition("\n")[0]
                LOGGER.warning("Engine stacked: its step cannot be recorded as a CUDA graph: %s", reason)
                self._fails = True
                self._recordings, self._held = {}, {}  # memory may be short
                return step(parameters, buffers, inputs, targets, pulls)
        recording = self._recordings[key]
        with torch.no_grad():
            for memory, tensor in zip(recording.arguments, given, strict=True):
                memory[:count].copy_(tensor)
        recording.replay()
        slopes, (losses, logged, updated) = recording.result
        # Losses and logged values are still needed after the next step.
        return _rows(slopes, count), StepOutput(
            losses[:count].clone(),
            {name: each.clone() for name, each in _rows(logged, count).items()},
            _rows(updated, count),
        )

    def _record(
        self, step: Step, parameters: Named, buffers: Named, inputs: Tensor, targets: Tensor, pulls: Pulls
    ) -> Recording:
        clients = stack_size(len(targets))

        def memory(name: str, tensor: Tensor) -> Tensor:
            place = name, tensor.shape[1:]
            if place not in self._held or len(self._held[place]) < clients:
                self._held[place] = torch.zeros(clients, *tensor.shape[1:], dtype=tensor.dtype, device=tensor.device)
            return self._held[place][:clients].detach().requires_grad_(tensor.requires_grad)

        own = {name: memory(name, each) for name, each in parameters.items()}
        kept = {name: memory(name, each) for name, each in buffers.items()}
        read, labels = memory("inputs of the step", inputs), memory("targets of the step", targets)
        targeted = Pulls._make(
            None if each is None else memory(f"pull {place}", each) for place, each in enumerate(pulls)
        )
        replay, result = record(lambda: step(own, kept, read, labels, targeted), self._pool)
        present = (each for each in targeted if each is not None)
        return Recording([*own.values(), *kept.values(), read, labels, *present], result, replay)


def is_recordable(module: FederatedModule) -> bool:
    """Returns whether a module's step is lcfl's. A method of the user's own may do something else in every step."""
    return all(getattr(type(module), name) is getattr(FederatedModule, name) for name in STEP)


def stack_size(count: int) -> int:
    """Returns a number of clients with at most three significant bits, which is by less than a quarter too large."""
    unit = 1 << max(0, (count - 1).bit_length() - 3)
    return -(-count // unit) * unit


def record(function: Callable[[], Result], pool: Any) -> tuple[Callable[[], None], Result]:
    """Returns a function that starts the same kernels again, and the results, whose memory they write.

    Args:
        function: what starts the kernels.
        pool: the memory that recordings share, which each overwrites.

    Raises:
        RuntimeError: if the function waits for the GPU or copies from the CPU, or if memory is short.
    """
    current, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(current)
    try:
        with torch.cuda.stream(side):
            function()  # libraries reserve their memory before the recording
    finally:
        current.wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    recording = torch.cuda.graph(graph, pool, capture_error_mode="thread_local")
    with torch.cuda.stream(current), recording:  # alone, a recording that fails would not restore the current stream
        result = function()
    return graph.replay, result


def _rows(stacked: Named, count: int) -> Named:
    return {name: each[:count] for name, each in stacked.items()}
