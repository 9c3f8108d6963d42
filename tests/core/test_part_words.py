"""Tests the texts that distinguish two parts of the user's own."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pytest
import torch
from torch import Tensor

from lcfl.core.part_words import beyond_repr, settings_beyond_fields


@dataclass(frozen=True)
class Scale:
    factor: float | Tensor | np.ndarray = 1.0

    @cached_property
    def square(self):
        return torch.as_tensor(self.factor) ** 2


class Shifted(Scale):
    def __init__(self, shift, factor=1.0):
        super().__init__(factor)
        self.shift, self._scratch, self.log = shift, object(), print
        self.vector = torch.zeros(2)


def long_vector(middle, kind):
    values = kind(2000)
    values[1000] = middle
    return values


def test_a_dataclass_with_plain_fields_has_no_more_than_its_repr():
    part = Scale(2.0)
    assert part.square == 4.0
    assert beyond_repr(part) == "" and settings_beyond_fields(part) == {}


@pytest.mark.parametrize(
    "make", [lambda value: long_vector(value, torch.zeros), lambda value: long_vector(value, np.zeros)]
)
def test_tensors_are_told_apart_by_every_number(make):
    assert repr(Scale(make(0.0))) == repr(Scale(make(5.0)))
    assert beyond_repr(Scale(make(0.0))) != beyond_repr(Scale(make(5.0)))
    assert beyond_repr(Scale(make(5.0))) == beyond_repr(Scale(make(5.0)))


def test_a_plain_subclass_has_the_arguments_that_it_keeps():
    part = Shifted(3)
    assert part.square == 1.0
    assert settings_beyond_fields(part) == {"shift": 3}
    assert beyond_repr(part) == " shift=3"


def test_tensors_of_every_kind_have_a_text():
    kinds = [torch.bfloat16, torch.float32, torch.complex64, torch.bool]
    made = [Scale(torch.ones((), dtype=kind)) for kind in kinds] + [Scale(torch.ones(1, requires_grad=True))]
    made += [Scale(np.array(["a", None], dtype=object)), Scale(np.array(["b", None], dtype=object))]
    assert len({beyond_repr(part) for part in made}) == len(made)


class Remembering(Scale):
    remembers = ("best",)

    def __init__(self, best, depth):
        super().__init__()
        self._best, self._depth = best, depth


def test_what_is_remembered_is_no_setting():
    assert settings_beyond_fields(Remembering(0.0, 3)) == {"_depth": 3}
