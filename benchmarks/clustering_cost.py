"""Measures the cost of the server's clustering per round by the number of clients, as in Fig. 3 of LCFed.

    python benchmarks/clustering_cost.py --json clustering_cost.json --figure lcfed-fig3.png

In every round, the server compares the models of all N clients with K centres. It compares whole models by squared L2
distance (FeSEM) or by cosine, or low-rank models by cosine (LCFed). For low-rank models, it first projects all centres
and the models that were uploaded in this round. IFCA's server compares nothing, but it sends K models instead of one to
every client of a round.

K = 10, D = 50, and the network has 4.8 million parameters, as in the paper. Models are random. By cosine, whole models
are compared in blocks of 16, as in the package. So many of them do not fit into memory and would take too long.
Therefore, at most --models of them are compared, and the seconds are scaled to N. The column `compared` shows their
number. Low-rank models are measured for all N. Seconds are those of the processor, which do not depend on the load of
the machine. With --threads above 1, they are the sum over threads.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lcfl.figures.base import COLOURS, save
from lcfl.methods.clustering.low_rank_cosine import CLIENTS_AT_A_TIME
from lcfl.methods.clustering.similarity import assign, cosine, project, project_all, squared_distances_to_centres
from lcfl.models import CNN, Layout

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FLOAT_BYTES = 4


def seconds(act: Callable[[], object], turns: int) -> float:
    """Returns the median of some turns, in seconds of processor time."""
    taken = []
    for _ in range(turns):
        begin = time.process_time()
        act()
        taken.append(time.process_time() - begin)
    return statistics.median(taken)


def whole(compare: Callable[[Tensor, Tensor], Tensor], block_nP: Tensor, centre_KP: Tensor, num_models: int) -> float:
    """Compares models with all centres, block by block, and returns seconds of processor time per model."""
    begin, compared = time.process_time(), 0
    while compared < num_models:
        part_nP = block_nP[: num_models - compared]
        compare(part_nP, centre_KP).argmax(dim=1)
        compared += len(part_nP)
    return (time.process_time() - begin) / compared


def server_times(
    num_clients: int,
    compared: int,
    block_nP: Tensor,
    centre_KP: Tensor,
    basis_PD: Tensor,
    uploads: Sequence[Tensor],
    turns: int,
    draw: torch.Generator,
) -> dict[str, float]:
    """Returns the seconds of the server in a round, by whole models, by low rank, and by part of the latter.

    Args:
        num_clients: N.
        compared: the number of whole models that are really compared.
        block_nP: as many whole models as are compared at once.
        centre_KP: the centres.
        basis_PD: the basis of the low-rank models.
        uploads: the models that were uploaded in this round.
        turns: the number of turns, whose median counts.
        draw: the source of the low-rank models.
    """
    code_ND = torch.randn(num_clients, basis_PD.shape[1], generator=draw)
    current_N = torch.zeros(num_clients, dtype=torch.int64)
    centre_KD = project(centre_KP, basis_PD)
    uploads_s = seconds(lambda: project_all(uploads, basis_PD), turns)
    centres_s = seconds(lambda: project(centre_KP, basis_PD), turns)
    assign_s = seconds(lambda: assign(cosine(code_ND, centre_KD), current_N), turns)
    return {
        "l2_s": num_clients * whole(_negative_l2, block_nP, centre_KP, compared),
        "cosine_s": num_clients * whole(cosine, block_nP, centre_KP, compared),
        "low_rank_s": uploads_s + centres_s + assign_s,
        "project_uploads_s": uploads_s,
        "project_centres_s": centres_s,
        "assign_s": assign_s,
    }


def _negative_l2(model_nP: Tensor, centre_KP: Tensor) -> Tensor:
    return -squared_distances_to_centres(model_nP, centre_KP)


def cost_figure(entries: Sequence[dict[str, float]]) -> "Figure":
    """Draws seconds of the server, and models sent to the clients of a round, over the number of clients."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), dpi=100, layout="constrained")
    time_axes, bytes_axes = figure.subplots(1, 2)
    num_clients = [entry["num_clients"] for entry in entries]
    names = {
        "l2_s": "L2 of whole models (FeSEM)",
        "cosine_s": "cosine of whole models",
        "low_rank_s": "low rank (LCFed)",
    }
    for (name, label), colour in zip(names.items(), COLOURS, strict=False):
        time_axes.loglog(num_clients, [entry[name] for entry in entries], "o-", color=colour, label=label)
    one = [entry["model_megabytes"] for entry in entries]
    ifca = [entry["model_megabytes"] + entry["ifca_extra_megabytes"] for entry in entries]
    bytes_axes.semilogx(num_clients, ifca, "o-", color=COLOURS[3], label="all centres (IFCA)")
    bytes_axes.semilogx(
        num_clients, [2 * each for each in one], "o-", color=COLOURS[2], label="centre, embedding (LCFed)"
    )
    bytes_axes.semilogx(num_clients, one, "o-", color=COLOURS[0], label="one model (FeSEM)")
    bytes_axes.set_ylim(bottom=0)
    for axes, unit in ((time_axes, "seconds of one core per round"), (bytes_axes, "MB per round")):
        axes.set_xlabel("clients")
        axes.set_ylabel(unit)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    return figure


def main() -> None:
    """Measures, prints a table and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--populations", type=int, nargs="+", default=[100, 1000, 10_000, 100_000])
    parser.add_argument("--clients", type=int, default=25, help="clients per round")
    parser.add_argument("--clusters", type=int, default=10)
    parser.add_argument("--dimension", type=int, default=50)
    parser.add_argument(
        "--parameters", type=int, help="parameters of a model (default: those of the CNN for 100 classes)"
    )
    parser.add_argument("--models", type=int, default=100, help="largest number of whole models to compare")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="file for the entries")
    parser.add_argument("--figure", type=Path, help="file for the picture")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    size = options.parameters or Layout.from_network(CNN(num_classes=100)).num_parameters
    draw = torch.Generator().manual_seed(0)
    centre_KP = torch.randn(options.clusters, size, generator=draw)
    block_nP = torch.randn(min(CLIENTS_AT_A_TIME, options.models), size, generator=draw)
    basis_PD = torch.randn(size, options.dimension, generator=draw)
    uploads = [block_nP[number % len(block_nP)] for number in range(options.clients)]
    print(
        f"{platform.processor() or platform.machine()}, torch {torch.__version__}, {options.threads} thread(s), "
        f"{size:,} parameters, K = {options.clusters}, D = {options.dimension}, {options.clients} clients a round"
    )
    entries = []
    for num_clients in options.populations:
        compared = min(num_clients, options.models)
        times = server_times(num_clients, compared, block_nP, centre_KP, basis_PD, uploads, options.turns, draw)
        entry = {
            "num_clients": num_clients,
            "compared": compared,
            **times,
            "l2_over_low_rank": times["l2_s"] / times["low_rank_s"],
            "ifca_extra_megabytes": (options.clusters - 1) * size * FLOAT_BYTES * options.clients / 1e6,
            "model_megabytes": size * FLOAT_BYTES * options.clients / 1e6,
        }
        entries.append(entry)
        print("  ".join(f"{name} {value:.4g}" for name, value in entry.items()))
    if options.json:
        options.json.write_text(json.dumps(entries, indent=2) + "\n")
    if options.figure:
        save(cost_figure(entries), options.figure)


if __name__ == "__main__":
    main()
