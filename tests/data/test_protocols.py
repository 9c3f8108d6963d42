"""Tests of test protocols as pure functions on a small split."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from lcfl.data.protocols import Split, global_test, label_proportional, label_view, own_split

#          0  1  2  3  4  5  | official: 6  7  8  9
TARGETS = np.array([0, 1, 1, 2, 2, 0, 0, 1, 2, 1])


def split(official):
    parts = [[[0, 1], [3]], [[], [4]], [[2], [5]]]
    train, val, held_out = ([np.array(each, dtype=np.int64) for each in part] for part in parts)
    return Split(train, val, held_out, np.array(official), TARGETS)


def test_own_split_gives_the_held_out_samples():
    assert [each.tolist() for each in own_split(split([6, 7, 8, 9]))] == [[2], [5]]


def test_label_view_gives_all_free_official_samples_of_learnt_labels():
    # Client 0 learns labels 0 and 1. Client 1 learns label 2; its held-out sample of label 0 does not count.
    assert [each.tolist() for each in label_view(split([6, 7, 8, 9]))] == [[6, 7, 9], [8]]
    assert [each.tolist() for each in label_view(split([6, 9]))] == [[6, 9], []]


def test_clients_with_the_same_labels_share_the_test_samples_of_label_view():
    labels = np.array([0, 1, 1, 0, 2, 0, 1, 2, 0])
    shares = [np.array(each, dtype=int) for each in ([0, 1], [2, 3], [4], [])]
    first, second, third, nothing = label_view(Split(shares, [np.zeros(0, int)] * 4, shares, np.arange(5, 9), labels))
    assert first is second and first.tolist() == [5, 6, 8]
    assert third.tolist() == [7] and nothing.tolist() == []


def test_global_gives_all_free_official_samples_to_every_client():
    assert [each.tolist() for each in global_test(split([6, 9]))] == [[6, 9], [6, 9]]


def proportional(learnt, free, seed=0):
    """Returns the label counts of one client's test set.

    The client learns ``learnt`` samples of each label, and ``free`` official test samples of each label are free.
    """
    targets = np.concatenate([np.repeat(np.arange(len(each)), each) for each in (learnt, free)])
    official = np.arange(sum(learnt), len(targets))
    parts = [[np.arange(sum(learnt))], [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]]
    (tested,) = label_proportional(Split(*parts, official, targets, seed))
    assert (np.diff(tested) > 0).all() and np.isin(tested, official).all()
    return np.bincount(targets[tested], minlength=len(learnt)).tolist()


@pytest.mark.parametrize(
    ("learnt", "free", "expected"),
    [
        ([30, 10, 0], [60, 60, 60], [60, 20, 0]),
        ([30, 10, 0], [60, 5, 60], [15, 5, 0]),
        ([7, 3, 1], [10, 10, 10], [10, 4, 1]),  # floor(30 / 7), floor(10 / 7)
        ([3, 2, 1], [0, 4, 4], [0, 4, 2]),  # no client can be tested on label 0
        ([3, 0, 0], [0, 4, 4], [0, 0, 0]),
        ([49, 49, 0], [1, 5, 0], [1, 1, 0]),  # 49 * (1 / 49) is less than 1 in floating-point arithmetic
    ],
)
def test_label_proportional_by_hand(learnt, free, expected):
    assert proportional(learnt, free) == expected


@given(arrays(np.int64, 4, elements=st.integers(1, 40)), arrays(np.int64, 4, elements=st.integers(1, 40)))
def test_label_proportional_is_as_large_as_possible(learnt, free):
    counts = np.array(proportional(learnt, free))
    assert (counts <= free).all() and (counts == free).any()
    scale = (free / learnt).min()
    assert (np.abs(counts - scale * learnt) < 1 + 1e-9).all()


def test_label_proportional_is_a_random_part_drawn_for_each_client():
    targets = np.zeros(210, dtype=np.int64)
    targets[100:110], targets[200:210] = 1, 1
    train = [np.concatenate([np.arange(10), np.arange(100, 110)]), np.concatenate([np.arange(10, 20), [100]])]
    none = [np.empty(0, dtype=np.int64)] * 2
    sets = [label_proportional(Split(train, none, none, np.arange(110, 210), targets, seed)) for seed in (0, 0, 1)]
    assert [len(each) for each in sets[0]] == [20, 90 + 9]
    assert all(map(np.array_equal, sets[0], sets[1]))
    assert not np.array_equal(sets[0][0], sets[2][0])
    # Client 0 is tested on ten of the ninety samples of label 0, which are not the first ten.
    assert sets[0][0][9] > 119


def test_validation_samples_count_as_learnt():
    # Client 1 trains and validates on label 2. Its sample of label 0 is held out, so it is tested only on label 2.
    assert [each.tolist() for each in label_proportional(split([6, 7, 8, 9]))][1] == [8]
