"""Tests of agglomerative clustering: trees worked by hand, comparisons with scipy, and the rules that cut a tree."""

import numpy as np
import pytest
import torch
from scipy.cluster import hierarchy
from scipy.spatial.distance import pdist, squareform
from sklearn.metrics import adjusted_rand_score

from lcfl.methods.clustering import agglomerative
from lcfl.methods.clustering.agglomerative import (
    check_options,
    cut_tree,
    linkage_tree,
    mean_silhouettes,
    num_clusters_by_gap,
    pairwise_distances,
    tree_labels,
)

LINE = np.abs(np.subtract.outer([0.0, 10.0, 1.0, 13.0, 30.0], [0.0, 10.0, 1.0, 13.0, 30.0]))
LINKAGES = ["average", "complete", "single", "weighted", "ward"]
CHOICES = ["gap", "silhouette", "silhouette_or_one"]


def blobs(num_groups=4, size=6, seed=0):
    """Returns points in well separated groups, interleaved, and the groups."""
    draw = np.random.default_rng(seed)
    groups = np.arange(num_groups * size) % num_groups
    return torch.from_numpy(10 * np.eye(num_groups)[groups] + draw.normal(size=(len(groups), num_groups))), groups


# distances


@pytest.mark.parametrize(("metric", "name"), [("l2", "euclidean"), ("l1", "cityblock"), ("cosine", "cosine")])
def test_distances_equal_scipys(metric, name, monkeypatch):
    monkeypatch.setattr("lcfl.methods.clustering.similarity.CHUNK", 3)
    vectors = torch.randn(7, 10, generator=torch.Generator().manual_seed(0))
    found = pairwise_distances(vectors, metric)
    np.testing.assert_allclose(found, squareform(pdist(vectors.double().numpy(), name)), atol=1e-12)
    assert found.dtype == np.float64 and (found == found.T).all() and not found.diagonal().any()


def test_cosines_do_not_depend_on_the_scale():
    vectors = torch.randn(7, 10, generator=torch.Generator().manual_seed(0))
    found = pairwise_distances(vectors * 1e-30, "cosine")
    np.testing.assert_allclose(found, pairwise_distances(vectors, "cosine"), atol=1e-6)


def test_a_vector_of_zeros_is_at_a_right_angle_to_all_others():
    x, zero = [1.0, 0.0], [0.0, 0.0]
    found = pairwise_distances(torch.tensor([zero, x, [-3.0, 0.0], zero]), "cosine")
    assert found.tolist() == [[0, 1, 1, 1], [1, 0, 2, 1], [1, 2, 0, 1], [1, 1, 1, 0]]


def test_small_distances_between_large_vectors_are_exact():
    vectors = torch.full((2, 4), 4096.0)
    vectors[1, 0] += 2**-10
    assert pairwise_distances(vectors)[0, 1] == 2**-10


# the tree


def test_average_linkage_by_hand():
    """The heights of 0 1 | 10 13 | 30: 1, 3, the mean of 10, 13, 9, 12 = 11, and the mean of 30, 29, 20, 17 = 24."""
    tree = linkage_tree(LINE, "average")
    assert tree[:, 2].tolist() == [1.0, 3.0, 11.0, 24.0]
    assert tree_labels(tree, 5).tolist() == [0, 1, 2, 3, 4]
    assert tree_labels(tree, 4).tolist() == [0, 1, 0, 2, 3]
    assert tree_labels(tree, 3).tolist() == [0, 1, 0, 1, 2]
    assert tree_labels(tree, 2).tolist() == [0, 0, 0, 0, 1]
    assert tree_labels(tree, 1).tolist() == [0, 0, 0, 0, 0]


def test_complete_and_single_linkage_by_hand():
    assert linkage_tree(LINE, "complete")[:, 2].tolist() == [1.0, 3.0, 13.0, 30.0]
    assert linkage_tree(LINE, "single")[:, 2].tolist() == [1.0, 3.0, 9.0, 17.0]


def test_ward_by_hand():
    """A height is sqrt(2 a b / (a + b)) times the distance of the means.

    The last two merges join {0, 1} and {10, 13}, then these four and {30}.
    """
    expected = [1.0, 3.0, 2**0.5 * 11, 1.6**0.5 * 24]
    assert linkage_tree(LINE, "ward")[:, 2].tolist() == pytest.approx(expected)


def test_weighted_is_wpgma():
    """When {0, 1} is joined with 4, UPGMA averages over the three clients and WPGMA over the two sides."""
    points = np.array([0.0, 1.0, 4.0, 20.0])
    distance = np.abs(np.subtract.outer(points, points))
    assert linkage_tree(distance, "average")[-1, 2] == pytest.approx((20 + 19 + 16) / 3)
    assert linkage_tree(distance, "weighted")[-1, 2] == pytest.approx(((20 + 19) / 2 + 16) / 2)


@pytest.mark.parametrize("linkage", LINKAGES)
def test_cuts_equal_scipys(linkage):
    draw = np.random.default_rng(3)
    distance = squareform(pdist(draw.normal(size=(17, 3))))
    tree = linkage_tree(distance, linkage)
    for number in range(1, 18):
        # scipy 1.11 makes too few clusters itself if almost all clients are alone, so it gets the threshold.
        made = cut_tree(distance, linkage, num_clusters=number)
        assert adjusted_rand_score(made.labels, hierarchy.fcluster(tree, made.threshold, "distance")) == 1
        assert made.labels.max() + 1 == number
    for threshold in (0.0, 0.4, 1.0, 2.5, 100.0):
        labels = cut_tree(distance, linkage, threshold=threshold).labels
        assert adjusted_rand_score(labels, hierarchy.fcluster(tree, threshold, "distance")) == 1


@pytest.mark.parametrize("linkage", LINKAGES)
def test_clusters_are_numbered_by_their_smallest_client(linkage):
    points, _ = blobs()
    for number in range(1, len(points) + 1):
        _, first = np.unique(
            cut_tree(pairwise_distances(points), linkage, num_clusters=number).labels, return_index=True
        )
        assert len(first) == number and (np.diff(first) > 0).all()


# where to cut


def test_a_threshold_joins_clusters_that_are_no_farther_apart():
    assert cut_tree(LINE, "average", threshold=0.99).labels.tolist() == [0, 1, 2, 3, 4]
    assert cut_tree(LINE, "average", threshold=3.0).labels.tolist() == [0, 1, 0, 1, 2]
    assert cut_tree(LINE, "average", threshold=24.0).num_clusters == 1


@pytest.mark.parametrize("number", range(1, 6))
def test_the_reported_threshold_gives_the_same_clusters(number):
    found = cut_tree(LINE, "average", num_clusters=number)
    assert found.num_clusters == number
    assert (cut_tree(LINE, "average", threshold=found.threshold).labels == found.labels).all()


def test_the_largest_gap_by_hand():
    """The heights are 1, 3, 11 and 24, so the gap of 13 lies before the last merge."""
    assert num_clusters_by_gap(linkage_tree(LINE, "average")) == 2
    found = cut_tree(LINE, "average", choose="gap")
    assert found.labels.tolist() == [0, 0, 0, 0, 1] and found.threshold == 17.5
    assert num_clusters_by_gap(np.array([[0, 0, height, 0] for height in (1.0, 9.0, 10.0, 11.0)])) == 4
    assert num_clusters_by_gap(np.array([[0, 0, height, 0] for height in (1.0, 5.0, 9.0)])) == 2, "ties"


@pytest.mark.parametrize("linkage", LINKAGES)
@pytest.mark.parametrize("choose", CHOICES)
def test_all_choices_find_separated_groups(linkage, choose):
    points, groups = blobs()
    found = cut_tree(pairwise_distances(points), linkage, choose=choose)
    assert found.num_clusters == 4 and adjusted_rand_score(groups, found.labels) == 1


def test_silhouette_is_the_best_of_all_cuts():
    tree = linkage_tree(LINE, "average")
    # By hand for K = 3: s = (b - a) / max(a, b), and 0 for a singleton.
    by_hand = np.mean([1 - 1 / 11.5, 1 - 1 / 10.5, 1 - 3 / 9.5, 1 - 3 / 12.5, 0])
    scores = mean_silhouettes(tree, LINE)
    assert list(scores) == [2, 3, 4] and max(scores, key=scores.get) == 3
    assert scores[3] == pytest.approx(by_hand) and by_hand == pytest.approx(0.652, abs=1e-3)
    found = cut_tree(LINE, "average", choose="silhouette")
    assert (found.num_clusters, found.silhouette) == (3, scores[3])
    assert cut_tree(LINE, "average", choose="gap").silhouette is None


def test_only_silhouette_or_one_finds_no_groups_where_there_are_none():
    points = torch.randn(40, 10, generator=torch.Generator().manual_seed(0))
    cuts = [cut_tree(pairwise_distances(points), "average", choose=choose) for choose in CHOICES]
    assert min(cut.num_clusters for cut in cuts[:2]) > 1 and cuts[2].num_clusters == 1
    assert cuts[2].silhouette == cuts[1].silhouette < 0.5


@pytest.mark.parametrize(("least", "number"), [(0.65, 3), (0.66, 1)])
def test_a_silhouette_below_the_least_one_is_one_cluster(monkeypatch, least, number):
    """By hand it is 0.652; see above."""
    monkeypatch.setattr(agglomerative, "REASONABLE", least)
    assert cut_tree(LINE, "average", choose="silhouette_or_one").num_clusters == number


@pytest.mark.parametrize("choose", CHOICES)
def test_few_clients(choose):
    for number in (1, 2):
        matrix = np.ones((number, number)) - np.eye(number)
        expected = 1 if choose == "silhouette_or_one" else number
        assert cut_tree(matrix, "average", choose=choose).num_clusters == expected
    assert cut_tree(np.zeros((1, 1)), "average", threshold=0.0).labels.tolist() == [0]
    assert cut_tree(np.zeros((1, 1)), "average", num_clusters=1).labels.tolist() == [0]


def test_equal_vectors_are_one_cluster_at_threshold_0():
    assert cut_tree(pairwise_distances(torch.ones(4, 3)), "average", threshold=0.0).labels.tolist() == [0, 0, 0, 0]


# settings


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_clusters": 2}, r"got threshold=1.0, num_clusters=2, choose=None; exactly one"),
        ({"threshold": None}, "exactly one must be given"),
        ({"threshold": -1.0}, r"threshold=-1.0; it must be a number >= 0"),
        ({"threshold": float("nan")}, "threshold=nan"),
        ({"threshold": None, "num_clusters": 0}, "num_clusters=0; it must be at least 1"),
        ({"linkage": "ward", "euclidean": False}, r"linkage=ward .* metric=l2"),
    ],
)
def test_invalid_settings_are_refused(options, words):
    given = {"linkage": "average", "threshold": 1.0, "num_clusters": None, "choose": None, **options}
    with pytest.raises(ValueError, match=words):
        check_options("X", **given)
