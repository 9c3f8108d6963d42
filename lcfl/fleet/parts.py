"""Local updates and exchanges of warm-up and extra rounds, as the plain values by which a message names them."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

from lcfl.fleet.parcel import MessageError

__all__ = ["described_part", "part_of"]

Part = TypeVar("Part")
PLAIN = (type(None), bool, int, float, str)


def described_part(part: object | None) -> dict[str, Any] | None:
    """Returns the class and the arguments of a part; None for None.

    Raises:
        MessageError: if the part is no dataclass of plain values, which a node could not build from a message.
    """
    if part is None:
        return None
    kind = type(part)
    if not is_dataclass(part):
        raise MessageError(f"{kind.__name__} cannot be named in a message: make it a dataclass.")
    arguments = {each.name: _plain(getattr(part, each.name)) for each in fields(part) if each.init}
    for name, value in arguments.items():
        if not isinstance(value, (*PLAIN, list)):
            raise MessageError(
                f"{kind.__name__} cannot be named in a message: {name} is a {type(value).__name__}; allowed are "
                "numbers, text, None and lists of these."
            )
    return {"class": f"{kind.__module__}.{kind.__qualname__}", "arguments": arguments}


def part_of(described: Any, base: type[Part]) -> Part | None:
    """Returns the part that `described_part` described; None for None.

    Nothing is imported for it: the class must be a known subclass of `base`, and it checks its arguments itself.

    Raises:
        MessageError: for an unknown class, or arguments that the class refuses.
    """
    if described is None:
        return None
    if not isinstance(described, Mapping) or set(described) != {"class", "arguments"}:
        raise MessageError("a part must be named by its class and arguments.")
    known = {f"{kind.__module__}.{kind.__qualname__}": kind for kind in _subclasses(base)}
    kind = known.get(described["class"]) if isinstance(described["class"], str) else None
    if kind is None:
        raise MessageError(f"{described['class']!r:.80} is no {base.__name__} that this node knows.")
    try:
        return kind(**described["arguments"])
    except (TypeError, ValueError) as error:
        raise MessageError(f"{kind.__name__} refuses its arguments: {error}") from None


def _plain(value: Any) -> Any:
    """Returns a value with lists in place of tuples, if all that they hold is plain."""
    if isinstance(value, list | tuple) and all(isinstance(each, PLAIN) for each in value):
        return list(value)
    return value


def _subclasses(base: type[Part]) -> Iterator[type[Part]]:
    for kind in base.__subclasses__():
        yield kind
        yield from _subclasses(kind)
