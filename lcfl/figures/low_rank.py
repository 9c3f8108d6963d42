"""Maps of low-rank models, and how tight clusters are, drawn by pure functions from arrays to a matplotlib `Figure`.

Legend: N clients, n of them with a finite code, D length of a code, K clusters, G true groups.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lcfl.figures.base import COLOURS, Array, cluster_colours, integer_ticks, new_figure

if TYPE_CHECKING:  # importing it takes half a second, and only a run that draws needs it
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["code_map", "granularity_bars", "in_two_dimensions"]

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")


def in_two_dimensions(code_ND: Array) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns the directions of codes on their two principal axes ``[N, 2]``, and each axis' share of variance ``[2]``.

    Rows are scaled to length 1, because clusters are distinguished by cosine. The sign of an axis is fixed by its
    largest entry. An axis without any variance is zero. A code with NaN or infinity has no position, which is nan.
    """
    code_ND = np.asarray(code_ND, dtype=np.float64)
    finite_N = np.isfinite(code_ND).all(axis=1)
    place_N2 = np.full((len(code_ND), 2), np.nan)
    if not finite_N.any():
        return place_N2, np.zeros(2)
    code_nD = code_ND[finite_N]
    length_n1 = np.linalg.norm(code_nD, axis=1, keepdims=True)
    direction_nD = np.divide(code_nD, length_n1, out=np.zeros_like(code_nD), where=length_n1 > 0)
    direction_nD -= direction_nD.mean(axis=0)
    left_nR, scale_R, _ = np.linalg.svd(direction_nD, full_matrices=False)
    place_nR, variance_R = left_nR * scale_R, scale_R**2
    largest_R = np.abs(place_nR).argmax(axis=0)
    place_nR *= np.where(place_nR[largest_R, range(len(scale_R))] < 0, -1, 1)
    missing = max(0, 2 - len(scale_R))
    place_N2[finite_N] = np.pad(place_nR[:, :2], ((0, 0), (0, missing)))
    share_2 = np.pad(variance_R[:2], (0, missing)) / max(variance_R.sum(), np.finfo(float).tiny)
    return place_N2, share_2


def code_map(code_ND: Array, cluster_N: Array, groups_N: Array | None = None) -> "Figure":
    """Draws the clients' low-rank models in two dimensions, coloured by cluster and, in a second panel, by true group.

    Args:
        code_ND: low-rank models ``[N, D]``. Those with NaN or infinity are left out, and the title counts them.
        cluster_N: the cluster of each client ``[N]``.
        groups_N: the true group of each client ``[N]``, if it is known.

    Raises:
        ValueError: if there is no client, or if the shapes do not fit together.
    """
    code_ND, cluster_N = np.asarray(code_ND), np.asarray(cluster_N)
    if code_ND.ndim != 2 or 0 in code_ND.shape or cluster_N.shape != code_ND.shape[:1]:
        raise ValueError(
            f"figures: got codes {code_ND.shape} and clusters {cluster_N.shape}; the shapes must be [N, D] and [N]."
        )
    place_N2, share_2 = in_two_dimensions(code_ND)
    figure, axes = new_figure(5.6 if groups_N is None else 9.6, 4.8)
    _draw_places(axes, place_N2, share_2, cluster_N, "cluster")
    if groups_N is not None:
        figure.delaxes(axes)
        left, right = figure.subplots(1, 2, sharex=True, sharey=True)
        _draw_places(left, place_N2, share_2, cluster_N, "cluster")
        _draw_places(right, place_N2, share_2, np.asarray(groups_N), "true group")
        right.set_ylabel("")
    left_out = np.isnan(place_N2[:, 0]).sum()
    figure.suptitle(f"Directions of low-rank models{f' (without {left_out} that are not finite)' * bool(left_out)}")
    return figure


def granularity_bars(ratio_K: Array, size_K: Array) -> "Figure":
    """Draws G of each cluster, Dist_intra / Dist_inter (FedAC Algorithm 3, line 4), and how many clients it has.

    Args:
        ratio_K: G ``[K]``, nan if it is not defined, infinity if Dist_inter is 0.
        size_K: the number of members ``[K]``.

    Raises:
        ValueError: if there is no cluster, or if the shapes do not fit together.
    """
    ratio_K, size_K = np.asarray(ratio_K), np.asarray(size_K)
    if ratio_K.ndim != 1 or not len(ratio_K) or ratio_K.shape != size_K.shape:
        raise ValueError(
            f"figures: got ratios {ratio_K.shape} and sizes {size_K.shape}; the shapes must be [K] and [K]."
        )
    figure, axes = new_figure(6.4, 3.6)
    colours, _ = cluster_colours(np.arange(len(ratio_K)))
    bars = axes.bar(range(len(ratio_K)), np.where(np.isfinite(ratio_K), ratio_K, 0), color=colours(range(len(ratio_K))))
    if len(ratio_K) <= 20:
        notes = ["" if np.isfinite(ratio) else ", no G" if np.isnan(ratio) else ", infinite G" for ratio in ratio_K]
        texts = [f"{size}{note}" for size, note in zip(size_K, notes, strict=True)]
        axes.bar_label(bars, texts, fontsize=7)
    axes.margins(y=0.1)
    axes.set_xlabel("cluster (above: clients)")
    integer_ticks(axes, "x")
    axes.set_ylabel("G = Dist_intra / Dist_inter")
    axes.set_title("Granularity of each cluster")
    return figure


def _draw_places(
    axes: "Axes", place_N2: NDArray[np.float64], share_2: NDArray[np.float64], label_N: NDArray[Any], name: str
) -> None:
    """Draws one marker and colour per label, and a legend only if it is short enough to read.

    Markers are transparent, and the legend counts them, because similar clients lie upon each other.
    """
    present = np.unique(label_N)
    colours, _ = cluster_colours(label_N)
    for label in present:
        labelled_N = label_N == label
        axes.scatter(
            place_N2[labelled_N, 0], place_N2[labelled_N, 1], s=40, lw=0.5, edgecolors="black", alpha=0.5,
            color=colours(int(label)), marker=MARKERS[int(label) % len(MARKERS)],
            label=f"{label}: {np.isfinite(place_N2[labelled_N, 0]).sum()}",
        )  # fmt: skip
    axes.set_xlabel(f"first axis ({100 * share_2[0]:.0f} % of the variance)")
    axes.set_ylabel(f"second axis ({100 * share_2[1]:.0f} %)")
    axes.set_title(f"by {name}", fontsize=10)
    axes.grid(alpha=0.3)
    if len(present) <= len(COLOURS):
        axes.legend(title=f"{name}: clients", title_fontsize=7, fontsize=7, ncols=2 if len(present) > 6 else 1)
