"""BlazeFL, with its FedAvg server and its serial client trainer, which is faster here than its pools."""

import os

os.environ["TQDM_DISABLE"] = "1"  # tqdm reads it when it is imported

from blazefl.contrib import FedAvgBaseClientTrainer, FedAvgBaseServerHandler

from peers.common import Gate, Task


class Server(FedAvgBaseServerHandler):
    """Samples the task's clients."""

    def sample_clients(self) -> list[int]:
        return task.sampled[self.round]


class Models:
    """Returns the task's network."""

    def select_model(self, model_name: str):  # type: ignore[no-untyped-def]
        return task.network()


class Data:
    """Returns the batches of the current round."""

    def get_dataloader(self, type_, cid, batch_size, generator=None) -> list:  # type: ignore[no-untyped-def]
        return task.batches(server.round, cid)


gate = Gate("blazefl")
task = Task()
share = len(task.sampled[0]) / task.num_clients
server = Server(Models(), "task", Data(), task.num_rounds, task.num_clients, share, "cpu", task.batch_size, seed=0)
clients = FedAvgBaseClientTrainer(
    Models(), "task", Data(), "cpu", task.num_clients, epochs=1, batch_size=task.batch_size, lr=task.lr, seed=0
)
gate.ready()
while not server.if_stop():
    clients.local_process(server.downlink_package(), server.sample_clients())
    for pack in clients.uplink_package():
        server.load(pack)
    gate.end_round(lambda: list(server.model.parameters()))
