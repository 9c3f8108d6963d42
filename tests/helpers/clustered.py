"""The clustered baselines as methods for small runs, and common parts of their tests."""

from functools import partial

import torch
from torch import nn

from lcfl.core.callback import Callback
from lcfl.methods.aggregation import ClusterMean
from lcfl.methods.clustering import (
    ClientChoice,
    HierarchicalUpdates,
    LossVectorKMeans,
    ModelKMeans,
    PrincipalAngles,
    RecursiveBipartition,
    UpdateDirections,
)
from lcfl.methods.exchange import AllCentres, ClusterModel, ClusterReference, EnvelopeModel
from lcfl.methods.local import EnvelopeTraining, LeastLossTraining, LocalTraining
from lcfl.methods.method import Method
from lcfl.models import SplitNetwork
from lcfl.models.module import FederatedModule

SAMPLES = ClusterMean("participants", "participants", "samples")
UNIFORM = ClusterMean("participants", "participants", "uniform")
ALWAYS = {"eps1": 1e9, "eps2": 0.0, "min_round": 0, "min_size": 2}  # CFL splits whenever updates disagree


def normed():
    """Returns a network with batch normalisation for the blobs."""
    return SplitNetwork(nn.Sequential(nn.Linear(16, 12), nn.BatchNorm1d(12), nn.ReLU()), nn.Linear(12, 8))


def normed_module(lr=0.05):
    return FederatedModule(normed, partial(torch.optim.SGD, lr=lr))


def ifca(num_clusters=4, max_redraws=0, min_share=0.4, mean=SAMPLES, **local):
    clustering = ClientChoice(num_clusters, max_redraws, min_share)
    return Method(LeastLossTraining(**(local or {"steps": 3})), AllCentres(), mean, [clustering])


def clove(num_clusters=4, first="losses", stable_rounds=None, mean=SAMPLES, **local):
    clustering = LossVectorKMeans(num_clusters, first, stable_rounds)
    return Method(LocalTraining(**(local or {"steps": 3})), ClusterModel(), mean, [clustering])


def cfl_fixed(after=2, num_clusters=4, **local):
    clustering = HierarchicalUpdates(after, "cosine", "complete", num_clusters=num_clusters)
    return Method(LocalTraining(**(local or {"steps": 3})), ClusterModel(), UNIFORM, [clustering])


def fesem(num_clusters=4, over="participants", mean=UNIFORM, **local):
    clustering = ModelKMeans(num_clusters, over)
    return Method(LocalTraining(**(local or {"steps": 3})), ClusterModel(keeps_model=True), mean, [clustering])


def cfl(steps=3, mean=UNIFORM, **options):
    return Method(LocalTraining(steps=steps), ClusterModel(), mean, [RecursiveBipartition(**options)])


def fedgroup(num_clusters=4, pretrain_steps=5, clients_per_group=20, measure="edc", mean=SAMPLES, **local):
    clustering = UpdateDirections(num_clusters, pretrain_steps, clients_per_group, measure)
    return Method(LocalTraining(**(local or {"steps": 3})), ClusterModel(), mean, [clustering])


def fl_hc(after=2, local=None, mean=SAMPLES, **options):
    local = LocalTraining(steps=3) if local is None else local
    return Method(local, ClusterModel(), mean, [HierarchicalUpdates(after, **options)])


def pacfl(local=None, mean=SAMPLES, **options):
    local = LocalTraining(steps=3) if local is None else local
    return Method(local, ClusterModel(), mean, [PrincipalAngles(**options)])


def cgpfl(num_clusters=4, mean=UNIFORM, **local):
    local = EnvelopeTraining(**{"steps": 3, "inner_lr": 0.05, "outer_lr": 0.05, **local})
    return Method(local, EnvelopeModel(), mean, [ModelKMeans(num_clusters, "participants")])


def cgpfl_prox(num_clusters=4, mean=UNIFORM, **local):
    local = LocalTraining(**(local or {"steps": 3}))
    return Method(local, ClusterReference(), mean, [ModelKMeans(num_clusters, "participants")])


class Evaluations(Callback):
    """Keeps every evaluation."""

    def __init__(self):
        self.found = []

    def on_evaluated(self, evaluation):
        self.found.append(evaluation)
