"""The stacked engine with its step compiled into one program, which a GPU replays as a CUDA graph.

Legend: C clients at once, P parameters of a model, B batch size.
"""

import logging
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from lcfl.data.spec import SampleSpec
from lcfl.engines import kernels
from lcfl.engines.stacked import StackedEngine, check_stacked
from lcfl.engines.stacked_rows import Rows, at
from lcfl.engines.tracing import Unsupported
from lcfl.engines.vmapped import Named, StepOutput
from lcfl.models.module import FederatedModule, Pulls

__all__ = ["FusedEngine", "check_fused"]

LOGGER = logging.getLogger(__name__)
StepProgram = Callable[..., tuple[Named, StepOutput]]  # takes parameters, buffers, inputs, targets and pulls


def check_fused(module: FederatedModule, spec: SampleSpec, device: str = "cpu", precision: str = "32-true") -> None:
    """Checks that `FusedEngine` trains a module the way the module defines it, and that torch.compile works here.

    Args:
        module: network, loss and optimizer.
        spec: what one sample looks like.
        device: the type of the device.
        precision: the precision of a step's arithmetic.

    Raises:
        Unsupported: if one of the two is not the case, with the reason.
    """
    if not check_stacked(module, spec, precision).ignores_padding:
        raise Unsupported(
            "its step cannot be compiled for one size of batch: shorter batches can be padded with samples that the "
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
    """Traces a step's forward and backward pass once and compiles it by torch.compile, on a GPU into CUDA graphs.

    A program is for fixed shapes. Batches are padded to the batch size. The number of clients is padded to a power of
    two by copies of the last one, whose results are dropped. So there are few programs, and the program that a stack
    uses depends on its size alone. `StackedEngine` does the rest: optimizer, scores, Hessian-vector products and
    batches larger than the batch size. The engine agrees with `SequentialEngine` up to rounding.

    The arguments are those of `StackedEngine`; every program has B = `batch_size`. The module must be one that
    `check_fused` accepts. Its loss is traced, so side effects of the loss happen only once.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.most_clients = 1 << (self.most_clients.bit_length() - 1)  # keeps programs within the budget
        self._programs: dict[tuple[object, ...], StepProgram] = {}

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
        count, length = targets.shape[:2]
        if directions is not None or length > self._batch_size:
            return super()._step(parameters, buffers, batch, number, pulls, directions)
        assert isinstance(self.module.loss, nn.CrossEntropyLoss), "check_fused refuses other losses"
        clients = 1 << (count - 1).bit_length()
        rows, columns = self._places(count, clients), self._places(length, self._batch_size)
        missing, ignored = self._batch_size - length, self.module.loss.ignore_index
        arguments = (
            at(parameters, rows),
            at(buffers, rows),
            inputs[:, columns][rows],
            functional.pad(targets, (*[0] * (2 * targets.dim() - 4), 0, missing), value=ignored)[rows],
            Pulls._make(None if pull is None else pull[rows] for pull in pulls),
        )
        untrained = tuple(name for name, each in parameters.items() if not each.requires_grad)
        key = clients, *(pull is None for pull in pulls), untrained
        begin, is_new = time.perf_counter(), key not in self._programs
        if is_new:
            self._programs[key] = self._compiled(arguments)
        torch.compiler.cudagraph_mark_step_begin()  # the program's previous outputs may be overwritten
        with torch.no_grad():
            slopes, output = self._programs[key](*arguments)
        if is_new and self.fabric.is_global_zero:
            seconds = time.perf_counter() - begin
            LOGGER.info("Engine fused: compiled a step of %d clients in %.1f s.", clients, seconds)
        kept = {name: each[:count].clone() for name, each in output.buffers.items()}
        losses = output.losses[:count].clone()  # unlike the gradients, they are still needed after the next step
        return {name: each[:count] for name, each in slopes.items()}, StepOutput(losses, {}, kept)

    def _places(self, length: int, count: int) -> Rows:
        """Returns the indices of `length` entries, followed by the last one again up to `count` indices."""
        return slice(None) if length == count else torch.arange(count, device=self.device).clamp_(max=length - 1)

    def _compiled(self, arguments: tuple[Named | Tensor | Pulls, ...]) -> StepProgram:
        """Compiles a program for arguments of these shapes."""

        def step(
            parameters: Named, buffers: Named, inputs: Tensor, targets: Tensor, pulls: Pulls
        ) -> tuple[Named, StepOutput]:
            # Copies, because tracing must change nothing and a program that writes into its inputs is no CUDA graph.
            own = {name: each.clone() for name, each in buffers.items()}
            return StackedEngine._step(self, parameters, own, (inputs, targets), 0, pulls)

        # One compile thread, in this process: a forked rank would wait forever for helpers that its parent started.
        program: StepProgram = torch.compile(
            make_fx(step)(*arguments),
            dynamic=False,
            options={"compile_threads": 1, "triton.cudagraphs": self.device.type == "cuda"},
        )
        return program
