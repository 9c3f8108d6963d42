"""Loading of weights that were trained elsewhere."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["load_weights"]

SHOWN = 3  # most names in a message


def load_weights(network: nn.Module, path: str | Path) -> None:
    """Fills a network, including its buffers, from a file that ``torch.save(network.state_dict(), path)`` wrote.

    The file is read with ``weights_only=True``, so it can hold numbers but never code.

    Raises:
        ValueError: if there is no such file, it holds something else, or its names or shapes do not fit the network.
    """
    state = _read(path)
    expected = network.state_dict()
    faults = []
    if missing := [name for name in expected if name not in state]:
        faults.append(f"it lacks {_few(missing)}")
    if unknown := [name for name in state if name not in expected]:
        faults.append(f"the network has no {_few(unknown)}")
    faults += [
        f"{name} has shape {tuple(state[name].shape)} instead of {tuple(tensor.shape)}"
        for name, tensor in expected.items()
        if name in state and state[name].shape != tensor.shape
    ][:SHOWN]
    if faults:
        raise ValueError(
            f"model.init_from: {path} does not fit the network {type(network).__name__}: {'; '.join(faults)}. Set "
            "model.network to the network that it was saved from."
        )
    network.load_state_dict(state)


def _read(path: str | Path) -> Mapping[str, Tensor]:
    if not Path(path).is_file():
        raise ValueError(
            f"model.init_from: there is no file {str(path)!r}; give a file with a network's state dict, or null (which "
            "also lets you evaluate a run whose file is gone)."
        )
    save = "write it with torch.save(network.state_dict(), path)"
    try:
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # the class of the error depends on what the file holds
        raise ValueError(f"model.init_from: {path} cannot be read as weights ({error}); {save}.") from error
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        got = f"entries {_few(map(str, content))}" if isinstance(content, Mapping) else f"a {type(content).__name__}"
        raise ValueError(f"model.init_from: {path} holds {got}, not a state dict of tensors; {save}.")
    return content


def _few(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
