"""CUDA graphs of the training steps of a stack: a GPU starts all kernels of a step at once.

Legend: C clients at once, B batch size.
"""

import logging
from collections.abc import Callable, Hashable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from lcfl.engines.vmapped import Named, StepOutput
from lcfl.models.module import Pulls

__all__ = ["StepGraphs", "StepResult", "record", "stack_size"]

LOGGER = logging.getLogger(__name__)
MOST_GRAPHS = 64  # beyond that, steps of other shapes start their kernels one by one

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
    clients hold what an earlier step left there, and their results are dropped.

    Args:
        step: computes gradients and other outputs from parameters, buffers, inputs, targets and pulls, whose first
            dimension is C. It must start the same kernels in every call.
    """

    def __init__(self, step: Step) -> None:
        self._step = step
        self._recordings: dict[Hashable, Recording | None] = {}

    def __call__(self, parameters: Named, buffers: Named, inputs: Tensor, targets: Tensor, pulls: Pulls) -> StepResult:
        """Returns the results of a step. The next call overwrites the gradients and the buffers."""
        count = len(targets)
        given = [
            *parameters.values(),
            *buffers.values(),
            inputs,
            targets,
            *(each for each in pulls if each is not None),
        ]
        untrained = tuple(name for name, each in parameters.items() if not each.requires_grad)
        absent = tuple(each is None for each in pulls)
        key = stack_size(count), inputs.shape[1:], inputs.dtype, targets.shape[1:], absent, untrained
        if key not in self._recordings:
            self._recordings[key] = self._record(parameters, buffers, inputs, targets, pulls)
        recording = self._recordings[key]
        if recording is None:
            return self._step(parameters, buffers, inputs, targets, pulls)
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
        self, parameters: Named, buffers: Named, inputs: Tensor, targets: Tensor, pulls: Pulls
    ) -> Recording | None:
        """Returns a recording for these shapes; None if there are too many or if the step cannot be recorded."""
        if len(self._recordings) >= MOST_GRAPHS:
            return None
        clients = stack_size(len(targets))

        def memory(tensor: Tensor) -> Tensor:
            zeros = torch.zeros(clients, *tensor.shape[1:], dtype=tensor.dtype, device=tensor.device)
            return zeros.requires_grad_(tensor.requires_grad)

        own = {name: memory(each) for name, each in parameters.items()}
        kept = {name: memory(each) for name, each in buffers.items()}
        read, labels = memory(inputs), memory(targets)
        targeted = Pulls._make(None if each is None else memory(each) for each in pulls)
        try:
            replay, result = record(lambda: self._step(own, kept, read, labels, targeted))
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            LOGGER.info("Engine stacked: steps of %d clients are not recorded as a CUDA graph: %s", clients, reason)
            return None
        present = (each for each in targeted if each is not None)
        return Recording([*own.values(), *kept.values(), read, labels, *present], result, replay)


def stack_size(count: int) -> int:
    """Returns a number of clients with at most three significant bits, which is by less than a quarter too large."""
    unit = 1 << max(0, (count - 1).bit_length() - 3)
    return -(-count // unit) * unit


def record(function: Callable[[], Result]) -> tuple[Callable[[], None], Result]:
    """Returns a function that starts the same kernels again, and the results, whose memory they write.

    Raises:
        RuntimeError: if the function waits for the GPU or copies from the CPU.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        function()  # libraries reserve their memory before the recording
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = function()
    return graph.replay, result


def _rows(stacked: Named, count: int) -> Named:
    return {name: each[:count] for name, each in stacked.items()}
