"""Pictures of a federation, drawn by pure functions from arrays to a matplotlib `Figure`, without any global state."""

from lcfl.figures.assignment_flow import assignment_flow
from lcfl.figures.base import save, shown
from lcfl.figures.clients import client_sizes, label_counts, sorted_values
from lcfl.figures.clusters import assignment_heatmap, cluster_sizes, distance_matrix, similarity_matrix
from lcfl.figures.curves import metric_curves
from lcfl.figures.label_similarity import label_similarity
from lcfl.figures.low_rank import code_map, granularity_bars

__all__ = [
    "assignment_flow",
    "assignment_heatmap",
    "client_sizes",
    "cluster_sizes",
    "code_map",
    "distance_matrix",
    "granularity_bars",
    "label_counts",
    "label_similarity",
    "metric_curves",
    "save",
    "shown",
    "similarity_matrix",
    "sorted_values",
]
