"""A simulated device. Its tensors say that they are on ``meta``, but they have values, which the CPU computes.

An operation on tensors of both devices is an error, as on a GPU, so tests of placement need none.
"""

import threading

import pytest
import torch
from lightning.fabric import Fabric
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

__all__ = ["DEVICE", "Elsewhere", "simulated"]

DEVICE = torch.device("meta")
CPU = torch.device("cpu")
INDEXING = (torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_)  # by indices on any device
COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)  # from one device to another


class Elsewhere(torch.Tensor):
    """A tensor on the simulated device."""

    @staticmethod
    def __new__(cls, own):
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            own.shape,
            own.stride(),
            own.storage_offset(),
            dtype=own.dtype,
            device=DEVICE,
            requires_grad=own.requires_grad,
        )
        made.own = own
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return dispatched(function, args, kwargs or {})

    def tolist(self):
        return self.own.tolist()

    def data_ptr(self):
        return self.own.data_ptr()

    def numpy(self, *args, **options):
        raise TypeError(f"can't convert a tensor on {DEVICE} to numpy; copy it to the CPU first.")

    __array__ = numpy

    def __repr__(self):
        return f"Elsewhere({self.own})"


def dispatched(function, args, kwargs):
    """Runs an operation on the CPU. Its results are on the device of its arguments, or on the one that it names."""
    tensors = _tensors(args, kwargs)
    is_indexed = function.overloadpacket in INDEXING and isinstance(args[0], Elsewhere)
    placed = _tensors(args[:1], args[2:], kwargs) if is_indexed else tensors
    places = {isinstance(each, Elsewhere) for each in placed if each.dim()}  # numbers may be anywhere
    if len(places) > 1 and function not in COPIES:
        raise RuntimeError(f"{function}: expected all tensors on one device, got some on {DEVICE} and some on {CPU}.")
    named = kwargs.get("device")
    is_elsewhere = any(isinstance(each, Elsewhere) for each in tensors)
    if named is not None:
        is_elsewhere = torch.device(named).type == DEVICE.type
        kwargs = kwargs | {"device": CPU}
    elif function is torch.ops.aten.copy_.default:
        is_elsewhere = isinstance(args[0], Elsewhere)
    own_args, own_kwargs = tree_map(lambda each: each.own if isinstance(each, Elsewhere) else each, (args, kwargs))
    result = function(*own_args, **own_kwargs)
    if not is_elsewhere:
        return result
    known = {id(each.own): each for each in tensors if isinstance(each, Elsewhere)}  # changed in place and returned
    return tree_map(lambda each: known[id(each)] if id(each) in known else _moved(each), result)


def _moved(value):
    return Elsewhere(value) if isinstance(value, torch.Tensor) else value


def _tensors(*trees):
    return [each for each in tree_flatten(trees)[0] if isinstance(each, torch.Tensor)]


class Operations(TorchDispatchMode):
    """Catches operations without tensors, such as `torch.empty`, and those that move a tensor."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return dispatched(function, args, kwargs or {})


class Values(TorchFunctionMode):
    """Catches `torch.tensor`, which would make a tensor without values."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.tensor and kwargs.get("device") is not None:
            return function(*args, **{**kwargs, "device": CPU}).to(kwargs["device"])
        return function(*args, **kwargs)


@pytest.fixture
def simulated(monkeypatch):
    """Moves what lcfl computes on a device to the simulated one, in all threads of this process."""
    run = threading.Thread.run

    def run_there(self):
        with Values(), Operations():
            run(self)

    monkeypatch.setattr(threading.Thread, "run", run_there)
    monkeypatch.setattr(Fabric, "device", DEVICE)
    autocast = torch.autocast  # does not know the device
    monkeypatch.setattr(
        torch,
        "autocast",
        lambda name, *args, **options: autocast(CPU.type if name == DEVICE.type else name, *args, **options),
    )
    with Values(), Operations():
        yield DEVICE
