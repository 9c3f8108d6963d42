"""Measures seconds per round on a GPU for a plain loop and two engines, in float32 and lower precisions.

    python benchmarks/gpu.py --root data --json gpu.json

The tasks are:

    lenet  Fashion-MNIST, 100 clients with 160 images each (client-wise Dirichlet 0.1), 25 clients x 5 SGD steps a
           round, LeNet-5 with 61,706 parameters
    cnn    the same with CIFAR-10 and the CNN with 4.8 million parameters
    crowd  Fashion-MNIST, dealt out to 1,000 clients, which all train for one epoch in every round
    lcfed  1,000 rounds of LCFed with LeNet-5 on CIFAR-10, 100 clients with 50 to 350 images, without evaluation during
           the run

All run on one device. The entries of lenet and cnn take turns. In float32, they must reach the same accuracy up to
rounding, because they start from the same initial model and read the samples in the same order. Seconds are medians
over the rounds after the first three. ``--accelerator cpu`` with small numbers tests the script without a GPU.
"""

import argparse
import csv
import functools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from lcfl import FederatedModule, Federation, Method
from lcfl.data.datamodule import FederatedDataModule
from lcfl.data.datasets import CIFAR10, FashionMNIST, FederatedDataset, RandomLike
from lcfl.data.partition import IID, ClientDirichlet, Partition
from lcfl.methods.aggregation import ClusterMean, GlobalMean
from lcfl.methods.clustering import LowRankCosine
from lcfl.methods.exchange import CentreAndEmbedding, FullModel
from lcfl.methods.local import LocalTraining
from lcfl.methods.local.training import LocalData, draw_batches
from lcfl.models import CNN, LeNet5
from lcfl.server.schedule import Schedule

SEED = 0
LR = 0.01
WARM_UP = 3  # rounds that include compilation, caches and page faults
AGREEMENT = 0.05  # largest difference of accuracies in float32
LOOP = "reference-loop"
ENGINES = ("sequential", "stacked")
COMPARED = [(engine, precision) for engine in (LOOP, *ENGINES) for precision in ("32-true", "bf16-mixed")]
HALF = ("sequential", "16-mixed")  # only on a GPU
ENTRIES = [
    *((task, *each) for task in ("lenet", "cnn") for each in (*COMPARED, HALF)),
    *((task, "stacked", "32-true") for task in ("crowd", "lcfed")),
]


@dataclass(frozen=True)
class Task:
    """The data, the network, the method and the number of rounds of a task, and the protocol of its final test."""

    dataset: Callable[[str], FederatedDataset]
    partition: Partition
    network: Callable[[], torch.nn.Module]
    num_clients: int
    clients_per_round: int
    method: Callable[[], Method]
    rounds: int
    protocol: str = "global"
    pull: float = 0.0  # mu and lambda


def fedavg() -> Method:
    return Method(LocalTraining(epochs=1), FullModel(), GlobalMean())


def lcfed(num_clusters: int, dimension: int) -> Method:
    clustering = LowRankCosine(num_clusters, dimension)
    mean = ClusterMean(over="stored", embedding_over="stored")
    return Method(LocalTraining(steps=5), CentreAndEmbedding(), mean, [clustering])


def tasks_of(options: argparse.Namespace) -> dict[str, Task]:
    """Returns the tasks by name."""
    clients, sampled, size = options.num_clients, options.clients_per_round, options.num_samples
    equal, unequal = ClientDirichlet(0.1, (size, size)), ClientDirichlet(0.1, (size // 3, 2 * size))
    lenet = functools.partial(LeNet5, 1, 28, padding=2)
    few, clustered = max(1, options.rounds // 3), functools.partial(lcfed, min(10, clients // 2), min(50, clients // 2))
    return {
        "lenet": Task(FashionMNIST, equal, lenet, clients, sampled, fedavg, options.rounds),
        "cnn": Task(CIFAR10, equal, CNN, clients, sampled, fedavg, options.rounds),
        "crowd": Task(FashionMNIST, IID(), lenet, options.crowd, options.crowd, fedavg, few),
        "lcfed": Task(CIFAR10, unequal, LeNet5, clients, sampled, clustered, options.lcfed_rounds, "own_split", 0.5),
    }


def made(task: Task, options: argparse.Namespace) -> tuple[FederatedModule, FederatedDataModule]:
    """Returns module and data of a task."""
    dataset = task.dataset(options.root)
    if options.root == "random":
        dataset = RandomLike(dataset, 2 * options.num_samples * task.num_clients)
    data = FederatedDataModule(
        dataset, task.partition, task.num_clients, protocols=[task.protocol], val_fraction=0.0
    )  # fmt: skip
    optimizer = functools.partial(torch.optim.SGD, lr=LR)
    return FederatedModule(task.network, optimizer, cluster_weight=task.pull, global_weight=task.pull), data


def looped(task: Task, precision: str, options: argparse.Namespace) -> dict[str, float]:
    """Runs FedAvg as a plain loop: load_state_dict for every client, torch.optim.SGD, and a mean of state dicts."""
    begin = time.perf_counter()
    module, data = made(task, options)
    data.prepare_data()
    data.setup("fit")
    device, train = torch.device(options.accelerator), data.population.train
    network = module.fill(task.network(), module.initial_model(SEED)).to(device)
    state = {name: value.clone() for name, value in network.state_dict().items()}
    schedule, consumed = Schedule(task.rounds, task.clients_per_round, 0), [0] * task.num_clients
    active, seconds = torch.ones(task.num_clients, dtype=torch.bool), []
    for number in range(task.rounds):
        start = time.perf_counter()
        sampled = schedule.sample(SEED, number, active)
        num_samples = sum(len(train[client]) for client in sampled)
        total = {name: torch.zeros_like(value) for name, value in state.items()}
        for client in sampled:
            local = LocalData(train[client], data.batch_size, SEED, client)
            consumed[client], batches = draw_batches(consumed[client], local, epochs=1)
            network.load_state_dict(state)
            optimizer = torch.optim.SGD(network.parameters(), lr=LR)
            for batch in batches:
                inputs, targets = data.samples.training_batch(batch, device)
                with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16-mixed"):
                    loss = torch.nn.functional.cross_entropy(network(inputs), targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            for name, value in network.state_dict().items():
                total[name] += value * (len(train[client]) / num_samples)
        state = total
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    network.load_state_dict(state)
    result = {
        "seconds_per_round": statistics.median(seconds[WARM_UP:] or seconds),
        "seconds_of_all_rounds": sum(seconds),
    }
    return result | {
        "local_seconds_per_round": result["seconds_per_round"],
        "seconds_with_start_and_evaluation": time.perf_counter() - begin,
        "gpu_mb": torch.cuda.max_memory_allocated() / 1e6 if device.type == "cuda" else 0.0,
        "accuracy": accuracy(network, data, device),
    }


@torch.no_grad()
def accuracy(network: torch.nn.Module, data: FederatedDataModule, device: torch.device) -> float:
    """Returns the accuracy on the official test samples."""
    indices = data.population.test["global"][0]
    right = 0
    for start in range(0, len(indices), 500):
        inputs, targets = data.samples.batch(indices[start : start + 500], device)
        right += int((network.eval()(inputs).argmax(dim=1) == targets).sum())
    return right / len(indices)


def measured(task: Task, engine: str, precision: str, options: argparse.Namespace) -> dict[str, float]:
    """Runs one entry and returns its seconds, the memory of the GPU, and the final accuracy."""
    on_gpu = options.accelerator == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    if engine == LOOP:
        return looped(task, precision, options)
    module, data = made(task, options)
    with tempfile.TemporaryDirectory() as folder:
        federation = Federation(
            task.rounds, task.clients_per_round, evaluate_every=0, final_models=[], accelerator=options.accelerator,
            devices=[0] * options.ranks if on_gpu else options.ranks, strategy="ddp_spawn", engine=engine,
            precision=precision, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            default_root_dir=folder, seed=SEED,
        )  # fmt: skip
        begin = time.perf_counter()
        fitted = federation.fit(module, data, task.method())
        seconds = time.perf_counter() - begin
        metrics = fitted.metrics
        with (fitted.path / "metrics.csv").open() as file:
            rows = [row for row in csv.DictReader(file) if int(row["round"]) >= 0]
    whole, local = ([float(row[f"time/{name}_s"]) for row in rows] for name in ("round", "local"))
    kind = task.method().exchange.reported[0]
    return {
        "seconds_per_round": statistics.median(whole[WARM_UP:] or whole),
        "local_seconds_per_round": statistics.median(local[WARM_UP:] or local),
        "seconds_of_all_rounds": sum(whole),
        "seconds_with_start_and_evaluation": seconds,
        "gpu_mb": torch.cuda.max_memory_allocated() / 1e6 if on_gpu else 0.0,
        "accuracy": metrics[f"test/{task.protocol}/{kind}/acc"],
    }


def main(arguments: Sequence[str] | None = None) -> list[dict[str, object]]:
    """Measures, prints the entries, writes JSON and returns the entries."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default="data", help="folder of torchvision's files; random: no files, random images")
    parser.add_argument("--accelerator", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tasks", nargs="+", choices=["lenet", "cnn", "crowd", "lcfed"], help="only these tasks")
    parser.add_argument("--engines", nargs="+", choices=[LOOP, *ENGINES], help="only these")
    parser.add_argument("--ranks", type=int, default=1, help="processes that share the GPU, without the loop's")
    parser.add_argument("--rounds", type=int, default=30, help="rounds per turn of lenet and cnn; crowd has a third")
    parser.add_argument("--turns", type=int, default=3, help="turns of lenet and cnn, of which the fastest counts")
    parser.add_argument("--lcfed_rounds", type=int, default=1000)
    parser.add_argument("--crowd", type=int, default=1000, help="clients per round of crowd")
    parser.add_argument("--num_clients", type=int, default=100, help="for the other tasks")
    parser.add_argument("--clients_per_round", type=int, default=25, help="for the other tasks")
    parser.add_argument("--num_samples", type=int, default=160, help="images per client")
    parser.add_argument("--json", type=Path, help="file for the entries")
    options = parser.parse_args(arguments)
    tasks = tasks_of(options)
    device = torch.cuda.get_device_name() if options.accelerator == "cuda" else "cpu"
    print(f"{device}, torch {torch.__version__}, seed {SEED}", flush=True)
    results: dict[tuple[str, str, str], dict[str, float]] = {}
    for turn in range(options.turns):
        for entry in ENTRIES:
            name, engine, precision = entry
            if precision == "16-mixed" and options.accelerator == "cpu":
                continue
            if (options.tasks and name not in options.tasks) or (turn > 0 and name not in ("lenet", "cnn")):
                continue
            if options.engines and engine not in options.engines:
                continue
            result = measured(tasks[name], engine, precision, options)
            shown = (f"{key} {value:.4g}" for key, value in result.items())
            print(f"{name:<6} {engine:<14} {precision:<10}", *shown, flush=True)
            results[entry] = min(results.get(entry, result), result, key=lambda each: each["seconds_per_round"])
    rows: list[dict[str, object]] = [
        {"task": name, "engine": engine, "precision": precision, "device": device, **numbers}
        for (name, engine, precision), numbers in results.items()
    ]
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")
    for name in ("lenet", "cnn"):
        reached = [
            numbers["accuracy"]
            for (task, _, precision), numbers in results.items()
            if (task, precision) == (name, "32-true")
        ]
        if reached and max(reached) - min(reached) > AGREEMENT:
            raise SystemExit(f"{name}: the accuracies of the entries in float32 differ: {reached}.")
    return rows


if __name__ == "__main__":
    main()
