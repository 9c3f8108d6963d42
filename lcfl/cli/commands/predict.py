"""``lcfl predict RUN --model personal``: the label that every client's model gives to each of its test images."""

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
from lcfl.core.files import check_new, new_file
from lcfl.runs.result import Run

__all__ = ["main", "parser"]

BATCH = 512
HEADER = ("client", "index", "label", "prediction", "score")


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    made = argparse.ArgumentParser(prog="lcfl predict", description="Predicts the labels of the clients' test images.")
    made.add_argument("run", type=Path, metavar="RUN", help="a run directory")
    made.add_argument("--model", required=True, choices=("personal", "cluster", "global"), help="kind of model")
    made.add_argument("--ckpt_path", default="last", help="of the run: last (default), best, or a checkpoint")
    made.add_argument("--client", type=int, help="only this client; all of the federation if not given")
    made.add_argument("--protocol", help="whose test images; the run's first protocol if not given")
    made.add_argument("--out", type=Path, help="a CSV file that is not there yet; the terminal if not given")
    return made


def main(args: Sequence[str]) -> None:
    """Writes a line per client and test image: its index in the data set, label, prediction and softmax score.

    Raises:
        CheckpointError: if there is no such checkpoint.
        FileExistsError: if the file is there already.
        FileNotFoundError: if there is no run, or its data are not there.
        ValueError: if the run's method has no such model, client or protocol do not exist, or the client has no test
            images.
    """
    options = parser().parse_args(args)
    if options.out is not None:
        check_new(options.out)
    run = load(options.run, ckpt_path=options.ckpt_path)
    found = _rows(run, options.run, options.model, options.client, options.protocol)
    rows = chain([HEADER, next(found)], found)  # what is wrong shows before a file is made
    if options.out is None:
        _write(sys.stdout, rows)
        return
    with new_file(options.out) as path, path.open("w", newline="") as file:
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
                f"predict: got --client {only}, which has no test images under {protocol}; name another client or "
                f"protocol (this run has {', '.join(data.protocols)})."
            )
        for start in range(0, len(indices), BATCH):
            part = indices[start : start + BATCH]
            inputs, targets = seen.batch(part, torch.device("cpu"))
            score, prediction = network(inputs).softmax(dim=1).max(dim=1)
            cells = (targets.tolist(), prediction.tolist(), score.tolist())
            for index, label, guess, value in zip(part.tolist(), *cells, strict=True):
                yield client, index, label, guess, f"{value:.6f}"
