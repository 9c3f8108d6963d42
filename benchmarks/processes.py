"""Memory and computing time of a process and all that it started, whoever else runs on the machine."""

import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

__all__ = ["cpu_seconds", "memory_mb", "tree"]

MAPPING = re.compile(r"^[0-9a-f]+-[0-9a-f]+ \S+ (?P<offset>\S+) \S+ \S+ *(?P<path>.*)$")
SHARED = ("/dev/shm", "/memfd:", "/dev/zero", "/SYSV")  # shared memory has paths, too


def tree(root: int) -> list[int]:
    """The process `root` and its descendants that live."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        if fields := _stat(int(entry.name)):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found = [root]
    for process in found:
        found += children.get(process, [])
    return found


def cpu_seconds(root: int) -> float:
    """Seconds of all cores that the living processes of the tree have used; waiting in a loop counts as use."""
    used = sum(int(ticks) for process in tree(root) for ticks in _stat(process)[11:13])
    return used / os.sysconf("SC_CLK_TCK")


def memory_mb(root: int) -> float:
    """Megabytes (2^20 bytes) of the tree: every page once, however many of its processes have it.

    Anonymous and shared memory is summed in proportion (Pss): whoever else has such a page is in the tree. A page of a
    file, which other programs may have mapped, too, counts as in the process of the tree that has most of that mapping.
    """
    anonymous, of_files = 0, Counter[tuple[str, str]]()
    for process in tree(root):
        try:
            rollup = dict(_kilobytes((Path("/proc") / str(process) / "smaps_rollup").read_text()))
            anonymous += rollup["Pss_Anon"] + rollup["Pss_Shmem"]
            for mapping, kilobytes in _file_pages((Path("/proc") / str(process) / "smaps").read_text()):
                of_files[mapping] = max(of_files[mapping], kilobytes)
        except (OSError, KeyError):  # it has ended
            continue
    return (anonymous + of_files.total()) / 1024


def _stat(process: int) -> list[str]:
    """The fields of its ``stat`` behind the name; none if it has ended."""
    try:
        return (Path("/proc") / str(process) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _file_pages(smaps: str) -> Iterator[tuple[tuple[str, str], int]]:
    """Each mapping of a file with the kilobytes of it that are in memory and not this process's own copies."""
    mapping, found = ("", ""), 0
    for line in smaps.splitlines():
        if match := MAPPING.match(line):
            mapping = (match["path"], match["offset"])
        elif mapping[0].startswith("/") and not mapping[0].startswith(SHARED):
            if line.startswith("Rss:"):
                found = int(line.split()[1])
            elif line.startswith("Anonymous:"):
                yield mapping, found - int(line.split()[1])


def _kilobytes(rollup: str) -> Iterator[tuple[str, int]]:
    for line in rollup.splitlines()[1:]:
        name, value, _ = line.split()
        yield name.rstrip(":"), int(value)
