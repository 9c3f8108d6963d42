"""Values that are refused because an annotation does not list them, and the error messages."""

import inspect
import re
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pytest

from lcfl.core.validation import (
    CheckedFields,
    abbreviated,
    check_choice,
    check_instance,
    check_values,
    shortened,
)

Colour = Literal["red", "green", "blue"]


@dataclass
class Part(CheckedFields):
    colour: Colour = "red"
    second: Colour | None = None
    names: tuple[Colour, ...] = ()
    number: int | None = 3


@pytest.mark.parametrize("given", [{}, {"second": "blue"}, {"names": ("black",)}, {"number": None}])
def test_values_that_an_annotation_allows_are_accepted(given):
    Part(**given)


@dataclass(frozen=True)
class Base(CheckedFields):
    number: float = 1.0


@dataclass(frozen=True)
class Derived(Base):
    count: int | None = None
    names: list[str] = field(default_factory=list)
    sloppy: int = None
    anything: Any = 0

    def __post_init__(self):
        assert self.number >= 0  # fails for None and NaN if nothing was checked before


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"number": None}, "Derived: got number=null; it must be a number."),
        ({"number": float("nan")}, "Derived: got number=nan; it must be a number."),
        ({"names": None}, "Derived: got names=null; it must be a list."),
        ({"number": "2"}, "Derived: got number='2'; it must be a number."),
    ],
)
def test_null_nan_and_text_are_refused_before_anything_else(given, says):
    with pytest.raises(ValueError) as caught:
        Derived(**given)
    assert str(caught.value) == says


def test_null_is_accepted_where_the_annotation_or_the_default_allows_it():
    Derived(number=float("inf"), count=None, sloppy=None, anything=None)
    with pytest.raises(ValueError, match=r"Base: got number=null"):  # without a __post_init__ of its own
        Base(None)


class WithInit(CheckedFields):
    """A part with an ``__init__`` of its own."""

    def __init__(self, number: int, colour: Colour | None = None, *more: float, share: float = 0.5, **options: Any):
        self.number = number + 1  # fails for None if nothing was checked before


@pytest.mark.parametrize(
    ("args", "options", "says"),
    [
        ((None,), {}, "WithInit: got number=null; it must be a whole number."),
        ((2.5,), {}, "WithInit: got number=2.5; it must be a whole number."),
        ((1, "black"), {}, "WithInit: got colour='black'; allowed are red, green, blue and null."),
        ((1,), {"share": float("nan")}, "WithInit: got share=nan; it must be a number."),
    ],
)
def test_arguments_of_an_init_are_checked_like_fields(args, options, says):
    with pytest.raises(ValueError) as caught:
        WithInit(*args, **options)
    assert str(caught.value) == says


class WithTexts(CheckedFields):
    """Has annotations as ``from __future__ import annotations`` leaves them, one of them of a later class."""

    def __init__(self, number: "int", part: "Later | None" = None, *, unknown: "Nowhere" = 0):  # noqa: F821
        pass


class WithLater(CheckedFields):
    """The same without a name that nothing has."""

    def __init__(self, number: "int", share: "float" = 0.5, part: "Later | None" = None):
        pass


class Later:
    """Defined after its name is used."""


def test_annotations_that_are_texts_are_looked_up():
    WithTexts(None, unknown=None)  # one cannot be looked up, so none is checked
    WithLater(1, 2.5, Later())
    for options in ({"number": None}, {"number": 1, "share": float("nan")}):
        with pytest.raises(ValueError, match=r"^WithLater: got (number|share)="):
            WithLater(**options)


def test_words_beside_another_kind_are_not_looked_at():
    class Mixed(CheckedFields):
        def __init__(self, share: float | Literal["auto"] = "auto", only: Literal["only"] = "only") -> None:
            self.share = share

    assert Mixed(0.7).share == 0.7
    with pytest.raises(ValueError, match=r"Mixed: got only='x'; only only is allowed\."):
        Mixed(only="x")


def test_an_init_gets_what_it_was_given():
    assert WithInit(1, None, 2.0, float("nan"), share=1, other=None).number == 2
    assert list(inspect.signature(WithInit).parameters) == ["number", "colour", "more", "share", "options"]
    for args, options in (((), {}), ((1,), {"number": 2})):
        with pytest.raises(TypeError, match="number"):
            WithInit(*args, **options)


def test_annotations_that_are_texts_are_checked_as_well():
    class Postponed(CheckedFields):
        beta: "float" = 1.0
        colour: "Literal['red', 'green']" = "red"

    postponed = dataclass(Postponed)
    with pytest.raises(ValueError, match=r"^Postponed: got beta=null; it must be a number\.$"):
        postponed(None)
    with pytest.raises(ValueError, match=r"^Postponed: got colour='black'; allowed are red and green\.$"):
        postponed(colour="black")


def test_an_annotation_that_only_a_type_checker_knows_allows_anything():
    class Postponed(CheckedFields):
        tensor: "Unknown" = 1.0  # noqa: F821
        beta: "float" = 1.0

    postponed = dataclass(Postponed)
    assert postponed("anything").tensor == "anything"
    with pytest.raises(ValueError, match="got beta=null"):
        postponed(beta=None)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"colour": "black"}, "Part: got colour='black'; allowed are red, green and blue."),
        ({"colour": None}, "Part: got colour=null; it must be red or green or blue."),
        ({"second": "black"}, "Part: got second='black'; allowed are red, green, blue and null."),
    ],
)
def test_a_value_that_the_annotation_does_not_list_is_refused(given, message):
    with pytest.raises(ValueError) as caught:
        Part(**given)
    assert str(caught.value) == message


def test_a_reason_ends_the_message():
    with pytest.raises(ValueError, match=r"^one: got 3; allowed are 1 and 2\. Because\.$"):
        check_choice("one: got ", 3, (1, 2), " Because.")


@pytest.mark.parametrize(
    ("given", "got"), [("red", "str"), (Part, "the class Part, not an instance of it"), (None, "NoneType")]
)
def test_an_object_of_another_class_is_refused(given, got):
    check_instance("x.part", Part(), Part)
    with pytest.raises(TypeError) as caught:
        check_instance("x.part", given, Part, " Make one.")
    assert str(caught.value) == f"x.part: got {got}; it must be an instance of Part. Make one."


@pytest.mark.parametrize(
    ("annotation", "value", "must_be"),
    [
        (int, 2.5, "a whole number"),
        (int, 2.0, "a whole number"),
        (int | None, True, "a whole number"),
        (int | float, True, "a number"),
        (float, "1", "a number"),
    ],
)
def test_what_is_no_number_or_no_whole_one_is_refused(annotation, value, must_be):
    with pytest.raises(ValueError, match=rf"^Part: got x={re.escape(repr(value))}; it must be {must_be}\.$"):
        check_values("Part", {"x": (annotation, value)})
    check_values("Part", {"x": (annotation, np.int64(2)), "y": (int | bool, True), "z": (float, 2)})


def test_a_long_list_of_numbers_is_abbreviated():
    assert (abbreviated([]), abbreviated([1, 2]), abbreviated(range(9), 3)) == ("", "1, 2", "0, 1, 2, ...")


def test_a_long_text_keeps_its_beginning_and_its_end():
    assert shortened("a\nb" * 7) == "a\nb" * 7
    assert shortened("begin " + "é" * 1000 + " end", 100).startswith("begin éé")
    assert len(shortened("begin " + "é" * 1000 + " end", 100).encode()) <= 100
    assert shortened("begin " + "é" * 1000 + " end", 100).endswith("éé end")
    assert shortened("\n".join(map(str, range(100)))).split() == [*map(str, range(10)), "...", "96", "97", "98", "99"]
