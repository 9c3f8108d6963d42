"""Sizes of messages, computed by hand, and the values that count as finite."""

import dataclasses

import pytest
import torch

from lcfl.core.messages import Downlink, Uplink, all_finite


def test_the_size_of_a_message_is_that_of_its_tensors():
    payload = {
        "model": torch.zeros(10),  # 40
        "centre": torch.zeros(2, 3, dtype=torch.float64),  # 48
        "code": torch.zeros(5, dtype=torch.bfloat16),  # 10
        "flags": torch.zeros(7, dtype=torch.bool),  # 7
        "scalar": torch.tensor(1, dtype=torch.int64),  # 8
        "nothing": torch.zeros(0, 4),
    }
    assert Downlink(payload).num_bytes == 113
    assert Uplink(3, payload, 1000).num_bytes == 113
    assert Downlink({}).num_bytes == 0


def test_a_view_counts_only_the_entries_that_it_shows():
    matrix = torch.zeros(100, 100)
    assert Downlink({"model": matrix[3]}).num_bytes == 400
    assert Downlink({"model": matrix[0, :1].expand(50)}).num_bytes == 200


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_tensor_with_one_bad_number_is_not_finite(bad):
    matrix = torch.zeros(2, 2)
    assert all_finite(matrix)
    matrix[1, 1] = bad
    assert not all_finite(matrix)


def test_integers_empty_tensors_and_overflowing_sums_are_finite():
    for tensor in (torch.tensor([2**62]), torch.tensor([True]), torch.zeros(0), torch.full((2,), 3e38)):
        assert all_finite(tensor)


@pytest.mark.parametrize(("number", "expected"), [(1 - 2j, True), (complex(1, float("nan")), False)])
def test_both_parts_of_a_complex_number_count(number, expected):
    assert all_finite(torch.tensor([number])) == expected


def test_messages_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Uplink(0, {}, 1).client = 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        Downlink({}).payload = {}


def test_a_downlink_holds_tensors():
    with pytest.raises(ValueError, match=r"^Downlink: got int as 'n'; a payload maps names to tensors"):
        Downlink({"model": torch.zeros(1), "n": 3})
