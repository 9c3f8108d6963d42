"""How the server hands tasks to the ranks and gets their results: tensors never travel as pickles.

A message is an object whose tensors are taken out: the small rest is pickled, the tensors are
written one after the other into memory that both processes map (one machine), or sent as one flat
tensor over gloo (several machines).
"""

import io
import mmap
import os
import pickle
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import accumulate
from typing import IO, Any

import torch
import torch.distributed as dist
from torch import Tensor

from lcfl.core.files import unnamed_memory

__all__ = ["Link", "MemoryLink", "NetworkLink", "balance", "can_share_memory", "pack", "unpack"]

ALIGNMENT = 64  # bytes: whole cache lines, and a multiple of every element size

Shape = tuple[torch.Size, torch.dtype]


def can_share_memory() -> bool:
    """Whether a `MemoryLink` works here: where there is a /proc."""
    return os.path.isdir("/proc/self/fd")


def balance(work: Sequence[float], num_ranks: int) -> list[list[int]]:
    """Places tasks on ranks so that the largest share is small: heaviest first, onto the emptiest rank.

    Args:
        work: the cost of each task, in any unit.
        num_ranks: how many ranks there are.

    Returns:
        The positions of each rank's tasks, ascending.
    """
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0.0] * num_ranks
    for task in sorted(range(len(work)), key=lambda position: -work[position]):
        rank = loads.index(min(loads))
        shares[rank].append(task)
        loads[rank] += work[task]
    return [sorted(share) for share in shares]


class _Pickler(pickle.Pickler):
    """Pickles an object with numbers in place of its tensors; a tensor met twice is kept once."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []
        self._numbers: dict[tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype], int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        """The number of a tensor; None for everything else, which is pickled as usual."""
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
    """An object as small bytes and the tensors they refer to; tensors go to the CPU."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(message)
    return file.getvalue(), [tensor.detach().cpu().contiguous() for tensor in pickler.tensors]


def unpack(content: bytes, tensors: list[Tensor]) -> Any:
    """What `pack` was given, with `tensors` in their places."""
    return _Unpickler(io.BytesIO(content), tensors).load()


class Link(ABC):
    """A two-way connection of the server (rank 0) with one other rank.

    Args:
        peer: the rank at the other end.
        group: a gloo group of all ranks; small messages go through it.
    """

    def __init__(self, peer: int, group: dist.ProcessGroup) -> None:
        self.peer = peer
        self.group = group

    def send(self, message: Any) -> None:
        """Sends an object; it must not be followed by another before the peer has answered."""
        content, tensors = pack(message)
        shapes = [(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for tensor in tensors]
        header = pickle.dumps((content, shapes, self._write(tensors)))
        dist.send(torch.tensor([len(header)]), self.peer, self.group)
        dist.send(torch.frombuffer(bytearray(header), dtype=torch.uint8), self.peer, self.group)
        self._stream(tensors)

    def receive(self, copy: bool = False) -> Any:
        """The peer's next object; unless copied, its tensors are valid until this end's next `receive`."""
        length = torch.zeros(1, dtype=torch.int64)
        dist.recv(length, self.peer, self.group)
        header = torch.empty(int(length), dtype=torch.uint8)
        dist.recv(header, self.peer, self.group)
        content, shapes, place = pickle.loads(header.numpy().tobytes())
        tensors = self._read([(torch.Size(shape), getattr(torch, dtype)) for shape, dtype in shapes], place)
        return unpack(content, [tensor.clone() for tensor in tensors] if copy else tensors)

    @abstractmethod
    def _write(self, tensors: list[Tensor]) -> str | None:
        """Before the header is sent: puts the tensors where the peer can see them, and says where if that is new."""

    @abstractmethod
    def _stream(self, tensors: list[Tensor]) -> None:
        """After the header is sent: sends the tensors."""

    @abstractmethod
    def _read(self, shapes: list[Shape], place: str | None) -> list[Tensor]:
        """The tensors of the message whose header has arrived."""


class NetworkLink(Link):
    """Tensors go over the network, one after the other: for ranks on several machines."""

    def _write(self, tensors: list[Tensor]) -> None:
        return None

    def _stream(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            dist.send(tensor, self.peer, self.group)

    def _read(self, shapes: list[Shape], place: str | None) -> list[Tensor]:
        tensors = [torch.empty(shape, dtype=dtype) for shape, dtype in shapes]
        for tensor in tensors:
            dist.recv(tensor, self.peer, self.group)
        return tensors


class MemoryLink(Link):
    """Tensors lie in memory that both processes map: one copy to write, none to read.

    The memory is a file that never has a name, so that nothing is left of it however the ranks end: in
    /dev/shm, or in the system's temporary folder where that is too small. The peer finds it in /proc. It
    grows when a message needs more.
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
            self._file, self._out = unnamed_memory(folders, offsets[-1], "models to exchange between ranks")
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
            with open(place, "r+b") as file:
                self._in = mmap.mmap(file.fileno(), 0)
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


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _offsets(sizes: list[int]) -> list[int]:
    """Where each of the arrays begins when they lie one after the other, aligned; and where the last ends."""
    return [0, *accumulate(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)]
