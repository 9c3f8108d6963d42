"""The ranks of a federation: the server hands tasks out, every rank carries out its share."""

import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist
from lightning.fabric import Fabric

from lcfl.distributed.launch import StopFlag
from lcfl.distributed.transport import Link, MemoryLink, NetworkLink, balance, can_share_memory

__all__ = ["Ranks"]

Carry = Callable[[Sequence[Any]], Sequence[Any]]

PATIENCE = timedelta(days=7)  # a rank waits for the server as long as it takes; one that died is noticed at once


class Ranks:
    """All ranks behind one `map`. Used by the server; the others `serve` until it is done.

    Only rank 0 runs the round loop, clusters, aggregates and writes. What another rank needs for a
    task is sent with it, so which rank carries out a task never matters for its result.

    Args:
        fabric: launched.
        run: carries out tasks on this rank; gives their results in the same order.
        flag: this process's stop flag, installed here; the ranks' flags come together in `stop_signal`.

    Attributes:
        result: what the other ranks' `serve` returns; to be set by the server before it leaves.
    """

    def __init__(self, fabric: Fabric, run: Carry, flag: StopFlag) -> None:
        self.result: Any = None
        self._run = run
        self._flag = flag
        self._signal = 0
        self._links: list[Link] = []
        self._owed: list[Link] = []  # at work on their share of a `map`
        if fabric.world_size > 1:
            group = dist.new_group(backend="gloo", timeout=PATIENCE)
            assert isinstance(group, dist.ProcessGroup)
            machines = _machines(fabric.world_size, group)
            near = [can_share_memory() and machine == machines[fabric.global_rank] for machine in machines]
            peers = range(1, fabric.world_size) if fabric.is_global_zero else [0]
            self._links = [MemoryLink(peer, group) if near[peer] else NetworkLink(peer, group) for peer in peers]
        flag.install()  # all ranks are there: from now on a signal is a wish to stop after the round

    def map(self, tasks: Sequence[Any], work: Sequence[float]) -> list[Any]:
        """Carries out the tasks on all ranks and returns the results in the tasks' order.

        Args:
            tasks: anything that this class's `run` takes; must pickle but for its tensors.
            work: the cost of each in any unit, to balance the ranks.
        """
        shares = balance(work, len(self._links) + 1)
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
        """Carries out the server's tasks until it says that it is done; its `result`."""
        (server,) = self._links
        while not isinstance(message := server.receive(), _Farewell):
            server.send((self._run(message), self._flag.signal))
        return message.result

    @property
    def stop_signal(self) -> int:
        """The number of the signal that asks for a stop after this round, on whichever rank it came; 0 for none."""
        return self._flag.signal or self._signal

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Lets the other ranks go, also after an error on the server.

        A rank that is at work cannot be told: it ends when it finds the server gone.
        """
        for link in self._links:
            if link not in self._owed:
                link.send(_Farewell(self.result))


@dataclass(frozen=True)
class _Farewell:
    """The server's last message."""

    result: Any


def _machines(num_ranks: int, group: dist.ProcessGroup) -> list[str]:
    """Where each rank runs: ranks with the same text see each other's processes and memory.

    A name alone does not tell: machines may share it, and containers on one machine do not see each other.
    """
    machines: list[str] = [""] * num_ranks
    dist.all_gather_object(machines, f"{platform.node()} {_boot()} {_processes()}", group)
    return machines


def _boot() -> str:
    """Which start of which machine this is, where the system tells."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _processes() -> str:
    """The processes that this one can see, by the name of their namespace, where the system tells."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
