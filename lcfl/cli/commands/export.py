"""``lcfl export RUN --model cluster --cluster 2``: writes one trained model to a file."""

import argparse
import warnings
from collections.abc import Sequence
from contextlib import redirect_stderr, suppress
from functools import partial
from io import StringIO
from pathlib import Path

import torch
from torch import Tensor, nn

from lcfl.cli.federated_cli import instantiate_data
from lcfl.cli.loading import load
from lcfl.core.files import atomic_file, check_new

__all__ = ["main", "parser"]

FORMATS = ("state_dict", "torch_export")


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command's options."""
    options = argparse.ArgumentParser(
        prog="lcfl export", description="Writes one trained model to a file.", allow_abbrev=False
    )
    options.add_argument("run", type=Path, metavar="RUN", help="a run directory")
    options.add_argument("--model", required=True, choices=("personal", "cluster", "global"), help="kind of model")
    options.add_argument(
        "--ckpt_path", default="last", help="checkpoint of the run: last (default), best, a name or a path"
    )
    options.add_argument("--client", help="the client of the personal or cluster model, by name or else by number")
    options.add_argument("--cluster", type=int, help="the number of the cluster")
    options.add_argument("--out", type=Path, required=True, help="the file, which must not exist yet")
    options.add_argument(
        "--format",
        default="state_dict",
        choices=FORMATS,
        help="state_dict (default): weights by name, for model.init_from or the network's load_state_dict; "
        "torch_export: the whole network for any batch size, for torch.export.load",
    )
    return options


def main(args: Sequence[str]) -> None:
    """Writes the model to a file.

    Raises:
        CheckpointError: if there is no such checkpoint.
        FileExistsError: if the file exists already.
        FileNotFoundError: if there is no run.
        ValueError: if the run's method has no such model, if there is no such client or cluster, if the client is in
            another cluster, or if torch cannot export the network.
    """
    options = parser().parse_args(args)
    check_new(options.out)
    run = load(options.run, ckpt_path=options.ckpt_path)
    network = run.model(options.model, client=options.client, cluster=options.cluster)
    with atomic_file(options.out) as path:
        if options.format == "state_dict":
            torch.save(network.state_dict(), path)
        else:
            example, _ = instantiate_data(options.run / "config.yaml").dataset.spec.blank(2)
            with path.open("wb") as file:
                torch.export.save(_exported(network, example), file)
    print(f"written to {options.out}")


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
            f"({type(error).__name__}: {reason}). Use --format state_dict, or lcfl.load(run).model(...) in Python."
        ) from None
