"""fluke, with CentralizedFL, which is its FedAvg, without evaluation."""

import torch
from fluke import DDict, FlukeENV
from fluke.algorithms import CentralizedFL
from fluke.client import Client
from fluke.config import OptimizerConfigurator
from fluke.server import Server

from peers.common import Gate, Task


class Loader:
    """The batches of a client in the current round."""

    def __init__(self, client: int) -> None:
        self.client = client

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(task.batches(algorithm.rounds, self.client))

    def __len__(self) -> int:
        return len(task.batches(algorithm.rounds, self.client))


class Rounds(Server):
    """Samples the task's clients."""

    def get_eligible_clients(self, eligible_perc: float) -> list[Client]:
        return [self.clients[client] for client in task.sampled[algorithm.rounds]]


class Algorithm(CentralizedFL):
    """Calls the gate after every round."""

    def notify(self, event: str, **content) -> None:  # type: ignore[no-untyped-def]
        super().notify(event, **content)
        if event == "end_round":
            gate.end_round(lambda: list(self.server.model.parameters()))


gate = Gate("fluke-fl")
task = Task()
FlukeENV().set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=False)
optimizer = OptimizerConfigurator(DDict(name="SGD", lr=task.lr))
loss = torch.nn.CrossEntropyLoss()
clients = [
    Client(number, Loader(number), None, optimizer, loss, local_epochs=1, persistency=False)
    for number in range(task.num_clients)
]
algorithm = Algorithm(task.num_clients, None, {}, clients, Rounds(task.network(), None, clients))
gate.ready()
algorithm.run(task.num_rounds, len(task.sampled[0]) / task.num_clients)
