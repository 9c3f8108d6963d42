"""Tests of the batch order: shuffled passes with one stream each, which continue where the last participation ended."""

from itertools import chain, islice

import numpy as np
import pytest

from lcfl.core import rng
from lcfl.methods.local.batch_order import batch_positions, samples_per_epoch


def batches(number, num_samples=10, batch_size=4, consumed=0, seed=0, client=0, drop_last=False):
    endless = batch_positions(num_samples, batch_size, consumed, seed, client, drop_last)
    return [batch.tolist() for batch in islice(endless, number)]


def test_each_pass_has_its_own_stream_and_a_short_last_batch():
    found = batches(6, seed=3, client=7)
    assert [len(batch) for batch in found] == [4, 4, 2, 4, 4, 2]
    for number in (0, 1):
        order = rng.generator(3, "order", 7, number).permutation(10)
        assert list(chain(*found[3 * number : 3 * number + 3])) == order.tolist()
        assert sorted(order) == list(range(10))
    assert found[:3] != found[3:]


@pytest.mark.parametrize("done", range(1, 7))
def test_the_order_continues_where_it_ended(done):
    before = batches(done)
    consumed = sum(map(len, before))
    assert before + batches(4, consumed=consumed) == batches(done + 4)


def test_the_order_can_start_in_the_middle_of_a_pass():
    order = rng.generator(0, "order", 0, 1).permutation(10).tolist()
    assert batches(2, consumed=13) == [order[3:7], order[7:]]


def test_a_small_client_draws_all_its_samples():
    found = batches(5, num_samples=3, batch_size=32)
    assert all(sorted(batch) == [0, 1, 2] for batch in found)
    assert len({tuple(batch) for batch in found}) > 1


def test_the_order_depends_on_client_and_seed():
    orders = [batches(3, seed=seed, client=client) for seed in (0, 1) for client in (0, 1)]
    assert len({str(order) for order in orders}) == 4


@pytest.mark.parametrize(
    ("num_samples", "batch_size", "kept"),
    [(10, 4, 8), (8, 4, 8), (9, 4, 8), (4, 4, 4), (3, 4, 3), (1, 4, 1), (7, 1, 7)],
)
def test_a_pass_without_its_last_batch_is_floor_n_over_b_batches(num_samples, batch_size, kept):
    assert samples_per_epoch(num_samples, batch_size, drop_last=False) == num_samples
    assert samples_per_epoch(num_samples, batch_size, drop_last=True) == kept


def test_a_short_last_batch_is_left_out_of_the_same_order():
    found = batches(5, seed=3, client=7, drop_last=True)
    for number, part in enumerate((found[:2], found[2:4])):
        order = rng.generator(3, "order", 7, number).permutation(10).tolist()
        assert part == [order[:4], order[4:8]]
    assert found[4] == rng.generator(3, "order", 7, 2).permutation(10).tolist()[:4]


@pytest.mark.parametrize("num_samples", [3, 8, 9, 10])
@pytest.mark.parametrize("done", range(1, 6))
def test_the_order_continues_where_it_ended_with_drop_last(num_samples, done):
    before = batches(done, num_samples, drop_last=True)
    consumed = sum(map(len, before))
    assert before + batches(4, num_samples, consumed=consumed, drop_last=True) == batches(
        done + 4, num_samples, drop_last=True
    )


def test_drop_last_changes_nothing_without_short_batches_or_for_a_small_client():
    for num_samples in (3, 8):
        assert batches(6, num_samples, drop_last=True) == batches(6, num_samples)


def test_positions_are_integers():
    assert next(batch_positions(5, 2, 0, 0, 0)).dtype == np.int64
