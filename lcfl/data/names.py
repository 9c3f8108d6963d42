"""Names in data: of clients, columns and classes."""

from collections.abc import Iterable
from unicodedata import normalize

__all__ = ["composed", "in_order", "spelling"]


def in_order(names: Iterable[str]) -> list[str]:
    """Returns names in sorted order: by number if all of them are whole numbers, such as 9 and 10."""
    names = list(names)
    by_number = all(name.isdecimal() for name in names)
    return sorted(names, key=lambda name: (int(name) if by_number else 0, name))


def composed(name: str) -> str:
    """Returns a name with its accents as part of their letters (NFC); some systems store them apart."""
    return normalize("NFC", name)


def spelling(name: str) -> str:
    """Returns what names share that differ only in case, in spaces, or in how accents are stored."""
    return " ".join(composed(name).split()).casefold()
