"""Pictures of a federation, drawn by pure functions from arrays to a matplotlib `Figure`, without any global state."""

from lcfl.figures.assignment_flow import assignment_flow
from lcfl.figures.base import save, shown
from lcfl.figures.clients import label_counts, sorted_accuracies
from lcfl.figures.clusters import assignment_heatmap, cluster_sizes, distance_matrix, similarity_matrix
from lcfl.figures.curves import accuracy_curves
from lcfl.figures.label_similarity import label_similarity
from lcfl.figures.low_rank import code_map, granularity_bars

__all__ = [
    "accuracy_curves",
    "assignment_flow",
    "assignment_heatmap",
    "cluster_sizes",
    "code_map",
    "distance_matrix",
    "granularity_bars",
    "label_counts",
    "label_similarity",
    "save",
    "shown",
    "similarity_matrix",
    "sorted_accuracies",
]
