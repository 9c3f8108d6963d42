"""Tests of the numbers that new clusters get."""

import pytest
import torch

from lcfl import keep_numbers
from tests.helpers.builders import state_of
from tests.methods.clustering.models import SIZE


def state(assignment, num_clusters=3):
    return state_of([None] * len(assignment), assignment, torch.zeros(num_clusters, SIZE), [True] * len(assignment))


@pytest.mark.parametrize(
    ("before", "found", "kept"),
    [
        ([0, 0, 1, 1, 2, 2], [2, 2, 0, 0, 1, 1], [0, 0, 1, 1, 2, 2]),  # only renumbered: nobody moves
        ([0, 0, 1, 1, 2, 2], [7, 7, 7, 5, 9, 9], [0, 0, 0, 1, 2, 2]),  # one client moves
        ([0, 0, 0, 0, 1, 1], [1, 1, 1, 0, 2, 2], [0, 0, 0, 2, 1, 1]),  # an unmatched cluster takes the free number
        ([-1, -1, 0, 1, 2, 2], [0, 0, 1, 2, 3, 3], [3, 3, 0, 1, 2, 2]),  # without one, it is numbered last
    ],
)
def test_as_many_clients_as_possible_keep_their_number(before, found, kept):
    s = state(before)
    labels = keep_numbers(s, range(6), torch.tensor(found))
    assert labels.dtype == torch.int64 and labels.tolist() == kept
    assert s.assignment.tolist() == before


def test_clients_that_are_not_named_do_not_count():
    labels = keep_numbers(state([0, 0, 0, 1, 1]), [3, 2, 4], torch.tensor([0, 1, 0]))
    assert labels.tolist() == [1, 0, 1]


def test_a_new_cluster_does_not_take_the_number_of_clients_that_are_not_named():
    labels = keep_numbers(state([0, 0, 0, 0, 1, 2]), [0, 1, 2, 3], torch.tensor([0, 0, 1, 1]))
    assert sorted(labels.unique().tolist()) == [0, 3]
