"""Measures rounds of a network that is trained as a whole, and of the same one with a frozen body.

    python benchmarks/frozen.py --json frozen.json

FedAvg trains torchvision's ResNet-18 on random images, with few clients and few steps, in one process. The models of
all clients are kept, as a personal method does. All runs start anew and take turns. Shown are seconds of processor
time, of the local work in a round with each engine (the median of all rounds but the first of each run) and of a step
of plain autograd on the same batch, bytes that are sent in a round, and bytes of a checkpoint.
"""

import argparse
import json
import platform
import tempfile
import time
import warnings
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torchvision.models import resnet18

import lcfl
from lcfl.callbacks import Checkpoint
from lcfl.core.callback import Callback
from lcfl.data.datasets import Tensors
from lcfl.data.partition import IID

VARIANTS: dict[str, list[str] | None] = {
    "whole network": None,
    "last block and head": ["layer4", "fc"],
    "head alone": ["fc"],
}
ENGINES = ("compiled", "sequential")
SEED = 0


class Watch(Callback):
    """Keeps the seconds of local work of every round, and the bytes of the last one."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.num_bytes = 0.0
        self._begin = 0.0

    def on_clients_sampled(self) -> None:
        """Notes when local work begins."""
        self._begin = time.process_time()

    def on_uploads(self) -> None:
        """Notes how long it took."""
        self.seconds.append(time.process_time() - self._begin)

    def on_round_logged(self, row: dict[str, float]) -> None:
        """Notes the bytes."""
        self.num_bytes = row["comm/down_bytes"] + row["comm/up_bytes"]


def module_of(trainable: list[str] | None) -> lcfl.FederatedModule:
    return lcfl.FederatedModule(
        partial(resnet18, num_classes=10), partial(torch.optim.SGD, lr=0.01), cut="fc", trainable=trainable
    )


def measured(trainable: list[str] | None, engine: str, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the numbers of one run."""
    draw, number = torch.Generator().manual_seed(SEED), options.num_clients * 2 * options.batch_size
    images = torch.randn(number, 3, options.image_size, options.image_size, generator=draw)
    labels = torch.randint(10, (number,), generator=draw)
    data = lcfl.FederatedDataModule(
        Tensors((images, labels)),
        IID(),
        num_clients=options.num_clients,
        batch_size=options.batch_size,
        drop_last=True,
        protocols=["own_split"],
    )
    training, watch = lcfl.LocalTraining(steps=options.steps), Watch()
    method = lcfl.Method(training, lcfl.ClusterModel(keeps_model=True), lcfl.GlobalMean())
    with tempfile.TemporaryDirectory() as folder:
        run = lcfl.Federation(
            rounds=options.rounds,
            evaluate_every=0,
            final_models=[],
            accelerator="cpu",
            devices=1,
            engine=engine,
            logger=False,
            enable_progress_bar=False,
            callbacks=[watch, Checkpoint(every_n_rounds=options.rounds)],
            default_root_dir=folder,
            seed=SEED,
        ).fit(module_of(trainable), data, method)
        newest = max((run.path / "checkpoints").glob("*.ckpt"))
        checkpoint_bytes = sum(file.stat().st_size for file in newest.iterdir())
    return {"seconds": watch.seconds[1:], "bytes": watch.num_bytes, "checkpoint_bytes": checkpoint_bytes}


def step_seconds(trainable: list[str] | None, options: argparse.Namespace) -> float:
    """Returns the least seconds of a forward and backward pass of torch alone."""
    module, draw = module_of(trainable).train(), torch.Generator().manual_seed(SEED)
    images = torch.randn(options.batch_size, 3, options.image_size, options.image_size, generator=draw)
    batch = images, torch.randint(10, (options.batch_size,), generator=draw)
    times = []
    for _ in range(3):
        begin = time.process_time()
        torch.autograd.grad(module.training_step(batch), module.trained_parameters())
        times.append(time.process_time() - begin)
    return min(times)


def main(args: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Prints the table and returns its rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {
        "num_clients": 4,
        "batch_size": 16,
        "steps": 2,
        "rounds": 3,
        "image_size": 32,
        "turns": 2,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(args)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    turns: dict[tuple[str, str], list[dict[str, Any]]] = {pair: [] for pair in product(VARIANTS, ENGINES)}
    for _ in range(options.turns):
        for (name, engine), found in turns.items():
            found.append(measured(VARIANTS[name], engine, options))
    rows = []
    for name, trainable in VARIANTS.items():
        module = module_of(trainable)
        rows.append(
            {
                "trained": name,
                "parameters": module.layout.num_parameters,
                "frozen": 0 if module.frozen_layout is None else module.frozen_layout.num_parameters,
                "seconds_per_round": {
                    engine: median(second for turn in turns[name, engine] for second in turn["seconds"])
                    for engine in ENGINES
                },
                "step_seconds": step_seconds(trainable, options),
                "bytes_per_round": turns[name, ENGINES[0]][0]["bytes"],
                "checkpoint_bytes": turns[name, ENGINES[0]][0]["checkpoint_bytes"],
            }
        )
    print(
        f"| trained | parameters | {' | '.join(f'seconds per round, {engine}' for engine in ENGINES)} "
        "| step of torch alone in s | MB per round | MB of a checkpoint |"
    )
    print("|---" * (5 + len(ENGINES)) + "|")
    for row in rows:
        seconds = " | ".join(f"{row['seconds_per_round'][engine]:.3f}" for engine in ENGINES)
        print(
            f"| {row['trained']} | {row['parameters']:,} | {seconds} | {row['step_seconds']:.3f} "
            f"| {row['bytes_per_round'] / 1e6:.2f} | {row['checkpoint_bytes'] / 1e6:.1f} |"
        )
    if options.json is not None:
        content = {"versions": {"lcfl": lcfl.__version__, "torch": torch.__version__}, "machine": platform.platform()}
        options.json.write_text(json.dumps(content | {"rows": rows}, indent=2))
    return rows


if __name__ == "__main__":
    main()
