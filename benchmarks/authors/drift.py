"""Methods that train one model for all, against the drift of the clients. docs/results.md explains the differences."""

import tempfile
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from authors.common import BATCH, EQUAL, LR, UNEQUAL, VISION, Network, Rounds, Row, code_in, with_each
from lcfl import methods as parts


@contextmanager
def feddyn_code(folder: Path, rounds: Rounds, number: int, **amount: int) -> Iterator[tuple[Any, Any, Tensor]]:
    """Gives FedDyn's code, the clients' samples in its form, and lcfl's clients' models after some rounds ``[N, P]``.

    The code gets the batches of these rounds, each of so many steps or epochs. It writes into a folder of its own.
    """
    loaders = []
    for _ in range(number):
        loaders += [rounds.passes(client, **amount) for client in rounds.clients]
        models = rounds.round()

    def loader(dataset: Any, batch_size: int, shuffle: bool) -> Any:
        return loaders.pop(0) if shuffle else DataLoader(dataset, batch_size)

    inputs, targets = zip(*(map(Tensor.numpy, rounds.samples(share)) for share in rounds.shares), strict=True)
    data = SimpleNamespace(
        n_client=len(inputs), clnt_x=inputs, clnt_y=targets, tst_x=inputs[0], tst_y=targets[0], name="clients",
        dataset="synt",
    )  # fmt: skip
    unused = [*VISION, "matplotlib", "matplotlib.pyplot"]
    with (
        code_in(folder, "utils_methods", "utils_general", unused=unused) as (code, general),
        tempfile.TemporaryDirectory() as root,
        chdir(root),
    ):
        Path("Output", data.name).mkdir(parents=True)
        general.data = SimpleNamespace(DataLoader=loader)
        yield code, data, models
    assert not loaders, "the authors' code has drawn all batches"


@with_each(
    ("equal n_i", EQUAL, ""),
    ("unequal n_i", UNEQUAL, "they train client i with alpha / (N n_i / sum n_j), the paper with alpha"),
)
def feddyn(folder: Path, words: str, sizes: tuple[int, ...], reason: str) -> Iterator[Row]:
    """Compares two rounds."""
    alpha, mean = 0.3, parts.GlobalMean("uniform", optimizer=parts.ServerDynamics())
    rounds = Rounds(parts.DynamicTraining(epochs=2), parts.GlobalReference(), mean, sizes, cluster_weight=alpha)
    start = rounds.global_model
    with feddyn_code(folder, rounds, 2, epochs=2) as (code, data, ours):
        given = data, 1.0, LR, BATCH, 2, 2, 9, 0.0, Network, rounds.load(start), alpha, 2, 1.0
        (server,) = code.train_FedDyn(*given)[-1]
        clients = torch.from_numpy(np.load("Output/clients/FedDyn/2_clnt_params_list.npy"))
    yield Row(f"clients' models of the second round, {words}", ours, clients, start, reason)
    yield Row(f"server's model after two rounds, {words}", rounds.global_model, rounds.vector(server), start, reason)


@with_each(
    ("equal n_i", EQUAL, ""),
    ("unequal n_i", UNEQUAL, "they weight the changes of c_i by N n_i / sum n_j, and divide c by it"),
)
def scaffold(folder: Path, words: str, sizes: tuple[int, ...], reason: str) -> Iterator[Row]:
    """Compares two rounds of FedDyn's code for SCAFFOLD."""
    steps, mean = 4, parts.GlobalMean("uniform")
    rounds = Rounds(parts.ControlledTraining(steps=steps), parts.ControlledModel(), mean, sizes)
    start = rounds.global_model
    with feddyn_code(folder, rounds, 2, steps=steps) as (code, data, _):
        given = data, 1.0, LR, BATCH, steps, 2, 9, 0.0, Network, rounds.load(start), 2, 1.0
        (server,) = code.train_SCAFFOLD(*given)[0]
        control = torch.from_numpy(np.load("Output/clients/Scaffold/2_state_param_list.npy"))[-1]
    yield Row(f"server's model after two rounds, {words}", rounds.global_model, rounds.vector(server), start, reason)
    ours = rounds.state.aggregation["control"][0]
    yield Row(f"control variate c after two rounds, {words}", ours, control, torch.zeros(1), reason)


def fedprox(folder: Path) -> Iterator[Row]:
    """Compares the clients' models after a round of FedDyn's code for FedProx."""
    mu, local = 0.5, parts.LocalTraining(epochs=2, start="centre")
    rounds = Rounds(local, parts.GlobalReference(), parts.GlobalMean(), cluster_weight=mu)
    start, theirs = rounds.global_model, []
    with feddyn_code(folder, rounds, 1, epochs=2) as (code, data, ours):
        for samples in zip(data.clnt_x, data.clnt_y, strict=True):
            given = rounds.load(start), start, mu, *samples, LR, BATCH, 2, 9, 0.0, data.dataset
            theirs.append(code.train_fedprox_mdl(*given))
    yield Row("clients' models", ours, rounds.vectors(theirs), start)


@with_each((0.0, 0.0), (0.5, 0.0), (0.0, 0.4))
def fednova(folder: Path, momentum: float, mu: float) -> Iterator[Row]:
    """Compares the server's model after a round."""
    local = parts.NormalisedTraining(epochs=1, start="centre", effective_steps="steps" if mu else "normaliser")
    sgd = partial(torch.optim.SGD, lr=LR, momentum=momentum)
    rounds = Rounds(local, parts.NormalisedModel(), parts.NormalisedMean(), optimizer=sgd, cluster_weight=mu)
    start, totals = rounds.global_model, []

    def communicate(tensors: list[Tensor], reduce: Any) -> None:  # the last client gets the sum over all
        totals.extend(torch.zeros_like(tensor) for tensor in tensors[len(totals) :])
        for total, tensor in zip(totals, tensors, strict=True):
            total += tensor
            tensor.copy_(total)

    with code_in(folder, "distoptim.FedNova") as (code,):
        code.communicate, optimizers = communicate, []
        for client, share in enumerate(np.divide(UNEQUAL, sum(UNEQUAL))):
            network = rounds.load(start)
            own = code.FedNova(network.parameters(), share, 0, mu=mu, lr=LR, momentum=momentum)
            for inputs, targets in rounds.batches(client, epochs=1):
                own.zero_grad()
                nn.functional.cross_entropy(network(inputs), targets).backward()
                own.step()
            optimizers.append(own)
        # The sum that their `average` makes of a GPU's tensors.
        effective = sum((own.local_steps if mu else own.local_normalizing_vec) * own.ratio for own in optimizers)
        for own in optimizers:
            own.average(tau_eff=effective)
    rounds.round()
    words = f"server's model, momentum {momentum}, mu {mu}"
    yield Row(words, rounds.global_model, rounds.vector(network), start)
