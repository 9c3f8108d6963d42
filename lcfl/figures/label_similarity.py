"""Label distributions beside distances of models: a pure function from arrays to a matplotlib `Figure`.

Legend: N clients, C classes.
"""

from typing import TYPE_CHECKING

import numpy as np

from lcfl.figures.base import Array

if TYPE_CHECKING:  # half a second to import, and only a run that draws needs it
    from matplotlib.figure import Figure

__all__ = ["label_similarity"]


def label_similarity(count_NC: Array, divergence_NN: Array, distance_NN: Array, cosine_NN: Array) -> "Figure":
    """The four panels of FedAC's Fig. 2: label counts, KL divergence, L2 distance and low-rank cosine of every pair.

    Clients are ordered by the class of which they hold most, so that clients with similar labels lie together. Dark
    is alike in all three matrices; their diagonals, each client with itself, are left out of the colour range.

    Args:
        count_NC: images of each class ``[N, C]``.
        divergence_NN: KL of the label distributions of every pair ``[N, N]``.
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
    if any(each.shape != (num_clients, num_clients) for each in matrices.values()) or num_clients < 2:
        shapes = ", ".join(str(each.shape) for each in matrices.values())
        raise ValueError(
            f"figures: got label counts {count_NC.shape} and matrices {shapes}; needed are [N, C] and [N, N]."
        )
    share_NC = count_NC / count_NC.sum(axis=1, keepdims=True).clip(1)
    order_N = np.lexsort([-share_NC.max(axis=1), share_NC.argmax(axis=1)])

    figure = Figure(figsize=(10.0, 8.6), dpi=100, layout="constrained")
    panels = figure.subplots(2, 2).flat
    counts = panels[0].imshow(count_NC[order_N], aspect="auto", cmap="viridis_r", interpolation="nearest", vmin=0)
    panels[0].set(title="(a) training images", xlabel="class", ylabel="client, by its most frequent class")
    figure.colorbar(counts, ax=panels[0])
    apart = ~np.eye(num_clients, dtype=bool)
    for axes, (title, matrix_NN) in zip(panels[1:], matrices.items(), strict=True):
        low, high = matrix_NN[apart].min(), matrix_NN[apart].max()
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
