"""Checks whose error messages several modules share."""

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from inspect import Parameter, Signature, get_annotations, signature
from math import isnan
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

__all__ = [
    "CheckedFields",
    "abbreviated",
    "check_choice",
    "check_instance",
    "check_values",
    "errors_of",
    "shortened",
    "signature_of",
]

FIRST_LINES, LAST_LINES = 10, 4


def abbreviated(numbers: Iterable[object], most: int = 5) -> str:
    """Returns the first of some numbers as ``3, 7, ...``, so that a message stays short."""
    words = [str(number) for number in numbers]
    return ", ".join([*words[:most], *["..."] * (len(words) > most)])


def shortened(text: str, most: int = 1000) -> str:
    """Returns a text that fits a screen: of more than `most` bytes or 15 lines, only the beginning and the end."""
    lines = text.splitlines()
    if len(lines) > FIRST_LINES + LAST_LINES + 1:
        text = "\n".join([*lines[:FIRST_LINES], "...", *lines[-LAST_LINES:]])
    content = text.encode(errors="replace")
    if len(content) <= most:
        return text
    half = most // 2 - 3
    return f"{content[:half].decode(errors='ignore')} ... {content[-half:].decode(errors='ignore')}"


# What a value of a type is called in messages.
WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", list: "a list"}
WORDS |= {Sequence: "a list", tuple: "a list", dict: "a mapping"}
OBJECT = "a class"
UNCHECKED = (Any, object, NoneType, Parameter.empty)  # annotations that allow null


class CheckedFields:
    """Base of the parts of a configuration, whose fields or arguments are checked first of all.

    The parser accepts null for every option, and NaN for every number, and from Python anything can be given. Without
    this check it would fail later, in the middle of a comparison.

    Raises:
        ValueError: see `check_values`.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__init__" in vars(cls):  # a dataclass gets its own later
            cls.__init__ = _checked_arguments(cls.__init__)  # type: ignore[method-assign]
        own = vars(cls).get("__post_init__")
        if own is not None:

            @functools.wraps(own)
            def checked(self: Any, *args: Any) -> None:
                CheckedFields.__post_init__(self)
                own(self, *args)

            cls.__post_init__ = checked  # type: ignore[method-assign]

    def __post_init__(self) -> None:
        if is_dataclass(self):
            annotations = _annotations(self.__class__)
            given = [field for field in fields(self) if field.init and getattr(self, field.name) is not field.default]
            values = {field.name: (annotations[field.name], getattr(self, field.name)) for field in given}
            check_values(type(self).__name__, values)


def signature_of(function: Callable[..., Any]) -> Signature:
    """Returns a signature, with annotations that are texts looked up if they can be."""
    try:
        return signature(function, eval_str=True)
    except Exception:  # of any kind, because an annotation may be any text
        return signature(function)


def _checked_arguments(init: Callable[..., None]) -> Callable[..., None]:
    """Returns an ``__init__`` that checks its arguments."""

    @functools.cache
    def its_signature() -> Signature:  # in the first call, because annotations may name what is defined later
        return signature_of(init)

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **options: Any) -> None:
        known = its_signature()
        try:
            given = known.bind(self, *args, **options).arguments
        except TypeError:  # of an argument that is missing or unknown, which the call below names
            given = {}
        owner = type(self).__name__
        for name, value in given.items():
            parameter = known.parameters[name]
            is_one = parameter.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
            if is_one and value is not parameter.default:
                check_values(owner, {name: (parameter.annotation, value)})
        init(self, *args, **options)

    return checked


def check_values(owner: str, values: Mapping[str, tuple[Any, Any]]) -> None:
    """Checks values by their annotations: null only where it is allowed, numbers, whole numbers, and the words listed.

    A value of another kind is not looked at.

    Args:
        owner: the beginning of the message: the class or the option.
        values: annotation and value of each argument, by name.

    Raises:
        ValueError: if not; names the argument and what it must be.
    """
    for name, (annotation, value) in values.items():
        kinds = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
        words = [_word(kind) for kind in kinds]
        is_nan = isinstance(value, float) and isnan(value) and (int in kinds or float in kinds)
        is_no_number = isinstance(value, str | bool) and all(kind in (int, float, NoneType) for kind in kinds)
        is_fraction = isinstance(value, float) and all(kind in (int, NoneType) for kind in kinds)
        if (value is None and all(words)) or is_nan or is_no_number or is_fraction:
            got = "null" if value is None else repr(value)
            allowed = [word for word in words if word and not (word == WORDS[int] and float in kinds)]
            allowed = [word for word in allowed if word != OBJECT] or [OBJECT]  # a tensor, a path: not in a file
            raise ValueError(f"{owner}: got {name}={got}; it must be {' or '.join(allowed)}.")
        if choices := _choices(annotation):
            check_choice(f"{owner}: got {name}=", value, choices)


@contextmanager
def errors_of(option: str) -> Iterator[None]:
    """Prefixes a ``ValueError`` raised inside with the option that it concerns, unless it has this prefix already."""
    try:
        yield
    except ValueError as error:
        if str(error).startswith(f"{option}: "):
            raise
        raise ValueError(f"{option}: {error}") from error


def check_choice(got: str, value: object, allowed: Iterable[object], more: str = "") -> None:
    """Raises a ValueError if a value is not allowed; its message is ``<got><value>; allowed are ...<more>``."""
    allowed = list(allowed)
    if value not in allowed:
        *words, last = ["null" if choice is None else str(choice) for choice in allowed]
        these = f"allowed are {', '.join(words)} and {last}" if words else f"only {last} is allowed"
        raise ValueError(f"{got}{value!r}; {these}.{more}")


def check_instance(name: str, value: object, kind: type, more: str = "") -> None:
    """Checks that an argument is an instance of a class.

    This is for arguments passed in Python. The parser of the command line has its own check.

    Args:
        name: the name of the argument.
        value: the value that was given for it.
        kind: the class that is needed.
        more: further text of the message, which begins with a space.

    Raises:
        TypeError: if it is not; names the argument, what it got and what is needed.
    """
    if not isinstance(value, kind):
        got = f"the class {value.__name__}, not an instance of it" if isinstance(value, type) else type(value).__name__
        raise TypeError(f"{name}: got {got}; it must be an instance of {kind.__name__}.{more}")


@functools.cache
def _annotations(kind: type) -> Mapping[str, Any]:
    """Returns the annotation of each field of a dataclass.

    With ``from __future__ import annotations`` they are texts, which are looked up where their class is defined. One
    that cannot be looked up, such as a name that exists only for a type checker, allows anything.
    """
    found: dict[str, Any] = {}
    for field in fields(kind):
        home = next(each for each in kind.__mro__ if field.name in get_annotations(each))
        found[field.name] = field.type
        if isinstance(field.type, str):
            try:
                found[field.name] = eval(field.type, vars(sys.modules[home.__module__]), dict(vars(home)))
            except Exception:  # of any kind, because an annotation may be any text
                found[field.name] = Any
    return found


def _word(kind: Any) -> str | None:
    """Returns what a value of a type is called in messages; None for a type that allows null."""
    if get_origin(kind) is Literal:
        return None if None in get_args(kind) else " or ".join(map(str, get_args(kind)))
    kind = get_origin(kind) or kind
    if not isinstance(kind, type) or kind in UNCHECKED:
        return None
    return WORDS.get(kind, OBJECT)


def _choices(annotation: Any) -> list[object]:
    """Returns the values of a ``Literal``, with None if it is optional, or an empty list for any other annotation."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    kinds = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else ()
    if not all(kind is NoneType or get_origin(kind) is Literal for kind in kinds):
        return []  # another kind is allowed, too
    choices = [choice for kind in kinds for choice in _choices(kind)]
    return [*choices, None] if NoneType in kinds else choices
