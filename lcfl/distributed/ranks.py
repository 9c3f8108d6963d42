"""The ranks of a host. Its first rank distributes tasks, and every rank carries out its share."""

import os
import platform
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist
from lightning.fabric import Fabric

from lcfl.distributed.connections import (
    Connection,
    NetworkConnection,
    SharedMemoryConnection,
    balance,
    can_share_memory,
    open_files,
    watch_links,
)
from lcfl.distributed.launch import LostRankError
from lcfl.distributed.stop_flag import StopFlag

__all__ = ["Farewell", "Ranks"]

Carry = Callable[[Sequence[Any]], Sequence[Any]]

PATIENCE = timedelta(days=7)  # a rank waits for the server as long as necessary; a dead server is noticed at once


class Ranks:
    """All ranks of one host behind one `map`, which the first of them calls. The others `serve` until it is done.

    A task is sent with everything that another rank needs for it, so its result does not depend on the rank that
    carries it out. The first rank of the first host, rank 0, is the server: it alone runs the round loop, clusters,
    aggregates and writes. It reaches the ranks of other hosts through their first ranks (`lcfl.distributed.hosts`).

    Args:
        fabric: a launched Fabric.
        run: carries out tasks on this rank and returns their results in the same order.
        flag: this process's stop flag; `stop_signal` combines the flags of all ranks.

    Attributes:
        hosts: the numbers of the ranks of each host.
        group: the group of all ranks, over which hosts are connected; None for a single rank.
        result: what `serve` returns on the other ranks; the first rank sets it before it leaves.
    """

    def __init__(self, fabric: Fabric, run: Carry, flag: StopFlag) -> None:
        self.hosts = [[0]]
        self.group: dist.ProcessGroup | None = None
        self.result: Any = None
        self._rank = fabric.global_rank
        self._run = run
        self._flag = flag
        self._signal = 0
        self._links: list[Connection] = []
        self._owed: list[Connection] = []  # links of ranks that have not returned their share of a `map` yet
        if fabric.world_size > 1:
            before = open_files()
            group = dist.new_group(backend="gloo", timeout=PATIENCE)
            assert isinstance(group, dist.ProcessGroup)
            self.hosts, self.group = _hosts(fabric.world_size, group), group
            watch_links(open_files() - before)
            (own,) = (ranks for ranks in self.hosts if self._rank in ranks)
            peers = own[1:] if self.is_first else own[:1]
            kind = SharedMemoryConnection if can_share_memory() else NetworkConnection
            self._links = [kind(peer, group) for peer in peers]

    @property
    def is_first(self) -> bool:
        """Whether this is the first rank of its host."""
        return any(self._rank == ranks[0] for ranks in self.hosts)

    def map(self, tasks: Sequence[Any], costs: Sequence[float]) -> list[Any]:
        """Carries out the tasks on all ranks and returns the results in the tasks' order.

        Args:
            tasks: anything that this class's `run` accepts; everything except tensors must be picklable.
            costs: the cost of each task, in any unit, to balance the ranks.
        """
        shares = balance(costs, len(self._links) + 1)
        for link, share in zip(self._links, shares[1:], strict=True):
            link.send([tasks[position] for position in share])
            self._owed.append(link)
        results: list[Any] = [None] * len(tasks)
        own = self._run([tasks[position] for position in shares[0]])
        for position, answer in zip(shares[0], own, strict=True):
            results[position] = answer
        for link, share in zip(self._links, shares[1:], strict=True):
            answers, signal = link.receive(copy=True)
            self._owed.remove(link)
            self._signal = self._signal or signal
            for position, answer in zip(share, answers, strict=True):
                results[position] = answer
        return results

    def serve(self) -> Any:
        """Carries out the first rank's tasks until that rank is done, and returns its `result`."""
        (first,) = self._links
        while not isinstance(message := first.receive(), Farewell):
            first.send((self._run(message), self._flag.signal))
        return message.result

    @property
    def stop_signal(self) -> int:
        """The number of the signal that requests a stop after this round, received on any rank; 0 for none."""
        return self._flag.signal or self._signal

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends the other ranks of this host, also after an error.

        A rank that is busy with a share receives no message. It ends when it notices that this rank is gone.
        """
        for link in self._links:
            if link not in self._owed:
                with suppress(LostRankError):  # the other ranks still need theirs
                    link.send(Farewell(self.result))


@dataclass(frozen=True)
class Farewell:
    """The last message to a rank."""

    result: Any


def _hosts(num_ranks: int, group: dist.ProcessGroup) -> list[list[int]]:
    """Returns the ranks of each host, ascending. Ranks of one host see each other's processes and memory.

    The name of the machine is not enough: two machines may have the same name, and containers on one machine do not
    see each other.
    """
    machines: list[str] = [""] * num_ranks
    dist.all_gather_object(machines, f"{platform.node()} {_boot()} {_processes()}", group)
    return [[rank for rank in range(num_ranks) if machines[rank] == each] for each in dict.fromkeys(machines)]


def _boot() -> str:
    """Returns an identifier of this machine and its last start, if the system provides one."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _processes() -> str:
    """Returns the namespace of the processes that this one can see, if the system provides it."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
