"""Words that several messages share."""

from collections.abc import Iterable
from dataclasses import fields
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

__all__ = ["check_choice", "check_choices", "check_instance", "abbreviated"]


def abbreviated(numbers: Iterable[object], most: int = 5) -> str:
    """The first of some numbers, ``3, 7, ...``, so that a message stays short."""
    words = [str(number) for number in numbers]
    return ", ".join([*words[:most], *["..."] * (len(words) > most)])


def check_choices(owner: str, part: Any) -> None:
    """Refuses a value of a dataclass's field that is none of those in the field's annotation, a ``Literal``.

    Args:
        owner: what a message begins with: the class, or the option that it is given for.
        part: the dataclass; its fields of other kinds are passed over.

    Raises:
        ValueError: names field, value and what is allowed.
    """
    for field in fields(part):
        if allowed := _choices(field.type):
            check_choice(f"{owner}: got {field.name}=", getattr(part, field.name), allowed)


def check_choice(got: str, value: object, allowed: Iterable[object], more: str = "") -> None:
    """Refuses a value that is none of the allowed ones; the message is ``<got><value>; allowed are ...<more>``."""
    allowed = list(allowed)
    if value not in allowed:
        *words, last = ["null" if each is None else str(each) for each in allowed]
        raise ValueError(f"{got}{value!r}; allowed are {', '.join(words)} and {last}.{more}")


def check_instance(name: str, value: object, kind: type, more: str = "") -> None:
    """Refuses an object of another class, as Python passes it on: the parser of the command line has its own check.

    Args:
        name: of the argument.
        value: what was given for it.
        kind: what is needed.
        more: further words of the message, after a blank.

    Raises:
        TypeError: names the argument, what it got and what is needed.
    """
    if not isinstance(value, kind):
        got = f"the class {value.__name__}, not one made of it" if isinstance(value, type) else type(value).__name__
        raise TypeError(f"{name}: got {got}; it must be of the class {kind.__name__}.{more}")


def _choices(annotation: Any) -> list[object]:
    """The values of a ``Literal``, and None of an optional one; none of any other annotation."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    if get_origin(annotation) not in (Union, UnionType):
        return []
    choices = [choice for each in get_args(annotation) for choice in _choices(each)]
    return [*choices, None] if choices and NoneType in get_args(annotation) else choices
