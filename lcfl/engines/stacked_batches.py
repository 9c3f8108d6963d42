"""The batches of the clients that are trained at once, stacked. In every array the first dimension is the client.

Legend: C clients at once, B batch size.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from lcfl.data.samples import Samples
from lcfl.engines.engine_requests import ClientEngine, OptimizerRequest, StepSamples, length_of
from lcfl.engines.stacked_rows import pad_rows
from lcfl.methods.local.engine import Indices

__all__ = ["StackedBatch", "StackedBatches", "look_up"]

GATHERED_BYTES = 64 * 2**20  # of inputs; each time that batches are gathered, the CPU waits for the GPU

StackedBatch = tuple[Tensor, Tensor]  # inputs and targets [C, B, ...]


@dataclass(frozen=True)
class StackedBatches:
    """Gathers batches of clients, and pads the shorter ones with samples that the loss ignores.

    Args:
        device: where the batches go.
        batch_size: the batch size of most steps.
        input_bytes: bytes of one sample's input.
        ignored: the target that the loss ignores; None if padding would change the result, so that only batches of one
            size are stacked.
    """

    device: torch.device
    batch_size: int
    input_bytes: int
    ignored: int | None

    def of_steps(self, requests: Sequence[OptimizerRequest]) -> Iterator[list[tuple[list[int], StackedBatch]]]:
        """Yields, for every step, the groups of clients that are computed at once, and the batches of each group.

        The batches of several steps are gathered at once.
        """
        longest = max(len(request.batches) for request in requests)
        at_once = max(1, GATHERED_BYTES // (len(requests) * self.batch_size * self.input_bytes))
        for first in range(0, longest, at_once):
            steps = [self._groups(requests, number) for number in range(first, min(first + at_once, longest))]
            taken = [(row, first + later) for later, groups in enumerate(steps) for group in groups for row in group]
            batches = [requests[row].batches[number] for row, number in taken]
            inputs, targets = self.gather([requests[row].client for row, _ in taken], batches)
            ends = itertools.accumulate(len(group) for groups in steps for group in groups)
            for groups in steps:
                found = []
                for group in groups:
                    end = next(ends)
                    part = slice(end - len(group), end)
                    length = max(map(length_of, batches[part]))
                    found.append((group, (inputs[part, :length], targets[part, :length])))
                yield found

    def gather(self, clients: Sequence[ClientEngine], batches: Sequence[StepSamples]) -> StackedBatch:
        """Returns the inputs and targets of one batch per client."""
        sizes = [length_of(batch) for batch in batches]
        longest = max(sizes)
        drawn = [batch for batch in batches if isinstance(batch, tuple)]
        if drawn:
            inputs = torch.stack([pad_rows(samples, longest) for samples, _ in drawn])
            targets = torch.stack([pad_rows(labels, longest) for _, labels in drawn])
        else:
            positions = [batch for batch in batches if not isinstance(batch, tuple)]
            inputs, targets = look_up([client.samples for client in clients], positions, self.device, training=True)
        if min(sizes) < longest and self.ignored is not None:
            beyond = (torch.arange(longest) >= torch.tensor(sizes)[:, None]).to(self.device)
            beyond = beyond.view(*beyond.shape, *[1] * (targets.dim() - 2))
            targets = targets.masked_fill(beyond, self.ignored)
        return inputs, targets

    def lengthened(self, inputs: Tensor, targets: Tensor) -> StackedBatch:
        """Pads stacked batches to the usual size."""
        assert self.ignored is not None, "no other loss ignores padding"
        length = targets.shape[1]
        columns = torch.arange(self.batch_size, device=self.device).clamp_(max=length - 1)
        missing = (*[0] * (2 * targets.dim() - 4), 0, self.batch_size - length)
        return inputs[:, columns], functional.pad(targets, missing, value=self.ignored)

    def _groups(self, requests: Sequence[OptimizerRequest], number: int) -> list[list[int]]:
        """Returns the clients that take step `number`, in groups that are computed at once."""
        groups: dict[int, list[int]] = {}
        for row, request in enumerate(requests):
            if number < len(request.batches):
                size = length_of(request.batches[number]) if self.ignored is None else 0
                groups.setdefault(size, []).append(row)
        return list(groups.values())


def look_up(
    samples: Sequence[Samples], indices: Sequence[Indices], device: torch.device, training: bool = False
) -> StackedBatch:
    """Returns the inputs and targets ``[C, n, ...]`` of samples, where n is the largest number of indices.

    Shorter rows are padded with the sample of their first index.
    """
    padded = np.empty((len(indices), max(map(len, indices))), dtype=np.int64)
    for row, each in zip(padded, indices, strict=True):
        row[: len(each)], row[len(each) :] = each, each[0]
    readers = [each.training_batch if training else each.batch for each in samples]
    if all(each is samples[0] for each in samples):
        inputs, targets = readers[0](padded.reshape(-1), device)
        return inputs.unflatten(0, padded.shape), targets.unflatten(0, padded.shape)
    batches = [read(row, device) for read, row in zip(readers, padded, strict=True)]
    return torch.stack([inputs for inputs, _ in batches]), torch.stack([targets for _, targets in batches])
