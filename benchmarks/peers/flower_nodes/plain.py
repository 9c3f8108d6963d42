"""Flower, as an app for nodes that are machines of their own: FedAvg with its message API and plain torch.

`benchmarks/fleet.py` sends this file to the nodes. It needs only flwr and torch.
"""

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from torch import nn

BATCH_SIZE, STEPS, LR = 32, 5, 0.01
client = ClientApp()
server = ServerApp()


def lenet() -> nn.Module:
    """Returns LeNet-5 for colour images of 32 x 32 pixels, with 62,006 parameters."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


def cnn() -> nn.Module:
    """Returns the CNN of `peers.common`, with 4,778,954 parameters."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4096, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(),
        nn.Linear(512, 10),
    )  # fmt: skip


networks = {"lenet": lenet, "cnn": cnn}


@client.train()
def train(message: Message, context: Context) -> Message:
    """Trains the node's client."""
    network = networks[str(context.run_config["network"])]()
    network.load_state_dict(message.content["arrays"].to_torch_state_dict())
    share = Path(str(context.run_config["shares"])) / f"{context.node_config['client']}.pt"
    inputs, targets = torch.load(share, weights_only=True)
    optimizer = torch.optim.SGD(network.parameters(), lr=LR)
    for batch in torch.randperm(len(targets))[: STEPS * BATCH_SIZE].split(BATCH_SIZE):
        loss = nn.functional.cross_entropy(network(inputs[batch]), targets[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    reply = {"arrays": ArrayRecord(network.state_dict()), "metrics": MetricRecord({"num-examples": len(targets)})}
    return Message(content=RecordDict(reply), reply_to=message)


def bytes_of(messages: Iterable[Message]) -> int:
    """Returns the bytes of the arrays in these messages."""
    arrays = [array for each in messages if each.has_content() for array in each.content["arrays"].values()]
    return sum(len(array.data) for array in arrays)


class Strategy(FedAvg):
    """FedAvg that writes seconds and bytes of each round to a table.

    Args:
        table: the file.
        num_nodes: the nodes, all of which train in every round.
    """

    def __init__(self, table: Path, num_nodes: int) -> None:
        super().__init__(fraction_evaluate=0.0, min_train_nodes=num_nodes, min_available_nodes=num_nodes)
        self._table, self._begin, self._down = table, 0.0, 0
        table.write_text("round,time/round_s,comm/down_bytes,comm/up_bytes\n")

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Any:
        self._begin = time.perf_counter()
        messages = list(super().configure_train(server_round, arrays, config, grid))
        self._down = bytes_of(messages)
        return messages

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        replies = list(replies)
        up = bytes_of(replies)
        result = super().aggregate_train(server_round, replies)
        with self._table.open("a") as table:
            table.write(f"{server_round - 1},{time.perf_counter() - self._begin},{self._down},{up}\n")
        return result


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Runs the rounds."""
    told = context.run_config
    strategy = Strategy(Path(str(told["metrics"])), int(told["num-nodes"]))
    initial = ArrayRecord(networks[str(told["network"])]().state_dict())
    strategy.start(grid, initial, int(told["rounds"]), timeout=600)
