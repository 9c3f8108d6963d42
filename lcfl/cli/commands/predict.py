"""``lcfl predict RUN --model personal``: predicts the targets of each client's test samples with its model."""

import argparse
import csv
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from math import inf, isnan, prod
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from lcfl.cli.federated_cli import instantiate_data
from lcfl.cli.loading import load
from lcfl.core import rng
from lcfl.core.files import atomic_file, check_new, read_json
from lcfl.data.datamodule import FederatedDataModule
from lcfl.models.metrics import weight_in_loss
from lcfl.runs.result import Run

__all__ = ["main", "parser"]

BATCH = 512
LABELS = ("label", "prediction", "score")


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command's options."""
    options = argparse.ArgumentParser(
        prog="lcfl predict",
        description="Predicts the labels, or the numbers, of the clients' test samples.",
        allow_abbrev=False,
    )
    options.add_argument("run", type=Path, metavar="RUN", help="a run directory")
    options.add_argument("--model", required=True, choices=("personal", "cluster", "global"), help="kind of model")
    options.add_argument(
        "--ckpt_path", default="last", help="checkpoint of the run: last (default), best, a name or a path"
    )
    options.add_argument("--client", help="only this client, by name or else by number (default: all)")
    options.add_argument("--protocol", help="test protocol (default: the first one of the run)")
    options.add_argument("--scores", action="store_true", help="add a column for each class with its softmax score")
    options.add_argument("--out", type=Path, help="a CSV file, which must not exist yet (default: print)")
    return options


def main(args: Sequence[str]) -> None:
    """Writes one line per client and test sample, with its index in the data set.

    For classes it has label and prediction, by name if classes have names, and the softmax score, with ``--scores``
    that of each class, too. For other targets it has the numbers of target and output. If clients have names, a column
    has them. If samples come from files, two columns have file and row.

    Raises:
        CheckpointError: if there is no such checkpoint.
        FileExistsError: if the file exists already.
        FileNotFoundError: if there is no run.
        ValueError: if its data cannot be read, if the samples lie on the nodes of a fleet, if the data have changed
            since the run, if the run's method has no such model, if the client or the protocol does not exist, if there
            are no test samples, if targets are masks or tokens, which have no place in a line, or if scores are asked
            for and targets are no classes.
    """
    options = parser().parse_args(args)
    if options.out is not None:
        check_new(options.out)
    run = load(options.run, ckpt_path=options.ckpt_path)
    if run.is_of_fleet:
        raise ValueError(
            f"predict: {options.run} is the run of a fleet, whose test samples lie on its nodes. Write a model with "
            "lcfl export, and use it where the samples are."
        )
    lines = _rows(run, options.run, options.model, options.client, options.protocol, options.scores)
    rows = chain([next(lines), next(lines)], lines)  # errors occur before the file is created
    if options.out is None:
        _write(sys.stdout, rows)
        return
    with atomic_file(options.out) as path, path.open("w", newline="", encoding="utf-8") as file:
        _write(file, rows)
    print(f"written to {options.out}")


def _write(file: IO[str], rows: Iterable[Sequence[object]]) -> None:
    csv.writer(file, lineterminator="\n").writerows(rows)


@torch.no_grad()
def _rows(
    run: Run, path: Path, kind: str, only: str | None, protocol: str | None, has_scores: bool
) -> Iterator[list[object]]:
    """Yields the header, then a row for each client and test sample."""
    try:
        data = instantiate_data(path / "config.yaml")
        data.prepare_data()
        data.setup()
    except (ValueError, OSError) as error:
        raise ValueError(
            f"predict: the data of {path} cannot be read: {str(error).rstrip('.')}. If its configuration has relative "
            "paths, start this command in the folder in which lcfl fit was started."
        ) from error
    _check_data(path, data)
    population, spec = data.population, data.dataset.spec
    protocol = data.protocols[0] if protocol is None else protocol
    if protocol not in data.protocols:
        raise ValueError(f"predict: got --protocol {protocol}; this run has {', '.join(data.protocols)}.")
    has_labels = spec.num_classes is not None
    if not has_labels and len(spec.target_shape) + (spec.target_dtype == torch.int64) > 1:
        raise ValueError(
            f"predict: targets of shape {spec.target_shape} have no place in a line; use lcfl.load(RUN).model(...) in "
            "Python, which is the network."
        )
    if has_scores and not has_labels:
        raise ValueError("predict: got --scores; the targets of this run are numbers, not classes. Leave it out.")
    chosen = torch.nonzero(run.state.active).flatten().tolist() if only is None else [run.client(only)]
    clients = [client for client in chosen if len(population.test[protocol][client])]
    if not clients:
        got = "no client with test samples" if only is None else f"--client {only}, which has no test samples"
        raise ValueError(
            f"predict: got {got} under {protocol}; name another client or protocol (this run has "
            f"{', '.join(data.protocols)})."
        )
    chooses = kind == "cluster" and run.chooses_clusters
    classes, columns = data.dataset.classes, list(LABELS)
    # The network says how many columns there are. It may return more numbers than a target has, such as a mean and a
    # variance, and more scores than there are classes.
    if has_scores or not has_labels:
        outputs = run.model(kind, client=clients[0], cluster=0 if chooses else None)(spec.blank(1)[0])  # type: ignore[arg-type]
        if has_labels:
            columns += [f"score_{_name(number, classes)}" for number in range(outputs.shape[1])]
        else:
            columns = [*_numbered("target", spec.target_shape), *_numbered("output", outputs.shape[1:])]
    place_of, of_files = data.dataset.place_of, data.dataset.place_of(0) is not None
    yield ["client", *(["name"] if population.names else []), "index", *(["file", "row"] if of_files else []), *columns]
    for client in clients:
        cluster = _chosen(run, data, client) if chooses else None
        network = run.model(kind, client=client, cluster=cluster)  # type: ignore[arg-type]
        indices, seen = population.test[protocol][client], data.seen_by(client, protocol)
        who = [client] if population.names is None else [client, population.names[client]]
        for start in range(0, len(indices), BATCH):
            part = indices[start : start + BATCH]
            with rng.seeded(0, "predict", client, start):  # items may be drawn
                inputs, targets = seen.batch(part, torch.device("cpu"))
            outputs = network(inputs)
            cells = _classified(outputs, targets, classes, has_scores) if has_labels else _numbers(outputs, targets)
            for index, row in zip(part.tolist(), cells, strict=True):
                yield [*who, index, *(place_of(index) or ()), *row]


def _chosen(run: Run, data: FederatedDataModule, client: int) -> int:
    """Returns the cluster whose model has the least loss on a client's training samples, the first of equals."""
    loss, indices, seen = run.loss, data.population.train[client], data.seen_by(client)
    totals = []
    for cluster in range(run.state.num_clusters):
        network, total = run.model("cluster", client=client, cluster=cluster), 0.0
        for start in range(0, len(indices), BATCH):
            with rng.seeded(0, "predict choice", client, start):  # items may be drawn
                inputs, targets = seen.batch(indices[start : start + BATCH], torch.device("cpu"))
            if weight := weight_in_loss(loss, targets):
                total += float(loss(network(inputs), targets)) * weight
        totals.append(inf if isnan(total) else total)
    return totals.index(min(totals))


def _check_data(path: Path, data: FederatedDataModule) -> None:
    """Refuses data that differ from the run's, because clients and test samples would not be the same."""
    run = read_json(path / "partition.json")
    now = {"data_fingerprint": data.samples.fingerprint(), "fingerprint": data.population.fingerprint}
    names = {"data_fingerprint": "samples", "fingerprint": "clients' shares of them"}
    if changed := [names[key] for key, value in now.items() if run.get(key) != value]:
        raise ValueError(
            f"predict: the {' and the '.join(changed)} have changed since the run in {path}, so clients and test "
            "samples would not be those of the run. Restore its data; another version of lcfl may also read them "
            "differently. New clients get a model from lcfl onboard; for other samples, use lcfl export."
        )


def _classified(
    outputs: Tensor, labels: Tensor, classes: Sequence[str] | None, has_scores: bool
) -> Iterator[list[object]]:
    """Yields label, prediction and score, with `has_scores` also the score of each class."""
    scores = outputs.softmax(dim=1)
    values, predictions = scores.max(dim=1)
    rows = zip(labels.tolist(), predictions.tolist(), values.tolist(), scores.tolist(), strict=True)
    for label, prediction, value, all_scores in rows:
        numbers = [value, *(all_scores if has_scores else [])]
        yield [_name(label, classes), _name(prediction, classes), *(f"{number:.6f}" for number in numbers)]


def _name(number: int, classes: Sequence[str] | None) -> object:
    """Returns the name of a class, or its number if it has none. A network may have scores beyond the last class."""
    return number if classes is None or number >= len(classes) else classes[number]


def _numbers(outputs: Tensor, targets: Tensor) -> Iterator[list[object]]:
    """Yields the numbers of target and output, with all digits that their type holds."""
    values = (each.float() if each.dtype in (torch.bool, torch.bfloat16) else each for each in (targets, outputs))
    rows = [each.reshape(len(each), -1).numpy().astype(str).tolist() for each in values]
    for target, output in zip(*rows, strict=True):
        yield [*target, *output]


def _numbered(name: str, shape: Sequence[int]) -> list[str]:
    """Returns the names of columns: ``target`` for one number, or ``target_0``, ``target_1``, ... for several."""
    return [name] if prod(shape) == 1 else [f"{name}_{number}" for number in range(prod(shape))]
