"""Aggregations, which turn the uploads of a round into the server's models."""

from lcfl.methods.aggregation.base import Aggregation, NoAggregation, mean_model
from lcfl.methods.aggregation.cluster_mean import BlendedClusterMean, ClusterMean
from lcfl.methods.aggregation.global_mean import GlobalMean, NormalisedMean
from lcfl.methods.aggregation.update_mean import UpdateMean

__all__ = [
    "Aggregation",
    "BlendedClusterMean",
    "ClusterMean",
    "GlobalMean",
    "NoAggregation",
    "NormalisedMean",
    "UpdateMean",
    "mean_model",
]
