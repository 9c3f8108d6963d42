"""lcfl without YAML: build the parts, train, and predict with the models."""

import functools
import sys

import torch

import lcfl
from lcfl.data.datasets import Digits
from lcfl.data.partition import Pathological
from lcfl.models import MLP


def main() -> None:
    """Trains LCFed on the handwritten digits for 30 rounds and predicts with client 3's model."""
    data = lcfl.FederatedDataModule(Digits(), Pathological(classes_per_client=5), num_clients=20, batch_size=10)
    model = lcfl.FederatedModule(
        functools.partial(MLP, in_features=64, hidden=[64]),
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        cluster_weight=0.5,
        global_weight=0.1,
    )
    method = lcfl.Method(
        local_update=lcfl.LocalTraining(steps=5),
        exchange=lcfl.CentreAndEmbedding(),
        aggregation=lcfl.ClusterMean(),
        clustering=[lcfl.LowRankCosine(num_clusters=10, dimension=15)],
    )
    federation = lcfl.Federation(rounds=30, clients_per_round=10, name="python_api")

    run = federation.fit(model, data, method)
    if run.signal:  # Ctrl-C or SIGTERM; federation.fit(..., ckpt_path="last") goes on
        sys.exit(128 + run.signal)
    print("personal accuracy:", run.metrics["test/own_split/personal/acc"])

    # Another process can open the same run with its directory, the model and the method.
    again = lcfl.load(run.path, model, method)
    images, labels = data.seen_by(3).batch(data.population.test["own_split"][3], torch.device("cpu"))
    with torch.no_grad():
        predicted = again.model("personal", client=3)(images).argmax(dim=1)
    print("client 3:", int((predicted == labels).sum()), "of", len(labels), "test samples correct")


if __name__ == "__main__":
    main()
