"""Aggregations, which turn the uploads of a round into the server's models."""

from lcfl.methods.aggregation.base import Aggregation, Merge, NoAggregation, mean_model
from lcfl.methods.aggregation.cluster_mean import BlendedClusterMean, ClusterMean
from lcfl.methods.aggregation.global_mean import GlobalMean, NormalisedMean
from lcfl.methods.aggregation.rules import (
    AggregationRule,
    ClippedMean,
    CoordinateMedian,
    GeometricMedian,
    Krum,
    TrimmedMean,
)
from lcfl.methods.aggregation.server_optimizers import (
    ServerAdagrad,
    ServerAdam,
    ServerDynamics,
    ServerMomentum,
    ServerOptimizer,
    ServerYogi,
)
from lcfl.methods.aggregation.update_mean import UpdateMean

__all__ = [
    "Aggregation",
    "AggregationRule",
    "BlendedClusterMean",
    "ClippedMean",
    "ClusterMean",
    "CoordinateMedian",
    "GeometricMedian",
    "GlobalMean",
    "Krum",
    "Merge",
    "NoAggregation",
    "NormalisedMean",
    "ServerAdagrad",
    "ServerAdam",
    "ServerDynamics",
    "ServerMomentum",
    "ServerOptimizer",
    "ServerYogi",
    "TrimmedMean",
    "UpdateMean",
    "mean_model",
]
