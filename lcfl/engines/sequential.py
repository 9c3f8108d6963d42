"""The engine that trains any module with any optimizer, one client after the other."""

import copy
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from itertools import compress, islice
from math import nan
from typing import TypeVar

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.optim import Optimizer

from lcfl.core import rng
from lcfl.data.samples import Samples
from lcfl.methods.local.engine import Gradient, Indices, OptimizerResult
from lcfl.methods.local.sgd import sgd_settings
from lcfl.methods.local.training import mean_loss
from lcfl.models.layout import Part
from lcfl.models.metrics import weight_in_loss
from lcfl.models.module import FederatedModule
from lcfl.models.pulls import NO_PULLS, Pulls
from lcfl.models.step_loss import check_gradient, loss_of_step

__all__ = ["SequentialEngine", "check_steps"]

FIRST_SCALE = 2.0**10  # of a loss in float16; it is halved until the gradient fits into float16
SHOW_INPUTS = ("forward", "training_step")  # overridden in a module, they may need the usual order in memory
WIDE = 4  # channels; measured in docs/optimisations.md, as are the next numbers
WEIGHTS_PER_VALUE = 16  # weights of convolutions per value that they read or write for a sample, in float32
WEIGHTS_PER_MIXED_VALUE = 8  # the same in lower precision
SCORED_BATCH = 512  # samples at a time in evaluation

Result = TypeVar("Result")


class SequentialEngine:
    """Trains clients in one module on this rank's device: copies a client's model in, trains it and copies it out.

    The module is not set up by Fabric, which would average the gradients of different clients over the ranks and run
    single-device steps outside autocast. Instead it is moved to the device, and every step runs in Fabric's autocast
    and backward.

    Args:
        fabric: provides device and precision.
        module: its `training_step` and `configure_optimizers` define the local update.
        samples: the pool that batches are gathered from; the worker sets it to what the client sees.
        max_steps: cuts every local run after so many steps (``trainer.fast_dev_run``).

    Attributes:
        buffers: the buffers ``[Q]`` that every loaded model gets if buffers are not exchanged. The worker sets them to
            the client's. A local run sets them to the updated buffers if clients keep their own
            (``model.buffer_policy: local``).
        most_clients: the largest number of tasks that run at once.
    """

    most_clients = 1

    def __init__(self, fabric: Fabric, module: FederatedModule, samples: Samples, max_steps: int | None = None) -> None:
        self.fabric = fabric
        self.device = fabric.device
        self.module = module.to(self.device)
        self.layout = module.layout
        self.samples = samples
        self.max_steps = max_steps
        self.buffers: Tensor | None = None
        self._channels_last: bool | None = None  # None until the first inputs have been seen
        own = type(module).configure_optimizers is not FederatedModule.configure_optimizers
        self._sgd = None if own or self._scaling is not None else sgd_settings(module)

    def run_all(self, tasks: Sequence[Callable[["SequentialEngine"], Result]]) -> list[Result]:
        """Carries out tasks of different clients and returns their results in the order of the tasks.

        A task must not raise an exception, or depend on what the other tasks do.

        Args:
            tasks: functions of the engine that carries them out.
        """
        return [task(self) for task in tasks]

    def seeded(self, seed: int, purpose: str, *address: int) -> AbstractContextManager[None]:
        """See `lcfl.core.rng.seeded`."""
        return rng.seeded(seed, purpose, *address)

    def load(self, model: Tensor) -> FederatedModule:
        """Puts a flat model ``[P + Q]`` and `buffers` into the module and returns it."""
        buffers = None if self.buffers is None else self.buffers.to(self.device)
        self.module.fill(self.module.network, model.to(self.device), buffers)
        return self.module

    def run_optimizer(
        self,
        start: Tensor,
        batches: Iterable[Indices],
        pulls: Pulls = NO_PULLS,
        rate_scale: float = 1.0,
        part: Part = "all",
    ) -> OptimizerResult:
        """See `lcfl.methods.local.engine.Engine.run_optimizer`."""
        module = self.load(start).train()
        self._pull_towards(pulls)
        step: Callable[[Tensor], None] | None = None
        losses = []
        with module.collecting() as logged:
            for number, indices in enumerate(islice(batches, self.max_steps)):
                batch = self._training_batch(indices)
                with self.fabric.autocast():
                    loss = loss_of_step(module, batch, number)
                check_gradient(module, loss)
                step = step or self._stepper(loss, rate_scale, part)
                step(loss)
                losses.append(loss.detach())
        check_steps(losses)
        self._keep_buffers()
        means = {name: mean_loss(values) for name, values in logged.items()}
        return OptimizerResult(self.layout.pack(module.network), mean_loss(losses), means)

    def _stepper(self, first: Tensor, rate_scale: float, part: Part) -> Callable[[Tensor], None]:
        """Returns a function that makes a step of a new run from a loss, of which `first` is the first.

        It computes plain SGD itself. For any other optimizer, and for checkpoints through which only `backward` finds
        all parameters, it makes an object by the module's `configure_optimizers`.
        """
        names, trained = self.layout.names_of(part), self.module.trained_parameters()
        holds = [name in names for name, _ in self.layout.parameters]
        if self._sgd is not None and not _has_reentrant_checkpoint(first):
            settings = self._sgd
            parameters = list(compress(trained, holds))
            velocities: list[Tensor | None] = [None] * len(parameters)

            def sgd_step(loss: Tensor) -> None:
                gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
                settings.step(parameters, gradients, velocities, rate_scale)

            return sgd_step
        self._fresh_scaler()
        optimizer = self.module.configure_optimizers()
        if not isinstance(optimizer, Optimizer):
            raise ValueError(
                f"{type(self.module).__name__}.configure_optimizers: got {type(optimizer).__name__}; a local run needs "
                "one torch.optim.Optimizer."
            )
        for group in optimizer.param_groups:
            if "lr" in group:
                group["lr"] = group["lr"] * rate_scale

        def step(loss: Tensor) -> None:
            optimizer.zero_grad()
            self.fabric.backward(loss)
            for parameter, is_held in zip(trained, holds, strict=True):
                if not is_held:
                    parameter.grad = None  # an optimizer leaves such a parameter as it is
            self.fabric.strategy.optimizer_step(optimizer)

        return step

    def _training_batch(self, indices: Indices) -> tuple[Tensor, Tensor]:
        inputs, targets = self.samples.training_batch(indices, self.device)
        return self._arranged(inputs), targets

    def _arranged(self, inputs: Tensor) -> Tensor:
        """Returns inputs in the memory order that the network's convolutions read fastest."""
        is_last = self.has_channels_last(inputs)
        return inputs.contiguous(memory_format=torch.channels_last if is_last else torch.contiguous_format)

    def has_channels_last(self, inputs: Tensor) -> bool:
        """Returns whether the network gets inputs with channels innermost, and arranges its weights in that order."""
        if self._channels_last is None:
            self._channels_last = self._gains_by_channels_last(inputs)
            if self._channels_last:
                self.module.network.to(memory_format=torch.channels_last)
        return self._channels_last

    @torch.no_grad()
    def _gains_by_channels_last(self, inputs: Tensor) -> bool:
        """Returns whether a wide network on a CPU is faster with channels innermost and accepts inputs in this order.

        The order saves time for the values between the layers and costs time for the weights. A network with a `view`
        may refuse it.
        """
        is_wide = any(each.in_channels >= WIDE for each in _convolutions(self.module.network))
        if self.device.type != "cpu" or inputs.dim() != 4 or not is_wide:
            return False
        if any(isinstance(each, nn.InstanceNorm2d) for each in self.module.network.modules()):
            return False  # torch 2.14's gradient is wrong for a single sample whose slope has channels innermost
        if any(getattr(type(self.module), name) is not getattr(FederatedModule, name) for name in SHOW_INPUTS):
            return False
        network = copy.deepcopy(self.module.network).to(memory_format=torch.channels_last).eval()
        values: list[int] = []
        for each in _convolutions(network):
            each.register_forward_hook(lambda _, read, written: values.append(read[0].numel() + written.numel()))
        try:
            with rng.isolated():
                outputs = network(inputs[:1].clone(memory_format=torch.channels_last))  # may be changed in place
        except RuntimeError:
            return False
        if outputs.dim() == 4 and not type(self.module.loss).__module__.startswith("torch.nn."):
            return False  # a user's loss may have a `view`, too
        is_single = self.fabric.strategy.precision.precision == "32-true"
        most = WEIGHTS_PER_VALUE if is_single else WEIGHTS_PER_MIXED_VALUE
        return sum(each.weight.numel() for each in _convolutions(network)) < most * sum(values)

    def gradient(self, model: Tensor, batch: Indices, number: int = 0, pulls: Pulls = NO_PULLS) -> Gradient:
        """See `lcfl.methods.local.engine.Engine.gradient`."""
        self._pull_towards(pulls)
        return self._differentiate(model, batch, number, None)

    def hessian_vector_product(self, model: Tensor, batch: Indices, direction: Tensor, number: int = 0) -> Gradient:
        """See `lcfl.methods.local.engine.Engine.hessian_vector_product`."""
        self._pull_towards(NO_PULLS)
        return self._differentiate(model, batch, number, direction)

    def _pull_towards(self, pulls: Pulls) -> None:
        own = pulls if pulls.centre is None else pulls._replace(centre=pulls.centre[: self.layout.num_parameters])
        self.module.pulls = Pulls._make(None if each is None else each.to(self.device) for each in own)

    def _differentiate(self, model: Tensor, indices: Indices, number: int, direction: Tensor | None) -> Gradient:
        """Returns the gradient, or its derivative along `direction`, and the other outputs of the forward pass."""
        module = self.load(model).train()
        batch = self._training_batch(indices)
        with module.collecting() as logged, self.fabric.autocast():
            loss = loss_of_step(module, batch, number)
        check_gradient(module, loss)
        if _has_reentrant_checkpoint(loss):
            raise ValueError(
                "model.network: it recomputes activations by torch.utils.checkpoint with use_reentrant=True, and this "
                "method cannot differentiate through that. Set use_reentrant=False (in transformers: "
                "gradient_checkpointing_enable({'use_reentrant': False}))."
            )
        parameters = module.trained_parameters()
        slopes = self._slopes(loss, parameters, create_graph=direction is not None)
        if direction is not None:
            parts = _split_like(direction.to(self.device), parameters)
            along = sum((slope * part).sum() for slope, part in zip(slopes, parts, strict=True))
            assert isinstance(along, Tensor)
            slopes = self._slopes(along, parameters)
        else:
            self._keep_buffers()
        return Gradient(
            torch.cat([slope.reshape(-1) for slope in slopes]).to(model.device),
            self._buffers().to(model.device),
            loss.detach(),
            {name: torch.stack(values).float().mean() for name, values in logged.items()},
        )

    def _slopes(self, loss: Tensor, parameters: Sequence[Tensor], create_graph: bool = False) -> list[Tensor]:
        """Returns d loss / d parameter.

        In 16-mixed the loss is scaled, so that small gradients are not lost, and the gradients are scaled back. The
        scale is determined for every gradient again, because it must not depend on which client trained before.
        """
        scaled = self._scaling is not None
        scale = FIRST_SCALE if scaled else 1.0
        while True:
            slopes = torch.autograd.grad(
                loss * scale if scaled else loss,
                parameters,
                retain_graph=scaled or create_graph,
                create_graph=create_graph,
                materialize_grads=True,
            )
            if scale == 1 or all(bool(slope.isfinite().all()) for slope in slopes):
                return [slope / scale for slope in slopes] if scaled else list(slopes)
            scale /= 2

    def _keep_buffers(self) -> None:
        """Remembers the client's buffers if it keeps its own (``model.buffer_policy: local``)."""
        if self.module.keeps_buffers:
            assert self.module.buffer_layout is not None
            self.buffers = self.module.buffer_layout.pack(self.module.network)

    def _buffers(self) -> Tensor:
        named = dict(self.module.network.named_buffers())
        flat = [named[name].detach().reshape(-1).float() for name, *_ in self.layout.buffers]
        return torch.cat(flat) if flat else torch.empty(0)

    @torch.no_grad()
    def loss(self, model: Tensor, indices: Indices) -> float:
        """See `lcfl.methods.local.engine.Engine.loss`."""
        scored = (all_of.split(SCORED_BATCH) for all_of in self.scores(model, self.samples, indices))
        total = weights = 0.0
        for scores, targets in zip(*scored, strict=True):
            if weight := weight_in_loss(self.module.loss, targets):
                total += float(self.module.loss(scores, targets)) * weight
                weights += weight
        return total / weights if weights else nan

    @torch.no_grad()
    def scores(self, model: Tensor, samples: Samples, indices: Indices) -> tuple[Tensor, Tensor]:
        """Returns the outputs ``[n, ...]`` of a model in evaluation mode and the targets ``[n, ...]``, on the device.

        Args:
            model: ``[P + Q]``.
            samples: the pool of samples, which need not be the one that the engine trains on.
            indices: into the pool, ``[n]``.
        """
        scorer, batches = self.scorer(model), []
        for start in range(0, len(indices), SCORED_BATCH):
            inputs, targets = samples.batch(indices[start : start + SCORED_BATCH], self.device)
            batches.append((scorer(inputs), targets))
        scores, labels = zip(*batches, strict=True)
        return torch.cat(scores), torch.cat(labels)

    def scorer(self, model: Tensor) -> Callable[[Tensor], Tensor]:
        """Returns a function from inputs to the outputs ``[n, ...]`` of a model ``[P + Q]`` in evaluation mode.

        Outputs such as class scores are in float32. The function is valid until the next model is loaded.
        """
        module = self.load(model).eval()

        def scores(inputs: Tensor) -> Tensor:
            with self.fabric.autocast():
                result: Tensor = module(self._arranged(inputs)).float()
            return result

        return scores

    def pixels(self, indices: Indices) -> tuple[Tensor, Tensor]:
        """See `lcfl.methods.local.engine.Engine.pixels`. The result is on the CPU."""
        inputs, targets = self.samples.batch(indices, torch.device("cpu"))
        return self.samples.pixels(inputs).flatten(1), targets

    @property
    def _scaling(self) -> MixedPrecision | None:
        """The precision plugin if losses must be scaled, as in 16-mixed, else None."""
        precision = self.fabric.strategy.precision
        return precision if isinstance(precision, MixedPrecision) and precision.scaler is not None else None

    def _fresh_scaler(self) -> None:
        """Starts a new loss scale in 16-mixed, which would otherwise depend on the client that trained before."""
        if (scaling := self._scaling) is not None:
            scaling.scaler = torch.amp.GradScaler(self.device.type, init_scale=FIRST_SCALE)


def _has_reentrant_checkpoint(loss: Tensor) -> bool:
    """Returns whether a second pass, which `torch.autograd.grad` does not start, finds some of the parameters."""
    waiting, seen = [loss.grad_fn], set[Node]()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            if type(node).__name__ == "CheckpointFunctionBackward":
                return True
            seen.add(node)
            waiting += [each for each, _ in node.next_functions]
    return False


def _convolutions(network: nn.Module) -> list[nn.Conv2d]:
    return [each for each in network.modules() if isinstance(each, nn.Conv2d)]


def _split_like(vector: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Returns the pieces of a flat vector ``[P]`` that belong to these parameters, in their shapes."""
    pieces = vector.split([parameter.numel() for parameter in parameters])
    return [piece.view_as(parameter) for piece, parameter in zip(pieces, parameters, strict=True)]


def check_steps(steps: Sequence[object]) -> None:
    """Raises a ValueError for a local run without a step."""
    if not steps:
        raise ValueError("run_optimizer: got no batch; a local run takes at least one step.")
