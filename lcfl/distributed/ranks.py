"""The ranks of a federation. The server distributes tasks, and every rank carries out its share."""

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
from lcfl.distributed.launch import LostRankError, StopFlag

__all__ = ["Ranks"]

Carry = Callable[[Sequence[Any]], Sequence[Any]]

PATIENCE = timedelta(days=7)  # a rank waits for the server as long as necessary; a dead server is noticed at once


class Ranks:
    """All ranks behind one `map`, which the server calls. The other ranks `serve` until the server is done.

    Only rank 0 runs the round loop, clusters, aggregates and writes. A task is sent with everything that another rank
    needs for it, so its result does not depend on the rank that carries it out.

    Args:
        fabric: a launched Fabric.
        run: carries out tasks on this rank and returns their results in the same order.
        flag: this process's stop flag, which is installed here; `stop_signal` combines the flags of all ranks.

    Attributes:
        result: what `serve` returns on the other ranks; the server sets it before it leaves.
    """

    def __init__(self, fabric: Fabric, run: Carry, flag: StopFlag) -> None:
        self.result: Any = None
        self._run = run
        self._flag = flag
        self._signal = 0
        self._links: list[Connection] = []
        self._owed: list[Connection] = []  # links of ranks that have not returned their share of a `map` yet
        if fabric.world_size > 1:
            before = open_files()
            group = dist.new_group(backend="gloo", timeout=PATIENCE)
            assert isinstance(group, dist.ProcessGroup)
            machines = _machines(fabric.world_size, group)
            watch_links(open_files() - before)
            near = [can_share_memory() and machine == machines[fabric.global_rank] for machine in machines]
            peers = range(1, fabric.world_size) if fabric.is_global_zero else [0]
            self._links = [
                SharedMemoryConnection(peer, group) if near[peer] else NetworkConnection(peer, group) for peer in peers
            ]
        flag.install()  # all ranks have met, so from now on a signal means a stop after the round

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
        """Carries out the server's tasks until the server is done, and returns the server's `result`."""
        (server,) = self._links
        while not isinstance(message := server.receive(), _Farewell):
            server.send((self._run(message), self._flag.signal))
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
        """Ends the other ranks, also after an error on the server.

        A rank that is busy with a share receives no message. It ends when it notices that the server is gone.
        """
        for link in self._links:
            if link not in self._owed:
                with suppress(LostRankError):  # the other ranks still need theirs
                    link.send(_Farewell(self.result))


@dataclass(frozen=True)
class _Farewell:
    """The server's last message."""

    result: Any


def _machines(num_ranks: int, group: dist.ProcessGroup) -> list[str]:
    """Returns a text per rank. Ranks with the same text see each other's processes and memory.

    The name of the machine is not enough: two machines may have the same name, and containers on one machine do not
    see each other.
    """
    machines: list[str] = [""] * num_ranks
    dist.all_gather_object(machines, f"{platform.node()} {_boot()} {_processes()}", group)
    return machines


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
