"""Each partition's own rule, against numbers worked by hand and the literature's code."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from lcfl.data.partition import IID, ClassDirichlet, ClientDirichlet, Pathological, Subsampled
from lcfl.data.partition.dirichlet import fill
from lcfl.data.partition.pathological import class_blocks

CIFAR10 = np.repeat(np.arange(10), 5000)


def counts_of(labels, shares):
    return np.stack([np.bincount(labels[share], minlength=labels.max() + 1) for share in shares.indices])


class Scripted:
    """A generator whose Dirichlet draws are given and whose permutations change nothing."""

    def __init__(self, *draws):
        self.draws = list(draws)

    def dirichlet(self, alpha):
        return np.array(self.draws.pop(0))

    def permutation(self, values):
        return values


def test_class_dirichlet_closes_full_clients():
    # 12 samples, 2 clients, so a client with 6 is full. Class 0: floor(4 * 1) = 4 to client 0. Class 1: 3 and 1;
    # client 0 now holds 7. Class 2: (0.9, 0.1) becomes (0, 1).
    labels = np.repeat([0, 1, 2], 4)
    shares = ClassDirichlet(1.0, min_samples=5)(labels, 2, Scripted((1.0, 0.0), (0.75, 0.25), (0.9, 0.1)))
    assert counts_of(labels, shares).tolist() == [[4, 3, 0], [0, 1, 4]]
    assert shares.groups is None


def test_class_dirichlet_redraws_a_class_without_takers():
    labels = np.repeat([0, 1], 4)
    script = Scripted((1.0, 0.0), (1.0, 0.0), (0.5, 0.5))
    shares = ClassDirichlet(1.0, min_samples=4)(labels, 2, script)
    assert counts_of(labels, shares).tolist() == [[4, 0], [0, 4]] and script.draws == []


def test_class_dirichlet_rounds_down_and_the_last_client_takes_the_rest():
    labels = np.zeros(10, dtype=np.int64)
    shares = ClassDirichlet(1.0, min_samples=1)(labels, 3, Scripted((0.26, 0.26, 0.48)))
    # Cuts at floor(2.6) and floor(5.2).
    assert [len(share) for share in shares.indices] == [2, 3, 5]


def test_class_dirichlet_starts_over_until_everyone_has_enough():
    labels = np.zeros(10, dtype=np.int64)
    script = Scripted((0.1, 0.9), (0.95, 0.05), (0.4, 0.6))
    shares = ClassDirichlet(1.0, min_samples=4, max_tries=3)(labels, 2, script)
    assert [len(share) for share in shares.indices] == [4, 6]
    with pytest.raises(ValueError, match=r"none of 2 draws with alpha 1.0 .* num_clients 2 .* min_samples 4"):
        ClassDirichlet(1.0, min_samples=4, max_tries=2)(labels, 2, Scripted((0.1, 0.9), (0.95, 0.05)))


def test_class_dirichlet_gives_up_on_impossible_draws():
    with pytest.raises(ValueError, match="none of 5 draws with alpha 1e-05"):
        ClassDirichlet(1e-5, min_samples=10, max_tries=5)(CIFAR10, 50, np.random.default_rng(0))
    with pytest.raises(ValueError, match="need more than the 50000 samples"):
        ClassDirichlet(1.0, min_samples=1000)(CIFAR10, 51, np.random.default_rng(0))


def test_class_dirichlet_has_the_statistics_of_niid_bench():
    # NIID-Bench: m 100, beta 0.1 on CIFAR-10, simulated there independently.
    rows = []
    for seed in range(12):
        shares = ClassDirichlet(0.1)(CIFAR10, 100, np.random.default_rng(seed))
        counts = counts_of(CIFAR10, shares)
        sizes = counts.sum(axis=1)
        assert sizes.sum() == 50_000 and sizes.min() >= 10
        rows.append([np.median(sizes), sizes.max(), (counts > 0).sum(1).mean(), (counts.max(1) / sizes).mean()])
    median, largest, labels, majority = np.mean(rows, axis=0)
    assert median == pytest.approx(445, abs=40)
    assert largest == pytest.approx(2100, abs=300)
    assert labels == pytest.approx(4.2, abs=0.2)
    assert majority == pytest.approx(0.72, abs=0.02)


@pytest.mark.parametrize(
    ("wanted", "available", "proportions", "expected"),
    [
        ([5, 3, 0], [9, 9, 9], [0.6, 0.3, 0.1], [5, 3, 0]),
        ([5, 3, 0], [2, 9, 9], [0.6, 0.3, 0.1], [2, 6, 0]),
        ([5, 3, 0], [2, 9, 9], [0.6, 0.1, 0.3], [2, 3, 3]),
        ([5, 3, 1], [2, 4, 9], [0.6, 0.3, 0.1], [2, 4, 3]),
        ([0, 0, 4], [9, 1, 1], [0.6, 0.3, 0.1], [3, 0, 1]),
    ],
)
def test_overflow_moves_to_the_next_most_probable_class(wanted, available, proportions, expected):
    assert fill(np.array(wanted), np.array(available), np.array(proportions)).tolist() == expected


@given(arrays(np.int64, 5, elements=st.integers(0, 20)), arrays(np.int64, 5, elements=st.integers(0, 20)))
def test_fill_keeps_the_total_and_the_limits(wanted, room):
    available = room + wanted[::-1]
    counts = fill(wanted, available, np.arange(5) / 10)
    assert counts.sum() == wanted.sum() and (counts <= available).all() and (counts >= 0).all()
    if (wanted <= available).all():
        assert (counts == wanted).all()


@settings(max_examples=40, deadline=None)
@given(st.floats(0.01, 10), st.integers(0, 1000), st.booleans())
def test_fedac_sizes_hold_exactly(alpha, seed, dirichlet):
    labels = np.arange(8000) % 10
    rule = ClientDirichlet(alpha, (50, 350)) if dirichlet else Pathological(3, (50, 350))
    sizes = [len(share) for share in rule(labels, 20, np.random.default_rng(seed)).indices]
    assert min(sizes) >= 50 and max(sizes) <= 350
    if dirichlet:
        # Sizes are the first draw.
        assert sizes == np.random.default_rng(seed).integers(50, 351, size=20).tolist()


def test_client_dirichlet_without_sizes_uses_equal_ones():
    shares = ClientDirichlet(0.1)(np.arange(103) % 4, 10, np.random.default_rng(0))
    assert [len(share) for share in shares.indices] == [10] * 10


def test_client_dirichlet_has_the_majority_share_of_the_dirichlet():
    # 0.67 for alpha 0.1 and 10 classes.
    shares = [ClientDirichlet(0.1, (50, 350))(CIFAR10, 100, np.random.default_rng(seed)) for seed in range(8)]
    counts = np.concatenate([counts_of(CIFAR10, each) for each in shares])
    assert (counts.max(1) / counts.sum(1)).mean() == pytest.approx(0.67, abs=0.02)


def test_client_dirichlet_refuses_more_than_there_is():
    with pytest.raises(ValueError, match=r"20 clients of sizes \(10, 10\) drew 200 samples in all, the pool has 100"):
        ClientDirichlet(0.1, (10, 10))(np.arange(100) % 4, 20, np.random.default_rng(0))


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
def test_pathological_blocks_are_those_of_pfllib(num_classes, per_client, expected, sizes):
    # 100 clients.
    labels = np.repeat(np.arange(num_classes), 50_000 // num_classes)
    shares = Pathological(per_client, sizes)(labels, 100, np.random.default_rng(0))
    owned = [tuple(np.unique(labels[share]).tolist()) for share in shares.indices]
    assert owned == [classes for size, classes in expected for _ in range(size)]
    assert shares.groups.tolist() == [group for group, (size, _) in enumerate(expected) for _ in range(size)]


@given(st.integers(1, 60), st.integers(1, 30), st.data())
def test_class_blocks_leave_nobody_out(num_clients, num_classes, data):
    per_client = data.draw(st.integers(1, num_classes))
    owned = class_blocks(num_clients, num_classes, per_client).sum(axis=1)
    assert owned.min() >= 1 and owned.max() <= per_client


def test_pathological_spreads_a_clients_size_evenly():
    labels = np.repeat(np.arange(6), 100)
    counts = counts_of(labels, Pathological(3, (20, 20))(labels, 4, np.random.default_rng(0)))
    for row in counts:
        assert sorted(row[row > 0].tolist()) == [6, 7, 7]


def test_pathological_deals_whole_classes():
    labels = np.repeat(np.arange(4), [10, 11, 12, 13])
    counts = counts_of(labels, Pathological(2)(labels, 6, np.random.default_rng(0)))
    assert counts.tolist() == [[4, 4, 0, 0], [3, 4, 0, 0], [3, 3, 0, 0], [0, 0, 4, 5], [0, 0, 4, 4], [0, 0, 4, 4]]


def test_unbalanced_pathological_is_pfllibs():
    labels = np.repeat(np.arange(4), 1000)
    counts = counts_of(labels, Pathological(2, balanced=False)(labels, 20, np.random.default_rng(0)))
    assert counts.sum(axis=0).tolist() == [1000] * 4
    # 10 owners a class: all but the last hold 10 to 99 samples, the last the rest.
    first = counts[:9, :2]
    assert first.min() >= 10 and first.max() <= 99 and len(np.unique(first)) > 5
    assert (counts[9, :2] == 1000 - first.sum(axis=0)).all()


@pytest.mark.parametrize(
    ("partition", "words"),
    [
        (Pathological(5), "classes_per_client is 5, the pool has 4 classes"),
        (Pathological(4), "class number 0 has 5 samples for 8 owners"),
        (Pathological(2, (5, 5)), "class number 0 need .* samples of it, the pool has 5"),
    ],
)
def test_pathological_says_which_class_runs_short(partition, words):
    with pytest.raises(ValueError, match=words):
        partition(np.repeat(np.arange(4), 5), 8, np.random.default_rng(0))


def test_iid_takes_the_number_asked_for():
    shares = IID(7)(np.arange(100) % 4, 10, np.random.default_rng(0))
    assert [len(share) for share in shares.indices] == [7] * 10
    with pytest.raises(ValueError, match="samples_per_client can be at most 10"):
        IID(11)(np.arange(100) % 4, 10, np.random.default_rng(0))


def test_subsampled_cuts_the_base_and_keeps_its_groups():
    labels = np.repeat(np.arange(4), 50)
    base = Pathological(2)
    whole = base(labels, 10, np.random.default_rng(3))
    cut = Subsampled(base, (5, 30))(labels, 10, np.random.default_rng(3))
    for large, small in zip(whole.indices, cut.indices, strict=True):
        assert set(small.tolist()) <= set(large.tolist()) and 5 <= len(small) <= 30
    assert cut.groups.tolist() == whole.groups.tolist()
    assert len({len(small) for small in cut.indices}) > 1
    # What stays is a random part of the share, not its beginning.
    assert any(small[-1] > large[len(small)] for large, small in zip(whole.indices, cut.indices, strict=True))


def test_subsampled_keeps_a_share_that_is_smaller_whole():
    cut = Subsampled(IID(3), (5, 30))(np.zeros(30, dtype=np.int64), 10, np.random.default_rng(3))
    assert [len(share) for share in cut.indices] == [3] * 10
