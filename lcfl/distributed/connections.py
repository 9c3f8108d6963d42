"""Transport of tasks and results between the server and the ranks. Tensors are never pickled.

A message is an object whose tensors are taken out. The small rest is pickled. The tensors are written one after the
other into memory that both processes map (one machine), or sent one after the other over gloo (several machines).
"""

import io
import mmap
import os
import pickle
import re
import socket
import stat
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate
from typing import IO, Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from lcfl.core.files import unlinked_memory
from lcfl.distributed.launch import LostRankError

__all__ = [
    "Connection",
    "NetworkConnection",
    "SharedMemoryConnection",
    "balance",
    "can_share_memory",
    "open_files",
    "pack",
    "unpack",
    "watch_links",
]

ALIGNMENT = 64  # bytes; a cache line, and a multiple of every element size

# Seconds after which a silent link counts as lost. Without them the system would wait for a quarter of an hour.
LINK_IDLE, LINK_INTERVAL, LINK_TIMEOUT = 10, 5, 40
GRACE = 5  # seconds that gloo has to report a lost link before the process is ended

Shape = tuple[torch.Size, torch.dtype]


def can_share_memory() -> bool:
    """Returns whether a `SharedMemoryConnection` works here. It needs ``/proc``."""
    return os.path.isdir("/proc/self/fd")


def balance(costs: Sequence[float], num_ranks: int) -> list[list[int]]:
    """Assigns tasks to ranks so that the largest share is small: the most expensive first, to the least loaded rank.

    Args:
        costs: the cost of each task, in any unit.
        num_ranks: how many ranks there are.

    Returns:
        The positions of each rank's tasks, ascending.
    """
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0.0] * num_ranks
    for task in sorted(range(len(costs)), key=lambda position: -costs[position]):
        rank = loads.index(min(loads))
        shares[rank].append(task)
        loads[rank] += costs[task]
    return [sorted(share) for share in shares]


class _Pickler(pickle.Pickler):
    """Pickles an object with numbers in place of its tensors. A tensor that occurs twice is stored once."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []
        self._numbers: dict[tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype], int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        """Returns the number of a tensor, or None for everything else, which is pickled as usual."""
        if not isinstance(obj, Tensor):
            return None
        identity = (obj.data_ptr(), tuple(obj.shape), obj.stride(), obj.dtype)
        if identity not in self._numbers:
            self._numbers[identity] = len(self.tensors)
            self.tensors.append(obj)
        return self._numbers[identity]


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, pid: int) -> Tensor:
        return self._tensors[pid]


def pack(message: Any) -> tuple[bytes, list[Tensor]]:
    """Splits an object into a few bytes and the tensors that they refer to, which are moved to the CPU."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(message)
    return file.getvalue(), [tensor.detach().cpu().contiguous() for tensor in pickler.tensors]


def unpack(content: bytes, tensors: list[Tensor]) -> Any:
    """Returns the object that `pack` was called with, with `tensors` in their places."""
    return _Unpickler(io.BytesIO(content), tensors).load()


class Connection(ABC):
    """A two-way connection between two ranks.

    Args:
        peer: the rank at the other end.
        group: a gloo group of all ranks; small messages go through it.
    """

    def __init__(self, peer: int, group: dist.ProcessGroup) -> None:
        self.peer = peer
        self.group = group

    def send(self, message: Any) -> None:
        """Sends an object. The next one must not be sent before the peer has answered."""
        content, tensors = pack(message)
        shapes = [(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for tensor in tensors]
        header = pickle.dumps((content, shapes, self._write(tensors)))
        with self._naming_the_peer():
            dist.send(torch.tensor([len(header)]), self.peer, self.group)
            dist.send(torch.frombuffer(bytearray(header), dtype=torch.uint8), self.peer, self.group)
            self._stream(tensors)

    def receive(self, copy: bool = False) -> Any:
        """Returns the peer's next object. Unless copied, its tensors are valid until the next `receive` at this end."""
        length = torch.zeros(1, dtype=torch.int64)
        with self._naming_the_peer():
            dist.recv(length, self.peer, self.group)
            header = torch.empty(int(length), dtype=torch.uint8)
            dist.recv(header, self.peer, self.group)
            content, shapes, place = pickle.loads(header.numpy().tobytes())
            tensors = self._read([(torch.Size(shape), getattr(torch, dtype)) for shape, dtype in shapes], place)
        return unpack(content, [tensor.clone() for tensor in tensors] if copy else tensors)

    @contextmanager
    def _naming_the_peer(self) -> Iterator[None]:
        """Turns gloo's errors into one that names the peer, and notes for the watch that a transfer is under way."""
        _Watch.peer = self.peer
        try:
            yield
        except RuntimeError as error:
            reason = re.sub(r"^\[\S+\] ", "", str(error).strip()).partition(". ")[0]  # without gloo's place and advice
            raise LostRankError(
                f"rank {self.peer} was lost, or the link to it ({reason}). See the messages of that rank; the run can "
                "be resumed from its last checkpoint."
            ) from error
        finally:
            _Watch.peer = None

    @abstractmethod
    def _write(self, tensors: list[Tensor]) -> str | None:
        """Stores the tensors for the peer before the header is sent; returns where they are if that has changed."""

    @abstractmethod
    def _stream(self, tensors: list[Tensor]) -> None:
        """Sends the tensors, after the header is sent."""

    @abstractmethod
    def _read(self, shapes: list[Shape], place: str | None) -> list[Tensor]:
        """Returns the tensors of the message whose header has arrived."""


class NetworkConnection(Connection):
    """Sends tensors over the network, one after the other, for ranks on several machines."""

    def _write(self, tensors: list[Tensor]) -> None:
        return None

    def _stream(self, tensors: list[Tensor]) -> None:
        _wait_for([dist.isend(tensor, self.peer, self.group) for tensor in tensors])

    def _read(self, shapes: list[Shape], place: str | None) -> list[Tensor]:
        tensors = [torch.empty(shape, dtype=dtype) for shape, dtype in shapes]
        _wait_for([dist.irecv(tensor, self.peer, self.group) for tensor in tensors])
        return tensors


class SharedMemoryConnection(Connection):
    """Writes tensors into memory that both processes map: one copy to write, none to read.

    The memory is a file without a name, so it disappears however the ranks end. It lies in ``/dev/shm``, or in the
    system's temporary folder if that is too small. The peer finds it in ``/proc``. It grows when a message needs more.
    """

    def __init__(self, peer: int, group: dist.ProcessGroup) -> None:
        super().__init__(peer, group)
        self._file: IO[bytes] | None = None  # open until the peer has mapped it
        self._out: mmap.mmap | None = None
        self._in: mmap.mmap | None = None

    def _write(self, tensors: list[Tensor]) -> str | None:
        offsets = _offsets([_num_bytes(tensor) for tensor in tensors])
        place = None
        if offsets[-1] > (len(self._out) if self._out is not None else 0):
            folders = ["/dev/shm", tempfile.gettempdir()]
            self._file, self._out = unlinked_memory(folders, offsets[-1], "models to exchange between ranks")
            place = f"/proc/{os.getpid()}/fd/{self._file.fileno()}"
        for tensor, offset in zip(tensors, offsets, strict=False):
            if tensor.numel():
                assert self._out is not None
                flat = tensor.reshape(-1)
                torch.frombuffer(self._out, dtype=tensor.dtype, count=flat.numel(), offset=offset).copy_(flat)
        return place

    def _stream(self, tensors: list[Tensor]) -> None:
        pass

    def _read(self, shapes: list[Shape], place: str | None) -> list[Tensor]:
        if place is not None:
            try:
                with open(place, "r+b") as file:
                    self._in = mmap.mmap(file.fileno(), 0)
            except FileNotFoundError:
                raise RuntimeError("it ended before its message could be read") from None
        offsets = _offsets([shape.numel() * dtype.itemsize for shape, dtype in shapes])
        tensors = []
        for (shape, dtype), offset in zip(shapes, offsets, strict=False):
            if shape.numel() == 0:
                tensors.append(torch.empty(shape, dtype=dtype))
            else:
                assert self._in is not None
                flat = torch.frombuffer(self._in, dtype=dtype, count=shape.numel(), offset=offset)
                tensors.append(flat.view(shape))
        return tensors


def open_files() -> set[int]:
    """Returns the numbers of this process's open files, if the system lists them."""
    try:
        return {int(name) for name in os.listdir("/proc/self/fd")}
    except OSError:
        return set()


class _Watch(threading.Thread):
    """Ends this process if a link is lost and gloo does not report it.

    gloo closes the link, but forgets a tensor of which only a part has crossed it. Whoever sends or receives the rest
    would wait for days, in a call that nothing interrupts.

    Args:
        links: numbers of the open connections. Those of an earlier watch are no longer watched.
    """

    current: ClassVar["_Watch | None"] = None
    peer: ClassVar[int | None] = None  # the other end of the transfer that is under way

    def __init__(self, links: Collection[int]) -> None:
        super().__init__(daemon=True)
        self._links = {number: os.fstat(number).st_ino for number in links}
        _Watch.current = self

    def run(self) -> None:
        """Looks at the links every second."""
        waited = 0
        while _Watch.current is self:
            peer = _Watch.peer
            waited = waited + 1 if peer is not None and self._has_lost_one() else 0
            if waited > GRACE:
                print(
                    f"lcfl: error: a rank was lost, or the link to it, while this one waited for rank {peer}. See the "
                    "messages of the others; the run can be resumed from its last checkpoint.",
                    file=sys.stderr,
                    flush=True,
                )
                os._exit(1)
            time.sleep(1)

    def _has_lost_one(self) -> bool:
        try:
            return any(os.fstat(number).st_ino != inode for number, inode in self._links.items())
        except OSError:
            return True


def watch_links(files: Collection[int]) -> None:
    """Makes the system report a lost link after `LINK_TIMEOUT` seconds, whether data are on their way or not.

    A process that gloo does not tell is ended soon afterwards.

    Args:
        files: numbers of open files; those that are not connections over TCP are ignored.
    """
    options = {
        "SO_KEEPALIVE": (socket.SOL_SOCKET, 1),
        "TCP_KEEPIDLE": (socket.IPPROTO_TCP, LINK_IDLE),
        "TCP_KEEPINTVL": (socket.IPPROTO_TCP, LINK_INTERVAL),
        "TCP_KEEPCNT": (socket.IPPROTO_TCP, (LINK_TIMEOUT - LINK_IDLE) // LINK_INTERVAL),
        "TCP_USER_TIMEOUT": (socket.IPPROTO_TCP, 1000 * LINK_TIMEOUT),
    }
    links = []
    for number in files:
        with suppress(OSError):  # it may have been closed since
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            with socket.socket(fileno=os.dup(number)) as link:
                if link.family in (socket.AF_INET, socket.AF_INET6) and link.type == socket.SOCK_STREAM:
                    for name, (level, value) in options.items():
                        if hasattr(socket, name):
                            link.setsockopt(level, getattr(socket, name), value)
                    if _is_connected(link):
                        links.append(number)
    _Watch(links).start()


def _is_connected(link: socket.socket) -> bool:
    """Returns whether a connection has a peer; one that waits for connections has none."""
    try:
        link.getpeername()
    except OSError:
        return False
    return True


def _wait_for(transfers: Sequence[dist.Work | None]) -> None:
    """Waits for transfers that were begun together, so that only the first waits for the link's delay."""
    for transfer in transfers:
        assert transfer is not None, "this rank is part of the group"
        transfer.wait()


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _offsets(sizes: list[int]) -> list[int]:
    """Returns the aligned offset of each array if they are stored one after the other, and the end of the last."""
    return [0, *accumulate(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)]
