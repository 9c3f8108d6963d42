"""Selection of the engine that trains a module."""

import logging
from dataclasses import dataclass
from typing import Literal, cast, get_args

from lightning.fabric import Fabric

from lcfl.core.validation import check_choice
from lcfl.data.datamodule import FederatedDataModule
from lcfl.engines.compiled import CompiledEngine, check_compiled
from lcfl.engines.forward_graph import Unsupported
from lcfl.engines.sequential import SequentialEngine
from lcfl.engines.stacked import StackedEngine, check_stacked
from lcfl.engines.tracing import Program
from lcfl.models.module import FederatedModule

__all__ = ["ChosenEngine", "EngineName", "choose_engine", "make_engine"]

LOGGER = logging.getLogger(__name__)
EngineName = Literal["sequential", "compiled", "stacked"]


@dataclass(frozen=True, eq=False)
class ChosenEngine:
    """The engine of a run.

    Attributes:
        name: its name.
        program: what `compiled` computes; None for the other engines. It is traced before ranks are forked, because a
            trace in a rank would copy memory that they share.
    """

    name: EngineName
    program: Program | None = None


def choose_engine(
    wanted: str,
    module: FederatedModule,
    data: FederatedDataModule,
    device: str,
    precision: str,
    advice: str = "use auto or sequential",
) -> ChosenEngine:
    """Returns the named engine, or the one that ``auto`` takes.

    ``auto`` takes ``compiled`` on a CPU and ``stacked`` on a GPU if it trains the module as it is defined, and else
    ``sequential``, also for networks of wide linear layers of tokens on a CPU, and logs the reason then. The choice
    depends on the module, the shape of the data, the device and whether there is a compiler, and in ``bf16-mixed`` on
    whether the processor has AMX or AVX512-bf16. It does not depend on measurements: the same command gives the same
    engine again, and so the same bits. So it is not always the fastest (docs/performance.md).

    Args:
        wanted: a name or ``auto``.
        module: network, loss and optimizer.
        data: the data to train on; need not be set up.
        device: the type of the device.
        precision: the precision of a step's arithmetic.
        advice: what to do if the named engine cannot train the module, for the error message.

    Raises:
        ValueError: for an unknown name, or an engine that cannot train the module, with the reason.
    """
    check_choice("trainer.engine: got ", wanted, ("auto", *get_args(EngineName)))
    tried = wanted if wanted != "auto" else "compiled" if device == "cpu" else "stacked"
    try:
        if tried == "compiled":
            program = check_compiled(module, data.dataset.spec, device, precision)
            if wanted == "auto" and program.is_of_tokens:
                raise Unsupported("most of it are wide linear layers of tokens, which it makes no faster")
            return ChosenEngine("compiled", program)
        if tried == "stacked":
            check_stacked(module, data.dataset.spec, precision)
    except Unsupported as reason:
        if wanted != "auto":
            raise ValueError(f"trainer.engine: got {wanted}, but {reason}; {advice}.") from None
        # A warning reaches standard error from Python, too, where the logger has no handler.
        LOGGER.warning("Engine sequential, because %s does not suit this run: %s.", tried, reason)
        return ChosenEngine("sequential")
    return ChosenEngine(cast(EngineName, tried))


def make_engine(
    chosen: ChosenEngine,
    fabric: Fabric,
    module: FederatedModule,
    data: FederatedDataModule,
    max_steps: int | None = None,
) -> SequentialEngine:
    """Makes the engine of a rank.

    Args:
        chosen: what `choose_engine` returned.
        fabric: device and precision of the rank.
        module: network, loss and optimizer; the engine trains in it.
        data: a data module that has been set up.
        max_steps: cuts every local run after so many steps.
    """
    spec = data.dataset.spec
    if chosen.name == "compiled":
        assert chosen.program is not None, "choose_engine traces it"
        return CompiledEngine(fabric, module, data.samples, spec.shape, chosen.program, max_steps)
    if chosen.name == "stacked":
        longest = min(data.batch_size, int(data.population.sizes.max()))  # of all batches
        return StackedEngine(fabric, module, data.samples, spec, longest, max_steps)
    return SequentialEngine(fabric, module, data.samples, max_steps)
