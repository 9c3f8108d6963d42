"""Words that several messages share."""

from collections.abc import Iterable

__all__ = ["few"]


def few(numbers: Iterable[object], most: int = 5) -> str:
    """The first of some numbers, ``3, 7, ...``, so that a message stays short."""
    words = [str(number) for number in numbers]
    return ", ".join([*words[:most], *["..."] * (len(words) > most)])
