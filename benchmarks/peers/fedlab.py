"""FedLab, with a SyncServerHandler and an SGDSerialClientTrainer in the standalone pipeline."""

import logging

from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
from fedlab.contrib.algorithm.basic_server import SyncServerHandler
from fedlab.core.standalone import StandalonePipeline

from peers.common import Gate, Task


class Server(SyncServerHandler):
    """Samples the task's clients."""

    def sample_clients(self) -> list[int]:
        return task.sampled[self.round]


class Data:
    """Returns the batches of the current round."""

    def get_dataloader(self, client: int, batch_size: int) -> list:
        return task.batches(server.round, client)


class Pipeline(StandalonePipeline):
    """Calls the gate after every round."""

    def evaluate(self) -> None:
        gate.end_round(lambda: list(self.handler.model.parameters()))


gate = Gate("fedlab")
task = Task()
logging.disable()
server = Server(task.network(), task.num_rounds, len(task.sampled[0]) / task.num_clients)
clients = SGDSerialClientTrainer(task.network(), task.num_clients)
clients.setup_dataset(Data())
clients.setup_optim(epochs=1, batch_size=task.batch_size, lr=task.lr)
gate.ready()
Pipeline(server, clients).main()
