"""The engine that computes each step by one call into C++, for common networks.

Legend: P parameters and Q buffer entries in a model's flat vector, B batch size.
"""

import copy
import ctypes
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

import torch
from lightning.fabric import Fabric
from torch import Tensor

from lcfl.data.samples import Samples
from lcfl.data.spec import SampleSpec
from lcfl.engines import kernels
from lcfl.engines.forward_graph import Unsupported
from lcfl.engines.sequential import SequentialEngine, check_steps
from lcfl.engines.step_settings import check_loss, check_targets, loss_settings, optimizer_settings
from lcfl.engines.tracing import Program, trace
from lcfl.methods.local.engine import Gradient, Indices, OptimizerResult
from lcfl.models.hooks import has_hooks
from lcfl.models.layout import Part
from lcfl.models.metrics import CLASS_LOSSES
from lcfl.models.module import FederatedModule
from lcfl.models.pulls import NO_PULLS, Pulls

__all__ = ["CompiledEngine", "check_compiled"]

NEEDS_BFLOAT16 = (
    "in bf16-mixed it needs a processor with AMX or AVX512-bf16, and a layer with 16 inputs and outputs or more"
)
# methods that this engine replaces
REPLACED = ("forward", "training_step", "regularizer", "configure_optimizers", "trained_parameters", "train", "eval")


def check_compiled(
    module: FederatedModule, spec: SampleSpec, device: str = "cpu", precision: str = "32-true"
) -> Program:
    """Checks that `CompiledEngine` trains a module the way the module defines it, and returns the module's program.

    Builds the kernels if they are missing.

    Args:
        module: network, loss and optimizer.
        spec: what one sample looks like.
        device: the type of the device.
        precision: the precision of a step's arithmetic.

    Raises:
        Unsupported: if it does not, with the reason.
    """
    if device != "cpu" or precision not in ("32-true", "bf16-mixed"):
        raise Unsupported(f"it computes on a CPU, in 32-true or bf16-mixed, not in {precision} on {device}")
    if spec.dtype != torch.float32:
        raise Unsupported(f"the inputs are {spec.dtype}, not torch.float32")
    for name in REPLACED:
        if name in vars(module) or getattr(type(module), name) is not getattr(FederatedModule, name):
            raise Unsupported(f"{type(module).__name__} defines its own {name}")
    if has_hooks(module):
        raise Unsupported(f"{type(module).__name__} has hooks")
    check_loss(module.loss, spec)
    optimizer_settings(module)
    program = trace(module.network, spec.shape, module.layout)
    check_targets(module.loss, spec, program.num_outputs, program.log_softmax)
    try:
        opened = kernels.OpenProgram(program.arguments, precision == "bf16-mixed")
    except kernels.Unavailable as error:
        raise Unsupported(str(error)) from None
    if precision == "bf16-mixed" and not opened.is_in_bfloat16:
        raise Unsupported(NEEDS_BFLOAT16)
    _check_trace(module, spec.shape, program)
    return program


def _check_trace(module: FederatedModule, shape: Sequence[int], program: Program) -> None:
    """Checks that the network and its program give two random samples the same outputs, in float32.

    A network whose code does what a trace does not show would otherwise be trained as another one.
    """
    inputs = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    network = copy.deepcopy(module.network).eval()
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            wanted = network(inputs.clone())  # which it may change
    except Exception as error:
        raise Unsupported(f"it cannot take two random inputs ({type(error).__name__}: {error})") from None
    if wanted.shape != (2, program.num_outputs) or wanted.dtype != torch.float32:
        raise Unsupported(
            f"it returns {list(wanted.shape)} in {wanted.dtype} for two samples, and its trace {program.num_outputs} "
            "each in torch.float32"
        )
    outputs = torch.empty(2, program.num_outputs)
    opened = kernels.OpenProgram(program.arguments, frozen=module.frozen_part())
    model = module.layout.pack(network)
    buffers = model[module.layout.num_parameters :] if (apart := module.buffer_layout) is None else apart.pack(network)
    kernels.load().lcfl_scores(
        opened.address, *(each.data_ptr() for each in (model, buffers, inputs)), 2, outputs.data_ptr()
    )
    if program.log_softmax:  # its own values would hide small scores
        outputs, wanted = (each - each.mean(1, keepdim=True) for each in (outputs, wanted))
    if not torch.allclose(
        outputs, wanted, rtol=1e-3, atol=1e-3 * float(wanted.abs().nan_to_num(0, 0).max()), equal_nan=True
    ):
        raise Unsupported("its outputs are not those of its trace")


class CompiledEngine(SequentialEngine):
    """Trains models as flat vectors: a step reads and writes ``[P + Q]``, without autograd and without the module.

    It agrees with `SequentialEngine` up to rounding, because it adds numbers in another order. Hessian-vector products
    are computed by that engine.

    Args:
        fabric: a CPU, in float32 or bf16-mixed. In bf16-mixed, the factors of wide layers are in bfloat16.
        module: one that `check_compiled` accepts.
        samples: the pool that batches are gathered from; the worker sets it to what the client sees.
        shape: the shape of one input of the network.
        program: what `check_compiled` returned.
        max_steps: cuts every local run after so many steps (``trainer.fast_dev_run``).
    """

    def __init__(
        self,
        fabric: Fabric,
        module: FederatedModule,
        samples: Samples,
        shape: Sequence[int],
        program: Program,
        max_steps: int | None = None,
    ) -> None:
        super().__init__(fabric, module, samples, max_steps)
        bfloat16 = fabric.strategy.precision.precision == "bf16-mixed"
        self._kernels = kernels.load()
        settings = loss_settings(module.loss)
        self._program = kernels.OpenProgram(program.arguments, bfloat16, settings, module.frozen_part())
        if bfloat16 and not self._program.is_in_bfloat16:  # a rank on another host than the one that chose the engine
            raise ValueError(f"trainer.engine: got compiled, but {NEEDS_BFLOAT16}; use sequential.")
        self._optimizer = optimizer_settings(module)
        self._num_parameters = module.layout.num_parameters
        self._needs_two = program.needs_two
        self._traced = program
        self._num_outputs = program.num_outputs
        self._has_labels = isinstance(module.loss, CLASS_LOSSES)
        self._shape = torch.Size(shape)

    def run_optimizer(
        self,
        start: Tensor,
        batches: Iterable[Indices],
        pulls: Pulls = NO_PULLS,
        rate_scale: float = 1.0,
        part: Part = "all",
    ) -> OptimizerResult:
        """See `lcfl.methods.local.engine.Engine.run_optimizer`."""
        model, buffers = self._opened(start)
        optimizer = kernels.Optimizer.from_buffer_copy(self._optimizer)
        optimizer.rate *= rate_scale
        trained = self.layout.range_of(part)
        optimizer.begin, optimizer.end = trained.start, trained.stop
        vectors = (*self._moments(), *self._targets(pulls), self._correction(pulls))
        options = ctypes.byref(optimizer), *(None if each is None else each.data_ptr() for each in vectors)
        losses = []
        gathered = self.samples.training_batches(islice(batches, self.max_steps), self.device)
        for number, batch in enumerate(gathered, start=1):
            optimizer.step = number
            losses.append(self._at_batch(self._kernels.lcfl_step, model, buffers, batch, *options))
        check_steps(losses)
        self._close(buffers)
        return OptimizerResult(model, sum(losses) / len(losses), {})

    def gradient(self, model: Tensor, batch: Indices, number: int = 0, pulls: Pulls = NO_PULLS) -> Gradient:
        """See `lcfl.methods.local.engine.Engine.gradient`."""
        model, buffers = self._opened(model)
        vector, parameters = torch.empty(self._num_parameters), model[: self._num_parameters]
        gathered = self.samples.training_batch(batch, self.device)
        loss = self._at_batch(self._kernels.lcfl_gradient, model, buffers, gathered, vector.data_ptr())
        weights = self._optimizer.cluster_weight, self._optimizer.global_weight
        for target, weight in zip(self._targets(pulls), weights, strict=True):
            if target is not None:
                apart = parameters[: len(target)] - target
                vector[: len(target)] += weight * apart
                loss += weight / 2 * float(apart.square().sum())
        if (correction := self._correction(pulls)) is not None:
            vector += correction
        self._close(buffers)
        kept = model[self._num_parameters :] if self.layout.buffers else torch.empty(0)
        return Gradient(vector, kept, torch.tensor(loss), {})

    def scorer(self, model: Tensor) -> Callable[[Tensor], Tensor]:
        """See `SequentialEngine.scorer`."""
        model, buffers = self._opened(model)

        def scores(inputs: Tensor) -> Tensor:
            inputs, result = self._checked(inputs), torch.empty(len(inputs), self._num_outputs)
            pointers = [each.data_ptr() for each in (model, buffers, inputs)]
            self._kernels.lcfl_scores(self._program.address, *pointers, len(inputs), result.data_ptr())
            return self._traced.returned(result)

        return scores

    def _opened(self, model: Tensor) -> tuple[Tensor, Tensor]:
        """Returns a copy of a model ``[P + Q]`` and its buffers, which are part of the copy if they are exchanged."""
        model = _vector(model, self.layout.size, "the model").clone(memory_format=torch.contiguous_format)
        if (apart := self.module.buffer_layout) is None:
            return model, model[self._num_parameters :]
        buffers = apart.pack(self.module.network) if self.buffers is None else self.buffers
        return model, _vector(buffers, apart.size, "the client's buffers").clone()

    def _moments(self) -> tuple[Tensor | None, Tensor | None]:
        """Returns Adam's two moments ``[P]``, or the velocity of SGD, which needs no value before the first step."""
        if self._optimizer.is_adam:
            return torch.zeros(self._num_parameters), torch.zeros(self._num_parameters)
        return (torch.empty(self._num_parameters) if self._optimizer.momentum else None), None

    def _targets(self, pulls: Pulls) -> list[Tensor | None]:
        """Returns Omega ``[P]`` and Phi ``[P_phi]`` as the kernels read them; None for a pull without a weight."""
        lengths = {"the cluster's centre": self._num_parameters, "the global embedding": self.layout.num_embedding}
        weights = self._optimizer.cluster_weight, self._optimizer.global_weight
        return [
            None if target is None or weight == 0 else _vector(target[:length], length, name).contiguous()
            for target, weight, (name, length) in zip(pulls[:2], weights, lengths.items(), strict=True)
        ]

    def _correction(self, pulls: Pulls) -> Tensor | None:
        """Returns what is added to every gradient ``[P]`` as the kernels read it."""
        if pulls.correction is None:
            return None
        return _vector(pulls.correction, self._num_parameters, "the correction").contiguous()

    def _at_batch(
        self,
        kernel: Callable[..., float],
        model: Tensor,
        buffers: Tensor,
        batch: tuple[Tensor, Tensor],
        *options: object,
    ) -> float:
        """Calls a kernel for inputs ``[B, ...]`` and labels ``[B]`` or numbers ``[B, C]``, and returns the loss."""
        inputs, targets = self._checked(batch[0]), batch[1]
        if len(inputs) == 0:
            raise ValueError("got a batch without samples; a step needs one at least.")
        if self._needs_two and len(inputs) == 1:
            raise ValueError(
                "Expected more than 1 value per channel when training: a batch of one sample has no variance"
            )
        targets = self._checked_targets(targets, len(inputs))
        pointers = [each.data_ptr() for each in (model, buffers, inputs, targets)]
        masks = self._masks(batch[0])
        places = (ctypes.c_void_p * len(masks))(*(each.data_ptr() for each in masks))
        loss = kernel(self._program.address, *pointers, places, len(targets), *options)
        if loss == kernels.BAD_LABEL:
            raise ValueError(
                f"labels: got {targets.min()} to {targets.max()}; they must be from 0 to {self._num_outputs - 1}, as "
                f"the network returns {self._num_outputs} scores."
            )
        return float(loss)

    def _masks(self, inputs: Tensor) -> list[Tensor]:
        """Returns a mask ``[B, size]`` for every dropout."""
        return [each.mask(len(inputs), self.has_channels_last(inputs)) for each in self._traced.dropouts]

    def _checked(self, inputs: Tensor) -> Tensor:
        """Returns inputs as the kernels read them. Other inputs would make the kernels read outside their memory."""
        if inputs.dtype != torch.float32 or inputs.shape[1:] != self._shape:
            raise ValueError(
                f"trainer.engine: compiled was made for inputs of shape {tuple(self._shape)} in torch.float32, but an "
                f"augmentation or a client transform returned {tuple(inputs.shape[1:])} in {inputs.dtype}; set "
                "trainer.engine=sequential, or change the augmentation or the transform."
            )
        return inputs.contiguous()

    def _checked_targets(self, targets: Tensor, number: int) -> Tensor:
        """Returns labels ``[B]`` or numbers ``[B, C]`` as the kernels read them."""
        name, dtype = ("labels", torch.int64) if self._has_labels else ("numbers", torch.float32)
        shape = (number,) if self._has_labels else (number, self._num_outputs)
        if targets.dtype != dtype:
            raise ValueError(f"{name}: got {targets.dtype}; they must be {dtype}.")
        if targets.shape != shape:
            raise ValueError(f"{name}: got shape {list(targets.shape)} for {number} samples; {list(shape)} is needed.")
        return targets.contiguous()

    def _close(self, buffers: Tensor) -> None:
        """Remembers the client's buffers if it keeps its own (``model.buffer_policy: local``)."""
        if self.module.keeps_buffers:
            self.buffers = buffers


def _vector(values: Tensor, length: int, name: str) -> Tensor:
    """Returns `values` if it is a vector of this length in float32. The kernels would read beyond any other."""
    if values.dtype != torch.float32 or values.shape != (length,) or values.device.type != "cpu":
        raise ValueError(
            f"{name}: got {values.dtype} of shape {list(values.shape)} on {values.device}; engine compiled needs "
            f"torch.float32 of shape [{length}] on the CPU."
        )
    return values
