"""Tests that invalid options of clusterings are refused."""

import pytest

from lcfl.methods.clustering import (
    ClientChoice,
    ClusterNumberTuning,
    GreedyIncentive,
    HierarchicalUpdates,
    LossVectorKMeans,
    LowRankCosine,
    ModelKMeans,
    OneShotHierarchical,
    PrincipalAngles,
    RecursiveBipartition,
    RefreshedLowRankCosine,
    UpdateDirections,
    UpdateEM,
)


@pytest.mark.parametrize(
    ("clustering", "options", "says"),
    [
        (ClientChoice, {"num_clusters": 0}, "ClientChoice: got num_clusters"),
        (ClientChoice, {"max_redraws": -1}, "ClientChoice: got num_clusters"),
        (ClientChoice, {"max_redraws": 2**62}, "max_redraws from 0 to 1000"),
        (ClientChoice, {"min_share": 1.5}, "ClientChoice: got num_clusters"),
        (LossVectorKMeans, {"num_clusters": 0}, "num_clusters=0; it must be at least 1"),
        (LossVectorKMeans, {"first": "best"}, "first='best'; allowed are losses and random"),
        (LossVectorKMeans, {"stable_rounds": 0}, "stable_rounds=0; it must be at least 1, or null"),
        (RecursiveBipartition, {"eps1": -1.0}, "eps1=-1.0; it must be at least 0"),
        (RecursiveBipartition, {"min_size": 1}, "min_size=1; it must be at least 2"),
        (RecursiveBipartition, {"bipartition": "single"}, "bipartition='single'; allowed are complete and optimal"),
        (RecursiveBipartition, {"gamma_max": 2.0}, "gamma_max=2.0; it must lie between 0 and 1"),
        (PrincipalAngles, {"num_vectors": 0}, "num_vectors=0; it must be at least 1"),
        (PrincipalAngles, {"angle": "sum"}, "angle='sum'; allowed are vector_min, principal and trace"),
        (PrincipalAngles, {"threshold": 5.0}, r"threshold=5\.0, num_clusters=4; give exactly one"),
        (PrincipalAngles, {"linkage": "ward"}, "linkage=ward joins Euclidean vectors only"),
        (HierarchicalUpdates, {"after": -1}, "after=-1; it must be at least 0"),
        (HierarchicalUpdates, {"threshold": 1.0}, "threshold=1.0, num_clusters=4, choose=None; exactly one"),
        (HierarchicalUpdates, {"metric": "l3"}, "metric='l3'; allowed are l2, l1 and cosine"),
        (HierarchicalUpdates, {"metric": "cosine"}, "linkage=ward joins Euclidean vectors only"),
        (UpdateDirections, {"num_clusters": 0}, "num_clusters=0; it must be at least 1"),
        (UpdateDirections, {"pretrain_steps": 0}, "pretrain_steps=0; it must be at least 1"),
        (UpdateDirections, {"measure": "l2"}, "measure='l2'; allowed are edc and madc"),
        (OneShotHierarchical, {"num_clusters": 3}, r"choose=gap; exactly one must be given"),
        (OneShotHierarchical, {"choose": None}, "exactly one must be given"),
        (OneShotHierarchical, {"linkage": "mean"}, r"linkage='mean'; allowed are average"),
        (
            OneShotHierarchical,
            {"choose": "elbow"},
            r"choose='elbow'; allowed are gap, silhouette, silhouette_or_one and null",
        ),
        (OneShotHierarchical, {"layers": []}, r"layers=\[\]; name at least one layer"),
        (
            OneShotHierarchical,
            {"warmup_epochs": 1, "warmup_steps": 2},
            r"warmup_epochs=1 and warmup_steps=2; give at most one",
        ),
        (OneShotHierarchical, {"warmup_steps": 0}, "warmup_steps=0; it must be at least 1"),
        (RefreshedLowRankCosine, {"num_clusters": 0}, "num_clusters=0; it must be at least 1"),
        (RefreshedLowRankCosine, {"init": "zeros"}, "init='zeros'; allowed are kmeans, random and common"),
        (RefreshedLowRankCosine, {"dimension": 0}, "dimension=0"),
        (RefreshedLowRankCosine, {"refresh_every": 0}, "refresh_every=0"),
        (RefreshedLowRankCosine, {"fit_over": "all"}, "fit_over='all'; allowed are stored and participants"),
        (
            RefreshedLowRankCosine,
            {"similarity": "l1"},
            "similarity='l1'; allowed are low_rank_cosine, cosine, low_rank_l2 and l2",
        ),
        (GreedyIncentive, {"rule": "loose"}, "rule='loose'; allowed are relative and strict"),
        (GreedyIncentive, {"factorised": "models"}, "factorised='models'; allowed are updates and similarities"),
        (GreedyIncentive, {"layers": []}, r"layers=\[\]; give output, all, or the name of at least one"),
        (GreedyIncentive, {"theta": 0.0}, "theta=0.0; it must lie in"),
        (GreedyIncentive, {"candidates": 1.5}, "candidates=1.5"),
        (GreedyIncentive, {"explained_variance": 0.0}, "explained_variance=0.0"),
        (GreedyIncentive, {"margin": -0.1}, "margin=-0.1"),
        (ClusterNumberTuning, {"criterion": "best"}, "criterion='best'; allowed are ratio and silhouette"),
        (ClusterNumberTuning, {"lower": 0.8, "upper": 0.2}, "lower=0.8, upper=0.2; 0 <= lower < upper must hold"),
        (
            ClusterNumberTuning,
            {"criterion": "silhouette", "literal": True},
            "literal=true works with criterion=ratio only",
        ),
        (ClusterNumberTuning, {"interval": 0}, "interval=0; it must be at least 1"),
        (ClusterNumberTuning, {"cooldown": -1}, "cooldown=-1"),
        (ClusterNumberTuning, {"start": -1}, "start=-1; it must be at least 0"),
        (ClusterNumberTuning, {"min_clusters": 0}, "min_clusters=0"),
        (ClusterNumberTuning, {"margin": -0.1}, "margin=-0.1"),
        (LowRankCosine, {"num_clusters": 0}, "LowRankCosine: got num_clusters=0; it must be at least 1"),
        (LowRankCosine, {"dimension": 0}, "LowRankCosine: got dimension=0; it must be at least 1"),
        (LowRankCosine, {"offline_clients": 0}, "LowRankCosine: got offline_clients=0; it must be at least 1"),
        (LowRankCosine, {"offline_steps": 0}, "LowRankCosine: got offline_steps=0; it must be at least 1"),
        (LowRankCosine, {"offline_clients": 1}, "got offline_clients=1; principal components need at least 2 models"),
        (LowRankCosine, {"init": "k-means"}, "got init='k-means'; allowed are kmeans and random"),
        (ModelKMeans, {"num_clusters": 0}, "num_clusters=0; it must be at least 1"),
        (ModelKMeans, {"over": "all"}, "over='all'; allowed are stored and participants"),
        (UpdateEM, {"max_iterations": 0}, "max_iterations=0; it must be at least 1"),
    ],
)
def test_invalid_options_are_refused(clustering, options, says):
    with pytest.raises(ValueError, match=says):
        clustering(**options)


@pytest.mark.parametrize("clustering", [ClientChoice, PrincipalAngles, HierarchicalUpdates])
def test_more_clusters_than_clients_are_refused(clustering):
    with pytest.raises(ValueError, match="num_clusters=4 for"):
        clustering().check(3)
