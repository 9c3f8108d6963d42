"""Patterns that name parameters, buffers and layers of a network."""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

__all__ = ["covers", "layer_of", "layers_of", "matching"]


def covers(pattern: str, name: str) -> bool:
    """Returns whether a pattern covers a parameter or buffer.

    It does if it is the name, or the name of a layer that holds it: ``layer4`` covers ``layer4.0.bn1.weight``. As in
    a shell, ``*`` stands for any characters, ``?`` for one, and ``[ab]`` for one of these: ``layer4.*.bn*``, ``*bn*``.
    """
    if name == pattern or name.startswith(f"{pattern}."):
        return True
    if not any(sign in pattern for sign in "*?["):
        return False
    ends = [position for position, sign in enumerate(name) if sign == "."]
    return any(fnmatchcase(name[:end], pattern) for end in (*ends, len(name)))


def matching(patterns: Sequence[str], names: Iterable[str], option: str, owner: str) -> set[str]:
    """Returns the names that a pattern covers.

    Args:
        patterns: the patterns.
        names: names of parameters and buffers.
        option: the option that the patterns come from, for errors; empty if the caller adds it.
        owner: what has these names, for errors.

    Raises:
        ValueError: for a text instead of a list, or for patterns that cover no name.
    """
    where = f"{option}: " if option else ""
    if isinstance(patterns, str):
        raise ValueError(f"{where}got the text {patterns!r}; it must be a list of patterns, e.g. ['{patterns}'].")
    names = list(names)
    if missing := [each for each in patterns if not any(covers(each, name) for name in names)]:
        raise ValueError(
            f"{where}{owner} has no layer or parameter {', '.join(map(repr, missing))}; its layers are "
            f"{', '.join(layers_of(names))}. Give such names, or patterns such as '*norm*'."
        )
    return {name for name in names if any(covers(each, name) for each in patterns)}


def layer_of(name: str) -> str:
    """Returns the layer that holds a parameter or buffer; one of the network itself counts as a layer of its name."""
    return name.rpartition(".")[0] or name


def layers_of(names: Iterable[str]) -> list[str]:
    """Returns the layers that hold these parameters or buffers directly, each of them once and in the same order."""
    return list(dict.fromkeys(map(layer_of, names)))
