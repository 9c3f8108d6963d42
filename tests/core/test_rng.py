"""A stream is a function of its address and nothing else."""

import hashlib
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lcfl.core import rng

ADDRESSES = st.tuples(st.integers(0, 2**40), st.sampled_from(["order", "sample", "init"])).flatmap(
    lambda head: st.lists(st.integers(-3, 1000), max_size=3).map(lambda tail: (*head, *tail))
)


def draws():
    """Returns numbers drawn from each of the global generators."""
    return random.random(), np.random.rand(2).tolist(), torch.rand(2).tolist()


def test_the_seed_of_a_stream_is_a_hash_of_its_address():
    expected = int.from_bytes(hashlib.blake2b(b"7/order/3/-1", digest_size=16).digest(), "little")
    assert rng.stream_seed(7, "order", 3, -1) == expected
    assert expected == 0x2E55D99D64A464715AA51E70FC0476C9  # must not change, because old runs must stay repeatable


@given(ADDRESSES, ADDRESSES)
def test_streams_are_equal_exactly_if_their_addresses_are(one, other):
    first, second = (rng.generator(*address).integers(2**62) for address in (one, other))
    assert (first == second) == (one == other)


@pytest.mark.parametrize(
    "other",
    [(8, "order", 1, 2), (7, "split", 1, 2), (7, "order", 2, 1), (7, "order", 1), (7, "order", 12), (71, "order", 2)],
)
def test_changing_any_part_of_the_address_gives_another_stream(other):
    assert rng.generator(*other).integers(2**62) != rng.generator(7, "order", 1, 2).integers(2**62)


def test_numpy_integers_address_the_same_stream():
    assert rng.stream_seed(np.int64(7), "order", np.int32(3)) == rng.stream_seed(7, "order", 3)


def test_a_stream_does_not_depend_on_what_was_drawn_before():
    alone = rng.generator(0, "order", 1).random(4)
    other = rng.generator(0, "order", 2)
    other.random(100)
    np.random.rand(3)
    assert np.array_equal(rng.generator(0, "order", 1).random(4), alone)


def test_a_scope_seeds_all_global_generators_from_its_address():
    with rng.seeded(3, "init", 0):
        first = draws()
    draws()
    with rng.seeded(3, "init", 0):
        again = draws()
    with rng.seeded(3, "init", 1):
        other = draws()
    assert first == again
    assert all(one != two for one, two in zip(first, other, strict=True))


@pytest.mark.parametrize("fails", [False, True])
def test_a_scope_restores_the_global_generators(fails):
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    expected = draws()
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    try:
        with rng.seeded(0, "local", 1, 2):
            draws()
            if fails:
                raise KeyError
    except KeyError:
        assert fails
    assert draws() == expected


def test_a_scope_inside_a_scope_does_not_disturb_it():
    with rng.seeded(0, "outer"):
        expected = [draws(), draws()]
    with rng.seeded(0, "outer"):
        first = draws()
        with rng.seeded(0, "inner"):
            draws()
        assert [first, draws()] == expected


def test_a_scope_takes_any_seed():
    with rng.seeded(2**63 + 1, "local", -5):
        assert draws()
