"""Bytes worked by hand, and what counts as finite."""

import dataclasses

import pytest
import torch

from lcfl.messages import Downlink, Uplink


def test_bytes_are_those_of_the_tensors():
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


def test_a_view_counts_what_it_shows():
    matrix = torch.zeros(100, 100)
    assert Downlink({"model": matrix[3]}).num_bytes == 400
    assert Downlink({"model": matrix[0, :1].expand(50)}).num_bytes == 200


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["model", "code"])
def test_one_bad_number_anywhere_is_not_finite(bad, name):
    payload = {"model": torch.zeros(4), "code": torch.zeros(2, 2)}
    assert Uplink(0, payload, 1).is_finite
    payload[name].view(-1)[-1] = bad
    assert not Uplink(0, payload, 1).is_finite


def test_integers_and_empty_payloads_are_finite():
    assert Uplink(0, {"cluster": torch.tensor([2**62]), "mask": torch.tensor([True])}, 1).is_finite
    assert Uplink(0, {}, 1).is_finite


def test_messages_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Uplink(0, {}, 1).client = 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        Downlink({}).payload = {}
