"""Clients that have names."""

from collections.abc import Sequence
from difflib import get_close_matches

from lcfl.core.validation import abbreviated

__all__ = ["client_number"]


def client_number(client: str | int, names: Sequence[str] | None, num_clients: int) -> int:
    """Returns the number of the client with this name or number.

    Raises:
        ValueError: if there is no such client.
    """
    client = str(client)
    if names is not None and client in names:
        return names.index(client)
    if client.isdecimal() and int(client) < num_clients:
        return int(client)
    known = "" if names is None else f" and the names {abbreviated(names)}"
    close = get_close_matches(client, names or (), n=1)
    hint = f" Did you mean {close[0]}?" if close else ""
    raise ValueError(f"there is no client {client!r}; there are the numbers 0 to {num_clients - 1}{known}.{hint}")
