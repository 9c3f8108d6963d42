"""``lcfl predict RUN --model personal``: predicts the targets of each client's test samples, or of new samples."""

import argparse
import warnings
from collections.abc import Iterator, Sequence
from math import inf, isnan
from pathlib import Path

import torch

from lcfl.cli.federated_cli import instantiate_data
from lcfl.cli.loading import load
from lcfl.cli.prediction_file import BATCH, Cells, add_options, check_out, rows_of_new_samples, write_rows
from lcfl.core import rng
from lcfl.core.files import read_json
from lcfl.data.datamodule import FederatedDataModule
from lcfl.methods.exchange import ModelKind
from lcfl.models.metrics import weight_in_loss
from lcfl.runs.result import Run

__all__ = ["main", "parser"]


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command's options."""
    options = argparse.ArgumentParser(
        prog="lcfl predict",
        description="Predicts the labels, or the numbers, of the clients' test samples, or of new samples.",
        allow_abbrev=False,
    )
    options.add_argument("run", type=Path, metavar="RUN", help="a run directory")
    options.add_argument("--model", required=True, choices=("personal", "cluster", "global"), help="kind of model")
    options.add_argument(
        "--ckpt_path", default="last", help="checkpoint of the run: last (default), best, a name or a path"
    )
    options.add_argument(
        "--client",
        help="only this client, by name or else by number (default: all); with --data, whose model predicts",
    )
    options.add_argument("--protocol", help="test protocol (default: the first one of the run)")
    options.add_argument("--cluster", type=int, help="with --data, the number of the cluster whose model predicts")
    add_options(options)
    return options


def main(args: Sequence[str]) -> None:
    """Writes one line per client and test sample, with its index in the data set, or one line per new sample.

    For classes it has label and prediction, by name if classes have names, and the softmax score, with ``--scores``
    that of each class, too. For other targets it has the numbers of target and output. If clients have names, a column
    has them. If samples come from files, two columns have file and row. New samples have neither client nor target.

    Raises:
        CheckpointError: if there is no such checkpoint.
        FileExistsError: if the file exists already.
        FileNotFoundError: if there is no run.
        ValueError: if its data cannot be read, if the samples lie on the nodes of a fleet, if the data have changed
            since the run, if the run's method has no such model, if the client or the protocol does not exist, if there
            are no test samples, if targets are masks or tokens, which have no place in a line, if scores are asked
            for and targets are no classes, or if new samples do not fit the data of the run.
    """
    options = parser().parse_args(args)
    check_out(options.out, options.new)
    if options.new is None and options.cluster is not None:
        raise ValueError("predict: got --cluster without --data; every test sample is predicted by its client's model.")
    if options.new is not None and options.protocol is not None:
        raise ValueError("predict: got --protocol, which chooses test samples, and --data, which replaces them.")
    run = load(options.run, ckpt_path=options.ckpt_path)
    if run.is_of_fleet:
        raise ValueError(
            f"predict: {options.run} is the run of a fleet, whose samples lie on its nodes. Use lcfl fleet predict "
            "there, or write a model with lcfl export."
        )
    if options.new is None:
        rows = _rows(run, options.model, options.client, options.protocol, options.scores)
    else:
        rows = _rows_of_new(run, options.new, options.model, options.client, options.cluster, options.scores)
    write_rows(rows, options.out)


def _rows_of_new(
    run: Run, new: Path, kind: ModelKind, client: str | None, cluster: int | None, has_scores: bool
) -> Iterator[list[object]]:
    """Returns the header, and a row for each new sample."""
    if run.keeps_buffers and client is None:
        raise ValueError(
            "predict: clients keep their own buffers (model.buffer_policy: local), such as the means of a batch "
            "normalisation; name the client whose buffers to use with --client."
        )
    network = run.model(kind, client=client, cluster=cluster)
    data = _built_data(run.path)
    if data.client_transforms:
        names = ", ".join(type(each).__name__ for each in data.client_transforms)
        warnings.warn(f"predict: data.client_transforms ({names}) do not change new samples.", stacklevel=2)
    saved = read_json(run.path / "partition.json")
    then = {name: saved[name] for name in ("classes", "columns", "normalisation") if name in saved}
    return rows_of_new_samples(network, data.dataset, new, has_scores, then)


@torch.no_grad()
def _rows(run: Run, kind: str, only: str | None, protocol: str | None, has_scores: bool) -> Iterator[list[object]]:
    """Yields the header, then a row for each client and test sample."""
    data = _data(run.path)
    population, place_of = data.population, data.dataset.place_of
    protocol = data.protocols[0] if protocol is None else protocol
    if protocol not in data.protocols:
        raise ValueError(f"predict: got --protocol {protocol}; this run has {', '.join(data.protocols)}.")
    cells = Cells(data.dataset.spec, data.dataset.classes, has_scores)
    chosen = torch.nonzero(run.state.active).flatten().tolist() if only is None else [run.client(only)]
    clients = [client for client in chosen if len(population.test[protocol][client])]
    if not clients:
        got = "no client with test samples" if only is None else f"--client {only}, which has no test samples"
        raise ValueError(
            f"predict: got {got} under {protocol}; name another client or protocol (this run has "
            f"{', '.join(data.protocols)})."
        )
    chooses = kind == "cluster" and run.chooses_clusters
    for client in clients:
        cluster = _chosen(run, data, client) if chooses else None
        network = run.model(kind, client=client, cluster=cluster)  # type: ignore[arg-type]
        indices, seen = population.test[protocol][client], data.seen_by(client, protocol)
        owner = [client] if population.names is None else [client, population.names[client]]
        for start in range(0, len(indices), BATCH):
            part = indices[start : start + BATCH]
            with rng.seeded(0, "predict", client, start):  # items may be drawn
                inputs, targets = seen.batch(part, torch.device("cpu"))
            outputs = network(inputs)
            if start == 0 and client == clients[0]:
                who, where = ["name"] if population.names else [], ["file", "row"] if place_of(0) is not None else []
                yield ["client", *who, "index", *where, *cells.target_titles, *cells.titles(outputs)]
            rows = zip(part.tolist(), cells.of_targets(targets), cells.of_outputs(outputs), strict=True)
            for index, target, output in rows:
                yield [*owner, index, *(place_of(index) or ()), *target, *output]


def _data(path: Path) -> FederatedDataModule:
    """Returns the data of a run, if they have not changed since."""
    data = _built_data(path, is_set_up=True)
    _check_data(path, data)
    return data


def _built_data(path: Path, is_set_up: bool = False) -> FederatedDataModule:
    """Returns the data of a run as they are now. Without `is_set_up`, only the data set has been read."""
    try:
        data = instantiate_data(path / "config.yaml")
        if is_set_up:
            data.prepare_data()
            data.setup()
    except (ValueError, OSError) as error:
        raise ValueError(
            f"predict: the data of {path} cannot be read: {str(error).rstrip('.')}. If its configuration has relative "
            "paths, start this command in the folder in which lcfl fit was started."
        ) from error
    return data


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
            "differently. New clients get a model from lcfl onboard; other samples are predicted with --data."
        )
