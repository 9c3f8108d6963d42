"""Measures the checkpoints of LCFed: seconds, and megabytes that are written.

    python benchmarks/checkpoints.py --parameters 62006 4825124

Between two checkpoints nearly all clients take part, as in ten rounds with a quarter of them. Models are random. The
last two checkpoints are kept, as in a run. Seconds include waiting for the disk. The first checkpoint, which writes
everything, does not count.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from lcfl.core.clients import ClientState
from lcfl.core.model_sums import ModelSums
from lcfl.core.state import FederationState
from lcfl.runs import checkpoint
from lcfl.runs.checkpoint_lookup import remove

MEMBERS = 0.94  # share of the clients that take part in ten rounds in which a quarter of all is drawn


def lcfed_state(num_parameters: int, num_clients: int, num_clusters: int, dimension: int) -> FederationState:
    """Returns the state of LCFed after the first round of all clients."""
    state = FederationState.create(torch.randn(num_parameters), num_clients, keeps_model=True)
    state.centres = torch.randn(num_clusters, num_parameters)
    state.projection, state.codes = torch.randn(num_parameters, dimension), torch.randn(num_clients, dimension)
    sums = torch.zeros(num_clusters, num_parameters, dtype=torch.float64)
    state.clients.sums = ModelSums(sums, torch.zeros(num_clients, dtype=torch.int64))
    train(state, num_clients)
    return state


def train(state: FederationState, num_clients: int) -> None:
    """Gives so many clients, drawn at random, new models."""
    state.round += 1
    drawn = torch.randperm(state.num_clients)[:num_clients].tolist()
    state.clients.update({client: ClientState(torch.randn(len(state.initial))) for client in drawn})


def measure(state: FederationState, number: int, folder: Path) -> tuple[float, float]:
    """Returns the median seconds and megabytes of so many checkpoints after the first."""
    seconds, megabytes, kept = [], [], [checkpoint.write(folder, state, {})]
    for _ in range(number):
        train(state, round(MEMBERS * state.num_clients))
        begin = time.perf_counter()
        kept.append(checkpoint.write(folder, state, {}))
        seconds.append(time.perf_counter() - begin)
        files = [file.stat() for file in kept[-1].iterdir()]
        megabytes.append(sum(file.st_size for file in files if file.st_nlink == 1) / 1e6)
        if len(kept) > 2:
            remove(kept.pop(0))
    return statistics.median(seconds), statistics.median(megabytes)


def main() -> None:
    """Prints a row for each number of parameters."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, nargs="+", default=[62_006])
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--clusters", type=int, default=10)
    parser.add_argument("--dimension", type=int, default=50)
    parser.add_argument("--number", type=int, default=5, help="checkpoints after the first")
    parser.add_argument("--folder", help="where the checkpoints are written for a while (default: a temporary folder)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print("| parameters | seconds | MB written |\n|---|---|---|")
    for num_parameters in options.parameters:
        state = lcfed_state(num_parameters, options.clients, options.clusters, options.dimension)
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            seconds, megabytes = measure(state, options.number, Path(folder))
        print(f"| {num_parameters:,} | {seconds:.3f} | {megabytes:,.1f} |", flush=True)


if __name__ == "__main__":
    main()
