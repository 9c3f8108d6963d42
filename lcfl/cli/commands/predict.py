"""``lcfl predict RUN --model personal``: predicts the labels of each client's test samples with its model."""

import argparse
import csv
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import IO

import torch

from lcfl.cli.federated_cli import instantiate_data
from lcfl.cli.loading import load
from lcfl.core.files import atomic_file, check_new
from lcfl.runs.result import Run

__all__ = ["main", "parser"]

BATCH = 512
HEADER = ("client", "index", "label", "prediction", "score")


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command's options."""
    options = argparse.ArgumentParser(
        prog="lcfl predict",
        description="Predicts the labels of the clients' test samples.",
        allow_abbrev=False,
    )
    options.add_argument("run", type=Path, metavar="RUN", help="a run directory")
    options.add_argument("--model", required=True, choices=("personal", "cluster", "global"), help="kind of model")
    options.add_argument(
        "--ckpt_path", default="last", help="checkpoint of the run: last (default), best, a name or a path"
    )
    options.add_argument("--client", type=int, help="only this client (default: all of the federation)")
    options.add_argument("--protocol", help="test protocol (default: the first one of the run)")
    options.add_argument("--out", type=Path, help="a CSV file, which must not exist yet (default: print)")
    return options


def main(args: Sequence[str]) -> None:
    """Writes one line per client and test sample, with its index in the data set, label, prediction and softmax score.

    Raises:
        CheckpointError: if there is no such checkpoint.
        FileExistsError: if the file exists already.
        FileNotFoundError: if there is no run, or if its data set is missing.
        ValueError: if the run's method has no such model, if the client or the protocol does not exist, or if the
            client has no test samples.
    """
    options = parser().parse_args(args)
    if options.out is not None:
        check_new(options.out)
    run = load(options.run, ckpt_path=options.ckpt_path)
    lines = _rows(run, options.run, options.model, options.client, options.protocol)
    rows = chain([HEADER, next(lines)], lines)  # errors occur before the file is created
    if options.out is None:
        _write(sys.stdout, rows)
        return
    with atomic_file(options.out) as path, path.open("w", newline="") as file:
        _write(file, rows)
    print(f"written to {options.out}")


def _write(file: IO[str], rows: Iterable[Sequence[object]]) -> None:
    csv.writer(file, lineterminator="\n").writerows(rows)


@torch.no_grad()
def _rows(
    run: Run, path: Path, kind: str, only: int | None, protocol: str | None
) -> Iterator[tuple[int, int, int, int, str]]:
    data = instantiate_data(path / "config.yaml")
    data.prepare_data()
    data.setup()
    protocol = data.protocols[0] if protocol is None else protocol
    if protocol not in data.protocols:
        raise ValueError(f"predict: got --protocol {protocol}; this run has {', '.join(data.protocols)}.")
    for client in torch.nonzero(run.state.active).flatten().tolist() if only is None else [only]:
        network = run.model(kind, client=client)  # type: ignore[arg-type]
        indices, seen = data.population.test[protocol][client], data.seen_by(client)
        if only is not None and not len(indices):
            raise ValueError(
                f"predict: got --client {only}, which has no test samples under {protocol}; name another client or "
                f"protocol (this run has {', '.join(data.protocols)})."
            )
        for start in range(0, len(indices), BATCH):
            part = indices[start : start + BATCH]
            inputs, targets = seen.batch(part, torch.device("cpu"))
            score, prediction = network(inputs).softmax(dim=1).max(dim=1)
            cells = (targets.tolist(), prediction.tolist(), score.tolist())
            for index, label, guess, value in zip(part.tolist(), *cells, strict=True):
                yield client, index, label, guess, f"{value:.6f}"
