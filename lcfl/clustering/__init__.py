"""Who belongs together: callbacks of the server that run at the end of a round, one per paper."""

from lcfl.clustering.angles import PrincipalAngles
from lcfl.clustering.base import Clustering, Opening
from lcfl.clustering.bipartition import RecursiveBipartition
from lcfl.clustering.choice import ClientChoice
from lcfl.clustering.directions import UpdateDirections
from lcfl.clustering.incentive import GreedyIncentive
from lcfl.clustering.kmeans import ModelKMeans
from lcfl.clustering.lowrank import LowRankCosine
from lcfl.clustering.one_shot import OneShotHierarchical
from lcfl.clustering.refreshed import RefreshedLowRankCosine
from lcfl.clustering.tuning import ClusterNumberTuning
from lcfl.clustering.update_tree import HierarchicalUpdates
from lcfl.clustering.updates import SplitAndMerge, UpdateEM

__all__ = [
    "ClientChoice",
    "ClusterNumberTuning",
    "Clustering",
    "GreedyIncentive",
    "HierarchicalUpdates",
    "LowRankCosine",
    "ModelKMeans",
    "OneShotHierarchical",
    "Opening",
    "PrincipalAngles",
    "RecursiveBipartition",
    "RefreshedLowRankCosine",
    "SplitAndMerge",
    "UpdateDirections",
    "UpdateEM",
]
