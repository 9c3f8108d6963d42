"""Flower, with the message API on its simulation engine and one ClientApp per sampled client.

This is faster than its NumPyClient.
"""

import os

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "RAY_DISABLE_IMPORT_WARNING": "1"}

import logging

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from peers.common import Gate, Task

client_app = ClientApp()
server_app = ServerApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """Trains the client that the message names for one local epoch."""
    task = Task.here()
    network = task.network()
    network.load_state_dict(message.content["arrays"].to_torch_state_dict())
    number, client = message.content["config"]["server-round"] - 1, message.content["config"]["client"]
    optimizer = torch.optim.SGD(network.parameters(), lr=task.lr)
    batches = task.batches(number, client)
    for inputs, targets in batches:
        loss = torch.nn.functional.cross_entropy(network(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    num_examples = sum(len(targets) for _, targets in batches)
    reply = {"arrays": ArrayRecord(network.state_dict()), "metrics": MetricRecord({"num-examples": num_examples})}
    return Message(content=RecordDict(reply), reply_to=message)


class Strategy(FedAvg):
    """Samples the task's clients. It does not matter which node trains which client."""

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid):  # type: ignore[no-untyped-def]
        sampled = task.sampled[server_round - 1]
        nodes = list(grid.get_node_ids())[: len(sampled)]
        return [
            Message(
                RecordDict(
                    {"arrays": arrays, "config": ConfigRecord({"server-round": server_round, "client": client})}
                ),
                dst_node_id=node,
                message_type=MessageType.TRAIN,
            )
            for node, client in zip(nodes, sampled, strict=True)
        ]


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Runs the rounds. The strategy calls the gate as its evaluation, before the first round and after each round."""

    def evaluate(number: int, arrays: ArrayRecord) -> None:
        if number == 0:
            gate.ready()
        else:
            gate.end_round(lambda: list(arrays.to_torch_state_dict().values()))

    initial = ArrayRecord(task.network().state_dict())
    Strategy(fraction_evaluate=0.0).start(grid, initial, task.num_rounds, evaluate_fn=evaluate)


if __name__ == "__main__":
    logging.disable()
    gate = Gate("flwr", "ray")
    task = Task()
    cores = {
        "num_cpus": 1,
        "num_gpus": 0.0,
    }  # one single-threaded actor per core is 2.4 times as fast as one with all cores
    run_simulation(server_app, client_app, task.num_clients, backend_config={"client_resources": cores})
