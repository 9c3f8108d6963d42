"""Who belongs together: callbacks of the server that run at the end of a round, one per paper."""

from lcfl.clustering.base import Clustering, Opening
from lcfl.clustering.lowrank import LowRankCosine

__all__ = ["Clustering", "LowRankCosine", "Opening"]
