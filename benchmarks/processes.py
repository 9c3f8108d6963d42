"""Measures memory and processor time of a process and its descendants, independently of other processes."""

import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

__all__ = ["cpu_seconds", "memory_mb", "tree"]

MAPPING = re.compile(r"^[0-9a-f]+-[0-9a-f]+ \S+ (?P<offset>\S+) \S+ \S+ *(?P<path>.*)$")
SHARED = ("/dev/shm", "/memfd:", "/dev/zero", "/SYSV")  # shared memory has paths, too


def tree(root: int) -> list[int]:
    """Returns the process `root` and its living descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        if fields := _stat(int(entry.name)):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    processes = [root]
    for process in processes:
        processes += children.get(process, [])
    return processes


def cpu_seconds(root: int) -> float:
    """Returns the seconds of all cores that the living processes of the tree have used. Busy waiting counts, too."""
    used = sum(int(ticks) for process in tree(root) for ticks in _stat(process)[11:13])
    return used / os.sysconf("SC_CLK_TCK")


def memory_mb(root: int) -> float:
    """Returns the memory of the tree in megabytes (2^20 bytes). Each page counts once, even if processes share it.

    Anonymous and shared memory is summed in proportion (Pss), because all processes that share such a page are in the
    tree. Other programs may have mapped the same file. Of each mapping of a file, the pages of the process in the tree
    with the most pages are therefore counted.
    """
    anonymous, of_files = 0, Counter[tuple[str, str]]()
    for process in tree(root):
        try:
            rollup = dict(_kilobytes((Path("/proc") / str(process) / "smaps_rollup").read_text()))
            anonymous += rollup["Pss_Anon"] + rollup["Pss_Shmem"]
            for mapping, kilobytes in _file_pages((Path("/proc") / str(process) / "smaps").read_text()):
                of_files[mapping] = max(of_files[mapping], kilobytes)
        except (OSError, KeyError):  # the process has ended
            continue
    return (anonymous + of_files.total()) / 1024


def _stat(process: int) -> list[str]:
    """Returns the fields of ``stat`` after the name of a process; none if it has ended."""
    try:
        return (Path("/proc") / str(process) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _file_pages(smaps: str) -> Iterator[tuple[tuple[str, str], int]]:
    """Yields each mapping of a file with its kilobytes in memory, without private copies of the process."""
    mapping, resident = ("", ""), 0
    for line in smaps.splitlines():
        if match := MAPPING.match(line):
            mapping = (match["path"], match["offset"])
        elif mapping[0].startswith("/") and not mapping[0].startswith(SHARED):
            if line.startswith("Rss:"):
                resident = int(line.split()[1])
            elif line.startswith("Anonymous:"):
                yield mapping, resident - int(line.split()[1])


def _kilobytes(rollup: str) -> Iterator[tuple[str, int]]:
    for line in rollup.splitlines()[1:]:
        name, value, _ = line.split()
        yield name.rstrip(":"), int(value)
