"""Tests of the rules of partitions against numbers computed by hand: Dirichlet draws, sizes and copies."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from lcfl.data.partition import (
    IID,
    ClassDirichlet,
    ClientDirichlet,
    CopyPerGroup,
    OverlappingFractions,
    PartOfPool,
    Pathological,
    Quantity,
    Subsampled,
)
from lcfl.data.partition.dirichlet import fill
from tests.data.partitions import CIFAR10, Scripted, counts_of


def test_class_dirichlet_gives_no_more_samples_to_full_clients():
    # With 12 samples and 2 clients, a client with 6 samples is full. Class 0 gives floor(4 * 1) = 4 samples to client
    # 0. Class 1 gives 3 and 1, so client 0 holds 7. For class 2, (0.9, 0.1) therefore becomes (0, 1).
    labels = np.repeat([0, 1, 2], 4)
    shares = ClassDirichlet(1.0, min_samples=5)(labels, 2, Scripted((1.0, 0.0), (0.75, 0.25), (0.9, 0.1)))
    assert counts_of(labels, shares).tolist() == [[4, 3, 0], [0, 1, 4]]
    assert shares.groups is None


def test_class_dirichlet_redraws_a_class_that_only_full_clients_drew():
    labels = np.repeat([0, 1], 4)
    script = Scripted((1.0, 0.0), (1.0, 0.0), (0.5, 0.5))
    shares = ClassDirichlet(1.0, min_samples=4)(labels, 2, script)
    assert counts_of(labels, shares).tolist() == [[4, 0], [0, 4]] and script.draws == []


def test_class_dirichlet_rounds_down_and_gives_the_rest_to_the_last_client():
    labels = np.zeros(10, dtype=np.int64)
    shares = ClassDirichlet(1.0, min_samples=1)(labels, 3, Scripted((0.26, 0.26, 0.48)))
    # The class is cut at floor(2.6) and floor(5.2).
    assert [len(share) for share in shares.indices] == [2, 3, 5]


def test_class_dirichlet_draws_again_until_every_client_has_min_samples():
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


def test_without_balance_full_clients_get_more_samples():
    # As in the first test, but client 0 continues to get samples: 4 + 3 + floor(4 * 0.9).
    labels = np.repeat([0, 1, 2], 4)
    rule = ClassDirichlet(1.0, min_samples=2, balance=False)
    shares = rule(labels, 2, Scripted((1.0, 0.0), (0.75, 0.25), (0.9, 0.1)))
    assert counts_of(labels, shares).tolist() == [[4, 3, 3], [0, 1, 1]]


def test_fractions_are_the_expected_parts_of_the_pool():
    class Fixed(Scripted):
        """Returns the fractions 0.1 and 0.3 and records the arguments of Dirichlet draws."""

        def uniform(self, low, high, size):
            self.asked = []
            return np.array([0.1, 0.3])

        def dirichlet(self, alpha):
            self.asked.append(alpha.tolist())
            return super().dirichlet(alpha)

    script = Fixed((0.5, 0.5), (0.5, 0.5))
    ClassDirichlet(2.0, min_samples=1, balance=False, fractions=(0.1, 0.6))(np.arange(8) % 2, 2, script)
    np.testing.assert_allclose(script.asked, [[1.0, 3.0]] * 2)
    # With a real generator and a large alpha, the sizes themselves are close to these parts.
    rule = ClassDirichlet(1e6, balance=False, fractions=(0.1, 0.6))
    sizes = np.array([len(each) for each in rule(CIFAR10, 20, np.random.default_rng(0)).indices])
    fractions = np.random.default_rng(0).uniform(0.1, 0.6, size=20)
    np.testing.assert_allclose(sizes / 50_000, fractions / fractions.sum(), atol=2e-3)


def test_class_dirichlet_has_the_statistics_of_niid_bench():
    # The expected values come from an independent simulation with NIID-Bench: m 100, beta 0.1 on CIFAR-10.
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
    ("labels", "min_samples", "rate", "draws"),
    [
        (CIFAR10, 10, 0.24, 100),
        (np.repeat(np.arange(10), 6000), 10, 0.30, 100),
        (np.repeat(np.arange(10), 6000), 40, 0.01, 100),
        (np.repeat(np.arange(100), 500), 10, 1.0, 5),
    ],
)
def test_class_dirichlet_accepts_as_many_draws_as_niid_bench(labels, min_samples, rate, draws):
    rule, accepted = ClassDirichlet(0.1, min_samples, max_tries=1), 0
    for seed in range(draws):
        try:
            rule(labels, 100, np.random.default_rng(seed))
            accepted += 1
        except ValueError as error:
            assert "none of 1 draws" in str(error)
    assert accepted / draws == pytest.approx(rate, abs=3.5 * np.sqrt(rate * (1 - rate) / draws))


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
def test_fill_moves_overflow_to_the_next_most_probable_class(wanted, available, proportions, expected):
    assert fill(np.array(wanted), np.array(available), np.array(proportions)).tolist() == expected


@given(arrays(np.int64, 5, elements=st.integers(0, 20)), arrays(np.int64, 5, elements=st.integers(0, 20)))
def test_fill_respects_the_total_and_the_limits(wanted, room):
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
        # The sizes are drawn first.
        assert sizes == np.random.default_rng(seed).integers(50, 351, size=20).tolist()


def test_client_dirichlet_without_sizes_uses_equal_ones():
    shares = ClientDirichlet(0.1)(np.arange(103) % 4, 10, np.random.default_rng(0))
    assert [len(share) for share in shares.indices] == [10] * 10


def test_client_dirichlet_has_the_majority_share_of_the_dirichlet():
    # The expected share is 0.67 for alpha 0.1 and 10 classes.
    shares = [ClientDirichlet(0.1, (50, 350))(CIFAR10, 100, np.random.default_rng(seed)) for seed in range(8)]
    counts = np.concatenate([counts_of(CIFAR10, each) for each in shares])
    assert (counts.max(1) / counts.sum(1)).mean() == pytest.approx(0.67, abs=0.02)


def test_client_dirichlet_refuses_more_samples_than_the_pool_has():
    with pytest.raises(
        ValueError, match=r"20 clients of sizes \(10, 10\) drew 200 samples in all, but the pool has 100"
    ):
        ClientDirichlet(0.1, (10, 10))(np.arange(100) % 4, 20, np.random.default_rng(0))


def test_iid_gives_the_requested_number_of_samples():
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
    # A client keeps a random part of its share and not just the beginning.
    assert any(small[-1] > large[len(small)] for large, small in zip(whole.indices, cut.indices, strict=True))


def test_subsampled_keeps_smaller_shares_whole():
    cut = Subsampled(IID(3), (5, 30))(np.zeros(30, dtype=np.int64), 10, np.random.default_rng(3))
    assert [len(share) for share in cut.indices] == [3] * 10


def test_subsampled_keeps_a_fraction_of_each_share():
    # Clients 0 and 1 hold 150 samples, the others 100.
    labels = np.repeat(np.arange(3), [300, 200, 200])
    base = Pathological(1)
    whole = base(labels, 6, np.random.default_rng(3))
    cut = Subsampled(base, fractions=(0.1, 0.6))(labels, 6, np.random.default_rng(3))
    kept = np.array([len(small) / len(large) for small, large in zip(cut.indices, whole.indices, strict=True)])
    assert kept.min() >= 0.095 and kept.max() <= 0.605 and len(set(kept.tolist())) == 6
    assert all(set(small) <= set(large) for small, large in zip(cut.indices, whole.indices, strict=True))
    assert cut.groups.tolist() == whole.groups.tolist()
    # A tenth of three samples is rounded to 0, but a client keeps one sample.
    tiny = Subsampled(IID(3), fractions=(0.1, 0.1))(labels, 5, np.random.default_rng(0))
    assert [len(each) for each in tiny.indices] == [1] * 5


def test_part_of_the_pool_is_partitioned_like_a_pool():
    labels = np.repeat(np.arange(4), 50)
    shares = PartOfPool(Pathological(2), 60)(labels, 4, np.random.default_rng(0))
    everything = np.concatenate(shares.indices)
    assert len(everything) == 60 and everything.max() > 150
    assert shares.groups.tolist() == [0, 0, 1, 1]
    assert set(labels[np.concatenate(shares.indices[:2])].tolist()) == {0, 1}
    with pytest.raises(ValueError, match="num_samples is 201, but the pool has 200 samples"):
        PartOfPool(IID(), 201)(labels, 4, np.random.default_rng(0))


def test_quantity_skews_sizes_but_not_labels():
    shares = Quantity(0.5, min_samples=20)(CIFAR10, 20, np.random.default_rng(0))
    sizes = np.array([len(each) for each in shares.indices])
    assert sizes.sum() == 50_000 and sizes.min() >= 20 and sizes.max() > 4 * np.median(sizes)
    largest = counts_of(CIFAR10, shares)[sizes.argmax()]
    assert largest.min() > 0.08 * sizes.max() and largest.max() < 0.12 * sizes.max()
    with pytest.raises(ValueError, match=r"none of 3 draws with alpha 0.01 .* min_samples 10 of 100 samples"):
        Quantity(0.01, max_tries=3)(np.zeros(100, dtype=np.int64), 8, np.random.default_rng(0))


def test_quantity_cuts_at_the_rounded_down_sums():
    shares = Quantity(1.0, min_samples=2, max_tries=2)(
        np.zeros(10, dtype=np.int64), 3, Scripted((0.1, 0.1, 0.8), (0.26, 0.26, 0.48))
    )
    # The first draw gives a client only one sample. The second one cuts at floor(2.6) and floor(5.2).
    assert [each.tolist() for each in shares.indices] == [[0, 1], [2, 3, 4], [5, 6, 7, 8, 9]]


def test_every_group_has_a_copy_of_the_pool():
    labels = np.arange(60) % 5
    shares = CopyPerGroup(3)(labels, 7, np.random.default_rng(0))
    assert shares.groups.tolist() == [0, 0, 0, 1, 1, 2, 2]
    for group in range(3):
        held = [share for share, each in zip(shares.indices, shares.groups, strict=True) if each == group]
        assert sorted(np.concatenate(held).tolist()) == list(range(60))
        assert max(map(len, held)) - min(map(len, held)) <= 1
    assert not np.array_equal(shares.indices[3], shares.indices[5])


def test_copies_have_the_sizes_of_ifca():
    # For CIFAR-10 with 2 angles IFCA has 200 clients of 500 images, 100 clients in each group.
    shares = CopyPerGroup(2, 500)(CIFAR10, 200, np.random.default_rng(0))
    assert {len(each) for each in shares.indices} == {500} and np.bincount(shares.groups).tolist() == [100, 100]


def test_overlapping_fractions_are_fractions_of_the_pool():
    labels = np.arange(1000) % 10
    for rule in (OverlappingFractions((0.1, 0.6)), OverlappingFractions((0.1, 0.6), alpha=0.5)):
        shares = rule(labels, 20, np.random.default_rng(0))
        fractions = np.random.default_rng(0).uniform(0.1, 0.6, size=20)
        assert [len(each) for each in shares.indices] == np.rint(1000 * fractions).astype(int).tolist()
    # Each class has 100 samples. A client that draws more of a class takes all of these and fills up with other
    # classes.
    counts = counts_of(labels, shares)
    assert counts.max() == 100 and (counts == 100).sum() > 3 and (counts < 5).sum() > 3
