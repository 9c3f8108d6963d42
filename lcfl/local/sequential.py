"""The engine that runs any module with any optimizer, one client after the other."""

from collections.abc import Iterable
from itertools import islice

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.precision import MixedPrecision
from torch import Tensor
from torch.optim import Optimizer

from lcfl.data.examples import Examples
from lcfl.local.update import Descent, Positions
from lcfl.module import FederatedModule

__all__ = ["SequentialEngine"]


class SequentialEngine:
    """One module on this rank's device; a client's model is copied in, trained and copied out.

    The module is not set up by Fabric, which would average the gradients of different clients over
    the ranks and run single-device steps outside autocast: it is moved to the device, and every step
    runs in Fabric's autocast and backward.

    Args:
        fabric: gives device and precision.
        module: its `training_step` and `configure_optimizers` define the local work.
        examples: the pool that batches are gathered from; the worker sets it to what the client sees.
        max_steps: cuts every local run after so many steps (``trainer.fast_dev_run``).

    Attributes:
        buffers: what every model gets that is loaded, ``[Q]``, where buffers are not exchanged; set by the worker
            to the client's, and by a local run to what it made of them if they are the client's own
            (``model.buffer_policy: local``).
    """

    def __init__(
        self, fabric: Fabric, module: FederatedModule, examples: Examples, max_steps: int | None = None
    ) -> None:
        self.fabric = fabric
        self.module = module.to(fabric.device)
        self.layout = module.layout
        self.examples = examples
        self.max_steps = max_steps
        self.buffers: Tensor | None = None

    def load(self, model: Tensor) -> FederatedModule:
        """Puts a flat model ``[P + Q]`` and `buffers` into the module and returns it."""
        device = self.fabric.device
        buffers = None if self.buffers is None else self.buffers.to(device)
        self.module.fill(self.module.network, model.to(device), buffers)
        return self.module

    def descend(
        self,
        start: Tensor,
        batches: Iterable[Positions],
        centre: Tensor | None = None,
        embedding: Tensor | None = None,
    ) -> Descent:
        """See `lcfl.local.update.Engine.descend`."""
        module, device = self.load(start).train(), self.fabric.device
        module.pull_towards(
            centre=None if centre is None else centre[: self.layout.num_parameters].to(device),
            embedding=None if embedding is None else embedding.to(device),
        )
        self._fresh_scaler()
        optimizer = module.configure_optimizers()
        if not isinstance(optimizer, Optimizer):
            raise ValueError(
                f"{type(module).__name__}.configure_optimizers: got {type(optimizer).__name__}; a local run needs one "
                "torch.optim.Optimizer."
            )
        losses = []
        with module.collecting() as logged:
            for number, indices in enumerate(islice(batches, self.max_steps)):
                batch = self.examples.training_batch(indices, device)
                with self.fabric.autocast():
                    loss = module.training_step(batch, number)
                optimizer.zero_grad()
                self.fabric.backward(loss)
                self.fabric.strategy.optimizer_step(optimizer)
                losses.append(loss.detach())
        if module.buffer_layout is not None and module.buffer_policy == "local":
            self.buffers = module.buffer_layout.pack(module.network)
        means = {name: _mean(values) for name, values in logged.items()}
        return Descent(self.layout.pack(module.network), _mean(losses), means)

    def _fresh_scaler(self) -> None:
        """16-mixed: a loss scale of its own per local run, or it would depend on who trained before."""
        precision = self.fabric.strategy.precision
        if isinstance(precision, MixedPrecision) and precision.scaler is not None:
            precision.scaler = torch.amp.GradScaler(self.fabric.device.type)


def _mean(values: list[Tensor]) -> float:
    return float(torch.stack(values).float().mean())
