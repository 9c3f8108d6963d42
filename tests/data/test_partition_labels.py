"""Tests of partitions by label sets against numbers computed by hand and by the code of the literature."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lcfl.data.partition import CopyPerGroup, LabelRing, LabelSkew, Pathological, Shards
from lcfl.data.partition.pathological import class_blocks
from tests.data.partitions import CIFAR10, Scripted, counts_of


@pytest.mark.parametrize(
    ("num_classes", "per_client", "expected"),
    [
        (10, 3, [(30, (0, 1, 2)), (30, (3, 4, 5)), (30, (6, 7, 8)), (10, (9,))]),
        (10, 4, [(40, (0, 1, 2, 3)), (40, (4, 5, 6, 7)), (20, (8, 9))]),
        (10, 2, [(20, (k, k + 1)) for k in range(0, 10, 2)]),
        (100, 8, [(8, tuple(range(k, k + 8))) for k in range(0, 96, 8)] + [(4, (96, 97, 98, 99))]),
        (100, 10, [(10, tuple(range(k, k + 10))) for k in range(0, 100, 10)]),
    ],
)
@pytest.mark.parametrize("sizes", [None, (50, 350)])
def test_pathological_has_the_blocks_of_pfllib(num_classes, per_client, expected, sizes):
    # The expected blocks are those of 100 clients.
    labels = np.repeat(np.arange(num_classes), 50_000 // num_classes)
    shares = Pathological(per_client, sizes)(labels, 100, np.random.default_rng(0))
    owned = [tuple(np.unique(labels[share]).tolist()) for share in shares.indices]
    assert owned == [classes for size, classes in expected for _ in range(size)]
    assert shares.groups.tolist() == [group for group, (size, _) in enumerate(expected) for _ in range(size)]


@given(st.integers(1, 60), st.integers(1, 30), st.data())
def test_class_blocks_give_every_client_a_class(num_clients, num_classes, data):
    per_client = data.draw(st.integers(1, num_classes))
    owned = class_blocks(num_clients, num_classes, per_client).sum(axis=1)
    assert owned.min() >= 1 and owned.max() <= per_client


def test_pathological_spreads_a_clients_size_evenly():
    labels = np.repeat(np.arange(6), 100)
    counts = counts_of(labels, Pathological(3, (20, 20))(labels, 4, np.random.default_rng(0)))
    for row in counts:
        assert sorted(row[row > 0].tolist()) == [6, 7, 7]


def test_pathological_deals_out_whole_classes():
    labels = np.repeat(np.arange(4), [10, 11, 12, 13])
    counts = counts_of(labels, Pathological(2)(labels, 6, np.random.default_rng(0)))
    assert counts.tolist() == [[4, 4, 0, 0], [3, 4, 0, 0], [3, 3, 0, 0], [0, 0, 4, 5], [0, 0, 4, 4], [0, 0, 4, 4]]


def test_unbalanced_pathological_follows_pfllib():
    labels = np.repeat(np.arange(4), 1000)
    counts = counts_of(labels, Pathological(2, balanced=False)(labels, 20, np.random.default_rng(0)))
    assert counts.sum(axis=0).tolist() == [1000] * 4
    # A class has 10 owners. All but the last one hold 10 to 99 samples, and the last one holds the rest.
    first = counts[:9, :2]
    assert first.min() >= 10 and first.max() <= 99 and len(np.unique(first)) > 5
    assert (counts[9, :2] == 1000 - first.sum(axis=0)).all()


@pytest.mark.parametrize(
    ("partition", "words"),
    [
        (Pathological(5), "classes_per_client is 5, but the pool has 4 classes"),
        (Pathological(4), "owners of class number 0 need 8 samples of it, but the pool has 5"),
        (Pathological(2, (5, 5)), "class number 0 need .* samples of it, but the pool has 5"),
    ],
)
def test_pathological_error_names_the_class_with_too_few_samples(partition, words):
    with pytest.raises(ValueError, match=words):
        partition(np.repeat(np.arange(4), 5), 8, np.random.default_rng(0))


@pytest.mark.parametrize("sizes", [None, (50, 350)])
@pytest.mark.parametrize(("num_classes", "num_labels"), [(10, 2), (10, 3), (100, 20), (100, 10)])
def test_label_skew_gives_every_client_its_number_of_labels(num_classes, num_labels, sizes):
    # For 10 of 100 classes, lcfl does not follow NIID-Bench's special case, which gives all clients classes 0 to 9.
    labels = np.repeat(np.arange(num_classes), 50_000 // num_classes)
    counts = counts_of(labels, LabelSkew(num_labels, sizes=sizes)(labels, 100, np.random.default_rng(0)))
    assert ((counts > 0).sum(axis=1) == num_labels).all()
    assert all(counts[client, client % num_classes] > 0 for client in range(100))
    if sizes is None:
        assert (counts.sum(axis=0) == 50_000 // num_classes).all()
        for label in range(num_classes):
            parts = counts[counts[:, label] > 0, label]
            assert parts.max() - parts.min() <= 1
    else:
        assert counts.sum(axis=1).min() >= 50 and counts.sum(axis=1).max() <= 350
        spread = [row[row > 0].max() - row[row > 0].min() for row in counts]
        assert max(spread) <= 1


def test_random_labels_may_leave_a_class_unused():
    labels = np.repeat(np.arange(10), 30)
    used = {
        len(np.unique(labels[np.concatenate(LabelSkew(1, "random")(labels, 10, np.random.default_rng(seed)).indices)]))
        for seed in range(20)
    }
    assert max(used) < 10 and len(used) > 1
    assert len(np.unique(labels[np.concatenate(LabelSkew(1)(labels, 10, np.random.default_rng(0)).indices)])) == 10


def test_label_ring_owns_neighbouring_labels():
    labels = np.repeat(np.arange(5), 40)
    for rule in (LabelRing(3, min_per_label=2), LabelRing(3, (6, 9))):
        shares = rule(labels, 7, np.random.default_rng(0))
        owned = [set(labels[each].tolist()) for each in shares.indices]
        assert owned == [{u % 5, (u + 1) % 5, (u + 2) % 5} for u in range(7)]
        assert shares.groups is None
    assert all(6 <= len(each) <= 9 for each in shares.indices)


def test_label_ring_follows_a_power_law():
    counts = counts_of(CIFAR10, LabelRing(2)(CIFAR10, 20, np.random.default_rng(0)))
    assert counts.sum(axis=0).tolist() == [5000] * 10
    parts = counts[counts > 0]
    assert parts.min() >= 10 and parts.max() > 10 * np.median(parts)
    even = counts_of(CIFAR10, LabelRing(2, log_std=0.0)(CIFAR10, 20, np.random.default_rng(0)))
    assert set(even[even > 0].tolist()) == {1250}


def test_label_ring_weights_are_exponentials():
    class Normals(Scripted):
        def standard_normal(self, size):
            return np.array(self.draws.pop(0))

    # Three owners of a class of 30 samples get 2 each. They share the other 24 in the ratio 1 : e : e^2, which gives
    # floor(2.16), floor(5.87) and the rest.
    shares = LabelRing(1, log_std=2.0, min_per_label=2)(np.zeros(30, dtype=np.int64), 3, Normals((0.0, 0.5, 1.0)))
    assert [len(each) for each in shares.indices] == [2 + 2, 2 + 5, 2 + 17]


def test_shards_of_mcmahan_may_hold_two_classes():
    labels = np.repeat(np.arange(3), 10)
    shares = Shards(2)(labels, 2, np.random.default_rng(0))
    # The sorted pool is cut into four shards of 8, 8, 7 and 7 samples.
    sizes = sorted(len(each) for each in shares.indices)
    assert sum(sizes) == 30 and sizes[0] >= 14
    pool = [Shards(2)(np.sort(np.arange(600) % 10), 100, np.random.default_rng(seed)) for seed in range(3)]
    for each in pool:
        assert {len(share) for share in each.indices} == {6}
        assert max(len(np.unique(np.sort(np.arange(600) % 10)[share])) for share in each.indices) == 2


def test_shards_by_class_hold_one_class_and_may_repeat_it():
    labels = np.repeat(np.arange(10), 600)
    counts = counts_of(labels, Shards(2, by_class=True)(labels, 100, np.random.default_rng(0)))
    # Each class has 20 shards of 30 samples.
    assert set(counts.reshape(-1).tolist()) == {0, 30, 60}
    assert (counts.sum(axis=1) == 60).all() and (counts.sum(axis=0) == 600).all()
    assert 0 < (counts == 60).sum() < 30


def test_shards_by_class_with_sizes_give_a_repeated_class_more_samples():
    labels = np.repeat(np.arange(2), 600)
    counts = counts_of(labels, Shards(3, by_class=True, sizes=(30, 30))(labels, 20, np.random.default_rng(0)))
    assert {tuple(row) for row in counts.tolist()} <= {(30, 0), (20, 10), (10, 20), (0, 30)}
    assert len({tuple(row) for row in counts.tolist()}) > 2


def test_number_of_shards_need_not_be_a_multiple_of_the_classes():
    # With 9 shards and 4 classes, one random class has three shards.
    labels = np.repeat(np.arange(4), 12)
    tops = set()
    for seed in range(20):
        counts = counts_of(labels, Shards(3, by_class=True)(labels, 3, np.random.default_rng(seed)))
        assert counts.sum() == 48
        tops.add(next(label for label in range(4) if (counts[:, label] % 6).any()))
    assert tops == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("partition", "words"),
    [
        (LabelSkew(5), "num_labels is 5, but the pool has 4 classes"),
        (LabelSkew(4), "owners of class number 0 need 8 samples of it, but the pool has 5"),
        (LabelRing(5), "num_labels is 5, but the pool has 4 classes"),
        (LabelRing(1), "owners of class number 0 need 20 samples of it, but the pool has 5"),
        (Shards(3), "8 clients x shards_per_client 3 need at least 24 samples, but the pool has 20"),
        (Shards(3, by_class=True), "owners of class number 0 need 6 samples of it, but the pool has 5"),
        (CopyPerGroup(9), "num_groups 9 is more than num_clients 8"),
        (CopyPerGroup(2, 6), "4 clients of a group x samples_per_client 6 need 24 .* can be at most 5"),
    ],
)
def test_errors_name_what_the_pool_lacks(partition, words):
    with pytest.raises(ValueError, match=words):
        partition(np.repeat(np.arange(4), 5), 8, np.random.default_rng(0))


def test_fewer_shards_than_classes_are_refused():
    with pytest.raises(ValueError, match="2 shards leave some of the 4 classes without a shard"):
        Shards(1, by_class=True)(np.arange(8) % 4, 2, np.random.default_rng(0))
