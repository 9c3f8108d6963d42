"""Tests the texts that distinguish two parts of the user's own."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pytest
import torch
from torch import Tensor

from lcfl.core.part_words import attributes_beyond_fields, beyond_repr


@dataclass(frozen=True)
class Scale:
    factor: float | Tensor | np.ndarray = 1.0

    @cached_property
    def square(self):
        return self.factor**2


class Shifted(Scale):
    def __init__(self, shift, factor=1.0):
        super().__init__(factor)
        self.shift, self._scratch = shift, object()


def long_vector(middle, kind):
    values = kind(2000)
    values[1000] = middle
    return values


def test_a_dataclass_with_plain_fields_has_no_more_than_its_repr():
    part = Scale(2.0)
    assert part.square == 4.0
    assert beyond_repr(part) == "" and attributes_beyond_fields(part) == {}


@pytest.mark.parametrize(
    "make", [lambda value: long_vector(value, torch.zeros), lambda value: long_vector(value, np.zeros)]
)
def test_tensors_are_told_apart_by_every_number(make):
    assert repr(Scale(make(0.0))) == repr(Scale(make(5.0)))
    assert beyond_repr(Scale(make(0.0))) != beyond_repr(Scale(make(5.0)))
    assert beyond_repr(Scale(make(5.0))) == beyond_repr(Scale(make(5.0)))


def test_a_plain_subclass_has_its_public_attributes():
    part = Shifted(3)
    assert part.square == 1.0
    assert attributes_beyond_fields(part) == {"shift": 3}
    assert beyond_repr(part) == " shift=3"
