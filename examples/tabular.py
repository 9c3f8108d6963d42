"""Tabular data: clients with a few bottles each learn to recognise the growers of 178 wines by their chemistry."""

import functools

import torch
from sklearn.datasets import load_wine

import lcfl
from lcfl.data.datasets import Tensors
from lcfl.data.partition import ClientDirichlet
from lcfl.models import MLP


def main() -> None:
    """Trains FedAvg with a small perceptron on the 13 columns, which are scaled to mean 0 and standard deviation 1."""
    columns, growers = load_wine(return_X_y=True)
    inputs = torch.tensor((columns - columns.mean(0)) / columns.std(0), dtype=torch.float32)
    wines = Tensors((inputs, torch.from_numpy(growers)))

    data = lcfl.FederatedDataModule(wines, ClientDirichlet(alpha=1.0), num_clients=6, batch_size=8)
    model = lcfl.FederatedModule(
        functools.partial(MLP, in_features=13, hidden=[16], num_classes=3),
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
    )
    method = lcfl.Method(lcfl.LocalTraining(epochs=1), lcfl.FullModel(), lcfl.GlobalMean())
    run = lcfl.Federation(rounds=20, name="tabular").fit(model, data, method)
    print("global accuracy:", run.metrics["test/own_split/global/acc"])


if __name__ == "__main__":
    main()
