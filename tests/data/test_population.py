"""Stratified cuts, the trivial baseline and the fingerprint, on numbers worked by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lcfl.data.population import Population, split_share


def lists(*parts):
    return [np.array(part, dtype=np.int64) for part in parts]


def population(train=((0, 1, 2), (3, 4)), val=((), (5,)), test=((6, 7), (8, 9, 10)), groups=None):
    counts = np.array([[2, 1], [0, 2]])
    return Population(lists(*train), lists(*val), {"own_split": lists(*test)}, groups, counts)


def test_a_cut_keeps_label_proportions():
    share = np.arange(100, 112)
    labels = np.repeat([0, 1], [8, 4])
    stays, cut = split_share(share, labels, 3, np.random.default_rng(0))
    assert np.bincount(labels[cut - 100]).tolist() == [2, 1]
    assert np.bincount(labels[stays - 100]).tolist() == [6, 3]


def test_a_label_with_one_sample_makes_the_cut_plain():
    # Nine of label 0 and one of label 1: stratified, a cut of one would always be of label 0.
    share, labels = np.arange(10), np.repeat([0, 1], [9, 1])
    cuts = {int(split_share(share, labels, 1, np.random.default_rng(seed))[1][0]) for seed in range(200)}
    assert cuts == set(range(10))


def test_remainders_are_shared_out_at_random():
    # Each of four labels is entitled to half an image: no label may always lose.
    share, labels = np.arange(8), np.repeat(np.arange(4), 2)
    winners = [
        set(labels[split_share(share, labels, 2, np.random.default_rng(seed))[1]].tolist()) for seed in range(60)
    ]
    assert all(len(each) == 2 for each in winners) and set.union(*winners) == {0, 1, 2, 3}
    assert len({tuple(sorted(each)) for each in winners}) == 6


@given(st.lists(st.integers(0, 5), min_size=1, max_size=60), st.data(), st.integers(0, 10**6))
def test_a_cut_has_the_size_asked_for(label_list, data, seed):
    labels = np.array(label_list)
    number = data.draw(st.integers(0, len(labels)))
    share = np.arange(len(labels)) * 3 + 1
    stays, cut = split_share(share, labels, number, np.random.default_rng(seed))
    assert len(cut) == number
    assert np.array_equal(np.sort(np.concatenate([stays, cut])), share)
    assert (np.diff(stays) > 0).all() and (np.diff(cut) > 0).all()
    counts = np.bincount(labels)
    if counts[counts > 0].min() >= 2:
        taken = np.bincount(labels[(cut - 1) // 3], minlength=len(counts))
        assert (np.abs(taken - number * counts / len(labels)) < 1).all()


def test_majority_accuracy_is_that_of_constant_prediction():
    targets = np.array([0, 0, 1, 1, 1, 1, 0, 1, 1, 1, 0])
    # Client 0 guesses label 0 on labels 0, 1; client 1 guesses label 1 on labels 1, 1, 0.
    np.testing.assert_allclose(population().majority_accuracy("own_split", targets), [1 / 2, 2 / 3])
    nothing = population(test=((), (8,))).majority_accuracy("own_split", targets)
    assert np.isnan(nothing[0]) and nothing[1] == 1


def test_sizes_are_training_sizes():
    assert population().num_clients == 2 and population().sizes.tolist() == [3, 2]


def test_fingerprint_sees_every_move():
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


def test_summary_tells_sizes_labels_and_majority():
    rows = {line[:22].strip(): line[22:].split() for line in population(groups=np.array([0, 0])).summary().splitlines()}
    text = population().summary()
    assert text.startswith("2 clients, true groups: unknown")
    assert rows["train images"] == ["2", "2.5", "3"]
    assert rows["test/own_split images"] == ["2", "2.5", "3"]
    assert rows["labels"] == ["1", "1.5", "2"]
    assert [float(number) for number in rows["majority share"]] == pytest.approx([0.666667, 0.83, 1.0])
