"""Notices what a user's part of a run remembers in its attributes, where no checkpoint holds it."""

import hashlib
import io
import pickle
import warnings
from collections.abc import Iterable
from typing import Any

import numpy as np
from torch import Tensor, nn

from lcfl.core.callback import Callback
from lcfl.models.module import FederatedModule
from lcfl.runs.client_shards import content_hash
from lcfl.runs.identity import added_attributes
from lcfl.runs.user_code import is_installed

__all__ = ["UnsavedMemory"]

OTHERS = ("builtins", "abc", "typing", "lcfl", "torch", "lightning", "lightning_fabric", "pytorch_lightning")
MUTABLE = (dict, list, set, np.ndarray, Tensor)


class UnsavedMemory:
    """Compares the attributes of parts, and those of their classes that can change, with what they were before a run.

    The parts of lcfl are left out, as are attributes that a part lists in `remembers`, and parts with a `state_dict` of
    their own.

    Args:
        parts: the parts, at the start of the run.
        network: the network. Its layers are parts, too, except those of installed packages. A checkpoint holds their
            parameters and buffers.
    """

    def __init__(self, parts: Iterable[object], network: nn.Module | None = None) -> None:
        own = [(part, False) for part in parts if not type(part).__module__.startswith("lcfl.")]
        layers = () if network is None else network.modules()
        own += [(layer, True) for layer in layers if not is_installed(type(layer))]
        self._before = [(part, is_layer, _contents(part, is_layer)) for part, is_layer in own]

    def warn(self) -> None:
        """Warns about each part that has changed since, once."""
        waiting, self._before = self._before, []
        for part, is_layer, before in waiting:
            now = _contents(part, is_layer)
            changed = sorted(name for name in now if now[name] != before.get(name))
            if not changed:
                self._before.append((part, is_layer, before))
                continue
            warnings.warn(
                f"{type(part).__name__} has changed its attribute{'s' * (len(changed) > 1)} {', '.join(changed)}, "
                "which no checkpoint holds: a resumed run starts without it. An aggregation keeps what it remembers in "
                "state.aggregation, a local update in LocalOutput.memory, a clustering or callback lists it in "
                "remembers. What a network learns, it has as parameters or buffers; a layer, module or loss keeps "
                "nothing else from step to step.",
                stacklevel=3,
            )


def _contents(part: object, is_layer: bool) -> dict[str, bytes]:
    """Returns digests of the attributes of a part, by name, without those that a checkpoint holds.

    Results of the last forward pass, which have a gradient function, are left out: the next one makes them anew.
    """
    saved: set[str] = set()
    if isinstance(part, Callback):
        if type(part).state_dict is not Callback.state_dict:
            return {}
        saved = {f"_{name}" for name in part.remembers}
    if isinstance(part, FederatedModule):
        values = added_attributes(part)
    elif isinstance(part, nn.Module):
        saved = set(vars(nn.Module()))
        values = vars(part) | ({} if is_layer else dict(part.named_buffers()))
    else:
        values = vars(part)
    values = {name: value for name, value in (_of_classes(part) | values).items() if name not in saved}
    return {name: _digest(value) for name, value in values.items() if getattr(value, "grad_fn", None) is None}


def _of_classes(part: object) -> dict[str, Any]:
    """Returns the attributes of a user's classes that can change in place."""
    own = [each for each in reversed(type(part).__mro__) if each.__module__.partition(".")[0] not in OTHERS]
    values = {name: value for each in own for name, value in vars(each).items()}
    return {name: value for name, value in values.items() if isinstance(value, MUTABLE) and not name.startswith("__")}


def _digest(value: Any) -> bytes:
    text = io.BytesIO()
    try:  # a module may have been in training or evaluation mode
        _Contents(text).dump(dict(value.state_dict()) if isinstance(value, nn.Module) else value)
    except Exception:  # an open file, a lock: it could not be saved in any case
        return b""
    return hashlib.blake2b(text.getbuffer(), digest_size=16).digest()


class _Contents(pickle.Pickler):
    """Writes equal values as equal bytes: no address of a tensor's memory, and no reference to an identical object."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.fast = True  # without it, pickle refers to an object that it has written before

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return str, (f"{value.dtype} {tuple(value.shape)} {content_hash(value.detach().cpu())}",)
        return NotImplemented
