"""Values that are refused because an annotation does not list them, and the error messages."""

from dataclasses import dataclass
from typing import Literal

import pytest

from lcfl.core.validation import abbreviated, check_choice, check_choices, check_instance

Colour = Literal["red", "green", "blue"]


@dataclass
class Part:
    colour: Colour = "red"
    second: Colour | None = None
    names: tuple[Colour, ...] = ()
    number: int | None = 3


@pytest.mark.parametrize("given", [{}, {"second": "blue"}, {"names": ("black",)}, {"number": None}, {"number": "many"}])
def test_fields_without_a_literal_annotation_are_not_checked(given):
    check_choices("Part", Part(**given))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"colour": "black"}, "Part: got colour='black'; allowed are red, green and blue."),
        ({"colour": None}, "Part: got colour=None; allowed are red, green and blue."),
        ({"second": "black"}, "Part: got second='black'; allowed are red, green, blue and null."),
    ],
)
def test_a_value_that_the_annotation_does_not_list_is_refused(given, message):
    with pytest.raises(ValueError) as caught:
        check_choices("Part", Part(**given))
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


def test_a_long_list_of_numbers_is_abbreviated():
    assert (abbreviated([]), abbreviated([1, 2]), abbreviated(range(9), 3)) == ("", "1, 2", "0, 1, 2, ...")
