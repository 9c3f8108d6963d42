"""Seconds per FedAvg round: lcfl on one rank and on two, beside a plain PyTorch loop, in one run.

    python benchmarks/round.py --root data --json round.json

Fashion-MNIST, 100 clients with 160 images each (client-wise Dirichlet 0.1), 25 clients a round, batch
32, one local epoch = 5 SGD steps, learning rate 0.01, LeNet-5 with 61,706 parameters, no evaluation in
the timed rounds. All entries train the same clients on the same batches from the same initial model,
so they must reach the same accuracy; they take turns, so that a busy machine is busy for all of them.
"""

import argparse
import csv
import functools
import json
import platform
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lcfl import FederatedModule, Federation, Method, rng
from lcfl.aggregation import GlobalMean
from lcfl.data.datamodule import FederatedDataModule
from lcfl.data.datasets import FashionMNIST
from lcfl.data.partition import ClientDirichlet
from lcfl.exchange import FullModel
from lcfl.local import LocalTraining
from lcfl.local.order import batch_positions
from lcfl.networks import LeNet5

SEED = 0
CLIENTS_PER_ROUND = 25


def parts(root: str) -> tuple[FederatedModule, FederatedDataModule, Method]:
    """Module, data and method of the round."""
    data = FederatedDataModule(
        FashionMNIST(root), ClientDirichlet(0.1, (160, 160)), protocols=["label_view"], val_fraction=0.0
    )
    network = functools.partial(LeNet5, in_channels=1, image_size=28, padding=2)
    module = FederatedModule(network, functools.partial(torch.optim.SGD, lr=0.01))
    return module, data, Method(LocalTraining(epochs=1), FullModel(), GlobalMean())


def accuracy(module: FederatedModule, model: Tensor, data: FederatedDataModule) -> float:
    """Of the model on all official test images."""
    examples = data.examples
    network = module.layout.unpack(model, module.make_network()).eval()
    with torch.no_grad():
        inputs, targets = examples.batch(np.arange(examples.num_train, len(examples)), torch.device("cpu"))
        return float((network(inputs).argmax(dim=1) == targets).float().mean())


def ours(devices: int, rounds: int, root: str) -> tuple[list[float], float]:
    """Seconds of each round, and the final accuracy."""
    module, data, method = parts(root)
    with tempfile.TemporaryDirectory() as folder:
        federation = Federation(
            rounds, CLIENTS_PER_ROUND, evaluate_every=0, accelerator="cpu", devices=devices, logger=False,
            enable_progress_bar=False, default_root_dir=folder, seed=SEED,
        )  # fmt: skip
        run = federation.fit(module, data, method)
        with (run.path / "metrics.csv").open() as file:
            seconds = [float(row["time/round_s"]) for row in csv.DictReader(file)]
        return seconds, accuracy(module, run.state.global_model, data)


def reference_loop(threads: int, rounds: int, root: str) -> tuple[list[float], float]:
    """The loop that everybody writes: one model, load_state_dict per client, torch.optim.SGD, a mean of state dicts."""
    module, data, _ = parts(root)
    data.setup()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    network = module.layout.unpack(module.initial_model(SEED), module.make_network())
    state = {name: value.clone() for name, value in network.state_dict().items()}
    consumed = [0] * data.num_clients
    seconds = []
    for number in range(rounds):
        begin = time.perf_counter()
        draw = rng.generator(SEED, "sample", number)
        sampled = sorted(draw.choice(data.num_clients, CLIENTS_PER_ROUND, replace=False).tolist())
        total = {name: torch.zeros_like(value) for name, value in state.items()}
        for client in sampled:
            network.load_state_dict(state)
            optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
            indices = data.population.train[client]
            batches = batch_positions(len(indices), 32, consumed[client], SEED, client)
            for _ in range(5):
                inputs, targets = data.examples.batch(indices[next(batches)], torch.device("cpu"))
                loss = torch.nn.functional.cross_entropy(network(inputs), targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            consumed[client] += len(indices)
            for name, value in network.state_dict().items():
                total[name] += value / CLIENTS_PER_ROUND
        state = total
        seconds.append(time.perf_counter() - begin)
    torch.set_num_threads(before)
    network.load_state_dict(state)
    return seconds, accuracy(module, module.layout.pack(network), data)


def main() -> None:
    """Measures, prints a table and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default="data", help="where torchvision's FashionMNIST lies")
    parser.add_argument("--rounds", type=int, default=30, help="timed rounds per turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the entries there")
    options = parser.parse_args()
    entries = {
        ("reference-loop", "2 threads"): functools.partial(reference_loop, 2),
        ("reference-loop", "1 thread"): functools.partial(reference_loop, 1),
        ("sequential", "1"): functools.partial(ours, 1),
        ("sequential", "2"): functools.partial(ours, 2),
    }
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in entries}
    reached = {}
    for _ in range(options.turns):
        for key, entry in entries.items():
            taken, reached[key] = entry(options.rounds, options.root)
            seconds[key] += taken[2:]  # the first rounds pay for imports and page faults
    base = statistics.median(seconds["reference-loop", "2 threads"])
    print(
        f"{platform.processor() or platform.machine()}, torch {torch.__version__}, seed {SEED}, {options.rounds} rounds"
    )
    rows = []
    for (engine, devices), values in seconds.items():
        median = statistics.median(values)
        row = {
            "engine": engine, "devices": devices, "seconds_per_round": median, "fastest_round": min(values),
            "accuracy": reached[engine, devices], "reference_over_this": base / median,
        }  # fmt: skip
        rows.append(row)
        print(
            "  ".join(
                f"{name} {value:.4f}" if isinstance(value, float) else f"{value:>15}" for name, value in row.items()
            )
        )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
