"""Tests of stratified splits of single shares and of shares that overlap."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lcfl.data.partition import ClientShares
from lcfl.data.train_test_split import split_disjoint, split_overlapping, split_share


def test_a_cut_keeps_label_proportions():
    share = np.arange(100, 112)
    labels = np.repeat([0, 1], [8, 4])
    stays, cut = split_share(share, labels, 3, np.random.default_rng(0))
    assert np.bincount(labels[cut - 100]).tolist() == [2, 1]
    assert np.bincount(labels[stays - 100]).tolist() == [6, 3]


def test_cut_is_not_stratified_if_a_label_has_one_sample():
    # There are nine samples of label 0 and one of label 1. A stratified cut of one sample would always have label 0.
    share, labels = np.arange(10), np.repeat([0, 1], [9, 1])
    cuts = {int(split_share(share, labels, 1, np.random.default_rng(seed))[1][0]) for seed in range(200)}
    assert cuts == set(range(10))


def test_remainders_are_assigned_at_random():
    # Each of four labels is entitled to half a sample, so no label may always lose.
    share, labels = np.arange(8), np.repeat(np.arange(4), 2)
    winners = [
        set(labels[split_share(share, labels, 2, np.random.default_rng(seed))[1]].tolist()) for seed in range(60)
    ]
    assert all(len(each) == 2 for each in winners) and set.union(*winners) == {0, 1, 2, 3}
    assert len({tuple(sorted(each)) for each in winners}) == 6


@given(st.lists(st.integers(0, 5), min_size=1, max_size=60), st.data(), st.integers(0, 10**6))
def test_cut_has_the_requested_size(label_list, data, seed):
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


def test_overlapping_shares_give_a_sample_the_same_role_everywhere():
    targets = np.arange(200) % 4
    draw = np.random.default_rng(0)
    shares = [np.arange(100), *(np.sort(draw.permutation(100)[:60]) for _ in range(4))]
    train, val, test = split_overlapping(ClientShares(shares), targets, 0.25, 0.2, seed=7)
    for share, *roles in zip(shares, train, val, test, strict=True):
        assert np.array_equal(np.sort(np.concatenate(roles)), share)
        assert all((np.diff(each) > 0).all() for each in roles)
    sets = [set(np.concatenate(part).tolist()) for part in (train, val, test)]
    # Clients hold all 100 samples: 25 are for testing and 15 of the others for validation, each stratified.
    assert [len(each) for each in sets] == [60, 15, 25] and len(set.union(*sets)) == 100
    assert np.bincount([targets[each] for each in sets[0]]).tolist() == [15, 15, 15, 15]
    again = split_overlapping(ClientShares(shares), targets, 0.25, 0.2, seed=7)
    assert all(map(np.array_equal, again[2], test))
    assert not all(map(np.array_equal, split_overlapping(ClientShares(shares), targets, 0.25, 0.2, seed=8)[2], test))
    assert all(len(each) == 0 for each in split_overlapping(ClientShares(shares), targets, 0.0, 0.2, seed=7)[2])


def test_split_of_a_client_depends_only_on_its_number_and_share():
    targets = np.arange(60) % 3
    shares = [np.arange(20), np.arange(20, 40)]
    first = split_disjoint(ClientShares(shares), targets, 0.25, 0.1, seed=7)
    second = split_disjoint(ClientShares([shares[0], np.arange(30, 60)]), targets, 0.25, 0.1, seed=7)
    for mine, same in zip(first, second, strict=True):
        assert np.array_equal(mine[0], same[0])
    assert [len(part[0]) for part in first] == [13, 2, 5]
