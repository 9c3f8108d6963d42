"""Tests of the bytes of a tensor: all of them, in the order of the entries, whatever the strides."""

import numpy as np
import pytest
import torch

from lcfl.core.raw_bytes import raw_bytes

TENSORS = {
    "transposed": torch.arange(6.0).view(2, 3).T,
    "one entry, repeated": torch.tensor(1.5, dtype=torch.float64).expand(1),
    "a scalar": torch.tensor(7),
    "empty": torch.zeros(0, 3),
    "every second": torch.arange(6, dtype=torch.int16)[1::2],
    "conjugated": torch.tensor([1 + 2j, 3j]).conj(),
    "negated": torch.tensor([1 + 2j, 3j]).conj().imag,
    "with a gradient": torch.ones(2, requires_grad=True),
}


@pytest.mark.parametrize("kind", TENSORS)
def test_the_bytes_are_those_of_numpy(kind):
    tensor = TENSORS[kind]
    assert bytes(raw_bytes(tensor).numpy()) == np.ascontiguousarray(tensor.numpy(force=True)).tobytes()


def test_types_without_a_counterpart_in_numpy_have_bytes_too():
    one = torch.tensor(1.0, dtype=torch.bfloat16).expand(1, 1)
    assert raw_bytes(one).view(torch.int16).tolist() == [0x3F80]
