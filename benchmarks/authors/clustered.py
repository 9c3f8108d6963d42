"""Methods that form clusters of clients. docs/results.md explains the differences."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.cluster import AgglomerativeClustering
from torch import nn
from torch.utils.data import TensorDataset

from authors.common import LR, SGD, VISION, Network, Rounds, Row, code_in
from lcfl import methods as parts
from lcfl.core.messages import Uplink
from lcfl.methods.clustering.agglomerative import cut_tree
from lcfl.methods.clustering.bipartition import bipartition_of
from lcfl.methods.clustering.loss_vectors import match_to_models
from lcfl.methods.clustering.principal_angles import angles
from lcfl.methods.local.signature import left_singular_vectors

MEAN = parts.ClusterMean("participants", "participants", "uniform")


def ifca(folder: Path) -> Iterator[Row]:
    """Compares a round in which six clients choose one of two models."""
    rounds = Rounds(parts.LeastLossTraining(steps=3), parts.AllCentres(), MEAN, sizes=(12,) * 6, batch_size=12)
    start = rounds.state.centres = torch.stack([rounds.random_model(seed) for seed in (1, 2)])
    with code_in(folder / "mnist", "train_cluster_mnist", unused=VISION) as (code,):
        theirs = object.__new__(code.TrainMNISTCluster)
        theirs.config = {"m": 6, "m_test": 6, "p": 2, "tau": 3}
        theirs.dataset = {"train": {"cluster_assign": [0] * 6}}
        theirs.criterion, theirs.models = nn.CrossEntropyLoss(), [rounds.load(model) for model in start]
        theirs.load_data = lambda client, train=True: rounds.samples(rounds.shares[client])
        chosen = theirs.get_inference_stats(train=True)["cluster_assign"]
        theirs.train(chosen, LR)
    choices = torch.tensor([int(rounds.trained(client).extras["cluster"]) for client in rounds.clients])
    rounds.state.assignment = choices
    rounds.round()
    yield Row("clusters that clients choose", choices, torch.tensor(np.array(chosen)))
    yield Row("cluster models", rounds.state.centres, rounds.vectors(theirs.models), start)


def cfl(folder: Path) -> Iterator[Row]:
    """Compares a round that divides six clients into two halves."""
    sgd = partial(torch.optim.SGD, lr=0.99 * LR)  # their clients lower the rate before they train
    local, mean = parts.LocalTraining(epochs=2), parts.GlobalMean("uniform")
    rounds = Rounds(local, parts.FullModel(), mean, sizes=(12,) * 6, optimizer=sgd)
    start = rounds.global_model
    with code_in(folder, "fl_devices") as (code,):
        code.AgglomerativeClustering = lambda affinity, **given: AgglomerativeClustering(metric=affinity, **given)
        data = TensorDataset(*rounds.samples(rounds.shares[0]))
        server = code.Server(Network, data)
        code.copy(dict(server.W), dict(rounds.load(start).named_parameters()))
        clients = [code.Client(Network, SGD, data, number) for number in rounds.clients]
        for number, client in enumerate(clients):
            client.synchronize_with_server(server)
            client.compute_weight_update(2, rounds.passes(number, epochs=2))
            client.reset()
        halves = server.cluster_clients(server.compute_pairwise_similarities(clients))
        server.aggregate_clusterwise([[clients[number] for number in half] for half in halves])
        norms = torch.tensor([server.compute_max_update_norm(clients), server.compute_mean_update_norm(clients)])
    updates, theirs = (rounds.vectors(getattr(client, name) for client in clients) for name in ("dW", "W"))
    ends = rounds.round()
    own = ends - start
    labels = torch.from_numpy(bipartition_of(own, "complete")[0])
    state = replace(rounds.state, assignment=labels, centres=torch.stack([start, start]))
    MEAN(state, [Uplink(number, {"model": model}, 12) for number, model in enumerate(ends)], rounds.layout)
    yield Row("clients' updates", own, updates, torch.zeros(1))
    lengths = torch.tensor([float(own.norm(dim=1).max()), float(own.mean(dim=0).norm())])
    yield Row("largest update and length of the mean", lengths, norms, torch.zeros(1))
    other = torch.zeros(6, dtype=torch.int64)
    other[halves[1] if 0 in halves[0] else halves[0]] = 1
    yield Row("halves by complete linkage", labels, other)
    yield Row("cluster models", state.centres[state.assignment], theirs, start)


def pacfl(folder: Path) -> Iterator[Row]:
    """Compares the angles between the data of nine clients, and the clusters by thresholds of them."""
    draw = np.random.default_rng(0)
    bases = draw.normal(size=(3, 12, 3))
    data = [bases[i % 3] @ draw.normal(size=(3, 20)) + 0.3 * draw.normal(size=(12, 20)) for i in range(9)]
    ours = angles([left_singular_vectors(torch.from_numpy(each), 3) for each in data], "vector_min")
    theirs = [np.linalg.svd(each, full_matrices=False)[0][:, :3] for each in data]
    cuts = []
    with code_in(folder / "src" / "clustering", "hierarchical_clustering") as (code,):
        plain = code.calculating_adjacency(range(9), theirs)
        both = code.calculating_adjacency(range(9), [np.concatenate([each, -each], axis=1) for each in theirs])
        for threshold in np.linspace(1, 89, 45):
            for linkage, name in (("weighted", "average"), ("complete", "maximum"), ("single", "minimum")):
                found = code.hierarchical_clustering(ours.copy(), threshold, name)
                cuts.append((cut_tree(ours, linkage, float(threshold)).labels, found))
    for found in (plain, both):
        np.fill_diagonal(found, 0.0)
    ours, plain, both = map(torch.from_numpy, (ours, plain, both))
    reason = "they take no absolute value of a product, whose sign is arbitrary (reading A23)"
    yield Row("angles between the clients' data", ours, plain, torch.zeros(1), reason)
    yield Row("angles, with every vector and its negative", ours, both, torch.zeros(1))
    apart = sum(_groups(labels) != {frozenset(group) for group in found} for labels, found in cuts)
    yield Row(f"{len(cuts)} clusterings of our angles, that differ", torch.tensor([apart]), torch.zeros(1))


def _groups(labels: Any) -> set[frozenset[int]]:
    return {frozenset(np.flatnonzero(labels == label).tolist()) for label in np.unique(labels)}


def clove(folder: Path) -> Iterator[Row]:
    """Compares which of four models the groups of ten clients get."""
    draw, num_models, num_clients = np.random.default_rng(0), 4, 10
    unused = ["finch", "model", "utils.learning_utils", "utils.logging_utils"]
    apart = 0
    with code_in(folder, "utils.algorithm_utils", unused=unused) as (code,):
        for _ in range(500):
            losses = draw.exponential(size=(num_clients, num_models)).astype(np.float32)
            labels = np.unique(draw.integers(num_models, size=num_clients), return_inverse=True)[1]
            config = {
                "cluster_to_model_matching_method": "min_cost_matching_wrt_total_cluster_loss",
                "number_of_models": int(labels.max()) + 1,
                "total_number_of_models": num_models,
            }
            rows = dict(enumerate(losses.astype(np.float64)))
            _, found = code.match_clusters_to_models(config, labels, rows, list(range(num_clients)))
            ours = match_to_models(torch.from_numpy(losses), torch.from_numpy(labels))
            apart += any(int(ours[client]) != found[client] for client in range(num_clients))
    yield Row("500 matchings of groups with models, that differ", torch.tensor([apart]), torch.zeros(1))
