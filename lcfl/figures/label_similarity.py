"""Label distributions next to distances of models, drawn by a pure function from arrays to a matplotlib `Figure`.

Legend: N clients, C classes.
"""

from typing import TYPE_CHECKING

import numpy as np

from lcfl.figures.base import Array

if TYPE_CHECKING:  # importing it takes half a second, and only a run that draws needs it
    from matplotlib.figure import Figure

__all__ = ["label_similarity"]


def label_similarity(count_NC: Array, divergence_NN: Array, distance_NN: Array, cosine_NN: Array) -> "Figure":
    """Draws FedAC's Fig. 2 in four panels: label counts, and KL divergence, L2 distance and low-rank cosine of pairs.

    Clients are ordered by the class of which they hold most, so that clients with similar labels lie together. Dark
    means similar in all three matrices. Their diagonals compare each client with itself and do not affect the colour
    range.

    Args:
        count_NC: the number of samples of each class ``[N, C]``.
        divergence_NN: KL divergence of the label distributions of every pair ``[N, N]``.
        distance_NN: L2 distance of their models ``[N, N]``.
        cosine_NN: cosine of their low-rank models ``[N, N]``.

    Raises:
        ValueError: if the shapes do not fit together.
    """
    from matplotlib.figure import Figure

    count_NC = np.asarray(count_NC)
    matrices = {
        "(b) KL divergence of labels": np.asarray(divergence_NN),
        "(c) L2 distance of models": np.asarray(distance_NN),
        "(d) low-rank cosine of models": np.asarray(cosine_NN),
    }
    num_clients = len(count_NC)
    if any(matrix.shape != (num_clients, num_clients) for matrix in matrices.values()) or num_clients < 2:
        shapes = ", ".join(str(matrix.shape) for matrix in matrices.values())
        raise ValueError(
            f"figures: got label counts {count_NC.shape} and matrices {shapes}; the shapes must be [N, C] and [N, N]."
        )
    share_NC = count_NC / count_NC.sum(axis=1, keepdims=True).clip(1)
    order_N = np.lexsort([-share_NC.max(axis=1), share_NC.argmax(axis=1)])

    figure = Figure(figsize=(10.0, 8.6), dpi=100, layout="constrained")
    panels = figure.subplots(2, 2).flat
    counts = panels[0].imshow(count_NC[order_N], aspect="auto", cmap="viridis_r", interpolation="nearest", vmin=0)
    panels[0].set(title="(a) training samples", xlabel="class", ylabel="client, by its most frequent class")
    figure.colorbar(counts, ax=panels[0])
    off_diagonal = ~np.eye(num_clients, dtype=bool)
    for axes, (title, matrix_NN) in zip(panels[1:], matrices.items(), strict=True):
        low, high = matrix_NN[off_diagonal].min(), matrix_NN[off_diagonal].max()
        image = axes.imshow(
            matrix_NN[np.ix_(order_N, order_N)],
            cmap="cividis_r" if "cosine" in title else "cividis",
            vmin=low,
            vmax=high,
            interpolation="nearest",
        )
        axes.set(title=title, xlabel="client", ylabel="client")
        figure.colorbar(image, ax=axes)
    return figure
