"""The stacked engine with its step as one compiled program, which a GPU replays as a CUDA graph.

Legend: C clients at once, P parameters of a model, B batch size.
"""

import logging
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from lcfl.engines import kernels
from lcfl.engines.stacked import Pulls, StackedEngine, check_stacked
from lcfl.engines.stacks import Rows, at
from lcfl.engines.tracing import Unsupported
from lcfl.engines.vmapped import Named, StepOutput
from lcfl.models.module import FederatedModule

__all__ = ["FusedEngine", "check_fused"]

LOGGER = logging.getLogger(__name__)
StepProgram = Callable[..., tuple[Named, StepOutput]]  # of parameters, buffers, inputs, targets and the two pulls


def check_fused(
    module: FederatedModule, shape: Sequence[int], dtype: torch.dtype, device: str = "cpu", precision: str = "32-true"
) -> None:
    """Makes sure that `FusedEngine` trains a module as it wants to be trained, and that torch.compile can work here.

    Args:
        module: network, loss and optimizer.
        shape: of one input of the network.
        dtype: of the inputs.
        device: the type of the device.
        precision: of a step's arithmetic.

    Raises:
        Unsupported: if it does not; says why.
    """
    if not check_stacked(module, shape, dtype, precision).fills_up:
        raise Unsupported(
            "its step cannot be compiled for one size of batch: shorter ones can be filled up with samples that the "
            "loss ignores only for images or features, cross-entropy, lcfl's training_step and no batch normalisation"
        )
    if device == "cuda" and find_spec("triton") is None:
        raise Unsupported("torch.compile needs the package triton for a GPU")
    if device == "cpu":
        try:
            kernels.compiler_command()
        except kernels.Unavailable as error:
            raise Unsupported(f"torch.compile needs a compiler, and {error}") from None


class FusedEngine(StackedEngine):
    """A step's forward and backward pass are traced once and compiled by torch.compile, on a GPU into CUDA graphs.

    Programs are for fixed shapes. Batches are filled up to the batch size, and clients to a power of two by copies of
    the last one, whose results are dropped: so there are few programs, and which one a stack takes depends on its size
    alone. Optimizer, scores, Hessian-vector products and batches of more than the batch size are `StackedEngine`'s. It
    agrees with `SequentialEngine` up to rounding.

    Its arguments are those of `StackedEngine`; B of every program is `batch_size`. The module must be one that
    `check_fused` accepts. Its loss is traced: what it does besides computing is not repeated.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.most_clients = 1 << (self.most_clients.bit_length() - 1)  # a program is for no more than the budget is for
        self._programs: dict[tuple[int, bool, bool], StepProgram] = {}

    def _step(
        self,
        parameters: Named,
        buffers: Named,
        batch: tuple[Tensor, Tensor],
        number: int,
        pulls: Pulls,
        directions: Tensor | None = None,
    ) -> tuple[Named, StepOutput]:
        inputs, targets = batch
        count, length = targets.shape
        if directions is not None or length > self._batch_size:
            return super()._step(parameters, buffers, batch, number, pulls, directions)
        assert isinstance(self.module.loss, nn.CrossEntropyLoss), "check_fused refuses others"
        clients = 1 << (count - 1).bit_length()
        rows, columns = self._places(count, clients), self._places(length, self._batch_size)
        missing, ignored = self._batch_size - length, self.module.loss.ignore_index
        arguments = (
            at(parameters, rows),
            at(buffers, rows),
            inputs[:, columns][rows],
            functional.pad(targets, (0, missing), value=ignored)[rows],
            *(None if pull is None else pull[rows] for pull in pulls),
        )
        key = clients, pulls[0] is None, pulls[1] is None
        begin, is_new = time.perf_counter(), key not in self._programs
        if is_new:
            self._programs[key] = self._compiled(arguments)
        torch.compiler.cudagraph_mark_step_begin()  # what the program gave before may be written over
        with torch.no_grad():
            slopes, found = self._programs[key](*arguments)
        if is_new and self.fabric.is_global_zero:
            seconds = time.perf_counter() - begin
            LOGGER.info("Engine fused: compiled a step of %d clients in %.1f s.", clients, seconds)
        kept = {name: each[:count].clone() for name, each in found.buffers.items()}
        losses = found.losses[:count].clone()  # gradients are used up before the next step, these are not
        return {name: each[:count] for name, each in slopes.items()}, StepOutput(losses, {}, kept)

    def _places(self, length: int, count: int) -> Rows:
        """Places of so many entries, and then of the last one again, up to a count."""
        return slice(None) if length == count else torch.arange(count, device=self.device).clamp_(max=length - 1)

    def _compiled(self, arguments: tuple[Named | Tensor | None, ...]) -> StepProgram:
        """A program for arguments of these shapes."""

        def step(
            parameters: Named,
            buffers: Named,
            inputs: Tensor,
            targets: Tensor,
            centre: Tensor | None,
            embedding: Tensor | None,
        ) -> tuple[Named, StepOutput]:
            # Copies: tracing must change nothing, and a program that writes into its inputs would be no CUDA graph.
            own = {name: each.clone() for name, each in buffers.items()}
            return StackedEngine._step(self, parameters, own, (inputs, targets), 0, (centre, embedding))

        # In this process alone: a forked rank would wait for ever for helpers that its parent has started.
        program: StepProgram = torch.compile(
            make_fx(step)(*arguments),
            dynamic=False,
            options={"compile_threads": 1, "triton.cudagraphs": self.device.type == "cuda"},
        )
        return program
