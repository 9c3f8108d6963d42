"""Which engine trains a module."""

import logging
from typing import Literal, get_args

from lightning.fabric import Fabric

from lcfl.data.datamodule import FederatedDataModule
from lcfl.engines.compiled import CompiledEngine, check_compiled
from lcfl.engines.program import Unsupported
from lcfl.engines.sequential import SequentialEngine
from lcfl.module import FederatedModule

__all__ = ["EngineName", "choose", "make"]

LOGGER = logging.getLogger(__name__)
EngineName = Literal["sequential", "compiled"]
WIDEST = 64  # input channels of a convolution; beyond, what torch calls is faster (docs/performance.md)


def choose(wanted: str, module: FederatedModule, data: FederatedDataModule, device: str, precision: str) -> EngineName:
    """The engine of that name, or under ``auto`` the fastest that trains the module as it wants to be trained.

    It depends on the module, the shape of the data, the device and whether there is a compiler, and on no
    measurement: the same command gives the same engine again, and so the same bits.

    Args:
        wanted: a name or ``auto``.
        module: network, loss and optimizer.
        data: what is trained on; need not be set up.
        device: the type of the device.
        precision: of a step's arithmetic.

    Raises:
        ValueError: for another name, or an engine that cannot train the module; says why.
    """
    known = get_args(EngineName)
    if wanted not in ("auto", *known):
        raise ValueError(f"trainer.engine: got {wanted!r}; allowed are auto, {', '.join(known)}.")
    if wanted == "sequential":
        return "sequential"
    try:
        program = check_compiled(module, data.dataset.shape, data.dataset.dtype, device, precision)
        if wanted == "auto" and program.widest > WIDEST:
            raise Unsupported(f"its convolutions have up to {program.widest} channels, for which it is slower")
    except Unsupported as reason:
        if wanted == "compiled":
            raise ValueError(f"trainer.engine: got compiled, but {reason}; use auto or sequential.") from None
        LOGGER.info("Engine sequential, because compiled is not for this: %s.", reason)
        return "sequential"
    return "compiled"


def make(
    name: EngineName, fabric: Fabric, module: FederatedModule, data: FederatedDataModule, max_steps: int | None = None
) -> SequentialEngine:
    """The engine of a rank.

    Args:
        name: what `choose` gave.
        fabric: device and precision of the rank.
        module: network, loss and optimizer; the engine trains in it.
        data: set up.
        max_steps: cuts every local run after so many steps.
    """
    if name == "compiled":
        return CompiledEngine(fabric, module, data.examples, data.dataset.shape, max_steps)
    return SequentialEngine(fabric, module, data.examples, max_steps)
