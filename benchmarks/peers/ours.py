"""lcfl, with a `Federation` that has the parts of FedAvg, on the same partition and initial weights."""

import argparse
import functools
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from lcfl import Callback, FederatedModule, Federation, Method
from lcfl.core.state import FederationState
from lcfl.data.datamodule import FederatedDataModule
from lcfl.data.datasets import CIFAR10, FashionMNIST, RandomLike
from lcfl.data.partition import FromFile, Partition
from lcfl.methods.aggregation import GlobalMean
from lcfl.methods.exchange import FullModel
from lcfl.methods.local import LocalTraining
from lcfl.models import CNN, LeNet5
from lcfl.server.server import Server
from peers.common import Gate

NETWORKS = {"lenet": functools.partial(LeNet5, in_channels=1, image_size=28, padding=2), "cnn": CNN}
DATASETS = {"lenet": FashionMNIST, "cnn": CIFAR10}


class Rounds(Callback):
    """Calls the gate after every round."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate

    def on_fit_start(self) -> None:
        """Reports that all ranks have started."""
        self.gate.ready()

    def on_round_logged(self, server: Server, state: FederationState) -> None:
        """Reports the end of the round, with the global model."""
        module = server.module
        self.gate.end_round(lambda: list(module.layout.unpack(state.global_model, module.make_network()).parameters()))


def make_data(plan: dict[str, Any], partition: Partition) -> FederatedDataModule:
    """Returns the clients' data, which are random images if the plan's root is None."""
    dataset = DATASETS[plan["network"]](plan["root"] or "data")
    if plan["root"] is None:
        dataset = RandomLike(dataset, 2 * plan["num_clients"] * plan["num_samples"])
    return FederatedDataModule(
        dataset,
        partition,
        plan["num_clients"],
        batch_size=plan["batch_size"],
        protocols=["label_view"],
        val_fraction=0.0,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--devices", type=int, default=1)
    options = parser.parse_args()
    gate = Gate("lcfl", "lightning")
    plan = json.loads(Path(os.environ["CONTEST_PLAN"]).read_text())
    module = FederatedModule(
        NETWORKS[plan["network"]], functools.partial(torch.optim.SGD, lr=plan["lr"]), init_from=plan["weights"]
    )
    method = Method(LocalTraining(epochs=1), FullModel(), GlobalMean())
    with tempfile.TemporaryDirectory() as folder:
        federation = Federation(
            plan["num_rounds"], plan["clients_per_round"], evaluate_every=0, accelerator="cpu",
            devices=options.devices, logger=False, callbacks=[Rounds(gate)], enable_checkpointing=False,
            enable_progress_bar=False, default_root_dir=folder, seed=plan["seed"],
            engine=options.engine,
        )  # fmt: skip
        federation.fit(module, make_data(plan, FromFile(plan["partition"])), method)


if __name__ == "__main__":
    main()
