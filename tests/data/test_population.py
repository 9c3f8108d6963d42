"""Tests of the trivial baseline, fingerprint and text output of a population on numbers computed by hand."""

import numpy as np
import pytest

from lcfl.data.population import Population
from lcfl.data.views import Relabelling


def lists(*parts):
    return [np.array(part, dtype=np.int64) for part in parts]


def population(train=((0, 1, 2), (3, 4)), val=((), (5,)), test=((6, 7), (8, 9, 10)), groups=None):
    counts = np.array([[2, 1], [0, 2]])
    return Population(lists(*train), lists(*val), {"own_split": lists(*test)}, groups, counts)


def test_majority_accuracy_is_that_of_constant_prediction():
    targets = np.array([0, 0, 1, 1, 1, 1, 0, 1, 1, 1, 0])
    # Client 0 guesses 0 for labels 0, 1. Client 1 guesses 1 for labels 1, 1, 0.
    np.testing.assert_allclose(population().majority_accuracy("own_split", targets), [1 / 2, 2 / 3])
    nothing = population(test=((), (8,))).majority_accuracy("own_split", targets)
    assert np.isnan(nothing[0]) and nothing[1] == 1


def test_majority_accuracy_uses_labels_as_the_client_sees_them():
    targets = np.array([0, 0, 1, 1, 1, 1, 0, 1, 1, 1, 0])
    swapped = [(Relabelling((1, 0)),), ()]
    counts = np.array([[1, 2], [0, 2]])  # client 0 sees its labels 0, 0, 1 as 1, 1, 0
    tests = lists((6, 7), (8, 9, 10))
    both = {"global": tests, "global_plain": tests}
    made = Population(lists((0, 1, 2), (3, 4)), lists((), ()), both, None, counts, views=swapped)
    np.testing.assert_allclose(made.majority_accuracy("global", targets), [1 / 2, 2 / 3])  # client 0 sees 1, 0
    targets[6] = 1
    np.testing.assert_allclose(made.majority_accuracy("global", targets), [0, 2 / 3])  # client 0 sees 0, 0
    np.testing.assert_allclose(
        made.majority_accuracy("global_plain", targets), [1, 2 / 3]
    )  # without views they are 1, 1


def test_sizes_are_training_sizes():
    assert population().num_clients == 2 and population().sizes.tolist() == [3, 2]


def test_samples_in_use_are_all_samples_with_a_role():
    shared = np.array([6, 7])
    made = Population(
        lists((0, 3), (1,)), lists((), (5,)), {"global": [shared, shared]}, None, np.ones((2, 2)), proxy=np.array([9])
    )
    assert made.samples_in_use.tolist() == [0, 1, 3, 5, 6, 7, 9]


def test_fingerprint_depends_on_every_role():
    variants = [
        population(),
        population(train=((0, 1), (2, 3, 4))),
        population(train=((3, 4), (0, 1, 2))),
        population(val=((5,), ())),
        population(train=((0, 1, 2), (3, 4, 5)), val=((), ())),
        population(test=((6,), (7, 8, 9, 10))),
    ]
    assert len({each.fingerprint for each in variants}) == len(variants)
    assert population().fingerprint == population(groups=np.array([0, 1])).fingerprint


def test_dictionary_holds_whole_shares():
    content = population(groups=np.array([0, 1])).to_dict()
    assert content["indices"] == [[0, 1, 2, 6, 7], [3, 4, 5, 8, 9, 10]]
    assert content["groups"] == [0, 1] and content["label_counts"] == [[2, 1], [0, 2]]
    assert content["train"] == [[0, 1, 2], [3, 4]] and content["test"] == {"own_split": [[6, 7], [8, 9, 10]]}


def test_shared_test_set_is_written_once():
    everybody = np.array([8, 9, 10])
    for sets, written in (([everybody] * 2, [8, 9, 10]), ([everybody, everybody.copy()], [[8, 9, 10]] * 2)):
        people = Population(*[population().train, population().val], {"global": sets}, None, np.array([[2, 1], [0, 2]]))
        assert people.to_dict()["test"] == {"global": written}


def test_a_rounded_mean_lies_between_the_smallest_and_the_largest_value():
    entropies = Population(*[[np.arange(1000)] * 2] * 2, {}, None, np.array([[501, 499], [503, 497]])).summary()
    rows = {line.split("  ")[0]: [float(word) for word in line.split()[-3:]] for line in entropies.splitlines()[2:]}
    assert all(least <= mean <= most for least, mean, most in rows.values()), rows


def test_summary_shows_sizes_labels_and_majority():
    rows = {line[:22].strip(): line[22:].split() for line in population(groups=np.array([0, 0])).summary().splitlines()}
    text = population().summary()
    assert text.startswith("2 clients, true groups: unknown")
    assert rows["train samples"] == ["2", "2.5", "3"]
    assert rows["test/own_split samples"] == ["2", "2.5", "3"]
    assert rows["labels"] == ["1", "1.5", "2"]
    assert [float(number) for number in rows["label entropy"]] == pytest.approx([0.0, 0.46, 0.918296])
    assert [float(number) for number in rows["majority share"]] == pytest.approx([0.666667, 0.83, 1.0])
