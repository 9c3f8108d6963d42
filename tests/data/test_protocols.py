"""Protocols as pure functions, on a split small enough to see."""

import numpy as np

from lcfl.data.protocols import Split, label_view, own_split

#          0  1  2  3  4  5  | official: 6  7  8  9
TARGETS = np.array([0, 1, 1, 2, 2, 0, 0, 1, 2, 1])


def split(official):
    parts = [[[0, 1], [3]], [[], [4]], [[2], [5]]]
    train, val, held_out = ([np.array(each, dtype=np.int64) for each in part] for part in parts)
    return Split(train, val, held_out, np.array(official), TARGETS)


def test_own_split_is_what_was_held_out():
    assert [each.tolist() for each in own_split(split([6, 7, 8, 9]))] == [[2], [5]]


def test_label_view_is_every_free_official_image_of_the_labels_learnt():
    # Client 0 learns labels 0 and 1; client 1 learns 2 (its held-out image of label 0 does not count).
    assert [each.tolist() for each in label_view(split([6, 7, 8, 9]))] == [[6, 7, 9], [8]]
    assert [each.tolist() for each in label_view(split([6, 9]))] == [[6, 9], []]
