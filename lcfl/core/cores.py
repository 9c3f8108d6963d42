"""The processor's cores, and work that is spread over some of them."""

import math
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

__all__ = ["in_threads", "usable_cores"]

MOST_THREADS = 4  # more do not add up models any faster (docs/optimisations.md)


def usable_cores() -> int:
    """Returns the number of cores that this process may use: its affinity, limited by the container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = Path("/sys/fs/cgroup/cpu.max")
    if quota.is_file():
        limit, period = quota.read_text().split()
        if limit != "max":
            cores = min(cores, max(1, math.floor(int(limit) / int(period))))
    return cores


def in_threads(function: Callable[[Any], None], arguments: Iterable[Any]) -> None:
    """Calls a function of torch for all arguments, on several cores.

    It is for the server's work on large models, while the other ranks wait. The calls must write to different memory,
    so that their order does not change a result.

    Raises:
        Exception: the first exception of a call.
    """
    with ThreadPoolExecutor(min(MOST_THREADS, usable_cores())) as pool:
        for _ in pool.map(function, arguments):
            pass
