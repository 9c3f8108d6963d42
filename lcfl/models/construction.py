"""The construction of a network whose arguments may be unusable."""

import re
from math import prod
from typing import Any

import lightning.pytorch as pl
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

from lcfl.core.memory import check_memory
from lcfl.models.split_network import NetworkFactory

__all__ = ["checked_network", "constructed"]

UNFIT = re.compile("missing .* required|unexpected keyword|positional argument")  # what Python says of other arguments
STEPS = ("training_step", "configure_optimizers")  # what a LightningModule does that a network has no place for


def checked_network(network: NetworkFactory) -> nn.Module:
    """Returns a new network, see `constructed`.

    Raises:
        ValueError: for a network that is an object instead of a factory, one with a training step or optimizer of its
            own, one with parameters that wait for an input (``nn.LazyLinear``), or a factory whose networks share
            parameters.
    """
    if isinstance(network, nn.Module):
        raise ValueError(
            f"model.network: got a finished {type(network).__name__}; it must be a factory of networks, because "
            "every initial model is drawn anew. Pass the class, or a function such as lambda: MyNet(...)."
        )
    made = constructed(network)
    own = [name for name in STEPS if getattr(type(made), name, None) not in (None, getattr(pl.LightningModule, name))]
    if isinstance(made, pl.LightningModule) and own:
        raise ValueError(
            f"model.network: {type(made).__name__} is a LightningModule, whose {' and '.join(own)} would "
            "never be called. Give its plain network (an nn.Module), and put the rest into a subclass of "
            "lcfl.FederatedModule, which is given as --model (docs/howto/network.md)."
        )
    if lazy := [name for name, each in (*made.named_parameters(), *made.named_buffers()) if is_lazy(each)]:
        raise ValueError(
            f"model.network: {type(made).__name__} has {lazy[0]}, whose shape is not known before a first input. Give "
            "its layer the size of its inputs (nn.Linear for nn.LazyLinear), or call the layers once on a blank input, "
            "such as torch.zeros(1, 3, 32, 32), at the end of __init__."
        )
    ours = {parameter.data_ptr() for parameter in made.parameters()}
    if any(parameter.data_ptr() in ours for parameter in network().parameters()):
        raise ValueError(
            "model.network: two calls gave networks that share parameters; every call must make new parameters. In "
            "YAML, name lcfl.models.split instead of SplitNetwork. It takes factories of embedding and decision."
        )
    return made


def constructed(network: NetworkFactory) -> nn.Module:
    """Returns a new network.

    Raises:
        ValueError: if it cannot be made with its arguments, if a layer is empty, or, before anything is allocated, if
            its layers need more memory than the machine has.
    """
    try:
        with _BoundedMemory():
            made = network()
    except (RuntimeError, TypeError, ArithmeticError, MemoryError) as error:
        reason = str(error).partition("\n")[0]  # torch adds the frames of its own code
        advice = "Sizes of layers must be whole numbers of at least 1."
        is_of_call = error.__traceback__ is not None and error.__traceback__.tb_next is None  # and not of its own code
        if is_of_call and UNFIT.search(reason):
            advice = "It is called without arguments: give functools.partial(MyNet, ...), or in YAML its init_args."
        raise ValueError(
            f"model.network: it cannot be made with its arguments ({type(error).__name__}: {reason}). {advice}"
        ) from error
    for name, parameter in made.named_parameters():
        if not is_lazy(parameter) and parameter.numel() == 0:
            raise ValueError(
                f"model.network: {type(made).__name__} has the parameter {name} of shape {list(parameter.shape)}, "
                "which is empty. Sizes of layers must be at least 1."
            )
    return made


class _BoundedMemory(TorchDispatchMode):
    """Adds up the sizes of the tensors that are created, and refuses one with which they no longer fit into memory."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation of torch, after a check of the size if it creates a tensor."""
        size = args[0] if args else ()
        if isinstance(size, list | tuple) and all(isinstance(length, int) for length in size):
            self.num_bytes += 4 * prod(size)  # parameters are float32
            check_memory("model.network: its layers need", self.num_bytes, "Lower their sizes.")
        return func(*args, **(kwargs or {}))
