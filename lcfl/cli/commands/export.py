"""``lcfl export RUN --model cluster --cluster 2``: writes one trained model to a file."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from lcfl.cli.federated_cli import instantiate_data
from lcfl.cli.loading import load
from lcfl.cli.model_file import add_options, write_model
from lcfl.core.files import check_new
from lcfl.data.spec import SampleSpec
from lcfl.fleet.members import read_spec
from lcfl.runs.result import Run

__all__ = ["main", "parser"]


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
    add_options(options)
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
    write_model(network, options.out, options.format, lambda: _spec(run))
    print(f"written to {options.out}")


def _spec(run: Run) -> SampleSpec:
    """Returns what a sample of a run looks like. The data of a fleet need not be where its configuration has them."""
    return read_spec(run.path) if run.is_of_fleet else instantiate_data(run.path / "config.yaml").dataset.spec
