"""The memory of this machine, as a bound for what a configuration may ask for."""

import os

__all__ = ["check_memory"]


def check_memory(what: str, num_bytes: int, cure: str) -> None:
    """Checks that something fits into the memory of this machine, before any of it is allocated.

    Args:
        what: the beginning of the message: the option, and what needs the memory.
        num_bytes: how much memory it needs at least.
        cure: what to change.

    Raises:
        ValueError: if it needs more than the machine has.
    """
    available = _memory()
    if available is not None and num_bytes > available:
        needed, has = (f"{size / 2**30:,.0f} GiB" for size in (num_bytes, available))
        raise ValueError(f"{what} at least {needed} of memory, but this machine has {has}. {cure}")


def _memory() -> int | None:
    """Returns the bytes of memory of this machine, None where the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf
        return None
