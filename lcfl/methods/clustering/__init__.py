"""Clusterings, which decide which clients belong together.

Each clustering is a callback of the server. Most run at the end of a round. A method may have several.
"""

from lcfl.methods.clustering.base import Clustering, ExtraRound
from lcfl.methods.clustering.bipartition import RecursiveBipartition
from lcfl.methods.clustering.client_choice import ChoiceBeforeTraining, ClientChoice
from lcfl.methods.clustering.cluster_moves import keep_numbers
from lcfl.methods.clustering.greedy_incentive import GreedyIncentive
from lcfl.methods.clustering.hierarchical_updates import HierarchicalUpdates
from lcfl.methods.clustering.loss_vectors import LossVectorKMeans
from lcfl.methods.clustering.low_rank_cosine import LowRankCosine
from lcfl.methods.clustering.model_kmeans import ModelKMeans
from lcfl.methods.clustering.one_shot import OneShotHierarchical
from lcfl.methods.clustering.principal_angles import PrincipalAngles
from lcfl.methods.clustering.refreshed_low_rank_cosine import RefreshedLowRankCosine
from lcfl.methods.clustering.tuning import ClusterNumberTuning
from lcfl.methods.clustering.update_directions import UpdateDirections
from lcfl.methods.clustering.update_em import SplitAndMerge, UpdateEM

__all__ = [
    "ChoiceBeforeTraining",
    "ClientChoice",
    "ClusterNumberTuning",
    "Clustering",
    "GreedyIncentive",
    "HierarchicalUpdates",
    "LossVectorKMeans",
    "LowRankCosine",
    "ModelKMeans",
    "OneShotHierarchical",
    "ExtraRound",
    "PrincipalAngles",
    "RecursiveBipartition",
    "RefreshedLowRankCosine",
    "SplitAndMerge",
    "UpdateDirections",
    "UpdateEM",
    "keep_numbers",
]
