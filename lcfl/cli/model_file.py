"""Writes one trained network to a file: its weights, or the whole network as a program."""

import argparse
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr, suppress
from functools import partial
from io import StringIO
from pathlib import Path

import torch
from torch import Tensor, nn

from lcfl.core.files import atomic_file
from lcfl.data.spec import SampleSpec

__all__ = ["add_options", "write_model"]

FORMATS = ("state_dict", "torch_export")


def add_options(options: argparse.ArgumentParser) -> None:
    """Adds the options ``--out`` and ``--format`` to a command's parser."""
    options.add_argument("--out", type=Path, required=True, help="the file, which must not exist yet")
    options.add_argument(
        "--format",
        default="state_dict",
        choices=FORMATS,
        help="state_dict (default): weights by name, for model.init_from or the network's load_state_dict; "
        "torch_export: the whole network for any batch size, for torch.export.load",
    )


def write_model(network: nn.Module, file: Path, form: str, spec: Callable[[], SampleSpec]) -> None:
    """Writes a network to a file.

    Args:
        network: the network.
        file: the file.
        form: one of the values of ``--format``.
        spec: returns what a sample looks like, which a program must know.

    Raises:
        ValueError: if torch cannot export the network.
    """
    with atomic_file(file) as path:
        if form == "state_dict":
            torch.save(network.state_dict(), path)
        else:
            with path.open("wb") as opened:
                torch.export.save(_exported(network, spec().blank(2)[0]), opened)


def _exported(network: nn.Module, example: Tensor) -> torch.export.ExportedProgram:
    """Returns a network as a program for any batch size. Strict tracing understands more of Python, and is slower."""
    export = partial(torch.export.export, network, (example,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    try:
        with warnings.catch_warnings(), redirect_stderr(StringIO()):  # to which torch prints whole graphs
            warnings.simplefilter("ignore")
            with suppress(Exception):
                return export()
            return export(strict=True)
    except Exception as error:  # of any kind, because the network may be the user's own
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"--format: torch.export cannot export {type(network).__name__} for any batch size "
            f"({type(error).__name__}: {reason}). Use --format state_dict, and load the weights into a "
            f"{type(network).__name__} in Python."
        ) from None
