"""Loading of weights that were trained elsewhere."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import product, takewhile
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lcfl.models.patterns import covers, layer_of

__all__ = ["Weights", "load_entries", "load_weights"]

if TYPE_CHECKING:
    Weights = str | Path | Mapping[str, Tensor]
else:
    Weights = str | Path  # what an option can be

SHOWN = 3  # most names in a message
WRAPPERS = ("state_dict", "model")  # entries under which training scripts save a state dict beside other things
MODULE = "network."  # where a FederatedModule has its network; its loss may have weights, too
ADAPTED = ".base_layer"  # what peft inserts into the names of a layer that it adds an adapter to


def load_weights(network: nn.Module, weights: Weights, but: Sequence[str] | None = None) -> dict[str, Tensor]:
    """Fills a network, including its buffers, from a state dict or from a file with one.

    The file is one that ``torch.save(network.state_dict(), path)`` or the package safetensors wrote. It can hold
    numbers but never code. The state dict may be the entry ``state_dict`` or ``model`` of a dict. First components that
    all names of a side have in common (``module.conv1.weight``) are left out on either side if more names agree then.
    Layers to which peft has added an adapter are found under their names without it.

    Args:
        network: the network.
        weights: the state dict, or the file; one whose name ends in ``.safetensors`` is read by that package.
        but: patterns (`lcfl.models.patterns`) of entries that are not read, so that the network keeps what it has.

    Returns:
        A copy of what the network was given, by its names.

    Raises:
        ValueError: if there is no such file, it or the state dict holds something else, its names or shapes do not fit
            the network, or a pattern covers nothing; or for safetensors without that package.
        TypeError: for weights of another kind.
    """
    but, expected = [] if but is None else but, network.state_dict()
    if isinstance(but, str):
        raise ValueError(f"model.init_except: got the text {but!r}; it must be a list of patterns, e.g. ['{but}'].")
    if isinstance(weights, Mapping):
        source = "the given state dict"
        # What is trained on must not change it.
        content = {name: each.detach().to("cpu", copy=True) for name, each in _tensors(weights, source).items()}
    else:
        source = str(weights)
        content = dict(_tensors(_read(weights), source))
    given = _renamed(_but(content, but), expected)  # a loss with weights, say, would hide what all other names share
    if idle := [each for each in but if not any(covers(each, name) for name in (*expected, *given, *content))]:
        raise ValueError(
            f"model.init_except: neither the network {type(network).__name__} nor {source} has "
            f"{', '.join(map(repr, idle))}. Name entries that do not fit, such as the layer of the class scores."
        )
    given, expected = _but(given, but), _but(expected, but)
    _check_fit(given, expected, f"model.init_from: {source} does not fit the network {type(network).__name__}")
    load_entries(network, given)
    return given


def load_entries(network: nn.Module, entries: Mapping[str, Tensor]) -> None:
    """Sets some entries of a network's state. Some networks refuse a state that lacks the others, or its version."""
    state = network.state_dict()
    state.update(entries)
    network.load_state_dict(state, strict=False)


def _but(entries: Mapping[str, Tensor], patterns: Sequence[str]) -> dict[str, Tensor]:
    return {name: each for name, each in entries.items() if not any(covers(pattern, name) for pattern in patterns)}


def _check_fit(given: Mapping[str, Tensor], expected: Mapping[str, Tensor], fault: str) -> None:
    """Refuses entries that are missing, unknown or of another shape."""
    missing = [name for name in expected if name not in given]
    unknown = [name for name in given if name not in expected]
    apart = [name for name in expected if name in given and given[name].shape != expected[name].shape]
    faults = [f"it lacks {_few(missing)}"] * bool(missing) + [f"the network has no {_few(unknown)}"] * bool(unknown)
    faults += [
        f"{name} has shape {tuple(given[name].shape)} instead of {tuple(expected[name].shape)}"
        for name in apart[:SHOWN]
    ]
    if faults:
        first = layer_of((*missing, *unknown, *apart)[0])
        raise ValueError(
            f"{fault}: {'; '.join(faults)}. Set model.network to the network that it was saved from, or name what "
            f"shall keep its drawn values, e.g. model.init_except=[{first}]."
        )


def _renamed(state: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
    """Returns the entries of a file under the names that the network has for them.

    If the file is a checkpoint of a `FederatedModule` by ``lightning.Trainer``, these are the entries of its network.
    """
    names = list(names)
    if not any(name.startswith(MODULE) for name in names):
        state = {name: each for name, each in state.items() if name.startswith(MODULE)} or state
    pairs = product(_shortened(names), _shortened(state))
    ours, theirs = max(pairs, key=lambda pair: len(set(pair[0]) & set(pair[1])))  # of equals the first
    name_of = dict(zip(ours, names, strict=True))
    return {name_of.get(name, name): each for name, each in zip(theirs, state.values(), strict=True)}


def _shortened(names: Iterable[str]) -> list[list[str]]:
    """Returns names without what peft inserts, then also without 1, 2, ... first components that all names share."""
    parts = [name.replace(ADAPTED, "").split(".") for name in names]
    layers = zip(*(each[:-1] for each in parts), strict=False)  # the last component of a name always stays
    num_shared = sum(1 for _ in takewhile(lambda each: len(set(each)) == 1, layers))
    return [[".".join(each[start:]) for each in parts] for start in range(num_shared + 1)]


def _read(path: str | Path) -> Any:
    if not isinstance(path, str | PathLike):
        raise TypeError(
            f"model.init_from: got {type(path).__name__}; it must be a file with a network's state dict, or the state "
            "dict itself (network.state_dict())."
        )
    if not Path(path).is_file():
        raise ValueError(
            f"model.init_from: there is no file {str(path)!r}; give a file with a network's state dict, or null (which "
            "also lets you resume, or evaluate, a run whose file is gone)."
        )
    try:
        return _safetensors(path) if Path(path).suffix == ".safetensors" else _pickled(path)
    except ImportError:
        raise ValueError(
            f"model.init_from: {path} needs the package safetensors: pip install 'lcfl[pretrained]'."
        ) from None
    except Exception as error:  # the class of the error depends on what the file holds
        raise ValueError(
            f"model.init_from: {path} cannot be read as weights ({error}); write it with "
            "torch.save(network.state_dict(), path)."
        ) from error


def _tensors(content: Any, source: str) -> Mapping[str, Tensor]:
    """Returns the state dict in what a source holds."""
    wrapped = [content[name] for name in WRAPPERS if isinstance(content, Mapping) and name in content]
    content = wrapped[0] if wrapped and isinstance(wrapped[0], Mapping) else content
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        got = f"entries {_few(map(str, content))}" if isinstance(content, Mapping) else f"a {type(content).__name__}"
        raise ValueError(
            f"model.init_from: {source} holds {got}, not a state dict of tensors, as network.state_dict() returns."
        )
    return content


def _pickled(path: str | Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True)


def _safetensors(path: str | Path) -> Any:
    from safetensors.torch import load_file

    return load_file(path)


def _few(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
