"""Measures a client's local run on a CPU by the engines `compiled` and `sequential`, and by plain PyTorch loops.

    python benchmarks/engines.py --json engines.json
    python benchmarks/engines.py --networks LeNet5 MLP --optimizer Adam

A run is five steps of plain SGD, or Adam, from given weights, on random samples that are in memory, and the addition of
the trained model to a sum. The loops load a state dict, step with torch.optim and add up state dicts; one of them has
the channels of images innermost. All entries use one thread and take turns. The table shows the milliseconds
of processor time for a step, the least of all turns. The last columns are the engine that ``auto`` takes and its time
divided by the shortest.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import Tensor, nn
from torchvision.models import get_model

from lcfl import FederatedModule
from lcfl import models as networks
from lcfl.data.datamodule import FederatedDataModule
from lcfl.data.datasets import Tensors
from lcfl.data.partition import IID
from lcfl.engines import choose_engine, make_engine

Precision = Literal["32-true", "bf16-mixed"]
STEPS = 5
BATCHES = (10, 32, 64)
ENGINES = ("compiled", "sequential")
ONE_HIDDEN = partial(networks.MLP, 784, (200,), 10)
OPTIMIZERS = {"SGD": partial(torch.optim.SGD, lr=0.01), "Adam": torch.optim.Adam}
# by the targets
LOSSES = {"classes": nn.CrossEntropyLoss, "numbers": nn.MSELoss, "labels": nn.BCEWithLogitsLoss}


class Transformer(networks.SplitNetwork):
    """Two layers over 32 tokens of 64 numbers, whose mean is classified."""

    def __init__(self) -> None:
        layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True)
        super().__init__(nn.Sequential(nn.Embedding(80, 64), nn.TransformerEncoder(layer, 2)), _MeanHead(64, 10))


class _MeanHead(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs.mean(1))


class Strided(networks.SplitNetwork):
    """Three convolutions with a stride of 2 and 64, 128 and 256 channels."""

    def __init__(self, kernel: int, normalised: bool) -> None:
        layers: list[nn.Module] = []
        for before, after in pairwise((3, 64, 128, 256)):
            layers += [nn.Conv2d(before, after, kernel, 2, 1), *[nn.BatchNorm2d(after)] * normalised, nn.ReLU()]
        super().__init__(nn.Sequential(*layers, nn.Flatten()), nn.Linear(256 * 16, 10))


class Signals(networks.SplitNetwork):
    """Two convolutions of 5 and pooling over 128 steps of 9 sensors."""

    def __init__(self) -> None:
        layers: list[nn.Module] = []
        for before, after in ((9, 32), (32, 64)):
            layers += [nn.Conv1d(before, after, 5), nn.ReLU(), nn.MaxPool1d(2)]
        super().__init__(nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 29, 100), nn.ReLU()), nn.Linear(100, 10))


class Steps(Signals):
    """The same for 128 steps of 9 sensors that come as rows ``[128, 9]``."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns class scores ``[B, 10]``."""
        return super().forward(inputs.transpose(1, 2))


class Causal(nn.Module):
    """Four residual blocks of dilated convolutions that see no later step, over 128 steps of 9 sensors."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.decision = nn.Conv1d(9, width, 1), nn.Linear(width, 10)
        self.apart = (1, 2, 4, 8)
        self.blocks = nn.ModuleList(nn.Conv1d(width, width, 3, dilation=step) for _ in range(2) for step in self.apart)

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns class scores ``[B, 10]``."""
        value = self.first(inputs)
        for step, one, two in zip(self.apart, self.blocks[:4], self.blocks[4:], strict=True):
            inner = F.relu(one(F.pad(value, (2 * step, 0))))
            value = F.relu(value + two(F.pad(inner, (2 * step, 0))))
        scores: Tensor = self.decision(value.mean(2))
        return scores


class Rows(nn.Module):
    """Linear layers for each of 128 steps of 9 sensors, whose mean is classified."""

    def __init__(self, width: int, number: int) -> None:
        super().__init__()
        sizes = pairwise((9, *[width] * number))
        self.embedding = nn.Sequential(*(nn.Sequential(nn.Linear(*size), nn.ReLU()) for size in sizes))
        self.decision = nn.Linear(width, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns class scores ``[B, 10]``."""
        scores: Tensor = self.decision(self.embedding(inputs).mean(1))
        return scores


class Mixer(nn.Module):
    """Four blocks of an MLP-Mixer with 64 patches of 4 x 4 pixels and 128 channels."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.norm, self.decision = nn.Conv2d(3, 128, 4, 4), nn.LayerNorm(128), nn.Linear(128, 10)
        self.of_tokens = nn.ModuleList(self._perceptron(64, 32) for _ in range(4))
        self.of_channels = nn.ModuleList(self._perceptron(128, 512) for _ in range(4))
        self.norms = nn.ModuleList(nn.LayerNorm(128) for _ in range(8))

    @staticmethod
    def _perceptron(size: int, hidden: int) -> nn.Module:
        return nn.Sequential(nn.Linear(size, hidden), nn.GELU(), nn.Linear(hidden, size))

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns class scores ``[B, 10]``."""
        value = self.patches(inputs).flatten(2).transpose(1, 2)
        for i, (of_tokens, of_channels) in enumerate(zip(self.of_tokens, self.of_channels, strict=True)):
            value = value + of_tokens(self.norms[2 * i](value).transpose(1, 2)).transpose(1, 2)
            value = value + of_channels(self.norms[2 * i + 1](value))
        scores: Tensor = self.decision(self.norm(value).mean(1))
        return scores


class Smooth(networks.SplitNetwork):
    """LeNet-5 with another activation."""

    def __init__(self, activation: Callable[[], nn.Module]) -> None:
        layers: list[nn.Module] = []
        for before, after in ((3, 6), (6, 16)):
            layers += [nn.Conv2d(before, after, 5), activation(), nn.MaxPool2d(2)]
        for before, after in ((400, 120), (120, 84)):
            layers += [*[nn.Flatten()] * (before == 400), nn.Linear(before, after), activation()]
        super().__init__(nn.Sequential(*layers), nn.Linear(84, 10))


class Dropping(nn.Module):
    """Two convolutions of 5, and dropout of channels and features, as examples for MNIST have it."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(1, 10, 5), nn.Conv2d(10, 20, 5)
        self.channels, self.three, self.decision = nn.Dropout2d(), nn.Linear(320, 50), nn.Linear(50, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns the logarithms of probabilities ``[B, 10]``."""
        value = F.relu(F.max_pool2d(self.one(inputs), 2))
        value = F.relu(F.max_pool2d(self.channels(self.two(value)), 2))
        value = F.dropout(F.relu(self.three(value.flatten(1))), training=self.training)
        return F.log_softmax(self.decision(value), dim=1)


OF_TORCHVISION = {  # name: where it is cut
    "resnet18": "fc",
    "resnext50_32x4d": "fc",
    "regnet_y_400mf": "fc",
    "shufflenet_v2_x1_0": "fc",
    "mobilenet_v2": "classifier",
    "mobilenet_v3_small": "classifier",
    "efficientnet_b0": "classifier",
    "densenet121": "classifier",
    "convnext_tiny": "classifier",
}
# name: the network, where it is cut, and the shape of one sample
IMAGES, DIGITS, SENSORS, GREY, CHARACTERS, TOKENS = (3, 32, 32), (1, 28, 28), (9, 128), (784,), (80,), (32,)
ROWS = SENSORS[::-1]
NETWORKS: dict[str, tuple[Callable[[], nn.Module], str | None, tuple[int, ...]]] = {
    "LeNet5": (networks.LeNet5, None, IMAGES),
    "CNN": (networks.CNN, None, IMAGES),
    "ResNet9": (networks.ResNet9, None, IMAGES),
    "VGG16": (networks.VGG16, None, IMAGES),
    **{
        f"{name} of torchvision": (partial(get_model, name, weights=None, num_classes=10), head, IMAGES)
        for name, head in OF_TORCHVISION.items()
    },
    "strides, 3 x 3": (partial(Strided, 3, False), None, IMAGES),
    "strides, 4 x 4": (partial(Strided, 4, True), None, IMAGES),
    "signals": (Signals, None, SENSORS),
    "signals, steps first": (Steps, None, ROWS),
    "causal, 32 channels": (partial(Causal, 32), "decision", SENSORS),
    "causal, 128 channels": (partial(Causal, 128), "decision", SENSORS),
    "rows, 2 layers of 64": (partial(Rows, 64, 2), "decision", ROWS),
    "rows, 3 layers of 256": (partial(Rows, 256, 3), "decision", ROWS),
    "mixer": (Mixer, "decision", IMAGES),
    "LeNet5, tanh": (partial(Smooth, nn.Tanh), None, IMAGES),
    "LeNet5, sigmoid": (partial(Smooth, nn.Sigmoid), None, IMAGES),
    "LeNet5, GELU": (partial(Smooth, nn.GELU), None, IMAGES),
    "LeNet5, leaky ReLU": (partial(Smooth, nn.LeakyReLU), None, IMAGES),
    "dropout": (Dropping, None, DIGITS),
    "MLP": (ONE_HIDDEN, None, GREY),
    "CharLSTM": (networks.CharLSTM, None, CHARACTERS),
    "transformer of two layers": (Transformer, None, TOKENS),
}


class Loop:
    """What a plain loop over clients does for one of them."""

    def __init__(
        self,
        network: nn.Module,
        inputs: Tensor,
        targets: Tensor,
        channels_last: bool,
        precision: str,
        optimizer: Callable[..., torch.optim.Optimizer],
        loss: nn.Module,
    ) -> None:
        self.is_mixed, self.make_optimizer, self.loss = precision != "32-true", optimizer, loss
        self.order = torch.channels_last if channels_last else torch.contiguous_format
        self.network = network.to(memory_format=self.order)
        self.inputs, self.targets = inputs.contiguous(memory_format=self.order), targets
        self.start = {name: value.clone() for name, value in network.state_dict().items()}
        self.total = {name: torch.zeros_like(value) for name, value in self.start.items()}

    def __call__(self, batches: Sequence[np.ndarray]) -> None:
        """Trains one client."""
        self.network.load_state_dict(self.start)
        optimizer = self.make_optimizer(self.network.parameters())
        for indices in batches:
            chosen = torch.from_numpy(indices)
            with torch.autocast("cpu", torch.bfloat16, enabled=self.is_mixed):
                loss = self.loss(self.network(self.inputs[chosen]), self.targets[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        for name, value in self.network.state_dict().items():
            self.total[name] += value


def data_of(shape: Sequence[int], number: int, task: str) -> FederatedDataModule:
    """Returns data with one client: tokens for the shapes of text, otherwise numbers. Classes or targets are ten."""
    draw = torch.Generator().manual_seed(0)
    is_text = shape in (CHARACTERS, TOKENS)
    inputs = (
        torch.randint(80, (number, *shape), generator=draw) if is_text else torch.randn(number, *shape, generator=draw)
    )
    targets = torch.randint(10, (number,), generator=draw)
    if task != "classes":
        targets = torch.randn(number, 10, generator=draw)
    if task == "labels":
        targets = (targets > 0).float()
    data = FederatedDataModule(Tensors((inputs, targets)), IID(), 1)
    data.prepare_data()
    data.setup()
    return data


def runs_of(
    name: str, batch_size: int, precision: Precision, optimizer_name: str, task: str
) -> tuple[dict[str, Callable[[Sequence[np.ndarray]], None]], str]:
    """Returns one client's run by every engine and loop, and the engine that ``auto`` takes."""
    make, cut, shape = NETWORKS[name]
    data, fabric = data_of(shape, STEPS * batch_size * 2, task), Fabric(accelerator="cpu", precision=precision)
    data.batch_size = batch_size
    optimizer, loss = OPTIMIZERS[optimizer_name], LOSSES[task]()
    new_module = partial(FederatedModule, make, optimizer, cut=cut, loss=loss, report="loss")
    runs: dict[str, Callable[[Sequence[np.ndarray]], None]] = {}
    for engine_name in ENGINES:
        module = new_module()
        try:
            chosen = choose_engine(engine_name, module, data, "cpu", precision)
        except ValueError:
            continue
        engine, model = make_engine(chosen, fabric, module, data), module.initial_model(0)
        runs[engine_name] = partial(_add_run, engine.run_optimizer, model, torch.zeros_like(model))
    inputs, targets = data.samples.batch(np.arange(len(data.samples)), torch.device("cpu"))
    for channels_last in (False, True)[: 1 + (inputs.dim() == 4)]:
        runs["loop, channels_last" if channels_last else "loop"] = Loop(
            make(), inputs, targets, channels_last, precision, optimizer, loss
        )
    return runs, choose_engine("auto", new_module(), data, "cpu", precision).name


def _add_run(run: Callable, model: Tensor, total: Tensor, batches: Sequence[np.ndarray]) -> None:
    total += run(model, batches).model


def milliseconds(runs: dict[str, Callable], batches: Sequence[np.ndarray], seconds: float) -> dict[str, float]:
    """Returns each run's least milliseconds for a step, after turns that take `seconds` each on average."""
    least = dict.fromkeys(runs, float("inf"))
    for run in runs.values():
        run(batches)
    spent = 0.0
    while spent < seconds * len(runs):
        for name, run in runs.items():
            begin = time.process_time()
            run(batches)
            taken = time.process_time() - begin
            spent += taken
            least[name] = min(least[name], taken / len(batches) * 1000)
    return least


def main(args: Sequence[str] | None = None) -> list[dict[str, object]]:
    """Measures, prints a table and writes JSON. Returns a row per network and batch size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--precision", choices=get_args(Precision), default="32-true")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="SGD")
    parser.add_argument(
        "--targets",
        choices=LOSSES,
        default="classes",
        help="numbers have the squared error as loss, and labels of 0 and 1 the binary cross-entropy",
    )
    parser.add_argument("--seconds", type=float, default=4.0, help="processor seconds for an entry, on average")
    parser.add_argument("--json", type=Path, help="file for the numbers")
    options = parser.parse_args(args)
    torch.set_num_threads(1)
    columns = [*ENGINES, "loop", "loop, channels_last"]
    setting = f"{options.precision}, {options.optimizer}, {options.targets}"
    print(f"torch {torch.__version__}, {setting}; processor ms for a step, one thread")
    print(f"| network | batch | {' | '.join(columns)} | auto | x fastest |\n|{'---|' * (len(columns) + 4)}")
    rows: list[dict[str, object]] = []
    for name in options.networks:
        for batch_size in options.batches:
            runs, chosen = runs_of(name, batch_size, options.precision, options.optimizer, options.targets)
            batches = list(np.random.default_rng(0).permutation(STEPS * batch_size).reshape(STEPS, batch_size))
            least = milliseconds(runs, batches, options.seconds)
            ratio = least[chosen] / min(least.values())
            rows.append({"network": name, "batch": batch_size, **least, "auto": chosen, "ratio": ratio})
            cells = [f"{least[each]:.2f}" if each in least else "" for each in columns]
            print(f"| {name} | {batch_size} | {' | '.join(cells)} | {chosen} | {ratio:.2f} |", flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")
    return rows


if __name__ == "__main__":
    main()
