"""The pictures show their data in the documented order, and nothing in them overlaps."""

import sys
from itertools import pairwise

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex

from lcfl.figures import (
    assignment_heatmap,
    cluster_sizes,
    distance_matrix,
    label_counts,
    metric_curves,
    save,
    similarity_matrix,
    sorted_values,
)
from lcfl.figures.base import COLOURS, NO_CLUSTER, cluster_colours

ROUNDS = np.array([0, 1, 2])
ASSIGNMENT = np.array([[0, 0, 0, 0], [0, 1, 0, 1], [1, 0, 1, 0]])


def labels(axis):
    return [label.get_text() for label in axis.get_ticklabels()]


def overlapping(axis, renderer):
    """Returns the number of pairs of neighbouring tick labels that overlap."""
    boxes = [label.get_window_extent(renderer) for label in axis.get_ticklabels() if label.get_text()]
    return sum(one.overlaps(other) for one, other in pairwise(boxes))


def clashes(figure):
    """Returns the number of overlapping tick labels and of axes whose labels stick out of the picture."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    count = 0
    for axes in figure.axes:
        for part in (axes, *axes.child_axes):
            count += overlapping(part.xaxis, renderer) + overlapping(part.yaxis, renderer)
        tight = axes.get_tightbbox(renderer)
        count += tight.x0 < -1 or tight.y0 < -1 or tight.x1 > figure.bbox.x1 + 1 or tight.y1 > figure.bbox.y1 + 1
    return count


def test_the_heatmap_sorts_clients_by_final_cluster_then_number():
    axes = assignment_heatmap(ASSIGNMENT, ROUNDS, clients_N=[10, 11, 12, 13]).axes[0]
    assert labels(axes.yaxis) == ["11", "13", "10", "12"]
    image = axes.images[0]
    np.testing.assert_array_equal(image.get_array(), [[0, 1, 0], [0, 1, 0], [0, 0, 1], [0, 0, 1]])
    assert image.cmap(image.norm(1)) == pytest.approx((1.0, 0x6E / 255, 0x3A / 255, 1.0))  # cluster 1 is COLOURS[1]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("round", "client, by final cluster")
    assert axes.yaxis_inverted()


def test_the_heatmap_by_true_group_has_a_line_between_groups():
    figure = assignment_heatmap(torch.as_tensor(ASSIGNMENT), torch.as_tensor(ROUNDS), groups_N=[1, 0, 0, 1])
    axes = figure.axes[0]
    assert labels(axes.yaxis) == ["1", "2", "3", "0"]  # group 0: clusters 0, 1; group 1: clusters 0, 1
    assert [line.get_ydata()[0] for line in axes.lines] == [1.5]
    assert labels(axes.child_axes[0].yaxis) == ["group 0", "group 1"]


def test_the_colour_bar_has_an_integer_for_every_cluster():
    bar = assignment_heatmap(ASSIGNMENT, ROUNDS).axes[1]
    assert labels(bar.yaxis) == ["0", "1"]
    assert bar.get_ylabel() == "cluster"
    assert len(set(COLOURS)) == 12


def test_cluster_sizes_stack_the_members_of_each_round():
    axes = cluster_sizes(np.array([[0, 0, 0, 2], [1, 1, 0, 2]]), np.array([5, 6])).axes[0]
    paths = [collection.get_paths()[0] for collection in axes.collections]

    def cluster_at(number, height):
        return [cluster for cluster, path in enumerate(paths) if path.contains_point((number, height))]

    assert [cluster_at(5, height) for height in (0.5, 2.5, 3.5)] == [[0], [0], [2]]
    assert [cluster_at(6, height) for height in (0.5, 1.5, 2.5, 3.5)] == [[0], [1], [1], [2]]
    assert axes.get_ylim() == (0, 4) and axes.get_xlim() == (4.5, 6.5)


def test_the_axis_of_cluster_sizes_tells_when_only_some_clients_are_counted():
    assert cluster_sizes(ASSIGNMENT, ROUNDS, of_clients=9).axes[0].get_ylabel() == "clients (4 of 9)"
    assert cluster_sizes(ASSIGNMENT, ROUNDS, of_clients=4).axes[0].get_ylabel() == "clients"


def test_similarities_are_ordered_by_cluster_with_a_border_around_each():
    similarity = np.array([[1.0, 0.2, 0.8], [0.2, 1.0, 0.4], [0.8, 0.4, 1.0]])
    axes, bar = similarity_matrix(similarity, [3, 0, 3]).axes
    np.testing.assert_array_equal(axes.images[0].get_array(), [[1.0, 0.2, 0.4], [0.2, 1.0, 0.8], [0.4, 0.8, 1.0]])
    assert {(patch.get_x(), patch.get_width()) for patch in axes.patches} == {(-0.5, 1.0), (0.5, 2.0)}
    assert labels(axes.xaxis) == labels(axes.yaxis) == ["0", "3"]
    assert bar.get_ylabel() == "cosine"
    assert axes.images[0].get_clim() == (0.2, 1.0)


def test_distances_are_ordered_by_cluster_and_begin_at_zero():
    distance = np.array([[0.0, 7.0, 1.0], [7.0, 0.0, 5.0], [1.0, 5.0, 0.0]])
    axes, bar = distance_matrix(distance, [1, 0, 1], "T").axes
    np.testing.assert_array_equal(axes.images[0].get_array(), [[0.0, 7.0, 5.0], [7.0, 0.0, 1.0], [5.0, 1.0, 0.0]])
    assert axes.images[0].get_clim() == (0.0, 7.0) and bar.get_ylabel() == "distance" and axes.get_title() == "T"


def test_the_colours_of_negative_cosines_are_symmetric_around_zero():
    image = similarity_matrix(np.array([[1.0, -0.5], [-0.5, 1.0]]), [0, 1]).axes[0].images[0]
    assert image.get_clim() == (-1.0, 1.0) and image.cmap.name == "RdBu_r"


def test_a_client_without_a_value_is_the_worst():
    (stairs,) = sorted_values({"personal": np.array([0.9, np.nan, 0.1, 0.5])}, "test own_split").axes[0].patches
    assert stairs.get_data().values.tolist()[1:] == pytest.approx([10, 50, 90])


def test_sorted_values_rise_from_the_worst_client():
    values = {"personal": np.array([0.9, 0.5]), "global": np.array([0.25]), "cluster": np.array([])}
    axes = sorted_values(values, "test own_split").axes[0]
    personal, other = (patch.get_data() for patch in axes.patches)
    np.testing.assert_allclose(personal.values, [50, 90])
    np.testing.assert_allclose(personal.edges, [0, 50, 100])
    np.testing.assert_allclose(other.values, [25])
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["personal", "global"]


COUNTS = np.array([[5, 0], [0, 2], [3, 1]])


def test_curves_are_means_over_seeds_with_a_band_around_them():
    curves = {"global": {"one": [[(1, 0.2), (2, 0.4)], [(1, 0.4), (2, 0.4)]], "two": [[(1, 0.5)]], "none": [[]]}}
    axes = metric_curves(curves, "round", "mine", baseline=0.1).axes[0]
    one, two, baseline = axes.lines
    np.testing.assert_allclose(one.get_xydata(), [[1, 30], [2, 40]])
    np.testing.assert_allclose(two.get_xydata(), [[1, 50]])
    assert (one.get_label(), two.get_label()) == ("one, global", "two, global")
    assert list(baseline.get_ydata()) == [10, 10]
    band = axes.collections[0].get_paths()[0].vertices
    assert (band[:, 1].min(), band[:, 1].max()) == pytest.approx((20, 40))
    with pytest.raises(ValueError, match="no curve to draw"):
        metric_curves({"global": {"none": [[]]}}, "round", "mine")


def test_many_curves_have_a_panel_per_kind_of_model_and_a_distinct_look_per_method():
    methods = [f"method {number}" for number in range(20)]
    curves = {kind: {method: [[(1, 0.5), (2, 0.6)]] for method in methods} for kind in ("personal", "cluster")}
    panels = metric_curves(curves, "round", "mine").axes
    assert [axes.get_title() for axes in panels] == ["mine, personal", "mine, cluster"]
    lines = [axes.lines for axes in panels]
    assert [[line.get_label() for line in of_kind] for of_kind in lines] == [methods, methods]
    looks = [[(line.get_color(), line.get_marker()) for line in of_kind] for of_kind in lines]
    assert looks[0] == looks[1] and len(set(looks[0])) == 20


def test_a_few_curves_of_several_kinds_share_a_panel():
    curves = {kind: {method: [[(1, 0.5), (2, 0.6)]] for method in "abcd"} for kind in ("personal", "cluster", "global")}
    figure = metric_curves(curves, "round", "mine", baseline=0.1)
    (axes,) = figure.axes
    assert len({line.get_linestyle() for line in axes.lines if "cluster" in line.get_label()}) == 1
    assert len({(line.get_color(), line.get_linestyle()) for line in axes.lines}) == 13
    assert clashes(figure) == 0


def test_the_legend_of_many_curves_names_each_method_once():
    curves = {kind: {method: [[(1, 0.5)]] for method in "abcdefg"} for kind in ("personal", "cluster")}
    curves["global"] = {"h": [[(1, 0.7)]]}
    figure = metric_curves(curves, "round", "mine", baseline=0.1)
    assert sorted(text.get_text() for text in figure.legends[0].texts) == [*"abcdefgh", "majority class"]
    assert len(figure.axes) == 3 and clashes(figure) == 0


def test_label_counts_are_ordered_by_client_number():
    figure = label_counts(COUNTS, clients_N=[4, 7, 9], title="mine")
    axes, sizes = figure.axes[0], figure.axes[0].child_axes[0]
    np.testing.assert_array_equal(axes.images[0].get_array().filled(0), COUNTS)
    assert axes.images[0].get_array().mask.tolist() == [[False, True], [True, False], [False, False]]
    assert labels(axes.yaxis) == ["4", "7", "9"] and axes.yaxis_inverted()
    assert (axes.get_xlabel(), axes.get_ylabel(), axes.get_title()) == ("class", "client, by number", "mine")
    np.testing.assert_array_equal(sizes.patches[0].get_data().values, [5, 2, 4])


def test_label_counts_are_ordered_by_true_group():
    axes = label_counts(COUNTS, groups_N=[1, 0, 1]).axes[0]
    assert labels(axes.yaxis) == ["1", "0", "2"]
    assert [line.get_ydata()[0] for line in axes.lines] == [0.5]
    assert labels(axes.child_axes[0].child_axes[0].yaxis) == ["group 0", "group 1"]


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (3,)])
def test_label_counts_need_a_client_and_a_class(shape):
    with pytest.raises(ValueError, match=r"figures: got label counts .* \[N, C\]"):
        label_counts(np.zeros(shape))


@pytest.mark.parametrize(
    ("num_clients", "num_clusters", "num_rounds"),
    [(1, 1, 1), pytest.param(40, 12, 100, marks=pytest.mark.slow), (256, 100, 1000)],
)
def test_nothing_overlaps_at_any_size(num_clients, num_clusters, num_rounds):
    final = np.arange(num_clients) % num_clusters
    assignment, rounds = np.tile(final, (num_rounds, 1)), np.arange(num_rounds)
    similarity = np.eye(num_clients)
    assert clashes(assignment_heatmap(assignment, rounds, groups_N=final)) == 0
    assert clashes(cluster_sizes(assignment, rounds)) == 0
    assert clashes(similarity_matrix(similarity, final)) == 0
    assert clashes(label_counts(np.ones((num_clients, num_clusters)), final)) == 0


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (2, 4), (3,)])
def test_a_history_that_does_not_fit_is_refused(shape):
    for picture in (assignment_heatmap, cluster_sizes):
        with pytest.raises(ValueError, match="figures: got assignments"):
            picture(np.zeros(shape, dtype=int), ROUNDS)


def test_similarities_and_accuracies_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="figures: got similarities"):
        similarity_matrix(np.eye(3), [0, 1])
    with pytest.raises(ValueError, match="figures: got distances"):
        distance_matrix(np.eye(3), [0, 1])
    with pytest.raises(ValueError, match="no values of test own_split"):
        sorted_values({"personal": np.array([])}, "test own_split")


def test_pictures_leave_no_figure_in_pyplot():
    cluster_sizes(ASSIGNMENT, ROUNDS)
    pyplot = sys.modules.get("matplotlib.pyplot")
    assert pyplot is None or pyplot.get_fignums() == []


def test_clients_without_a_cluster_are_grey_and_not_counted():
    history = np.array([[-1, 0, 1], [-1, 0, 1]])
    colours, edges = cluster_colours(history)
    assert to_hex(colours(-1)).upper() == NO_CLUSTER and edges.tolist() == [-0.5, 0.5, 1.5]
    axes = cluster_sizes(history, np.arange(2)).axes[0]
    assert axes.dataLim.y1 == 2
    assert len(cluster_colours(np.array([[-1]]))[1]) == 2


def test_names_with_signs_of_mathematics_are_drawn_as_they_are(tmp_path):
    figure = label_counts(np.ones((2, 2)), names_N=["b$1_$", "a very long name of a hospital in the north"])
    save(figure, tmp_path / "names.png")
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == ["b$1_$", "a very lon… the north"]
    save(metric_curves({"global": {"a$b_$": [[(1, 0.5)]]}}, "round", "own_split"), tmp_path / "legend.png")
