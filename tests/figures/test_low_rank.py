"""Pictures of low-rank models, of granularity and of movements between clusters."""

import numpy as np
import pytest
import torch

from lcfl.figures import assignment_flow, code_map, granularity_bars
from lcfl.figures.low_rank import in_two_dimensions
from tests.figures.test_figures import clashes, labels

DRAW = np.random.default_rng(0)


def test_the_two_dimensions_are_the_principal_axes_of_directions():
    code_ND = DRAW.normal(size=(20, 6))
    place_N2, share_2 = in_two_dimensions(code_ND)
    direction_ND = code_ND / np.linalg.norm(code_ND, axis=1, keepdims=True)
    variance_D, axis_DD = np.linalg.eigh(np.cov(direction_ND.T))
    expected_N2 = (direction_ND - direction_ND.mean(axis=0)) @ axis_DD[:, [-1, -2]]
    np.testing.assert_allclose(np.abs(place_N2), np.abs(expected_N2), atol=1e-12)
    np.testing.assert_allclose(share_2, variance_D[[-1, -2]] / variance_D.sum())
    assert (place_N2[np.abs(place_N2).argmax(axis=0), [0, 1]] > 0).all()
    np.testing.assert_allclose(in_two_dimensions(7 * code_ND)[0], place_N2)  # the length of a code has no effect


@pytest.mark.parametrize("code_ND", [np.ones((3, 1)), np.zeros((2, 4)), np.ones((1, 3))])
def test_codes_without_two_axes_still_have_positions(code_ND):
    place_N2, share_2 = in_two_dimensions(code_ND)
    assert place_N2.shape == (len(code_ND), 2)
    assert np.abs(place_N2).max() < 1e-12
    assert np.isfinite(share_2).all()


def test_the_map_has_one_panel_by_cluster_and_one_by_true_group():
    code_ND, cluster_N, groups_N = torch.randn(9, 5), torch.arange(9) % 3, np.arange(9) % 2
    (alone,) = code_map(code_ND, cluster_N).axes
    assert [len(each.get_offsets()) for each in alone.collections] == [3, 3, 3]
    figure = code_map(code_ND, cluster_N, groups_N)
    left, right = figure.axes
    assert (left.get_title(), right.get_title()) == ("by cluster", "by true group")
    assert [len(each.get_offsets()) for each in right.collections] == [5, 4]
    assert [text.get_text() for text in right.get_legend().get_texts()] == ["0: 5", "1: 4"]
    assert clashes(figure) == 0


@pytest.mark.parametrize("broken", [[2], [0, 3, 6], [*range(9)]])
@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_the_map_leaves_out_models_that_are_not_finite(broken, value):
    code_ND, cluster_N, groups_N = DRAW.normal(size=(9, 5)), np.arange(9) % 3, np.arange(9) % 2
    code_ND[broken, 1] = value
    others = np.setdiff1d(np.arange(9), broken)
    place_N2, share_2 = in_two_dimensions(code_ND)
    assert np.isnan(place_N2[broken]).all() and np.isfinite(share_2).all()
    if len(others):
        np.testing.assert_array_equal(place_N2[others], in_two_dimensions(code_ND[others])[0])
    figure = code_map(code_ND, cluster_N, groups_N)
    assert figure.get_suptitle() == f"Directions of low-rank models (without {len(broken)} that are not finite)"
    counts = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert counts == [f"{cluster}: {(cluster_N[others] == cluster).sum()}" for cluster in range(3)]
    assert clashes(figure) == 0


def test_bars_show_g_and_members_and_mark_clusters_without_g():
    figure = granularity_bars([0.5, np.nan, 0.25, np.inf], [4, 0, 2, 3])
    axes = figure.axes[0]
    assert [bar.get_height() for bar in axes.patches] == [0.5, 0, 0.25, 0]
    assert [text.get_text() for text in axes.texts] == ["4", "0, no G", "2", "3, infinite G"]
    assert clashes(figure) == 0


def test_the_height_of_a_band_is_the_number_of_clients_that_moved():
    axes = assignment_flow([[0, 0, 0, 1], [0, 1, 1, 1]], [3, 9]).axes[0]
    assert labels(axes.xaxis) == ["3", "9"]
    blocks = [(bar.get_x() + bar.get_width() / 2, bar.get_y(), bar.get_height()) for bar in axes.patches]
    gap = 0.03 * 4
    expected = [(0, 0, 3), (0, 3 + gap, 1), (1, 0, 1), (1, 1 + gap, 3)]
    np.testing.assert_allclose(blocks, expected, atol=1e-12)
    (collection,) = axes.collections
    bands = [path.vertices for path in collection.get_paths()]  # 0 to 0, 0 to 1, 1 to 1
    heights = [[np.ptp(band[band[:, 0] == side, 1]) for side in (band[:, 0].min(), band[:, 0].max())] for band in bands]
    np.testing.assert_allclose(heights, [[1, 1], [2, 2], [1, 1]])
    starts = [band[band[:, 0] == band[:, 0].max(), 1].min() for band in bands]
    np.testing.assert_allclose(starts, [0, 1 + gap, 3 + gap])


def test_clients_without_a_cluster_form_a_grey_block_at_the_bottom():
    axes = assignment_flow([[-1, -1, 0], [1, 0, 0]], [0, 1]).axes[0]
    gap = 0.03 * 3
    blocks = [(bar.get_y(), bar.get_height()) for bar in axes.patches]
    np.testing.assert_allclose(blocks, [(0, 2), (2 + gap, 1), (0, 2), (2 + gap, 1)])
    red, green, blue, _ = axes.patches[0].get_facecolor()
    assert red == green == blue


def test_the_flow_shows_eight_of_many_rounds_including_the_first_and_the_last():
    figure = assignment_flow(DRAW.integers(0, 12, size=(100, 30)), np.arange(100))
    shown = [int(text) for text in labels(figure.axes[0].xaxis)]
    assert len(shown) == 8
    assert (shown[0], shown[-1]) == (0, 99)
    assert clashes(figure) == 0


def test_a_single_round_is_a_column_without_bands():
    axes = assignment_flow([[0, 2]], [5]).axes[0]
    assert len(axes.patches) == 2
    assert not axes.collections


@pytest.mark.parametrize(
    ("draw", "what"),
    [
        (lambda: code_map(np.ones((2, 3)), [0]), r"codes \(2, 3\) and clusters \(1,\)"),
        (lambda: code_map(np.ones((0, 3)), []), r"codes \(0, 3\)"),
        (lambda: granularity_bars([1.0], [1, 2]), r"ratios \(1,\) and sizes \(2,\)"),
        (lambda: granularity_bars([], []), r"ratios \(0,\)"),
        (lambda: assignment_flow(np.zeros((0, 3)), []), r"assignments \(0, 3\)"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(draw, what):
    with pytest.raises(ValueError, match=what):
        draw()
