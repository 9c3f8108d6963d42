"""pfl, with FederatedAveraging on the simulated backend and data sets of tensors."""

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel

from peers.common import Gate, Task


class Network(torch.nn.Module):
    """The task's network with the two functions that pfl requires of a model."""

    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self.network = network

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.train()
        return torch.nn.functional.cross_entropy(self.network(inputs), targets)

    def metrics(self, inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, Weighted]:
        self.eval()
        with torch.no_grad():
            return {"loss": Weighted(float(self.loss(inputs, targets)) * len(targets), len(targets))}


class Rounds(TrainingProcessCallback):
    """Calls the gate after every round."""

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):  # type: ignore[no-untyped-def]
        gate.end_round(lambda: list(model.pytorch_model.parameters()))
        return False, Metrics()


gate = Gate("pfl")
task = Task()
np.random.seed(0)
draws = iter([(number, client) for number, sampled in enumerate(task.sampled) for client in sampled])
data = FederatedDataset(lambda draw: Dataset(raw_data=task.samples(*draw)), lambda: next(draws))
network = Network(task.network())
model = PyTorchModel(network, torch.optim.SGD, torch.optim.SGD(network.parameters(), lr=1.0))
cohort = len(task.sampled[0])
gate.ready()
FederatedAveraging().run(
    NNAlgorithmParams(task.num_rounds, task.num_rounds + 1, cohort, 0),  # evaluates only before the first round
    SimulatedBackend(data, data),
    model,
    NNTrainHyperParams(task.batch_size, local_num_epochs=1, local_learning_rate=task.lr),
    callbacks=[Rounds()],
    send_metrics_to_platform=False,
)
