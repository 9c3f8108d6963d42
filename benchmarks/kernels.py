"""Measures a gradient by the engine `compiled`, also with narrower vectors, in comparison with autograd.

    python benchmarks/kernels.py --json kernels.json

The batch has 32 random images. The kernels are built for all instructions of this processor. On x86, they are also
built without AVX-512 and without AVX, as for other processors. Each library is kept like that of a run. All variants
run on one thread and take turns. Shown are milliseconds of processor time, the least of all turns. This command
disables AVX-512 for autograd, too:

    ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 python benchmarks/kernels.py
"""

import argparse
import json
import os
import platform
import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from lightning.fabric import Fabric
from torch import Tensor

from lcfl import FederatedModule
from lcfl import models as networks
from lcfl.data.datamodule import FederatedDataModule
from lcfl.data.datasets import Tensors
from lcfl.data.partition import IID
from lcfl.engines import ChosenEngine, choose_engine, kernels, make_engine

NETWORKS = {
    "lenet 1x28x28": (partial(networks.LeNet5, in_channels=1, image_size=28, padding=2), (1, 28, 28)),
    "lenet 3x32x32": (networks.LeNet5, (3, 32, 32)),
    "cnn 3x32x32": (networks.CNN, (3, 32, 32)),
    "resnet9 3x32x32": (networks.ResNet9, (3, 32, 32)),
    "mlp 784": (partial(networks.MLP, 784, (200,), 10), (784,)),
}
FLAGS = {"native": "", "no AVX-512": "-mno-avx512f", "no AVX": "-mno-avx"}
BATCH = 32


@contextmanager
def compiled_with(flag: str) -> Iterator[None]:
    """Makes the compiler use one more flag for kernels that are built inside the block."""
    command = shlex.join([*kernels.compiler_command(), *flag.split()])
    with patch.dict(os.environ, CXX=command), patch.object(kernels, "load", kernels.load.__wrapped__):
        yield


def data_of(shape: Sequence[int]) -> FederatedDataModule:
    """Returns data with one client, which has random images for one batch and for a test."""
    draw = torch.Generator().manual_seed(0)
    pixels, labels = torch.randn(2 * BATCH, *shape, generator=draw), torch.randint(10, (2 * BATCH,), generator=draw)
    data = FederatedDataModule(Tensors((pixels, labels)), IID(), 1, batch_size=BATCH, protocols=["own_split"])
    data.prepare_data()
    data.setup()
    return data


def main(args: Sequence[str] | None = None) -> dict[str, dict[str, float]]:
    """Measures, prints a table and writes JSON. Returns milliseconds per network and engine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.5, help="duration of each turn")
    parser.add_argument("--json", type=Path, help="file for the numbers")
    options = parser.parse_args(args)
    torch.set_num_threads(1)
    flags = FLAGS if platform.machine() in ("x86_64", "AMD64") else {"native": ""}
    print(f"torch {torch.__version__}, {options.turns} turns; processor ms for a gradient of {BATCH} images")
    print(f"| network | parameters | sequential | {' | '.join(flags)} |\n|{'---|' * (3 + len(flags))}")
    results = {}
    for name in options.networks:
        network, shape = NETWORKS[name]
        data, fabric = data_of(shape), Fabric(accelerator="cpu", devices=1)
        module = FederatedModule(network, partial(torch.optim.SGD, lr=0.01))
        engines = {"sequential": make_engine(ChosenEngine("sequential"), fabric, module, data)}
        for label, flag in flags.items():
            with compiled_with(flag):
                chosen = choose_engine("compiled", module, data, "cpu", "32-true")
                engines[label] = make_engine(chosen, fabric, module, data)
        model, batch = module.initial_model(0), np.arange(BATCH)
        taken: dict[str, list[float]] = {label: [] for label in engines}
        for turn in range(options.turns + 1):
            for label, engine in engines.items():
                begin, steps = time.process_time(), 0
                while steps == 0 or time.process_time() - begin < options.seconds * (turn > 0):
                    gradient: Tensor = engine.gradient(model, batch).vector
                    steps += 1
                if turn:  # the first turn is for warming up
                    taken[label].append((time.process_time() - begin) / steps * 1000)
                elif label == "sequential":
                    reference = gradient
                elif not torch.allclose(gradient, reference, rtol=1e-3, atol=1e-3 * float(reference.abs().max())):
                    raise SystemExit(f"{name}: the gradient of {label} differs from that of autograd.")
        results[name] = {label: min(each) for label, each in taken.items()}
        cells = [f"{value:.2f}" for value in results[name].values()]
        print(f"| {name} | {module.layout.num_parameters:,} | {' | '.join(cells)} |", flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    return results


if __name__ == "__main__":
    main()
